"""No option does nothing: in every mode of every command, each one changes the result or is refused in a sentence."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import talking
from command_line import Run, complaint
from safetensors.torch import load_file, save_file

import minigpt
from minigpt.choices import words_of
from minigpt.cli.commands import app_of

# A value for each option: another one than what stands there without it.
VALUES = {
    "--model": "OTHER", "--norm": "rms", "--sites": "ln_f", "--keep": "scale", "--fit": "TEXT", "--attention": "eager",
    "--device": "cpu", "--dtype": "bfloat16", "--quantize": "int8", "--revision": "main", "--against": "OTHER",
    "--prompt": "cat", "--prompts": "PROMPTS", "--text": "TEXT", "--remove-file": "NEW", "--budget": "kl=9",
    "--record": "NEW", "--original": "RECORD", "--outputs": "OUTPUTS", "--json": "NEW", "--html": "NEW", "--csv": "NEW",
    "--as": "rms_norm", "--seed": "7", "--check": "rms", "--out": "NEW", "--batch-size": "3",
    "--num-return-sequences": "2", "--engine": "onnx=no.onnx", "--engine-option": "intra_op_num_threads=1",
}  # fmt: skip
OPENING = "--model --norm --sites --keep --center --fit --attention --dtype --quantize --revision"
OF_TEXTS = "--against --prompt --prompts --text --gradients"
OF_NORMS = "--remove --remove-file --bisect"
SEARCHES = f"--sensitivity {OF_NORMS}"
REFUSED = {  # by the words of a mode
    "parity --compare REPORT REPORT": (
        f"{OPENING} {OF_TEXTS} {SEARCHES} --device --budget --record --original --outputs --engine --engine-option"
    ),
    "parity --original RECORD --outputs OUTPUTS": (
        f"{OPENING} {OF_TEXTS} {SEARCHES} --record --compare --engine --engine-option"
    ),
    "parity --original RECORD --engine onnx=no.onnx": f"{OPENING} {OF_TEXTS} {OF_NORMS} --record --compare --outputs",
    "parity --model FOLDER --engine onnx=no.onnx": (
        f"{OF_NORMS} --norm --sites --keep --center --fit --quantize --against --gradients --compare --outputs"
    ),
    "parity --model FOLDER --prompt dog --record NEW": (
        f"{SEARCHES} --sites --keep --fit --budget --json --csv --html --original --outputs --compare --engine-option"
    ),
    "parity --original RECORD --norm textbook": (
        "--against --prompt --prompts --text --record --compare --remove-file --outputs --engine --engine-option"
    ),
    "parity --model FOLDER --prompt dog --norm textbook": (
        "--remove-file --original --outputs --compare --engine --engine-option"
    ),
    "parity --model FOLDER --prompt dog": (
        f"{SEARCHES} --sites --keep --fit --original --outputs --compare --engine-option"
    ),
    "norms": "--as --dtype --all --html --device --seed",
    "norms --check rms --json": "--all",
    "generate dog --model FOLDER": "--out --batch-size --num-return-sequences --sites --prompts",
    "generate --model FOLDER --prompts PROMPTS --out NEW": "--json",
    "convert FOLDER NEW": "--attention --revision",
    "info FOLDER": "--revision",
    "bench generate --model FOLDER": "--preset",
    "finetune --model FOLDER --text TEXT --steps 1 --out NEW": "--eval-steps",
}


def options_of(command: str) -> dict[str, bool]:
    """Return the options of a command, and whether each is a flag."""
    found: Any = typer.main.get_command(app_of(["--help"]))
    for word in command.split():
        if word not in getattr(found, "commands", {}):
            break
        found = found.commands[word]
    options = {}
    for parameter in found.params:
        if parameter.param_type_name == "option":
            options[parameter.opts[0]] = parameter.is_flag
    return options


def words_with(mode: str, option: str) -> list[str]:
    is_flag = options_of(mode)[option]
    return [*mode.split(), option, *([] if is_flag else [VALUES.get(option, "1")])]


def refused() -> Iterator[tuple[str, str]]:
    for mode, options in REFUSED.items():
        for option in options.split():
            yield mode, option


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the words in capitals stand for."""
    place = tmp_path_factory.mktemp("options")
    folder = talking(place / "model", n_positions=64)
    other = talking(place / "other", std=0.2, n_positions=64)
    (place / "text").write_text("the dog saw the cat and the cat ran. " * 9, encoding="utf-8")
    (place / "prompts").write_text("the dog\nthe cat\n", encoding="utf-8")
    original = minigpt.Original(folder, prompts=["dog"], max_new_tokens=2, device="cpu")
    original.save(place / "record")
    logits = {name: x for name, x in load_file(place / "record").items() if name.startswith("logits.")}
    save_file(logits, place / "outputs")
    (place / "report").write_text(json.dumps(original.judge(norm="rms").to_dict()))
    found = {name.upper(): place / name for name in ("text", "prompts", "record", "outputs", "report")}
    return found | {"FOLDER": folder, "OTHER": other}


