"""The reference, transformers on the same weights, and the settings under which the two are compared."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.checkpoint import config_file, read_tensors
from minigpt.device import full_products


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Compute in inference mode with ``full_products``."""
    with full_products(), torch.inference_mode():
        yield


class Reference:
    """transformers' GPT-2 with the weights of a checkpoint, rounded to ``dtype``, which computes in ``compute``.

    It reads the checkpoint's tensors itself, under their own names, so that a fault in our loading shows.
    """

    def __init__(
        self,
        place: Path,
        *,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # imported here, since it takes five seconds

        config = GPT2Config.from_json_file(config_file(place))
        if (compute or dtype) == torch.float64:
            config.reorder_and_upcast_attn = False  # it would compute the scores in float32
        config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
        rounded = {name: tensor.to(dtype) for name, tensor in read_tensors(place).items()}
        with quiet_transformers():
            model: Any = GPT2LMHeadModel.from_pretrained(
                None, config=config, state_dict=rounded, dtype=compute or dtype, attn_implementation=attention
            )
        self.model = model.to(device).eval()

    def __call__(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of a batch without padding."""
        return self.model(input_ids).logits

    def reading(self, _batch: int, _longest: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of more ids (B, T) and the mask (B, all) of all so far; it returns logits (B, V)."""
        from transformers import DynamicCache

        cache = DynamicCache()

        def read(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            return self.model(
                input_ids, cache, attention_mask=attention_mask, position_ids=positions, use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip

        return read

    def greedy(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        eos: tuple[int, ...],
    ) -> Int[Tensor, "batch total"]:
        """Continue the prompts with transformers' own ``generate``: (B, T + new)."""
        return self.model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the log messages and progress bars of transformers."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
