"""What a model says of itself, and where the functions are that other libraries have as methods."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

ELSEWHERE = {
    "from_pretrained": 'minigpt.from_pretrained("gpt2")',
    "generate": "minigpt.generate(model, input_ids, max_new_tokens=...)",
    "save_pretrained": "minigpt.save_pretrained(model, directory)",
    "push_to_hub": "minigpt.save_pretrained(model, directory) and huggingface_hub.upload_folder",
}


class Facts(nn.Module):
    """Read-only properties of a ``GPT2``."""

    attention: str
    wte: nn.Embedding

    @property
    def device(self) -> torch.device:
        """The device of the token embedding."""
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the token embedding."""
        return self.wte.weight.dtype

    @property
    def arithmetic(self) -> str:
        """ "reference": every operation is the one that Hugging Face transformers uses, bit for bit."""
        return "reference"

    @property
    def quantize(self) -> str | None:
        """How the weights that multiply are rounded: None, since these are the checkpoint's."""
        return None

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}, arithmetic={self.arithmetic!r}, quantize={self.quantize!r}"

    @classmethod
    def from_pretrained(cls, *_: object, **__: object) -> NoReturn:
        """Say which function loads a checkpoint."""
        raise AttributeError(f"GPT2 has no from_pretrained; use {ELSEWHERE['from_pretrained']}")

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in ELSEWHERE:
                raise AttributeError(f"GPT2 has no {name}; use {ELSEWHERE[name]}")
            return super().__getattr__(name)
