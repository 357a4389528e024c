"""The command line: what goes to which stream, with which exit status; and what it says to bad input."""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved, talking, tiny_bpe
from command_line import Ended, Run, complaint, judge
from foreign import write_book
from transformers import AutoModelForCausalLM, GenerationConfig

import minigpt
from minigpt.checkpoint import contents
from minigpt.cli.commands import COMMANDS
from minigpt.cli.output import PULSE


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer. Its context leaves room for a text that takes a second to write."""
    return talking(tmp_path_factory.mktemp("talking"), n_positions=1024)


@pytest.fixture
def copy(roomy: Path, tmp_path: Path) -> Path:
    """The same, for a test to damage."""
    for path in roomy.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def command(*words: object) -> list[str]:
    """As a process of its own."""
    return [sys.executable, "-m", "minigpt", *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    """One thread, so that a process costs what it must; no width, which a pipe has not."""
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"OMP_NUM_THREADS": "1"} | more


# Help and version


def test_help_of_every_command(run: Run) -> None:
    """Its options are described, its examples can be copied, and brackets are shown."""
    assert all(name in run().out for name in COMMANDS)
    for name in (*COMMANDS, "bench generate"):
        status, out, err = run(*name.split(), "--help")
        assert (status, err) == (0, "")
        assert "`" not in out
        assert name == "bench" or f"minigpt {name}" in out.partition("Examples:")[2], "no example to copy"
    assert "text, [finetune]." in run("study", "--help").out
    assert re.search("--norm .*a registered one", run("generate", "--help").out)


def test_help_groups_the_options_and_gives_flags_no_value(run: Run) -> None:
    """The rare options stand last, and every option of a command with a model has a group."""
    for name in ("generate", "parity"):
        out = run(name, "-h").out
        assert out == run(name, "--help").out
        titles = re.findall("^╭─ (.*?) ─+╮$", out, re.MULTILINE)
        assert (titles[:2], titles[-1]) == (["Arguments", "The model"], "How the model is opened")
        assert "Options" not in titles
        assert len(titles) == len({*titles})
        assert not re.search("bool|list", out.partition("The model")[2])


@pytest.mark.parametrize("words", ["info", "sites --text held", "perplexity held", "convert out --force"])
def test_a_model_may_stand_first_or_behind_its_option(run: Run, tmp_path: Path, words: str) -> None:
    name, *others = (str(tmp_path / word) if word in ("held", "out") else word for word in words.split())
    (tmp_path / "held").write_text("the dog saw the cat. " * 40)
    shown = run(name, "demo", *others)
    assert shown.status == 0
    assert run(name, *others, "--model", "demo") == shown
    assert run(name, *others, "--model=demo") == shown


@pytest.mark.parametrize("words", ["generate dog --greedy --max-new-tokens 3", "info", "perplexity demo HELD", "norms"])
def test_json_is_printed_or_written(run: Run, tmp_path: Path, words: str) -> None:
    held, file = tmp_path / "held", tmp_path / "out.json"
    held.write_text("the dog saw the cat. " * 40)
    command = [held if word == "HELD" else word for word in words.split()]
    printed, written = run(*command, "--json"), run(*command, "--json", file)
    fields = json.loads(printed.out), json.loads(file.read_text())
    assert fields[0].keys() == fields[1].keys()
    assert written.out == run(*command).out


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"minigpt {minigpt.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("generate --norm std", ["std_eps"]),
        ("parity --norm text", ["textbook"]),
        ("convert --dtype bf", ["bfloat16"]),
        ("bench generate --preset gpt2-", ["gpt2-large", "gpt2-medium", "gpt2-xl"]),
    ],
)
def test_a_shell_completes_values(run: Run, monkeypatch: pytest.MonkeyPatch, words: str, offered: list[str]) -> None:
    monkeypatch.setenv("_MINIGPT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"minigpt {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert run().out.split() == offered


# generate


def greedy_text(roomy: Path, prompt: str, new: int) -> str:
    """What the Python interface writes."""
    model, tokenizer = minigpt.from_pretrained(roomy, device="cpu"), minigpt.Tokenizer.from_pretrained(roomy)
    return "".join(minigpt.stream(model, tokenizer, prompt, max_new_tokens=new))


def write(run: Run, roomy: Path, *words: object, stdin: bytes = b"") -> Ended:
    return run("generate", "--model", roomy, "--device", "cpu", "--max-new-tokens", 12, *words, stdin=stdin)


def test_greedy_text_is_that_of_python(run: Run, roomy: Path) -> None:
    expected = greedy_text(roomy, "the dog", 12)
    assert expected
    assert write(run, roomy, "the dog", "--greedy") == (0, f"the dog{expected}\n", "")
    assert write(run, roomy, "the dog", "--temperature", 0) == (0, f"the dog{expected}\n", "")
    assert write(run, roomy, "the dog", "--top-k", 1) == (0, f"the dog{expected}\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("how", [["--greedy"], ["--seed", 3, "--top-k", 20]], ids=["greedy", "seeded"])
def test_a_gpu_writes_what_the_cpu_does(run: Run, roomy: Path, how: list[object]) -> None:
    words = ("the dog", "--dtype", "float64", *how)
    assert write(run, roomy, *words, "--device", "cuda") == write(run, roomy, *words)


def test_a_seed_repeats_and_another_does_not(run: Run, roomy: Path) -> None:
    texts = [write(run, roomy, "the dog", "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert write(run, roomy, "the dog").out != write(run, roomy, "the dog").out


def test_json_is_all_there_is_on_standard_output(run: Run, roomy: Path) -> None:
    status, out, err = write(run, roomy, "the dog", "--greedy", "--json")
    assert (status, err) == (0, "")
    fields = json.loads(out)
    assert (fields["prompt"], fields["text"]) == ("the dog", greedy_text(roomy, "the dog", 12))


@pytest.mark.parametrize("prompt", ["the dog", "naïve 狗 🐕", "two\nlines\r\n", " \t", "<|endoftext|>the"])
def test_a_prompt_from_standard_input(run: Run, roomy: Path, prompt: str) -> None:
    as_argument = json.loads(write(run, roomy, prompt, "--greedy", "--json").out)
    from_input = json.loads(write(run, roomy, "-", "--greedy", "--json", stdin=prompt.encode()).out)
    assert as_argument["prompt"] == prompt
    assert from_input | {"tokens_per_second": 0} == as_argument | {"tokens_per_second": 0}


def test_text_that_is_not_utf8(run: Run, roomy: Path, tmp_path: Path) -> None:
    latin = "caf\xe9".encode("latin-1")
    (tmp_path / "text").write_bytes(latin)
    for ended in (write(run, roomy, "-", stdin=latin), run("perplexity", roomy, tmp_path / "text")):
        assert re.search("is not UTF-8 text: byte 0xe9 at 3; convert it first, e.g. .*iconv", complaint(ended))


def test_control_characters_are_escaped_on_a_terminal_and_raw_in_a_pipe(
    run: Run, roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "a\x1b[31mb\x0b\x9b\r\tc\nd"
    assert write(run, roomy, prompt, "--greedy").out.startswith(prompt)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert write(run, roomy, prompt, "--greedy").out.startswith("a\\x1b[31mb\\x0b\\x9b\\r\tc\nd")


# parity


def test_parity_that_does_not_hold(run: Run, roomy: Path, tmp_path: Path) -> None:
    """As JSON on standard output with nothing beside it; in a file, with the summary on standard output."""
    code = "def forward(self, x):\n        return super().forward(x) * 1.01\n"
    (tmp_path / "wrong.py").write_text(f"import minigpt\n\nclass Wrong(minigpt.LayerNorm):\n    {code}")
    words = ("--norm", f"{tmp_path / 'wrong.py'}:Wrong", "--sites", "ln_f", "--json")
    to_output = judge(run, roomy, *words, "-")
    assert (to_output.status, to_output.err) == (1, "")
    fields = json.loads(to_output.out)
    assert fields["verdict"] == "fail"
    assert [site["site"] for site in fields["norm_sites"] if site["swapped"]] == ["ln_f"]
    to_file = judge(run, roomy, *words, tmp_path / "report.json")
    assert (to_file.status, to_file.err) == (1, "")
    assert to_file.out.startswith("FAIL")
    assert "times the noise floor" in to_file.out
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert written == fields


def test_a_report_that_does_not_fit_on_the_disk_has_been_shown(run: Run, roomy: Path) -> None:
    ended = judge(run, roomy, "--json", "/dev/full")
    assert ended.status == 2
    assert ended.out.startswith("PASS")
    assert ended.err == "error: cannot write /dev/full: No space left on device\n"


OF_MEMORY = (
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory\nframe #0"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
)


@pytest.mark.parametrize("error", OF_MEMORY, ids=lambda error: type(error).__name__)
def test_more_memory_than_there_is(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def judge(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("minigpt.judge.original.read_original", judge)
    assert "there is not enough memory for this: " in complaint(run("parity"))


# many prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["the dog", "", "狗", "I saw", "a", "x" * 30] * 4
    path.write_text("".join(json.dumps({"prompt": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def results(file: Path) -> dict[int, tuple[str, str]]:
    """The text of each prompt, and how it ended; each prompt once."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: (row["text"], row["end"]) for row in rows}


