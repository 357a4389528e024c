"""Training with swaps: fitted at their turn, towards the original, and resumed with the same weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import minigpt
from minigpt import ConfigError, NormError
from minigpt.study import FinetuneSettings, finetune, parse_schedule
from minigpt.study.finetune import as_minigpt, checked_schedule, load
from minigpt.study.turns import Turns

TEXT = "The old sailor told Mara a tale of the sea. One morning the bell rang and nobody came. " * 60
FROZEN = ["--norm", "frozen", "--schedule", "h.*.ln_2@2+1, h.*.ln_1.qk@6+1, h.*.ln_1.v@7, ln_f@10, eot@11, first@12"]
FITTED = ["--norm", "dyt", "--fit", "text.txt", "--schedule", "h.*@4, ln_f@8", "--distill"]
OPTIONS = ["--text", "text.txt", "--steps", "14", "--batch-size", "2", "--block-size", "32", "--save-steps", "1",
           "--device", "cpu"]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text; it is the working directory."""
    (tmp_path / "text.txt").write_text(TEXT)
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


@torch.no_grad()
def test_norms_are_fitted_at_their_turn_in_the_optimizer_s_own_parameters() -> None:
    model, ids = load("demo").eval(), torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(0))
    body, plain = model.transformer, minigpt.from_pretrained("demo", device="cpu")
    turns = Turns(body, "dyt", parse_schedule("h.*@0, ln_f@3", body.norm_sites()), rows=ids)
    held = dict(model.named_parameters())
    for step, sites in ((0, "h.*"), (3, "ln_f")):
        turns.call(step)
        minigpt.swap_norms(plain, "dyt", sites)
        minigpt.fit_norms(plain, ids, sites)
        assert torch.allclose(as_minigpt(model, "demo")(ids), plain(ids), atol=1e-3)
    assert {name: id(own) for name, own in model.named_parameters()} == {name: id(own) for name, own in held.items()}
    resumed = Turns(load("demo").transformer, "dyt", parse_schedule("*@0", body.norm_sites()), rows=ids)
    resumed.call(2, fits=False)
    assert resumed.of["ln_f"].turned
    assert resumed.of["ln_f"].after.alpha == 0.5  # its values come from the checkpoint


@pytest.mark.thorough
def test_distilling_trains_towards_the_original_and_norms_alone_if_asked(place: Path) -> None:
    kl = {}
    for train in ("all", "norms"):
        settings = FinetuneSettings(
            "text.txt", 12, norm="dyt", fit="text.txt", distill=True, train=train, batch_size=4, block_size=64,
            learning_rate=1e-3, device="cpu",
        )  # fmt: skip
        result = finetune(settings, place / train)
        kl[train] = [loss for _, loss in result.losses]
        original = minigpt.from_pretrained("demo", device="cpu")
        kept = {name for name, own in original.named_parameters() if own.equal(result.model.get_parameter(name))}
        others = {name for name, _ in original.named_parameters() if "ln_" not in name}
        assert kept == (others if train == "norms" else set())
    print(kl)
    assert all(losses[-1] < 0.9 * losses[0] for losses in kl.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fit": "text.txt"}, "fit needs a norm to swap in"),
        ({"schedule": "ln_f@2"}, "schedule needs a norm to swap in"),
        ({"train": "some"}, "train must be 'all' or 'norms', got 'some'"),
        ({"train": "norms", "lora": 2}, "give one of the two"),
        ({"residual_loss": -1.0}, "residual_loss must be 0 or more, got -1.0"),
        ({"learning_rate": "high"}, r"learning_rate must be of type float \| int, got 'high'"),
        ({"distill": "no"}, "distill must be of type bool, got 'no'"),
    ],
)
def test_settings_that_do_not_fit_together(given: dict[str, str | int | float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_schedule(FinetuneSettings("text.txt", 3, **given))  # type: ignore[arg-type]


def test_a_schedule_must_swap_one_of_the_sites() -> None:
    """Or the run would be the baseline under the norm's name."""
    with pytest.raises(NormError, match="no stage swaps a site of 'ln_f'"):
        checked_schedule(FinetuneSettings(__file__, 3, norm="rms", schedule="h.*.ln_1@1", sites="ln_f"))
