"""The network, whole: GPT2 -> Block -> (LayerNorm, CausalSelfAttention, LayerNorm, MLP).

Module names and weight layouts are those of the published checkpoints (``h.3.attn.c_attn.weight``, stored (in, out)):
a checkpoint is not converted into this model, it is this model.

B batch, T new tokens, C embedding, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minigpt import norms
from minigpt.config import GPT2Config
from minigpt.engine.product import product
from minigpt.engine.ragged import Ragged
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.model.attention import ATTENTIONS, CausalSelfAttention
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.checks import require_context, require_own_layers, require_positions, require_tokens
from minigpt.model.conv1d import Conv1D
from minigpt.model.masking import eager_mask, padding_mask, positions, sdpa_mask
from minigpt.model.mlp import MLP
from minigpt.model.plain import is_matrix, is_watched
from minigpt.norms.foreign.adapt import is_ours

ARITHMETICS = ("fast", "reference")


class Block(nn.Module):
    """One layer. Each half reads a normalized copy of the stream and adds what it found back to it (pre-norm).

    Its weights have no values until ``GPT2.initialize`` gives them some, or a checkpoint does.
    """

    def __init__(self, config: GPT2Config, layer: int, norm: norms.NormSpec, attention: str, arithmetic: str) -> None:
        super().__init__()
        self.ln_1 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, layer, attention, arithmetic)
        self.ln_2 = norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config, arithmetic)

    def forward(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None, cache: LayerCache | Ragged | None
    ) -> Float[Tensor, "batch seq embd"]:
        """The stream (B, T, C) after this layer; ``mask`` (B or 1, 1, T, S) as ``GPT2.mask`` makes it."""
        x, normalized = norms.add_norm(self.ln_2, x, self.attn(self.ln_1(x), mask, cache))
        return x + self.mlp(normalized)


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) with a language-model head.

    Args:
        config: its shape.
        norm: what normalizes at every site: a registered name, a class, or "package.module:Name".
        attention: "sdpa", the library's fused kernel, or "eager", the formula written out, which has derivatives of any
            order, and whose weights (B, H, T, S) a hook on ``attn.attn_dropout`` is given.
        arithmetic: "reference" computes every operation as the Hugging Face implementation writes it, and so its very
            bits; "fast" may fuse them.

    A new model is initialized at random as in the paper, and is in training mode.

    Raises:
        ConfigError: an unknown attention or arithmetic, or somebody else's config.
        NormError: an unknown norm.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        norm: norms.NormSpec = "fused",
        attention: str = "sdpa",
        arithmetic: str = "fast",
    ) -> None:
        super().__init__()
        if not isinstance(config, GPT2Config):
            said = f"the config is {kind_of(config)}, and no minigpt.GPT2Config"
            raise ConfigError(f"{said}; its preset or from_dict makes one")
        require_option("attention", attention, ATTENTIONS)
        require_option("arithmetic", arithmetic, ARITHMETICS)
        self.config, self.attention, self.arithmetic = config, attention, arithmetic
        self.quantize: str | None = None  # what ``quantize_int8`` has made of it
        self.fast_head: nn.Module | None = None  # the head in another form, of ``quantize_int8`` or ``pack``
        self.step: Any = None  # the ``CompiledStep`` that ``compile_steps`` has made
        self.wte = _embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = _embedding(config.n_positions, config.n_embd)  # positions
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, i, norm, attention, arithmetic) for i in range(config.n_layer))
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
        """Logits (B, T, V) for the token after each input token.

        All positions; where the last alone is wanted, ``head(hidden_states(...)[:, -1:])`` spares the rest.

        Args:
            input_ids: (B, T) token ids; with a cache, only those that it does not hold yet.
            attention_mask: (B, past + T), 1 for real tokens and 0 for padding, on either side; None where the new
                tokens are all real. A cache remembers the padding it has read.
            position_ids: (B, T) or (1, T); by default each token's place among the real tokens of its row. Where they
                begin again no new text does: a token sees all before it in its row.
            cache: from ``new_cache``; the new tokens' keys and values are appended to it.

        Raises:
            GenerationError: ids outside the vocabulary, more tokens than there is room for, or a mask of another shape.
        """
        return self.head(self.hidden_states(input_ids, attention_mask, position_ids, cache))

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "rows seq"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch seq embd"]:
        """The residual stream (B, T, C) after the last block and the last norm; arguments and errors as ``forward``.

        ``together.hidden_states_of_each`` is the same for several texts at once.
        """
        x, padding = self.embedded(input_ids, attention_mask, position_ids, cache)
        past, seq = 0 if cache is None else cache.length, x.shape[1]
        if self.step is not None and cache is not None and seq == 1 and not is_watched(self):
            x = self.step(x, padding, cache)
        else:
            x = self.read(x, self.mask(padding, past, seq, x), cache)
        if cache is not None:
            cache.advance(seq, padding)
        return x

    def embedded(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: KVCache | None
    ) -> tuple[Float[Tensor, "batch seq embd"], Bool[Tensor, "batch total"] | None]:
        """The stream before the first block, and which tokens are real; arguments and errors as ``forward``."""
        require_tokens(input_ids, cache, self.config)
        batch, seq = input_ids.shape
        past, remembered = (cache.length, cache.padding_mask) if cache is not None else (0, None)
        padding = padding_mask(attention_mask, remembered, batch, past, seq)  # (B, S) or None
        if position_ids is None:
            position_ids = positions(padding, past, seq, input_ids.device)  # (B or 1, T)
            require_context(position_ids, past + seq, padding is not None, self.config.n_positions)
        else:
            require_positions(position_ids, batch, seq, self.config.n_positions)
        x = self.wte(input_ids) + self.wpe(position_ids)  # (B, T, C)
        return (self.drop(x) if self.training else x), padding

    def head(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq vocab"]:
        """Logits from the last norm's output: by the token embedding itself where the two are tied."""
        if self.fast_head is not None:
            return self.fast_head(x)
        if not self.config.tie_word_embeddings and not is_matrix(self.lm_head):
            return self.lm_head(x)
        rows = self.head_rows()  # (V, C)
        return product(x, rows.t()) if self.arithmetic == "fast" else F.linear(x, rows)

    def head_rows(self) -> Float[Tensor, "vocab embd"]:
        """The head's weight, that of the token embedding where the two are tied.

        Raises:
            ConfigError: the head is more than a product with a weight.
        """
        if self.config.tie_word_embeddings:
            return self.wte.weight
        if not is_matrix(self.lm_head):
            raise ConfigError("lm_head has a bias, hooks or a class of its own, so no other form can be made of it")
        return self.lm_head.weight

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for ``batch_size`` rows of at most ``max_length`` tokens, in the model's dtype and place.

        It is written into by every forward that is given it, so no gradient goes back through one.

        Raises:
            GenerationError: there are no rows, there is room for no token, or two blocks would write to one place.
        """
        require_own_layers(self.h, self.config.n_layer)
        config, weight = self.config, self.wte.weight
        cache = KVCache(
            config.n_layer, batch_size, config.n_head, max_length, config.head_size,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        if self.step is not None:  # it reads what is masked too, which must not be NaN by chance
            cache.store.zero_()
        return cache

    def norm_sites(self) -> list[str]:
        """Names of the norm modules in the order data meets them: h.0.ln_1, h.0.ln_2, ..., ln_f."""
        return [f"h.{i}.{norm}" for i in range(self.config.n_layer) for norm in ("ln_1", "ln_2")] + ["ln_f"]

    def norm_modules(self) -> dict[str, Any]:
        """The norm modules by their names, in the same order."""
        return {site: self.get_submodule(site) for site in self.norm_sites()}

    @torch.no_grad()
    def initialize(self) -> None:
        """Random weights as in GPT-2's paper (section 2.3): N(0, initial_std), biases 0, and our norms as if new."""
        if self.wte.weight.is_meta:  # nothing to fill
            return
        for module in self.modules():
            if isinstance(module, norms.LayerNorm) and is_ours(type(module)):  # others know best how they begin
                module.reset_parameters()
            if isinstance(module, Conv1D | nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=self.initial_std(module))
            if isinstance(module, Conv1D):
                nn.init.zeros_(module.bias)

    def initial_std(self, layer: nn.Module) -> float:
        """Of a layer's random weights: initializer_range, and less where it adds to the residual stream.

        There it is smaller by the root of their number, 2 * n_layer, so that the stream does not grow with depth.
        """
        blocks: Any = self.h
        adds_to_stream = any(layer is half.c_proj for block in blocks for half in (block.attn, block.mlp))
        return self.config.initializer_range / (math.sqrt(2 * self.config.n_layer) if adds_to_stream else 1)

    def read(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None, cache: LayerCache | Ragged | None
    ) -> Float[Tensor, "batch seq embd"]:
        """All blocks and the last norm: the stream (B, T, C) through the whole network."""
        for block in self.h:
            x = block(x, mask, cache)
        return self.ln_f(x)

    def mask(self, padding: Bool[Tensor, "batch total"] | None, past: int, seq: int, x: Tensor) -> Tensor | None:
        """The mask (B or 1, 1, T, S) of all layers; None where the kernel knows by itself.

        For a single token it is one to be added: a Boolean one would be converted by every layer's kernel anew. Not in
        float16, whose lowest number is too high to hide a key of the largest scores.
        """
        single = seq == 1 and padding is not None and self.arithmetic == "fast" and x.dtype != torch.float16
        if self.attention == "sdpa" and not single:
            return sdpa_mask(padding, past, seq, x.device)
        return eager_mask(padding, past, seq, x.device, x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT2":
        """As any module goes to another dtype or device; a part that cannot go along says so before any has gone."""
        for part in self.modules():
            getattr(part, "require_applicable", lambda fn: None)(fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}, arithmetic={self.arithmetic!r}, quantize={self.quantize!r}"


def require_gpt2(model: object) -> None:
    """Refuse another class's model, before one of its missing parts is asked for.

    Raises:
        ConfigError: it is none of ours, nor a wrapper that hands on whatever is asked of one.
    """
    if not (isinstance(getattr(model, "config", None), GPT2Config) and hasattr(model, "norm_sites")):
        raise ConfigError(
            f"the model is {kind_of(model)}, and no minigpt.GPT2; minigpt.from_pretrained makes one, and the "
            ".transformer of a model of minigpt.hf is one"
        )


def kind_of(thing: object) -> str:
    """ "transformers's GPT2Config", for a message: names alone may be the same as ours."""
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"


def require_weights(model: GPT2, purpose: str, kind: type[MiniGPTError]) -> None:
    """Refuse a model on the meta device where its weights are needed, for ``purpose``: "save", for one.

    Raises:
        MiniGPTError: of the given kind.
    """
    if model.wte.weight.is_meta:
        raise kind(f"a model on the meta device has shapes only, and no values to {purpose}")


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding left to ``initialize``: PyTorch's own filling would be lost, and on meta is slow to import."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def require_option(what: str, given: Any, known: tuple[str, ...]) -> None:
    """Refuse a name that is none of those known.

    Raises:
        ConfigError: the message says which are.
    """
    if not isinstance(given, str) or given not in known:
        raise ConfigError(f"unknown {what} {given!r}; known are {', '.join(known)}")
