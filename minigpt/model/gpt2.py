"""The whole network: GPT2 -> Block -> (LayerNorm, CausalSelfAttention, LayerNorm, MLP).

Module names and weight layouts are as in the published checkpoints: ``h.3.attn.c_attn.weight`` has shape (in, out).
Every operation is the one that Hugging Face transformers uses, so the logits have the same bits.

B batch, T new tokens, S tokens in all (those in the cache, then the new ones), C embedding, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt import norms
from minigpt.choices import ATTENTIONS, check_option
from minigpt.config import GPT2Config, site_names
from minigpt.inputs import check_config, check_inputs, check_layers, refuse_pipeline
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.masking import causal_mask, packed_mask, positions, real_tokens
from minigpt.model.mlp import MLP, Conv1D, Stream

Ids = Int[Tensor, "batch seq"]
PositionIds = Int[Tensor, "rows seq"]


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) with a language-model head.

    A new model has random weights, initialized as in the paper, and is in training mode. It computes every operation
    as Hugging Face transformers does, bit for bit; ``minigpt.engine.accelerate`` makes it fast.

    Args:
        config: the shape of the model.
        norm: the norm at every site: a registered name, a class, or "package.module:Name".
        attention: "sdpa" is PyTorch's fused kernel. "eager" is the formula written out: it has derivatives of every
            order, and a hook on ``attn.attn_dropout`` sees the attention weights (B, H, T, S).

    Attributes:
        generation_fields: of the checkpoint's generation_config.json. Its ids of tokens go before the config's, as in
            transformers. None without that file.

    Raises:
        ConfigError: if ``config`` is not a minigpt.GPT2Config or ``attention`` is unknown.
        NormError: if ``norm`` is unknown.
    """

    generation_fields: Mapping[str, Any] | None = None
    __call__: Callable[..., Float[Tensor, "batch seq vocab"]]  # for type checkers: nn.Module's returns Any
    can_generate = refuse_pipeline  # transformers' pipelines ask for it first

    def __init__(self, config: GPT2Config, *, norm: norms.NormSpec = "fused", attention: str = "sdpa") -> None:
        super().__init__()
        check_config(config)
        check_option("attention", attention, ATTENTIONS)
        self.config = config
        self.attention = attention
        # With empty weights, which ``initialize`` fills: PyTorch's own filling is slow on meta.
        tokens, context, width = config.vocab_size, config.n_positions, config.n_embd
        self.wte = nn.Embedding(tokens, width, _weight=torch.empty(tokens, width))
        self.wpe = nn.Embedding(context, width, _weight=torch.empty(context, width))
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer, norm, attention) for layer in range(config.n_layer))
        self.ln_f = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.initialize()

    def forward(
        self,
        input_ids: Ids,
        attention_mask: Tensor | None = None,
        position_ids: PositionIds | None = None,
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
        input_ids: Ids,
        attention_mask: Tensor | None = None,
        position_ids: PositionIds | None = None,
        cache: KVCache | None = None,
    ) -> Stream:
        """Return the output (B, T, C) of the last norm. Takes the arguments of ``forward`` and does not check them."""
        seq, device = input_ids.shape[1], input_ids.device
        past = 0
        if cache is not None:
            past = cache.length
        real = real_tokens(attention_mask, cache, seq)  # (B, S), or None if all are
        mask = causal_mask(real, past, seq, device)  # (B or 1, 1, T, S), or None if none is needed
        if position_ids is None:
            position_ids = positions(real, past, seq, device)  # (B or 1, T)
        elif attention_mask is None and cache is None:
            mask = packed_mask(position_ids)
        x = self.embed(input_ids, position_ids)
        x = self.run(x, position_ids, mask, cache)
        if cache is not None:
            cache.advance(seq, real)
        return x

    def embed(self, input_ids: Ids, position_ids: PositionIds) -> Stream:
        """Return the residual stream (B, T, C) before the first block."""
        return self.drop(self.wte(input_ids) + self.wpe(position_ids))

    def run(self, x: Stream, position_ids: PositionIds, mask: Tensor | None, cache: LayerCache | None) -> Stream:
        """Return the residual stream (B, T, C) after every block and the last norm."""
        with norms.AtPositions(position_ids):
            for block in self.h:
                x = block(x, mask, cache)
            return self.ln_f(x)

    def head(self, x: Stream) -> Float[Tensor, "batch seq vocab"]:
        """Return logits for the last norm's output. A tied head is the token embedding."""
        if self.config.tie_word_embeddings:
            return F.linear(x, self.wte.weight)
        return self.lm_head(x)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch_size`` rows of at most ``max_length`` tokens, in the model's dtype.

        A forward writes its keys and values into the cache in place, so no gradient flows through one.

        Raises:
            GenerationError: if two blocks would write to the same layer.
        """
        check_layers(self.h, self.config.n_layer)
        return KVCache(self.config, batch_size, max_length, self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        """The device of the token embedding."""
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the token embedding."""
        return self.wte.weight.dtype

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
        for name, module in self.named_modules():
            std = self.config.initializer_range
            if name.endswith("c_proj"):
                std = std / math.sqrt(2 * self.config.n_layer)
            if isinstance(module, Conv1D | nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, Conv1D):
                nn.init.zeros_(module.bias)

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}"


class Block(nn.Module):
    """One pre-norm layer: attention and the MLP each read a normalized copy of the residual stream and add to it."""

    def __init__(self, config: GPT2Config, layer: int, norm: norms.NormSpec, attention: str) -> None:
        super().__init__()
        self.ln_1 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, layer, attention)
        self.ln_2 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Stream, mask: Tensor | None = None, cache: LayerCache | None = None) -> Stream:
        """Return the residual stream after this layer. ``mask`` is what ``causal_mask`` returns."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))
