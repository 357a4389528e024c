"""Training with swaps: with the model's own norms, fitted at their turn, towards the original, and resumed."""

import errno
import json
import math
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from norm_classes import SCALED
from safetensors.torch import load_file

import minigpt
from minigpt import CheckpointError, ConfigError, GenerationError, NormError, Recipe
from minigpt.files import locked
from minigpt.norms import name_of
from minigpt.study.resume import note_cut, remove_cut, resumable_step
from minigpt.study.schedule import NormSchedule, parse_schedule
from minigpt.study.settings import DivergedError, Training, checked_schedule
from minigpt.study.trainer import SwapTrainer, arguments, optimizer_facts
from minigpt.study.training import as_minigpt, as_transformers, finetune, token_ids

TEXT = "The old sailor told Mara a tale of the sea. One morning the bell rang and nobody came. " * 60
FROZEN = ["--norm", "frozen", "--schedule", "h.*.ln_2@2+1, h.*.ln_1@6+1, ln_f@10, first@12"]
FITTED = ["--norm", "dyt", "--fit", "text.txt", "--schedule", "h.*@4, ln_f@8", "--distill"]
OPTIONS = ["--text", "text.txt", "--steps", "14", "--batch-size", "2", "--block-size", "32", "--save-steps", "1",
           "--device", "cpu"]  # fmt: skip
DEMO = Recipe(device="cpu")
SHORT = Training("text.txt", 1, learning_rate=1e-9, batch_size=2, block_size=32)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text and a norm; it is the working directory."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "my_norm.py").write_text(SCALED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("options", [FROZEN, FITTED], ids=["frozen", "fitted"])
def test_a_killed_run_ends_with_the_same_weights(place: Path, options: list[str]) -> None:
    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "minigpt", "finetune", "--out", out, *OPTIONS, *options]

    subprocess.run(command("whole"), check=True, timeout=300)
    for step in (4, 8):
        run = subprocess.Popen(command("cut"))
        deadline = time.monotonic() + 120
        while not list(place.glob(f"cut/checkpoints/*/checkpoint-{step}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert not (place / "cut/model.safetensors").exists()
    subprocess.run(command("cut"), check=True, timeout=300)
    whole, resumed = (load_file(place / folder / "model.safetensors") for folder in ("whole", "cut"))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"norm": "rms"}, marks=pytest.mark.thorough),
        pytest.param({"norm": "std_eps", "sites": "h.*.ln_2"}, marks=pytest.mark.thorough),
        pytest.param({"norm": "dyt", "sites": ["h.[01].*", "ln_f"], "keep": ("scale",)}, marks=pytest.mark.thorough),
        pytest.param({"norm": "frozen", "fit": "text.txt"}, marks=pytest.mark.thorough),
        pytest.param({"norm": "my_norm.py:Scaled", "sites": "ln_f"}, marks=pytest.mark.thorough),
    ],
    ids=lambda options: options["norm"],
)
def test_what_was_saved_is_trained_on_with_its_norms(place: Path, options: dict[str, Any]) -> None:
    """By hand, with adapters, towards itself, or its norms alone; and what comes out can be trained on again."""
    model, tokenizer = Recipe(device="cpu", **options).open()
    minigpt.save_pretrained(model, place / "saved", tokenizer)
    named = {"norm": options["norm"]} if ":" in options["norm"] else {}
    recipe, ids = Recipe("saved", device="cpu", **named), torch.arange(5, 60)[None]
    kinds = [SHORT, *(Training(**vars(SHORT) | more) for more in ({"lora": 2}, {"distill": True}, {"train": "norms"}))]
    for training in kinds:
        result = finetune(recipe, training, place / "out")
        assert torch.allclose(result.model(ids), model(ids), atol=1e-3)
        assert [*map(type, result.model.norm_modules().values())] == [*map(type, model.norm_modules().values())]
    result.save(place / "saved")
    assert torch.allclose(recipe.open()[0](ids), model(ids), atol=1e-3)


