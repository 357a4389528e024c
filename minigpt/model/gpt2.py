"""The whole network: GPT2 -> Block -> (LayerNorm, CausalSelfAttention, LayerNorm, MLP).

Module names and weight layouts are those of the published checkpoints: ``h.3.attn.c_attn.weight`` has shape (in, out).
Every operation is the one that Hugging Face transformers uses, so the logits have the same bits.

B batch, T new tokens, S tokens in all (those in the cache, then the new ones), C embedding, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt import norms
from minigpt.choices import ATTENTIONS, check_option
from minigpt.config import GPT2Config, site_names
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, kind_of
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.inputs import check_inputs
from minigpt.model.masking import causal_mask, packed_mask, positions, real_tokens
from minigpt.model.mlp import MLP, Conv1D
from minigpt.norms.frozen import tell_positions


class Block(nn.Module):
    """One pre-norm layer: attention and the MLP each read a normalized copy of the residual stream and add to it."""

    def __init__(self, config: GPT2Config, layer: int, norm: norms.NormSpec, attention: str) -> None:
        super().__init__()
        self.ln_1 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, layer, attention)
        self.ln_2 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq embd"]:
        """Return the residual stream after this layer. ``mask`` is what ``causal_mask`` returns."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) with a language-model head.

    A new model has random weights, initialized as in the paper, and is in training mode. It computes every operation
    as Hugging Face transformers does, bit for bit; ``minigpt.engine.accelerate`` makes it fast.

    Args:
        config: the shape of the model.
        norm: the norm at every site: a registered name, a class, or "package.module:Name".
        attention: "sdpa" is PyTorch's fused kernel. "eager" is the formula written out: it has derivatives of every
            order, and a hook on ``attn.attn_dropout`` sees the attention weights (B, H, T, S).

    Raises:
        ConfigError: if ``config`` is not a minigpt.GPT2Config or ``attention`` is unknown.
        NormError: if ``norm`` is unknown.
    """

    __call__: Callable[..., Float[Tensor, "batch seq vocab"]]  # for type checkers: nn.Module's returns Any

    def __init__(self, config: GPT2Config, *, norm: norms.NormSpec = "fused", attention: str = "sdpa") -> None:
        super().__init__()
        if not isinstance(config, GPT2Config):  # transformers' has the same name
            kind = kind_of(config)
            raise ConfigError(f"config must be a minigpt.GPT2Config, got {kind}; use its preset or from_dict")
        check_option("attention", attention, ATTENTIONS)
        self.config, self.attention = config, attention
        self.wte = _empty_embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = _empty_embedding(config.n_positions, config.n_embd)  # positions
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer, norm, attention) for layer in range(config.n_layer))
        self.ln_f = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.initialize()

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "rows seq"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) for the token after each input token.

        ``head(hidden_states(...)[:, -1:])`` computes the last position's logits alone.

        Args:
            input_ids: (B, T) token ids, int64 or int32. With a cache, only the tokens that it does not hold yet.
            attention_mask: (B, S), 1 for real tokens and 0 for padding, on either side. None means that the new tokens
                are all real. A cache remembers the padding it has read.
            position_ids: (B, T) or (1, T). The default counts the real tokens before each token in its row. Without a
                mask or a cache, positions that do not go up by one begin another text in the row, as in transformers:
                texts that are packed into one row do not see each other.
            cache: made by ``new_cache``. The new tokens' keys and values are appended to it.

        Raises:
            GenerationError: if an id is outside the vocabulary, the tokens exceed the context or the cache, or a shape
                does not fit.
        """
        check_inputs(self.config, input_ids, attention_mask, position_ids, cache)
        return self.head(self.hidden_states(input_ids, attention_mask, position_ids, cache))

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "rows seq"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch seq embd"]:
        """Return the output (B, T, C) of the last norm. Takes the arguments of ``forward`` and does not check them."""
        x, real = self.embed(input_ids, attention_mask, position_ids, cache)
        past, seq = 0 if cache is None else cache.length, x.shape[1]
        mask = causal_mask(real, past, seq, x.device)
        if position_ids is not None and attention_mask is None and cache is None:
            mask = packed_mask(position_ids) if mask is None else mask
        x = self.run(x, mask, cache)
        if cache is not None:
            cache.advance(seq, real)
        return x

    def embed(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: KVCache | None
    ) -> tuple[Float[Tensor, "batch seq embd"], Tensor | None]:
        """Return the stream (B, T, C) before the first block, and which of all tokens are real: (B, S), or None."""
        seq, past = input_ids.shape[1], 0 if cache is None else cache.length
        real = real_tokens(attention_mask, cache, seq)
        are_given = position_ids is not None or real is not None or past > 0
        if position_ids is None:
            position_ids = positions(real, past, seq, input_ids.device)  # (B or 1, T)
        blocks: Any = self.h
        norms = [norm for block in blocks for norm in (block.ln_1, block.ln_2)]
        tell_positions([*norms, self.ln_f], position_ids if are_given else None)
        return self.drop(self.wte(input_ids) + self.wpe(position_ids)), real

    def run(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None, cache: LayerCache | None
    ) -> Float[Tensor, "batch seq embd"]:
        """Return the stream (B, T, C) after every block and the last norm."""
        for block in self.h:
            x = block(x, mask, cache)
        return self.ln_f(x)

    def head(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits for the last norm's output. A tied head is the token embedding."""
        return F.linear(x, self.wte.weight) if self.config.tie_word_embeddings else self.lm_head(x)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` rows of at most ``max_length`` tokens, in the model's dtype.

        A forward writes its keys and values into the cache in place, so no gradient flows through one.

        Raises:
            GenerationError: if two blocks would write to the same layer.
        """
        config, weight = self.config, self.wte.weight
        of_blocks = ({getattr(part, "layer", None) for part in block.modules()} for block in self.h)
        layers = [layer for of_block in of_blocks for layer in of_block if isinstance(layer, int)]
        if len({*layers}) < len(layers) or not {*layers} <= {*range(config.n_layer)}:
            raise GenerationError(
                f"each block's attn.layer must be one of {config.n_layer} layers and its own, got {layers}; renumber "
                "copied blocks"
            )
        return KVCache(
            config.n_layer, batch_size, config.n_head, max_length, config.head_size,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

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

    def site_names(self) -> list[str]:
        """Return the names of the norms in the order of the data: h.0.ln_1, h.0.ln_2, ..., ln_f."""
        return site_names(self.config.n_layer)

    def norm_modules(self) -> dict[str, nn.Module]:
        """Return the norms by their names, in the same order."""
        return {site: self.get_submodule(site) for site in self.site_names()}

    @torch.no_grad()
    def initialize(self) -> None:
        """Fill the weights as in GPT-2's paper, section 2.3: matrices from a normal distribution, biases 0.

        A layer that adds to the residual stream is divided by the root of the number of such layers, 2 * n_layer, so
        that the stream does not grow with depth.
        """
        if self.wte.weight.is_meta:
            return
        std = self.config.initializer_range
        for name, module in self.named_modules():
            if isinstance(module, Conv1D | nn.Embedding | nn.Linear):
                depth = 2 * self.config.n_layer if name.endswith("c_proj") else 1
                nn.init.normal_(module.weight, std=std / math.sqrt(depth))
            if isinstance(module, Conv1D):
                nn.init.zeros_(module.bias)


def _empty_embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding without values: ``initialize`` fills it, and PyTorch's own filling is slow on meta."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def check_gpt2(model: object) -> None:
    """Check that a model is a minigpt.GPT2, or a wrapper that passes on its attributes."""
    if not (isinstance(getattr(model, "config", None), GPT2Config) and hasattr(model, "site_names")):
        raise ConfigError(f"model must be a minigpt.GPT2, got {kind_of(model)}; minigpt.from_pretrained opens one")


def check_weights(model: GPT2, purpose: str, kind: type[MiniGPTError]) -> None:
    """Check that a model has values: one on the meta device has shapes only."""
    if model.wte.weight.is_meta:
        raise kind(f"a model on the meta device has shapes only, and no values to {purpose}")