def test_many_prompts_and_the_rest_of_them(run: Run, roomy: Path, prompts: Path, tmp_path: Path) -> None:
    words = ["generate", "--model", roomy, "--prompts", prompts, "--seed", 5, "--max-new-tokens", 20]
    status, out, err = run(*words, "--out", tmp_path / "whole.jsonl", "--batch-size", 5)
    assert (status, out) == (0, "")
    assert re.fullmatch(r"24 texts, \d+ tokens in [\d.]+ s, \d+ tokens/s\n", err)
    whole = results(tmp_path / "whole.jsonl")
    assert list(whole) == list(range(24)), "in the order of the prompts"

    part = tmp_path / "part.jsonl"
    part.write_bytes((tmp_path / "whole.jsonl").read_bytes()[:700])
    err = run(*words, "--out", part).err
    assert "was cut short" in err
    assert re.search(r"\d+ texts are there already", err)
    assert results(part) == whole
    before = part.read_bytes()
    assert "24 texts are there already" in run(*words, "--out", part).err
    assert part.read_bytes() == before
    assert "another run" in complaint(run(*words, "--top-k", 3, "--out", part))
    assert part.read_bytes() == before


@pytest.mark.parametrize("name", ["N", "make"])
@pytest.mark.parametrize("changed", ["norm.py", "tokenizer.json"])
def test_a_run_with_another_norm_or_tokenizer_is_another(
    run: Run, copy: Path, prompts: Path, tmp_path: Path, name: str, changed: str
) -> None:
    norm = "import torch\n\nclass N(torch.nn.LayerNorm):\n    pass\n\ndef make(size, eps):\n    return N(size, eps)\n"
    (tmp_path / "norm.py").write_text(norm)
    words = ["generate", "--model", copy, "--prompts", prompts, "--max-new-tokens", 2, "--out", tmp_path / "out.jsonl"]
    words += ["--norm", f"{tmp_path / 'norm.py'}:{name}"]
    assert run(*words).status == 0
    assert "24 texts are there already" in run(*words).err
    if changed == "norm.py":
        (tmp_path / "norm.py").write_text(norm.replace("pass", "factor = 2"))
    else:
        minigpt.Tokenizer(tiny_bpe(290)).save(tmp_path)
    assert "another run" in complaint(run(*words))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=lambda sent: sent.name)