@pytest.mark.parametrize(("mode", "option"), [*refused()])
def test_an_option_that_would_do_nothing_is_refused(
    run: Run, places: dict[str, Path], tmp_path: Path, mode: str, option: str
) -> None:
    names = {**places, "NEW": tmp_path / "new"}
    message = complaint(run(*(names.get(word, word) for word in words_with(mode, option))))
    named = {option, *(word for word in mode.split() if word.startswith("--"))}
    assert any(name in message for name in named), message
    assert [*tmp_path.iterdir()] == [], "something was done before the mistake was seen"


def accepted() -> Iterator[tuple[str, str]]:
    """Yield each other option of a mode of parity."""
    for mode, options in REFUSED.items():
        if mode.startswith("parity") and "--engine" not in mode:  # whose files are made by tests/engines
            for option in options_of(mode):
                if option not in options.split() and option not in mode.split():
                    yield mode, option


# These alone change nothing that is written, or this machine has one value only.
SAME = {"--device", "--revision", "--keep"}


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "option"), [pair for pair in accepted() if pair[1] not in SAME])
def test_every_other_option_of_parity_changes_what_is_written(
    run: Run, places: dict[str, Path], tmp_path: Path, mode: str, option: str
) -> None:
    results = []
    for words in (mode.split(), words_with(mode, option)):
        new = tmp_path / str(len(results))
        new.mkdir()
        names = {**places, "NEW": new / "new"}
        ended = run(*(names.get(word, word) for word in words))
        if ended.status == 2:
            assert ended.err.startswith("error: "), ended
        written = [file.read_bytes() for file in new.iterdir()]
        results.append((ended.status, re.sub(r"/\d/new", "", ended.out), ended.err, written))
    assert results[0] != results[1]


# What is written where


