"""Write a finetuned model."""

import json
from pathlib import Path

import minigpt
from minigpt.checkpoint.frozen_norms import can_save_frozen, save_frozen
from minigpt.engine import GPT2
from minigpt.study.finetune import Finetuned

CURVE = "finetune.json"


def write(result: Finetuned, out: Path, source: str) -> None:
    """Write the model, its tokenizer, and finetune.json with the curves of its loss, into ``out``.

    A model whose norms are all frozen is written as a plain GPT-2.
    """
    save_model(result.model, out, source)
    (out / CURVE).write_text(json.dumps(result.to_dict(), indent=2) + "\n")


def save_model(model: GPT2, out: Path, source: str) -> None:
    """Write a model and the tokenizer of ``source`` into ``out``; as a plain GPT-2 if its norms are all frozen."""
    save = save_frozen if can_save_frozen(model) else minigpt.save_pretrained
    save(model, out, minigpt.Tokenizer.from_pretrained(source))