def test_a_folder_s_norms_are_replaced_if_another_is_given(place: Path) -> None:
    model, tokenizer = Recipe(norm="dyt", device="cpu").open()
    minigpt.save_pretrained(model, place / "saved", tokenizer)
    result = finetune(Recipe("saved", norm="fused", sites="ln_f", device="cpu"), SHORT, place / "out")
    names = {site: minigpt.norms.name_of(norm) for site, norm in result.model.norm_modules().items()}
    assert names.pop("ln_f") == "fused"
    assert {*names.values()} == {"dyt"}


@torch.no_grad()
def test_norms_are_fitted_at_their_step_in_the_optimizer_s_parameters() -> None:
    ids, plain = torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(0)), DEMO.open()[0]
    ours, recipe = DEMO.open()[0], Recipe(norm="dyt", device="cpu")
    model = as_transformers(ours, recipe).eval()
    body = model.transformer
    norms = NormSchedule(body, "dyt", parse_schedule("h.*@0, ln_f@3", body.site_names()), rows=ids)
    held = dict(model.named_parameters())
    for step, sites in ((0, "h.*"), (3, "ln_f")):
        norms.before_step(step)
        minigpt.swap_norms(plain, "dyt", sites)
        minigpt.fit_norms(plain, ids, sites)
        assert torch.allclose(as_minigpt(model, ours)(ids), plain(ids), atol=1e-3)
    assert {name: id(single) for name, single in model.named_parameters()} == {
        name: id(single) for name, single in held.items()
    }
    fresh = as_transformers(DEMO.open()[0], recipe).transformer
    resumed = NormSchedule(fresh, "dyt", parse_schedule("*@0", fresh.site_names()), rows=ids)
    resumed.before_step(2, fits=False)
    assert resumed.norms["ln_f"].is_on
    assert resumed.norms["ln_f"].new.alpha == 0.5  # its values come from the checkpoint


@pytest.mark.thorough
def test_distilling_trains_towards_the_original_and_norms_alone_if_asked(place: Path) -> None:
    losses = {}
    for train in ("all", "norms"):
        training = Training("text.txt", 12, distill=True, train=train, batch_size=4, block_size=64, learning_rate=1e-3)
        result = finetune(Recipe(norm="dyt", fit="text.txt", device="cpu"), training, place / train)
        losses[train] = [loss for _, loss in result.losses]
        original = DEMO.open()[0]
        kept = {name for name, single in original.named_parameters() if single.equal(result.model.get_parameter(name))}
        others = {name for name, _ in original.named_parameters() if "ln_" not in name}
        assert kept == (others if train == "norms" else set())
    assert all(curve[-1] < 0.9 * curve[0] for curve in losses.values())


@pytest.mark.parametrize("block_size", [16, pytest.param(200, marks=pytest.mark.thorough)])
def test_the_held_out_loss_is_the_logarithm_of_the_perplexity(place: Path, block_size: int) -> None:
    """Whatever the length of the rows that it is trained on."""
    (place / "held.txt").write_text(TEXT[:1500])
    training = Training("text.txt", 1, eval_text="held.txt", batch_size=2, block_size=block_size)
    result = finetune(Recipe(norm="rms", device="cpu"), training, place / "out")
    perplexity = minigpt.perplexity(result.model, result.tokenizer, TEXT[:1500])
    assert result.eval_losses[-1][1] == pytest.approx(math.log(perplexity), rel=1e-5)


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_step(place: Path) -> None:
    with pytest.raises(DivergedError, match="step"):
        finetune(DEMO, Training("text.txt", 4, learning_rate=1e30, batch_size=2, block_size=32), place / "out")


def test_two_runs_in_one_folder_are_one_sentence(place: Path) -> None:
    (place / "out/checkpoints").mkdir(parents=True)
    with locked(place / "out/checkpoints"), pytest.raises(ConfigError) as error:
        finetune(DEMO, SHORT, place / "out")
    assert error.value.argument == "out"


