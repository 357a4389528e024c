"""lm-eval tasks as columns of a study."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minigpt
from minigpt.study import read_study, run_study

evaluator = pytest.importorskip("lm_eval.evaluator", reason="pip install 'lm-eval[hf]'")
pytestmark = pytest.mark.thorough

TASK = """task: local_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
DEMO = Path(minigpt.__file__).parent / "demo"


def test_the_scores_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = ["Once upon a time there was an old sailor.", "Mara found a silver coin in the forest."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "texts.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    (tmp_path / "study.toml").write_text(
        f'models = ["demo"]\nnorms = ["fused", "dyt"]\ntasks = ["{tmp_path / "texts.yaml"}"]\ndevice = "cpu"\n'
    )
    words = [sys.executable, "-m", "minigpt", "study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert all(re.match(r"\d+ s, \d+%: ", line) for line in done.stderr.splitlines()), done.stderr
    assert len(done.stdout.splitlines()) == 3
    fused, dyt = run_study(read_study(tmp_path / "study.toml"), tmp_path / "out")
    theirs = evaluator.simple_evaluate(
        model="hf", model_args={"pretrained": str(DEMO), "dtype": "float32", "max_length": 256},
        tasks=[str(tmp_path / "texts.yaml")], device="cpu", bootstrap_iters=0, log_samples=False,
    )  # fmt: skip
    wanted = theirs["results"]["local_texts"]["word_perplexity,none"]
    print(f"minigpt {fused['tasks']}, transformers {wanted}, with dyt {dyt['tasks']}")
    assert fused["tasks"]["local_texts word_perplexity"] == pytest.approx(wanted, rel=1e-4)
    assert dyt["tasks"]["local_texts word_perplexity"] > 2 * wanted


def test_an_unknown_task_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('models = ["demo"]\nnorms = ["rms"]\ntasks = ["no_such_task"]\n')
    with pytest.raises(minigpt.ConfigError, match="lm-eval has no task 'no_such_task'"):
        read_study(tmp_path / "study.toml")