@pytest.mark.thorough
def test_a_run_that_is_ended_goes_on(
    run: Run, roomy: Path, prompts: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    """Once a few texts are there, and long before all of them are."""
    out = tmp_path / "out.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:8]))
    words = ["generate", "--model", roomy, "--prompts", prompts, "--greedy", "--max-new-tokens", 200, "--out", out]
    process = subprocess.Popen(command(*words, "--batch-size", 2), stderr=subprocess.PIPE, env=environment())
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        time.sleep(0.02)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent)
    assert b"Traceback" not in err
    kept = out.read_bytes().rpartition(b"\n")[0]
    assert 2 <= kept.count(b"\n") + 1 < 8
    if sent == signal.SIGINT:
        assert err.endswith(b"stopped; the same command continues\n")
        return
    assert run(*words).status == 0
    assert out.read_bytes().startswith(kept)
    assert list(results(out)) == list(range(8))


# What the model's own generation config says


def test_settings_beside_the_weights_are_used_unless_others_are_given(run: Run, copy: Path) -> None:
    def ended(fields: str, *words: object) -> Ended:
        (copy / "generation_config.json").write_text(fields)
        return run("generate", "the dog", "--model", copy, *words)

    greedy = ended("{}", "--greedy", "--max-new-tokens", 9).out
    assert ended('{"do_sample": false, "max_new_tokens": 9}').out == greedy
    assert ended('{"top_k": 1, "max_new_tokens": 99}', "--max-new-tokens", 9).out == greedy
    assert ended('{"top_k": 5, "max_new_tokens": 99}', "--greedy", "--max-new-tokens", 9).out == greedy
    assert ended('{"top_k": 5}', "--temperature", 0, "--max-new-tokens", 9).out == greedy
    named = ended('{"use_cache": true, "stop_strings": ["z"], "max_new_tokens": 3}', "--greedy", "--json")
    assert json.loads(named.out)["settings"]["stop"] == ["z"]

    message = complaint(ended('{"do_sample": false, "top_k": 5}'))
    assert message.startswith("error: top_k ")
    assert f"generation_config.json of {copy}" in message
    length = len(minigpt.Tokenizer.from_pretrained(copy).encode("the dog"))
    assert ended(f'{{"do_sample": false, "max_length": {length + 9}}}').out == greedy
    assert ended('{"do_sample": false, "max_length": 3}', "--max-new-tokens", 9).out == greedy
    assert f"is 1, and the prompt has {length} tokens" in complaint(ended('{"max_length": 1}'))
    assert "max_length in generation_config.json must be a number" in complaint(ended('{"max_length": "long"}'))
    several = ended('{"num_return_sequences": 3, "max_length": 20, "max_new_tokens": 3}')
    assert complaint(several).startswith("error: num_return_sequences ")
    assert complaint(ended('{"num_beams": 4, "transformers_version": "5"}')).startswith("error: num_beams ")
    both = complaint(ended('{"top_k": 5}', "--temperature", 0, "--top-k", 5))
    assert both.startswith("error: --top-k ")
    assert "-3" in complaint(ended('{"top_k": 7}', "--top-k", 5, "--max-new-tokens", -3))