def test_compare_writes_json_and_page(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    report, target, page = places["REPORT"], tmp_path / "all.json", tmp_path / "page.html"
    ended = run("parity", "--compare", report, report, "--json", target, "--html", page)
    assert ended.status == 0, ended
    one = json.loads(report.read_text())
    assert json.loads(target.read_text()) == {"reports": [one, one]}
    assert "2 reports" in page.read_text(encoding="utf-8")
    printed = run("parity", "--compare", report, report, "--json")
    assert json.loads(printed.out) == {"reports": [one, one]}
    again = run("parity", "--compare", target)
    assert again.out.count("DIFFERENT") == 2


@pytest.mark.parametrize("words", ["--json A B", "A B --json A", "--json=B A B", "A B --html A"])
def test_compare_never_replaces_a_report(run: Run, places: dict[str, Path], tmp_path: Path, words: str) -> None:
    names = {"A": tmp_path / "a.json", "B": tmp_path / "b.json", "--json=B": f"--json={tmp_path / 'b.json'}"}
    for name in ("A", "B"):
        shutil.copy(places["REPORT"], names[name])
    message = complaint(run("parity", "--compare", *(names.get(word, word) for word in words.split())))
    assert re.match("error: --(json|html) ", message)
    for name in ("A", "B"):
        assert Path(names[name]).read_bytes() == places["REPORT"].read_bytes()


DASH = (
    "parity --html -", "parity --record -", "parity --norm rms --remove --remove-file -", "norms --check rms --html -",
    "sites FOLDER --text TEXT --html -", "generate --prompts PROMPTS --out -", "convert FOLDER -",
    "finetune --text TEXT --steps 1 --out -", "study TEXT --out -", "study TEXT --out NEW --html -",
    "study TEXT --out NEW --csv -",
)  # fmt: skip


@pytest.mark.parametrize("words", DASH)
def test_no_file_is_named_dash(
    run: Run, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**places, "NEW": tmp_path / "new"}
    message = complaint(run(*(names.get(word, word) for word in words.split())))
    assert "must be a path, got '-'; only JSON can be printed" in message
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("spaces", ["{},{}", "{}, {}", " {} ,\t{} "])
def test_spaces_around_a_comma_mean_nothing(spaces: str) -> None:
    assert words_of(spaces.format("ln_f", "h.0.*")) == ["ln_f", "h.0.*"]


def test_spaces_in_the_options_and_in_a_study(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    words = shlex.split("parity --prompt dog --norm rms --sites 'ln_f, h.0.ln_1' --keep 'scale, shift' --json")
    report = json.loads(run(*words, "--model", places["FOLDER"]).out)
    assert report["sites"] == ["ln_f", "h.0.ln_1"]
    from minigpt.study.file import read_study

    study = tmp_path / "study.toml"
    model = json.dumps(str(places["FOLDER"]))
    study.write_text(f'models = [{model}]\nnorms = ["rms"]\nsites = ["ln_f, h.0.ln_1"]\nkeep = ["scale, shift"]\n')
    (cell,) = read_study(study).cells()
    assert (cell.recipe.sites, cell.recipe.keep) == (("ln_f", "h.0.ln_1"), ("scale", "shift"))


def test_a_study_writes_into_the_folder_that_it_makes(run: Run, tmp_path: Path) -> None:
    """It is checked before the study is read: here it is not there, which is what is said."""
    out = tmp_path / "results"
    words = ("study", tmp_path / "none.toml", "--out", out, "--html", out / "page.html", "--csv", out / "table.csv")
    assert "none.toml" in complaint(run(*words))
    words = ("study", tmp_path / "none.toml", "--out", out, "--html", tmp_path / "no" / "page.html")
    assert "cannot write" in complaint(run(*words))


# A record


def test_a_model_beside_a_record_is_the_one_that_is_judged(run: Run, places: dict[str, Path]) -> None:
    record = places["RECORD"]
    own = json.loads(run("parity", "--original", record, "--json").out)
    other = json.loads(run("parity", "--original", record, "--model", places["OTHER"], "--json").out)
    assert (own["verdict"], own["against"]) == ("pass", None)
    assert (other["verdict"], other["model"]) == ("fail", str(places["OTHER"]))
    assert "demo and" in complaint(run("parity", "--original", record, "--model", "demo"))


@pytest.mark.thorough
def test_attention_is_the_records_unless_another_is_given(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    record = tmp_path / "eager"
    minigpt.Original(places["FOLDER"], prompts=["dog"], max_new_tokens=1, attention="eager", device="cpu").save(record)
    for words, attention in (((), "eager"), (("--attention", "sdpa"), "sdpa")):
        report = json.loads(run("parity", "--original", record, *words, "--json").out)
        assert report["attention"] == attention


def test_weights_of_eight_bits_are_judged_where_a_record_is_written(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    record = tmp_path / "record"
    words = ("parity", "--model", places["FOLDER"], "--prompt", "dog", "--quantize", "int8", "--record", record)
    ended = run(*words, "--json")
    assert (json.loads(ended.out)["quantize"], record.is_file()) == ("int8", True)


MISSING = (
    "parity --original NEW", "parity --original NEW --outputs OUTPUTS", "parity --original RECORD --outputs NEW",
    "parity --compare NEW", "parity --text NEW", "parity --prompts NEW",
    "parity --norm NEW:Norm", "sites FOLDER --text NEW", "perplexity FOLDER NEW", "study NEW --out DIR",
    "generate --prompts NEW --out DIR/out",
)  # fmt: skip


@pytest.mark.parametrize("words", MISSING)
def test_a_missing_file_is_missing(run: Run, places: dict[str, Path], tmp_path: Path, words: str) -> None:
    names = {**places, "NEW": tmp_path / "none.py", "DIR": tmp_path, "DIR/out": tmp_path / "out"}
    names["NEW:Norm"] = f"{tmp_path / 'none.py'}:Norm"
    message = complaint(run(*(names.get(word, word) for word in words.split())))
    assert re.match(rf"error: .*cannot read {tmp_path}/none.py: (No|there is no) such file", message), message


def test_a_folder_and_a_file_of_something_else_are_what_they_are(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    for words in (("--original", tmp_path), ("--original", places["RECORD"], "--outputs", tmp_path)):
        assert "Is a directory" in complaint(run("parity", *words))
    text = places["TEXT"]
    assert "is not a record" in complaint(run("parity", "--original", text))
    words = ("parity", "--original", places["RECORD"], "--outputs", text)
    assert "is not a safetensors file" in complaint(run(*words))
