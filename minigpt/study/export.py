"""Write a finetuned model."""

import json
from pathlib import Path

import minigpt
from minigpt.checkpoint.frozen_norms import can_save_frozen, save_frozen
from minigpt.study.finetune import Finetuned

CURVE = "finetune.json"


def write(result: Finetuned, out: Path, source: str) -> None:
    """Write the model, its tokenizer, and finetune.json with the curves of its loss, into ``out``.

    A model whose norms are all frozen is written as a plain GPT-2.
    """
    tokenizer = minigpt.Tokenizer.from_pretrained(source)
    save = save_frozen if can_save_frozen(result.model) else minigpt.save_pretrained
    save(result.model, out, tokenizer)
    (out / CURVE).write_text(json.dumps(result.to_dict(), indent=2) + "\n")