def test_fields_that_are_no_settings_or_off_change_nothing(run: Run, copy: Path) -> None:
    """Also what transformers writes of its own accord, and where a bare file of weights is given."""

    def greedy(place: Path) -> str:
        ended = run("generate", "the dog", "--model", place, "--max-new-tokens", 9)
        assert ended.status == 0, ended.err
        return ended.out

    off = {"pad_token_id": None, "top_k": 0, "output_attentions": False, "length_penalty": 1.0, "min_length": 0}
    bookkeeping = {
        "disable_compile": True, "use_cache": True, "num_assistant_tokens": 20, "_from_model_config": True,
        "bos_token_id": 0,
    }  # fmt: skip
    texts = set()
    for fields in ({}, off, bookkeeping):
        (copy / "generation_config.json").write_text(json.dumps(fields | {"do_sample": False}))
        texts.add(greedy(copy))
    GenerationConfig(do_sample=False).save_pretrained(copy)
    texts |= {greedy(copy), greedy(copy / "model.safetensors")}
    assert len(texts) == 1
    for unknown in ({"length_penalty": 3}, {"beams": 2}):
        (copy / "generation_config.json").write_text(json.dumps(unknown))
        message = complaint(run("generate", "the dog", "--model", copy))
        assert message.startswith(f"error: {next(iter(unknown))} ")