def test_texts_of_a_jsonl_file_end_at_newlines_only_and_with_the_model_s_end_of_text(place: Path) -> None:
    texts = ["Once upon\u2028a time", "Mara\u0085came"]
    (place / "a.jsonl").write_text("\n".join(json.dumps({"text": one}, ensure_ascii=False) for one in texts))
    model, tokenizer = DEMO.open()
    assert tokenizer is not None
    first, second = map(tokenizer.encode, texts)
    assert token_ids("a.jsonl", tokenizer, model) == [*first, *model.config.eos_token_ids, *second]
    model.config = minigpt.GPT2Config.from_dict(model.config.to_dict() | {"vocab_size": 3, "used_vocab_size": None})
    with pytest.raises(GenerationError, match="outside the vocabulary of 3"):
        token_ids("a.jsonl", tokenizer, model)


def test_the_texts_of_a_dataset_are_those_of_its_split(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's datasets read a folder of files as they read a name of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    model, tokenizer = DEMO.open()
    assert tokenizer is not None
    (place / "tales").mkdir()
    for split, texts in {"train": ["Once upon a time", "Mara came"], "test": ["The bell rang"]}.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (place / "tales" / f"{split}.jsonl").write_text("\n".join(lines))
        (place / f"{split}.jsonl").write_text("\n".join(lines))
    assert token_ids("tales", tokenizer, model) == token_ids("train.jsonl", tokenizer, model)
    assert token_ids("tales:test", tokenizer, model) == token_ids("test.jsonl", tokenizer, model)
    (place / "lines").mkdir()
    (place / "lines" / "train.jsonl").write_text('{"line": "The bell rang"}')
    for source, reason in (("tales:valid", "tales: .*valid"), ("lines", "lines: .*text")):
        with pytest.raises(GenerationError, match=f"^cannot read the dataset {reason}"):
            token_ids(source, tokenizer, model)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GenerationError, match=r"pip install -e '\.\[hf\]'"):
        token_ids("tales", tokenizer, model)


