"""The scripts, run as their first lines say, on a small checkpoint."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import minigpt

SCRIPTS = Path(__file__).parents[2] / "scripts"

WRONG_NORM = """
import minigpt

class Wrong(minigpt.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 1.01
"""


def run(script: str, *words: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error, from a folder that is not the repository's."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, words)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).anchor,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "300"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
def test_generate_writes_what_python_writes(talking: Path) -> None:
    model, tokenizer = minigpt.from_pretrained(talking), minigpt.Tokenizer.from_pretrained(talking)
    settings: dict[str, Any] = dict(max_new_tokens=10, do_sample=True, temperature=0.8, seed=3)
    expected = "".join(minigpt.stream(model, tokenizer, "the dog", **settings))
    actual = run("generate.py", "the dog", "--model", talking, "--max-new-tokens", 10, "--seed", 3)
    assert actual == (0, f"the dog{expected}\n", "")


@pytest.mark.thorough
def test_a_norm_of_ones_own_changes_next_to_nothing(talking: Path) -> None:
    status, out, err = run("swap_layer_norm.py", "--prompt", "the dog", "--model", talking, "--sites", "h.*.ln_?")
    assert (status, err) == (0, "")
    head, change, *texts = out.splitlines()
    assert head == "replaced 2 norms: h.0.ln_1, h.0.ln_2"
    largest = float(change.partition(": ")[2].partition(",")[0])
    scale = float(change.rpartition(" ")[2])
    print(f"largest change {largest:.3g}, bound 1e-4, scale {scale:.3g}")
    assert largest < 1e-4 < 0.1 < scale
    before, after = "\n".join(texts).split("after:  ")
    assert before.removeprefix("before: ").strip() == after.strip()
    assert after.startswith("the dog")


def test_check_parity_tells_the_truth_and_its_exit_status_too(
    talking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module("check_parity").main(model=str(talking))
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"{site} " in out for site in ("h.0.ln_1", "h.0.ln_2", "ln_f"))
    assert out.splitlines()[-1] == "parity holds"

    (tmp_path / "wrong.py").write_text(WRONG_NORM, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        import_module("check_parity").main(model=str(talking), norm=f"{tmp_path / 'wrong.py'}:Wrong")
    assert ended.value.code == 1
    assert "times the noise floor" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("script", sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.py")))
def test_every_script_says_what_it_is_for(script: str) -> None:
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    compile(text, script, "exec")
    assert text.startswith('"""')
    if "typer.run" in text:
        assert f"python scripts/{script}" in text.split('"""')[1], "its first lines do not say how to run it"


@pytest.mark.thorough
def test_results_that_could_not_be_kept_are_refused_before_the_work(tmp_path: Path) -> None:
    status, out, err = run("bench/serve.py", "--json", tmp_path / "nowhere" / "serve.json")
    assert (status, out) == (2, "")
    assert "cannot write" in err


@pytest.mark.thorough
def test_servers_are_timed_in_turns() -> None:
    pytest.importorskip("fastapi")
    sizes = ["--clients", 2, "--requests", 2, "--new-tokens", 5, "--repeats", 1, "--prompt-characters", 9]
    status, out, err = run("bench/serve.py", "--against", "", *sizes)
    assert status == 0, err
    report = json.loads(out)
    assert list(report["servers"]) == ["minigpt, streamed", "minigpt, whole"]
    for name, figures in report["servers"].items():
        assert figures["tokens"] == [20]
        assert figures["tokens_per_second"] == pytest.approx(20 / figures["seconds"][0])
        assert (figures["first_token_ms"] is not None) == name.endswith("streamed")


def test_results_are_the_same_printed_and_kept_and_say_in_words_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_module("bench.results").show(
        {"ratio": math.inf, "runs": [math.nan, 0.5], "name": "狗"}, tmp_path / "kept.json"
    )
    kept = (tmp_path / "kept.json").read_text(encoding="utf-8")
    assert kept == capsys.readouterr().out
    assert json.loads(kept) == {"ratio": "inf", "runs": ["nan", 0.5], "name": "狗"}