def test_a_text_that_cannot_fit_is_not_read(run: Run, tmp_path: Path) -> None:
    """Fifty megabytes take a minute to turn into ids, so its tokens are not counted: it has at least so many."""
    text = "Once upon a time. " * 10_000
    fits = 'the model\'s context 256; overflow="slide" (--overflow slide in a shell) goes on beyond it'
    error = complaint(run("generate", "-", stdin=text.encode()))
    assert re.fullmatch(rf"error: the prompt has at least \d{{4,}} tokens and {re.escape(fits)}\n", error)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    words = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out"]
    assert "prompts.jsonl, line 1: the prompt has at least" in complaint(run("generate", *words))


@pytest.mark.parametrize(
    "words", [["info"], ["generate", "x", "--greedy", "--max-new-tokens", 2, "--json"], ["perplexity", "demo", "t.txt"]]
)
def test_a_command_in_a_pipe_says_that_it_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[object]
) -> None:
    """Also in a step that takes long, and not at once."""
    assert run("--version").err == ""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("Once upon a time. ")
    monkeypatch.setattr("minigpt.cli.output.LINE_SECONDS", 0.02)
    files_at = contents.Files.at

    def slow(*arguments: object) -> object:
        time.sleep(0.1)
        return files_at(*arguments)

    monkeypatch.setattr(contents.Files, "at", slow)
    ended = run(*words)
    assert ended.status == 0
    assert len(re.findall(r"^\d+ s, 0%: reading demo$", ended.err, re.M)) >= 2
    assert "reading" not in ended.out


def test_no_line_of_progress_comes_after_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last line is being written as the block ends."""
    written: list[str] = []

    class SlowStream(io.StringIO):
        def write(self, text: str, /) -> int:
            time.sleep(0.05)
            written.append(text)
            return len(text)

    monkeypatch.setattr("minigpt.cli.output.LINE_SECONDS", 0.001)
    for _ in range(3):
        with contextlib.redirect_stderr(SlowStream()), PULSE.beating():
            time.sleep(0.08)
        before = list(written)
        time.sleep(0.15)
        assert before
        assert written == before


def test_beyond_the_context(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused, or told that it slides."""
    talking(tmp_path)  # a context of 48
    words = ["generate", "the dog", "--model", tmp_path, "--greedy", "--max-new-tokens", 60]
    assert "48" in complaint(run(*words))
    words += ["--overflow", "slide"]
    assert run(*words).status == 0
    assert ["context of 48" in message for message in caplog.messages] == [True]


# norms and info


def test_norms_are_listed(run: Run) -> None:
    status, out, err = run("norms")
    assert (status, err) == (0, "")
    for name, info in minigpt.norms.available().items():
        (line,) = (line for line in out.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1] == ("yes" if info.exact else "no")


# convert


def test_convert_writes_what_transformers_loads(run: Run, roomy: Path, tmp_path: Path) -> None:
    size = sum(parameter.numel() for parameter in minigpt.from_pretrained(roomy).parameters())
    printed = f"{tmp_path / 'out'} holds {roomy} with fused: {size:,} parameters\n"
    assert run("convert", roomy, tmp_path / "out") == (0, printed, "")
    ours = minigpt.from_pretrained(tmp_path / "out", device="cpu", arithmetic="reference")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids), hf(ids).logits)
    assert minigpt.Tokenizer.from_pretrained(tmp_path / "out").encode("the dog")


