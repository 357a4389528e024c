"""One checkpoint in transformers' own tools: on transformers' own network, and on ours with norms of your choice.

    python scripts/bench/hf_tools.py --model demo --norm textbook --norm rms --json docs/results/hf-tools.json

Each tool runs on each network: the text pipeline, Trainer, PEFT's LoRA, and lm-eval's "hf" model. With a norm
that is a LayerNorm the figures are those of transformers' class up to rounding. Another norm changes them.

Needs ``pip install 'minigpt[hf]'``, and lm-eval for the last tool; a tool that is not installed is left out.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything here is local

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainingArguments, pipeline
from transformers.utils import logging

import minigpt
from minigpt.checkpoint import locate
from minigpt.device import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, keep
from demo.tales import tales

NORMS = ["textbook", "rms"]
PROMPTS = ("Once upon a time", "The old sailor", "In a small house")
STEPS, BATCH, LENGTH = 20, 8, 64
UNSEEN = 1 << 33  # the seed of tales that the demo was not trained on


def main(model: str = "demo", norm: list[str] = NORMS, json_file: JsonFile = None) -> None:
    """Print, and with --json write, what each tool gives on each network."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(locate(model))
    networks = {"transformers": None, "fused": "fused", **{name: name for name in norm}}
    packages = ("peft", "accelerate", "lm_eval")
    results: dict[str, Any] = {"model": model, "measured_on": environment(torch.get_num_threads(), *packages)}
    for tool, run in TOOLS.items():
        results[tool] = {}
        for name, choice in networks.items():
            minigpt.hf.unregister()
            if choice is not None:
                minigpt.hf.register(norm=choice)
            torch.manual_seed(0)
            results[tool][name] = run(folder)
            print(f"{tool} on {name}: {json.dumps(results[tool][name])}", flush=True)
    minigpt.hf.unregister()
    keep(results, json_file)


def write(folder: str) -> dict[str, Any]:
    """What the pipeline adds to each prompt: by greedy search, by beam search, drawn."""
    write = pipeline("text-generation", model=folder, device="cpu")
    how = {"greedy": {"do_sample": False}, "beams": {"num_beams": 4}, "sampled": {"do_sample": True}}
    return {
        name: [write(prompt, max_new_tokens=16, **settings)[0]["generated_text"] for prompt in PROMPTS]
        for name, settings in how.items()
    }


def train(folder: str) -> dict[str, Any]:
    """Fine-tune all weights by Trainer, with gradient checkpointing; load what it saved."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = _rows(folder)
    with tempfile.TemporaryDirectory() as out:
        losses = _fit(model, rows, out, gradient_checkpointing=True)
        again = AutoModelForCausalLM.from_pretrained(out)
        with torch.inference_mode():
            difference = (again(rows[:2]).logits - model.eval()(rows[:2]).logits).abs().max().item()
        files = sorted(path.name for path in Path(out).glob("*.safetensors"))
    return losses | {"largest_difference_once_loaded_again": difference, "weights": files}


def adapt(folder: str) -> dict[str, Any]:
    """Train a LoRA adapter on the attention and the MLP, then merge it."""
    from peft import LoraConfig, get_peft_model

    layers = ["c_attn", "c_proj", "c_fc"]
    adapter = LoraConfig(r=8, target_modules=layers, fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), adapter)
    trained, rows = model.get_nb_trainable_parameters()[0], _rows(folder)
    with tempfile.TemporaryDirectory() as out:
        losses = _fit(model, rows, out)
    with torch.inference_mode():
        adapted = model.eval()(input_ids=rows[:2]).logits
        merged: Any = model.merge_and_unload()
        difference = (merged(rows[:2]).logits - adapted).abs().max().item()
    return losses | {"parameters": trained, "largest_difference_once_merged": difference}


def judge(folder: str) -> dict[str, Any]:
    """Perplexity of unseen tales by lm-eval's "hf" model, as one of its tasks."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "tales.jsonl")
        data.write_text("".join(json.dumps({"text": tale}) + "\n" for tale in tales(20, UNSEEN)), encoding="utf-8")
        task = {
            "task": "tales", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": "loglikelihood_rolling",
            "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
        }  # fmt: skip
        evaluate: Any = simple_evaluate
        network: Any = HFLM
        found = evaluate(
            network(folder, device="cpu", batch_size=4), tasks=[task], bootstrap_iters=0, log_samples=False
        )
    measured = found["results"]["tales"]
    return {name: measured[f"{name},none"] for name in ("bits_per_byte", "word_perplexity")}


TOOLS: dict[str, Callable[[str], dict[str, Any]]] = {"pipeline": write, "Trainer": train}
TOOLS |= {"PEFT": adapt} if find_spec("peft") else {}
TOOLS |= {"lm-eval": judge} if find_spec("lm_eval") else {}


def _rows(folder: str) -> torch.Tensor:
    """Token ids (rows, LENGTH) of the tales, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(tokenizer.eos_token.join(tales(200, UNSEEN)), return_tensors="pt", verbose=False)["input_ids"][0]
    return ids[: STEPS * BATCH * LENGTH].view(-1, LENGTH)


def _fit(model: Any, rows: torch.Tensor, out: str, **settings: Any) -> dict[str, float]:
    """Train for STEPS steps and save; the loss of the first and of the last."""
    arguments = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-4, logging_steps=1, seed=0,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(out)
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    return {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}


if __name__ == "__main__":
    typer.run(main)
