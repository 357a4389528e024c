"""The programs that ``minigpt bench generate`` times: ours, transformers, and the reading of memory as their limit."""

from typing import Any

import torch
from torch import Tensor

from minigpt.engine.int8 import Int8Linear
from minigpt.engine.parts import head_rows
from minigpt.engine.supported import path_of
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import parse_settings
from minigpt.inputs import left_padded
from minigpt.machine import settle_memory
from minigpt.model import GPT2
from minigpt.recipe import from_pretrained

PromptTokens = list[list[int]]


class Minigpt:
    """This project, in a dtype or in "int8"."""

    def __init__(self, folder: str, prompts: PromptTokens, kind: str, draft: str | None = None, room: int = 0) -> None:
        self.model = open_model(folder, kind)
        self.prompts = prompts
        self.draft = draft
        self.decoding = path_of(self.model)
        self.drafted = self.accepted = 0
        self.acceptance: float | None = None  # the share of drafted tokens that were accepted

    def prefill(self) -> None:
        """Read the prompts. The first token is chosen too, which takes some microseconds."""
        self._write(1, None)

    def generate(self, new: int) -> int:
        rows = self._write(new, self.draft)
        written = 0
        for row in rows:
            self.drafted += row.drafted
            self.accepted += row.accepted
            written += len(row.new_ids)
        if self.drafted:
            self.acceptance = self.accepted / self.drafted
        return written

    def _write(self, new: int, draft: str | None) -> list[Any]:
        settings = parse_settings(max_new_tokens=new, eos_token_id=None, draft=draft)
        rows = rows_of(self.model, self.prompts, settings)
        for _ in write_rows(self.model, rows, settings, len(rows)):
            pass
        return rows


class Transformers:
    """Hugging Face transformers with sdpa attention and its default cache."""

    def __init__(self, folder: str, prompts: PromptTokens, kind: str, draft: str | None = None, room: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
        self.model = model.eval()
        settings = self.model.generation_config
        settings.eos_token_id = None
        settings.pad_token_id = 0
        self.prompts = prompts

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        ids, mask = left_padded(self.prompts)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits

    def generate(self, new: int) -> int:
        ids, mask = left_padded(self.prompts)
        written = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return written[:, ids.shape[1] :].numel()


class Memory:
    """The limit: for each token it reads as many bytes as a step reads of weights, and computes nothing."""

    def __init__(self, folder: str, prompts: PromptTokens, kind: str, draft: str | None = None, room: int = 0) -> None:
        self.prompts = prompts
        self.step_bytes = weight_bytes(open_model(folder, kind))
        self.memory = torch.ones(self.step_bytes // 4)

    def prefill(self) -> Tensor:
        return self.memory.sum()

    def generate(self, new: int) -> int:
        for _ in range(new):
            self.memory.sum()
        return new * len(self.prompts)


def open_model(folder: str, kind: str) -> GPT2:
    """Return the model as the command line opens it."""
    settle_memory()
    if kind == "int8":
        return from_pretrained(folder, device="cpu", quantize="int8")
    return from_pretrained(folder, device="cpu", dtype=kind)


def weight_bytes(model: GPT2) -> int:
    """Return the bytes of the weights that every new token reads: all matrices with the head, without embeddings."""
    total = 0
    if model.quantize is None:
        total += head_rows(model).nbytes
    for part in model.modules():
        if isinstance(part, Int8Linear):
            total += part.panels.nbytes
    for part in (model.h, model.ln_f):
        for parameter in part.parameters():
            total += parameter.nbytes
    return total