def test_the_options_of_convert(run: Run, roomy: Path, tmp_path: Path) -> None:
    words = ("--norm", "rms", "--sites", "ln_f,h.0.ln_2", "--dtype", "bfloat16", "--max-shard-bytes", 20_000)
    assert run("convert", roomy, tmp_path / "out", *words).status == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = minigpt.from_pretrained(tmp_path / "out", device="cpu")
    changed = [site for site, norm in model.norm_modules().items() if "rms" in type(norm).__name__.lower()]
    assert (changed, model.wte.weight.dtype) == (["h.0.ln_2", "ln_f"], torch.bfloat16)


def test_convert_keeps_the_settings_for_writing(run: Run, copy: Path) -> None:
    """Also those that are off."""
    settings = {"temperature": 0.5, "do_sample": True, "top_k": 0, "max_new_tokens": 9, "eos_token_id": [0, 5]}
    settings |= {"min_p": None}
    (copy / "generation_config.json").write_text(json.dumps(settings | {"transformers_version": "5"}))
    assert run("convert", copy, copy / "out").status == 0
    written = json.loads((copy / "out" / "generation_config.json").read_text())
    assert written.items() >= settings.items()
    texts = [run("generate", "the dog", "--model", place, "--seed", 3).out for place in (copy, copy / "out")]
    assert texts[0] == texts[1]