@pytest.mark.thorough
def test_two_processes_train_the_model_that_one_trains_with_twice_the_batch(place: Path) -> None:
    """LOCAL_RANK tells them apart: both work in one folder, which is locked for others."""
    words = ["-m", "minigpt", "finetune", "--text", "text.txt", "--steps", "3", "--block-size", "32", "--norm", "rms"]
    words += ["--device", "cpu"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for command in (
        [sys.executable, *words, "--batch-size", "4", "--out", "one"],
        [sys.executable, *launch, *words, "--batch-size", "2", "--out", "two"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    start = minigpt.from_pretrained("demo", device="cpu").state_dict()
    one, two = (minigpt.from_pretrained(name, device="cpu").state_dict() for name in ("one", "two"))
    moved = sum((one[name] - start[name]).square().sum() for name in one).sqrt().item()
    apart = sum((one[name] - two[name]).square().sum() for name in one).sqrt().item()
    print(f"the weights moved by {moved:.3g} and are {apart:.3g} apart")
    assert apart < 0.01 * moved


@pytest.mark.parametrize(
    ("recipe", "training", "argument"),
    [
        ({}, {"schedule": "ln_f@2"}, "schedule"),
        ({}, {"train": "some"}, "train"),
        ({}, {"train": "norms", "lora": 2}, "lora"),
        ({}, {"residual_loss": -1.0}, "residual_loss"),
        ({}, {"learning_rate": "high"}, "learning_rate"),
        ({}, {"distill": "no"}, "distill"),
        ({"quantize": "int8"}, {}, "quantize"),
    ],
)
def test_settings_that_do_not_fit_together(recipe: Any, training: Any, argument: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked_schedule(Recipe(device="cpu", **recipe), Training(__file__, 3, **training))
    assert error.value.argument == argument


@pytest.mark.parametrize(("schedule", "message"), [
    ("h.*.ln_1@1", "no stage for a site of ln_f"),
    ("ln_f@4", "ln_f at step 4, after the last, 3"),
    ("ln_f@1, first@5", "first at step 5, after the last"),
])  # fmt: skip
def test_a_schedule_must_swap_one_of_the_sites_in_time(schedule: str, message: str) -> None:
    """Or the run would be the baseline under the norm's name."""
    with pytest.raises(NormError, match=message):
        checked_schedule(Recipe(norm="rms", sites="ln_f"), Training(__file__, 3, schedule=schedule))


def decayed(recipe: Recipe, folder: Path) -> set[str]:
    """The Parameters that a training of this recipe decays, by the names that they have without a norm's own."""
    model = as_transformers(DEMO.open()[0], recipe)
    norms = NormSchedule(model.transformer, recipe.norm, parse_schedule(None, model.transformer.site_names()))
    modules = [*model.transformer.norm_modules().values()]
    assert len(norms.norms) == len(modules)
    trainer = SwapTrainer(SHORT, modules, None, None, [], 8, model=model, args=arguments(DEMO, SHORT, folder))
    return {*trainer.get_decay_parameter_names(model)}


def test_weight_decay_reaches_the_same_parameters_whatever_the_norm(place: Path) -> None:
    """Those of transformers' GPT-2 under its own Trainer."""
    (place / "plain.py").write_text(
        "import torch\nclass Plain(torch.nn.Module):\n  def __init__(self, size):\n    super().__init__()\n"
        "    self.weight, self.bias = (torch.nn.Parameter(torch.full((size,), x)) for x in (1.0, 0.0))\n"
        "  def forward(self, x): return x * self.weight + self.bias\n"
    )
    plain = transformers.GPT2LMHeadModel.from_pretrained(Path(minigpt.__file__).parent / "demo")
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    expected = {*trainer.get_decay_parameter_names(plain)} - {"lm_head.weight"}  # which is wte
    for norm in ("fused", "dyt", "rms", "plain.py:Plain"):
        assert decayed(Recipe(norm=norm, device="cpu"), place) == expected, norm


@pytest.mark.thorough
def test_a_full_disk_is_one_sentence_and_the_run_goes_on(place: Path) -> None:
    """A limit on the size of files stands for the disk."""
    words = ["finetune", *OPTIONS, "--out", "tuned", "--steps", "2"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))"
    code = f"{limit}; from minigpt.cli import main; main()"
    full = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1].startswith("error: cannot write to ")
    assert full.stderr.splitlines()[-1].endswith("; the same command begins again at step 0")
    assert "Traceback" not in full.stderr
    assert not [path for path in (place / "tuned").rglob("*") if path.is_file()], "a cut file fills the disk"
    again = subprocess.run([sys.executable, "-m", "minigpt", *words], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr


def whole_checkpoint(folder: Path, step: int) -> Path:
    """The files of a checkpoint by their names, with few values in them."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    for name in ("weights.pt", "optimizer.pt", "rng_state.pth"):
        torch.save({"a": torch.arange(1000.0)}, place / name)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return place


def cut(place: Path) -> None:
    (place / "trainer_state.json").unlink()


def torn(place: Path) -> None:
    (place / "trainer_state.json").write_text('{"global_st')


@pytest.mark.parametrize("damage", [cut, torn])
def test_a_checkpoint_that_was_cut_short_is_removed_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    run = tmp_path / "run"
    older, newer = whole_checkpoint(run, 4), whole_checkpoint(run, 12)
    assert resumable_step(run, 20) == 12
    assert resumable_step(run, 12) == 4, "Trainer would add a step to one of the last step"
    note_cut(run, 20)
    assert caplog.messages == []
    damage(newer)
    assert resumable_step(run, 20) == 4
    note_cut(run, 20)
    remove_cut(tmp_path)
    assert not newer.exists()
    damage(older)
    assert resumable_step(run, 20) is None
    note_cut(run, 20)
    assert re.search("checkpoint-12 was cut short, so the run goes on from step 4$", caplog.messages[0])
    assert re.search("checkpoint-4 was cut short, so the run begins again at step 0$", caplog.messages[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["weights.pt", "optimizer.pt"])
def test_a_damaged_checkpoint_is_a_sentence(place: Path, name: str) -> None:
    training = Training("text.txt", 3, batch_size=2, block_size=16, save_steps=2)
    finetune(DEMO, training, place / "out")
    (damaged,) = place.glob(f"out/checkpoints/*/checkpoint-2/{name}")
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="checkpoint-2 is damaged; remove it, and the same command goes on"):
        finetune(DEMO, training, place / "out")
    shutil.rmtree(damaged.parent)
    assert finetune(DEMO, training, place / "out").losses


@pytest.mark.parametrize(
    "fails",
    [pytest.param("torch.save", marks=pytest.mark.thorough), "transformers.trainer_callback.TrainerState.save_to_json"],
)
def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """With one before it, which the sentence names."""
    module, _, name = fails.rpartition(".")
    write, calls = getattr(pkgutil.resolve_name(module), name), list[object]()

    def full(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if "checkpoint-2" in str(arguments[1]):
            Path(arguments[1]).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments, **options)

    monkeypatch.setattr(fails, full)
    training = Training("text.txt", 3, batch_size=2, block_size=16, save_steps=1)
    with pytest.raises(
        CheckpointError, match="No space left on device; the same command goes on from the checkpoint of step 1"
    ):
        finetune(DEMO, training, place / "out")
    assert calls
    assert [path.name for path in place.glob("out/checkpoints/*/*")] == ["checkpoint-1"]


def test_the_tokens_that_were_seen_are_counted(place: Path) -> None:
    result = finetune(DEMO, Training("text.txt", 3, batch_size=2, block_size=32), place / "out")
    assert (result.tokens_seen, result.tokens) == (3 * 2 * 32, len(result.tokenizer.encode(TEXT)))


def test_the_optimizer_is_described_as_it_is_used(tmp_path: Path) -> None:
    how = {"lr_scheduler_type": "cosine", "warmup_steps": 10, "weight_decay": 0.01, "max_grad_norm": 0}
    used = arguments(DEMO, Training("t.txt", steps=100, training=how), tmp_path)
    assert optimizer_facts(used) == {
        "optimizer": "AdamW, betas 0.9 and 0.999, weight decay 0.01, no clipping",
        "learning rate schedule": "cosine after 10 steps of warm-up",
    }


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"dtype": "bfloat16"}, "textbook"),
        ({"dtype": "bfloat16", "arithmetic": "reference"}, "fused"),
        ({"dtype": "float32"}, "fused"),
    ],
)
def test_norms_of_half_precision_are_trained_with_sums_in_float32(settings: dict[str, Any], trained: str) -> None:
    recipe = Recipe("demo", device="cpu", **settings)
    model, _ = recipe.open()
    hf_model = as_transformers(model, recipe)
    assert {name_of(norm) for norm in hf_model.transformer.norm_modules().values()} == {trained}
    with torch.no_grad():
        hf_model.transformer.ln_f.weight.mul_(2)
    expected = hf_model.transformer.ln_f.weight
    again = as_minigpt(hf_model, model)
    assert {name_of(norm) for norm in again.norm_modules().values()} == {"fused"}
    assert torch.equal(again.ln_f.weight, expected)


@pytest.mark.thorough
def test_gradients_of_half_precision_are_about_those_of_float64(place: Path) -> None:
    """One step of 4,096 tokens, whose gradient of a shift PyTorch's own norm adds in bfloat16."""
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (16, 256))
    gradients = {}
    for name, dtype, arithmetic in (
        ("exact", "float64", "reference"),
        ("own", "bfloat16", "reference"),
        ("sums", "bfloat16", "fast"),
    ):
        recipe = Recipe("demo", device="cpu", dtype=dtype, arithmetic=arithmetic)
        model, _ = recipe.open()
        hf_model = as_transformers(model, recipe)
        hf_model(ids, labels=ids).loss.backward()
        gradients[name] = hf_model.transformer.h[0].ln_1.bias.grad.double()
    off = {name: float((x - gradients["exact"]).norm() / gradients["exact"].norm()) for name, x in gradients.items()}
    print(off)
    assert off["sums"] < 0.03 < 0.1 < off["own"]
