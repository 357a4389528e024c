"""The root of a fast model: the plain network with int8 head and compiled steps.

B batch, T new tokens, S tokens in all, C embedding, V vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt import norms
from minigpt.config import GPT2Config
from minigpt.engine.parts import accelerate
from minigpt.engine.product import product
from minigpt.errors import ConfigError
from minigpt.model import gpt2
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.checks import check_option
from minigpt.norms.add import is_watched

if TYPE_CHECKING:
    from minigpt.engine.compiled import CompiledStep

ARITHMETICS = ("fast", "reference")


class GPT2(gpt2.GPT2):
    """GPT-2 (Radford et al. 2019) with a language-model head.

    A new model has random weights, initialized as in the paper, and is in training mode.

    Args:
        config: the shape of the model.
        norm: the norm at every site: a registered name, a class, or "package.module:Name".
        attention: "sdpa" is PyTorch's fused kernel. "eager" is the formula written out: it has derivatives of every
            order, and a hook on ``attn.attn_dropout`` sees the attention weights (B, H, T, S).
        arithmetic: "reference" computes every operation as Hugging Face transformers does, bit for bit. "fast" may fuse
            operations and pick other kernels; the last bits may differ.

    Raises:
        ConfigError: if ``config`` is not a minigpt.GPT2Config, or ``attention`` or ``arithmetic`` is unknown.
        NormError: if ``norm`` is unknown.
    """

    __call__: Callable[..., Float[Tensor, "batch seq vocab"]]  # for type checkers: nn.Module's returns Any

    def __init__(
        self, config: GPT2Config, *, norm: norms.NormSpec = "fused", attention: str = "sdpa", arithmetic: str = "fast"
    ) -> None:
        check_option("arithmetic", arithmetic, ARITHMETICS)
        super().__init__(config, norm=norm, attention=attention)
        self.arithmetic = arithmetic
        self.quantize: str | None = None  # set by quantize_int8
        self.fast_head: nn.Module | None = None  # the int8 head, set by quantize_int8
        self.step: CompiledStep | None = None  # set by compile_steps
        if arithmetic == "fast":
            accelerate(self)

    def run(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None, cache: LayerCache | None
    ) -> Float[Tensor, "batch seq embd"]:
        """Return the stream (B, T, C) after every block and the last norm; one new token by the compiled step."""
        if self.step is not None and x.shape[1] == 1 and isinstance(cache, KVCache) and not is_watched(self):
            return self.step(x, mask, cache)
        return super().run(x, mask, cache)

    def head(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits for the last norm's output. A tied head is the token embedding."""
        if self.fast_head is not None:
            return self.fast_head(x)
        if self.arithmetic == "fast" and self.config.tie_word_embeddings:
            return product(x, self.wte.weight.t())
        return super().head(x)

    def head_rows(self) -> Float[Tensor, "vocab embd"]:
        """Return the head's weight.

        Raises:
            ConfigError: if the head is more than a product with a weight.
        """
        if self.config.tie_word_embeddings:
            return self.wte.weight
        head = self.lm_head
        if not isinstance(head, nn.Linear) or head.bias is not None or "forward" in vars(head) or is_watched(head):
            raise ConfigError("lm_head must be a plain nn.Linear without bias or hooks to be quantized")
        return head.weight

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        cache = super().new_cache(batch_size, max_length)
        if self.quantize is not None:  # a long text's keys and values would take as long to read as the weights
            cache.store = torch.empty_like(cache.store, dtype=torch.bfloat16)
        if self.step is not None:  # a compiled step also reads what is masked, which must not be NaN by chance
            cache.store.zero_()
        return cache

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}, arithmetic={self.arithmetic!r}, quantize={self.quantize!r}"