def test_convert_replaces_a_model_only_by_force_and_leaves_nothing_of_it(run: Run, tmp_path: Path) -> None:
    """A finetuned model, with its curve and its checkpoints, and another model's shards and tokenizer."""
    out = saved(reference(n_layer=1, std=0.3), tmp_path / "tuned")
    (out / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    for name in ("finetune.json", "tokenizer.json", "pytorch_model.bin", "model-00001-of-00002.safetensors", "NOTES"):
        (out / name).write_text("{}")
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    source = write_book(reference(), tmp_path / "in")

    assert "holds a model; give another folder, or --force" in complaint(run("convert", source, out))
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    for part in ("config.json", "model.safetensors.index.json", "ckpt.pt", "vocab.json"):
        (tmp_path / part).mkdir()
        (tmp_path / part / part).touch()
        assert "--force" in complaint(run("convert", source, tmp_path / part))
    ended = run("convert", source, out, "--force")
    assert (ended.status, ended.out.count("\n")) == (0, 1)
    assert ended.out.startswith(f"{out} holds {source} with fused: ")
    assert ended.out.endswith(f"parameters, without a tokenizer, since {source} has none\n")
    assert sorted(path.name for path in out.iterdir()) == [
        "NOTES", "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    ours, hf = (minigpt.from_pretrained(place, device="cpu") for place in (out, source))
    assert torch.equal(ours.wte.weight, hf.wte.weight)


def test_convert_removes_neither_what_a_link_names_nor_its_source(run: Run, roomy: Path, tmp_path: Path) -> None:
    hf = tmp_path / "project" / "checkpoints" / "theirs"
    hf.mkdir(parents=True)
    assert run("convert", roomy, hf.parents[1]).status == 0
    assert hf.is_dir()

    source = shutil.copytree(roomy, hf.parent / "checkpoint-10")
    assert "would be removed" in complaint(run("convert", source, hf.parents[1], "--force"))
    assert source.is_dir()

    linked = shutil.copytree(roomy, tmp_path / "linked")
    (linked / "checkpoints").symlink_to(hf.parent)
    assert run("convert", roomy, linked, "--force").status == 0
    assert not (linked / "checkpoints").exists()
    assert hf.is_dir()


# Bad input


GENERATE, PARITY = "generate x --model FOLDER", "parity --prompt x --model FOLDER"
MANY = "generate --model FOLDER --prompts PROMPTS --out OUT"

BAD = [
    ("frobnicate", "frobnicate.*minigpt --help"),
    ("generate --frob", "--frob.*minigpt generate --help"),
    ("generate a b", "quote it: minigpt generate 'a b'"),
    ("convert", "MODEL.*minigpt convert --help"),
    ("generate x --model=", "--model must be a path, got ''"),
    ("bench generate --bacth 3", "--batch.*minigpt bench generate --help"),
    ("bench generate --model demo --preset gpt2-xl", "--preset is for random weights"),
    ("norms --device cpu", "--device is for --check NAME"),
    ("info ./no/such/folder", "no directory or file of weights"),
    (f"{GENERATE} --norm nope", "unknown norm 'nope'.*fused.*textbook"),
    (f"{GENERATE} --norm frozen", "--fit must name a text"),
    (f"{GENERATE} --dtype int3", "--dtype must be float32 or bfloat16 or float16 or float64, got 'int3'"),
    (f"{GENERATE} --dtype fp16", "did you mean float16"),
    (f"{GENERATE} --norm RMS", "did you mean rms"),
    (f"{GENERATE} --norm LayerNorm", "did you mean fused"),
    ("info demmo", "did you mean demo"),
    ("generate --json dog", "--json must be --json=FILE"),
    (f"{GENERATE} --draft int4", "--draft must be auto or int8 or none, got 'int4'"),
    (f"{GENERATE} --device gpu", "unknown device 'gpu'.*cpu.*cuda"),
    (f"{GENERATE} --sites ln_f", "--sites .*a norm"),
    (f"{GENERATE} --temperature 0 --seed 1", "--seed .* temperature 0"),
    (f"{GENERATE} --top-k -1", "--top-k.*0.*-1"),
    (f"{GENERATE} --max-new-tokens 2000", "--max-new-tokens.*1024.*2000"),
    (f"{GENERATE} --batch-size 3", "--batch-size is for --prompts"),
    (f"{GENERATE} --draft int4", "--draft .*int4"),
    (f"{GENERATE} --greedy --top-k=2 --top-p=.5 --seed=1", "--greedy.*--top-k, --top-p, --seed"),
    (f"{GENERATE} --prompts PROMPTS --out OUT", "cannot go with a PROMPT or --json"),
    ("generate --prompts PROMPTS", "--prompts .*--out"),
    ("generate --out OUT", "--out .*--prompts"),
    ("generate --prompts PROMPTS --out PROMPTS --model FOLDER", "prompts.jsonl.*another file"),
    ("generate --prompts no/such.jsonl --out OUT", r"cannot read no/such\.jsonl"),
    (f"{MANY} --max-new-tokens 1020", r"prompts\.jsonl, line 6: .*30 tokens.*1020"),
    (f"{PARITY} --norm rms --sites h.7.*", r"'h\.7\.\*'.*h\.0\.ln_1.*ln_f"),
    (f"{PARITY} --budget kl", "'kl'.*budget"),
    (f"{PARITY} --text no/such/file.txt", r"no/such/file\.txt"),
    (f"{PARITY} --norm no/such/norm.py:Norm", r"no/such/norm\.py"),
    ("parity --csv", "requires an argument.*minigpt parity --help"),
    ("parity report.json", "--compare must be given to read report.json"),
    ("parity --compare", "--compare needs the files of two or more reports"),
    ("parity --compare PROMPTS PROMPTS", "prompts.jsonl is not a JSON object"),
    ("perplexity FOLDER", "TEXT.*minigpt perplexity --help"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_what_cannot_be_done_is_one_line(
    run: Run, roomy: Path, prompts: Path, tmp_path: Path, words: str, message: str
) -> None:
    places = {"FOLDER": roomy, "PROMPTS": prompts, "OUT": tmp_path / "out.jsonl"}
    actual = complaint(run(*(places.get(word, word) for word in words.split())))
    assert re.search(message, actual), actual
    assert not (tmp_path / "out.jsonl").exists(), "something was done before the mistake was seen"


LOUD = """
import minigpt
print("imported")
class Loud(minigpt.LayerNorm):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        print("built")
    def forward(self, x):
        print("called")
        return super().forward(x)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "the dog", "--greedy", "--max-new-tokens", "5"],
        ["generate", "the dog", "--greedy", "--max-new-tokens", "5", "--json"],
        ["parity", "--prompt", "the dog", "--json", "-"],
    ],
    ids=" ".join,
)
def test_what_a_norm_prints_is_no_part_of_the_result(run: Run, roomy: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    ended = run(*words, "--model", roomy, "--norm", f"{tmp_path}/loud.py:Loud")
    assert ended.status == 0, ended
    assert {"imported", "built", "called"} <= set(ended.err.split())
    assert not {"imported", "built", "called"} & set(ended.out.split())
    if "--json" in words:
        json.loads(ended.out)


# Streams that end early


def closed_after(words: Sequence[object], count: int) -> tuple[int, str]:
    """Status and standard error of a command whose output is read up to ``count`` bytes and then closed."""
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(count)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(timeout=60), err


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["parity --prompt x --json -", "parity --prompt x", "norms", "generate x --seed 1"])
def test_a_reader_that_has_gone_is_no_verdict(roomy: Path, words: str) -> None:
    """Status 1 would say that parity does not hold."""
    model = [] if words == "norms" else ["--model", roomy]
    assert closed_after([*words.split(), *model], 0) == (128 + signal.SIGPIPE, "")


READ = {"prompts", "text", "reports", "original", "outputs", "file"}  # files that commands read
WRITES = (
    "generate --prompts PROMPTS --out", "parity --json", "parity --html", "parity --record",
    "parity --remove --remove-file", "norms --check rms --html", "convert FOLDER", "sites FOLDER --text PROMPTS --json",
    "sites FOLDER --text PROMPTS --html", "finetune --text PROMPTS --steps 1 --out", "study PROMPTS --out",
    *(f"study PROMPTS --out OUT {name}" for name in ("--html", "--csv")),
    "bench generate --json", "generate dog --json", "info FOLDER --json", "perplexity FOLDER PROMPTS --json",
    "norms --json", "parity --csv",
)  # fmt: skip


@pytest.mark.parametrize("words", WRITES)
def test_what_cannot_be_written_is_an_error_before_the_work(
    run: Run, roomy: Path, prompts: Path, tmp_path: Path, words: str
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "new.json"
    places = {"FOLDER": roomy, "PROMPTS": prompts, "OUT": tmp_path}
    message = complaint(run(*(places.get(word, word) for word in words.split()), place))
    assert re.match(f"error: cannot write (to )?{place}: ", message), message


def test_every_command_that_writes_is_among_them() -> None:
    for name in COMMANDS:
        module = import_module(f"minigpt.cli.{name}")
        function = module.generate if name == "bench" else getattr(module, name)
        for parameter in inspect.signature(function).parameters.values():
            if "Path" in str(parameter.annotation) and parameter.name not in READ:
                spelled = "--json" if parameter.name == "json_file" else f"--{parameter.name.replace('_', '-')}"
                ends = (f" {spelled}", " FOLDER" if name == "convert" else spelled)
                assert any(words.startswith(name) and words.endswith(ends) for words in WRITES), (name, spelled)


@pytest.mark.thorough
def test_a_file_that_is_replaced_is_whole_or_the_old_one(run: Run, roomy: Path, tmp_path: Path) -> None:
    """The disk is full when a report is written over an older one."""
    small = f"ulimit -f 1; trap '' XFSZ; {shlex.join(command('sites', roomy, '--text', roomy / 'tokenizer.json'))}"
    for name in ("--html", "--json"):
        old = tmp_path / "report"
        old.write_text("old")
        done = subprocess.run(
            ["bash", "-c", f"{small} {name} {old}"], capture_output=True, text=True, env=environment(), check=False
        )
        assert done.returncode == 2, done
        assert done.stderr == f"error: cannot write {old}: File too large\n"
        assert old.read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["report"]
