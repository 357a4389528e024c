"""lm-evaluation-harness: over the API it gets the figures that it gets from transformers' own GPT-2."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from live import live

import minigpt

lm_eval = pytest.importorskip("lm_eval.evaluator", reason="pip install 'lm-eval[api,hf]'")
tasks_of = pytest.importorskip("lm_eval.tasks")
pytestmark = pytest.mark.thorough
DEMO = Path(minigpt.__file__).parent / "demo"
WITHIN = 1e-4

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/choice.jsonl"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
"""
PERPLEXITY = """
task: local_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: "FOLDER/texts.jsonl"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A multiple-choice and a perplexity task of texts that the demo has written, and of other words."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = minigpt.from_pretrained("demo"), minigpt.Tokenizer.from_pretrained("demo")
    chance = random.Random(0)

    def story(seed: int, new: int) -> str:
        options = {"do_sample": True, "temperature": 0.9, "seed": seed, "max_new_tokens": new, "eos_token_id": None}
        return "Once upon a time" + "".join(minigpt.stream(model, tokenizer, "Once upon a time", **options))

    choices = []
    for number in range(24):
        words = story(number, 40).split(" ")
        ends = [" " + " ".join(words[12:18]), *(" " + " ".join(chance.sample(words, 6)) for _ in range(3))]
        order = chance.sample(range(4), 4)
        choices.append({"start": " ".join(words[:12]), "choices": [ends[i] for i in order], "label": order.index(0)})
    texts = [{"text": story(100 + i, new)} for i, new in enumerate((5, 60, 150, 250))]
    texts.append({"text": story(200, 200) + story(201, 200) + " naïve café 狗 🐕"})  # longer than the context
    for name, lines in (("choice", choices), ("texts", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", CHOICE), ("perplexity", PERPLEXITY)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    return tasks_of.TaskManager(include_path=str(tmp_path), include_defaults=False)


def figures(tasks: Any, kind: str, batch_size: int, **options: Any) -> dict[str, float]:
    report = lm_eval.simple_evaluate(
        model=kind, model_args=options, tasks=["local_choice", "local_perplexity"], task_manager=tasks,
        batch_size=batch_size, device="cpu", bootstrap_iters=0, log_samples=False,
    )  # fmt: skip
    return {
        f"{task} {name}": value
        for task, results in report["results"].items()
        for name, value in results.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_figures_over_the_api_are_those_of_transformers(tasks: Any) -> None:
    # Over the API lm-eval keeps two places of the context: one for the token that it must ask for, and one to spare.
    truth = figures(tasks, "hf", 1, pretrained=str(DEMO), dtype="float32", max_length=254)
    assert len(truth) == 6
    with live() as server:
        ours = figures(
            tasks, "local-completions", 4, model="demo", base_url=f"{server.url}/v1/completions", tokenizer=str(DEMO),
            tokenizer_backend="huggingface", max_length=256,
        )  # fmt: skip
    print({name: (value, ours[name]) for name, value in truth.items()})
    assert ours == pytest.approx(truth, abs=WITHIN)
    assert 0.5 < truth["local_choice acc,none"] <= 1, "chance would be 0.25"
