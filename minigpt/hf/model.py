"""A ``PreTrainedModel`` that runs our blocks.

Its ``transformer`` is our ``GPT2`` without its head: the names are a checkpoint's own here as there, so that nothing is
renamed, and ``minigpt.swap_norms(model.transformer, ...)`` does what it always does.

B batch, T new tokens, S tokens in all, C embedding, V vocabulary.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D as TheirConv1D
from transformers.utils.generic import can_return_tuple

from minigpt.checkpoint.save import require_unquantized
from minigpt.engine import GPT2
from minigpt.engine.parts import FastConv1D
from minigpt.errors import ConfigError
from minigpt.hf.cache import BorrowedCache
from minigpt.hf.config import Choice, FolderConfig, choice, config_of, shape_of
from minigpt.hf.inputs import is_packed, kept, packed_mask, require_one_input
from minigpt.hf.norms import install_norms, norm_kinds, require_norms_of_config
from minigpt.model.attention import ATTENTIONS
from minigpt.model.checks import check_mask, check_option
from minigpt.model.conv1d import Conv1D
from minigpt.model.masking import causal_mask, positions
from minigpt.placement import has_values


class AdaptableConv1D(Conv1D, TheirConv1D):
    """Our layer, of a type that PEFT's methods look for to tell which way round a weight lies."""

    __repr__ = nn.Module.__repr__

    @property
    def nx(self) -> int:
        """Width of the input."""
        return self.weight.shape[0]

    @property
    def nf(self) -> int:
        """Width of the output."""
        return self.weight.shape[1]


class FastAdaptableConv1D(AdaptableConv1D, FastConv1D):
    """The same, accelerated."""

    forward = FastConv1D.forward


ADAPTABLE: dict[type[nn.Module], type[nn.Module]] = {Conv1D: AdaptableConv1D, FastConv1D: FastAdaptableConv1D}


class GPT2LMHeadModel(PreTrainedModel, GenerationMixin):
    """GPT-2 with a language-model head, for all that works on transformers' models.

    Its ``transformer``, called by itself, gives logits, since it is our ``GPT2``. ``forward`` does not call it but
    walks its parts, so that is where hooks belong.

    Args:
        config: a ``transformers.GPT2Config``.
        norm: a norm as ``minigpt.GPT2`` takes it, or a dict from patterns of sites to norms, applied in order.
        arithmetic: "fast", or "reference" for transformers' own bits.

    Raises:
        ConfigError: the config asks for something that our network does not do.
        NormError: a norm is unknown, or a pattern matches no site.
    """

    config: transformers.GPT2Config
    config_class: Any = FolderConfig
    by_default: ClassVar[Choice] = Choice()

    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules: Any = ("Block",)
    _skip_keys_device_placement: Any = ("past_key_values",)
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012  (as the class above declares it)
    _keys_to_ignore_on_load_unexpected: Any = (r"attn\.(masked_)?bias$",)  # causal masks, in old files

    def __new__(cls, config: Any = None, norm: Any = None, arithmetic: Any = None, *_: Any, **__: Any) -> Any:
        """A decoder that looks at an encoder too is transformers' own, where nothing is chosen."""
        given = {"norm": norm, "arithmetic": arithmetic}
        if getattr(config, "add_cross_attention", False) and choice(config, given, cls.by_default).named() == Choice():
            return transformers.GPT2LMHeadModel(config)
        return super().__new__(cls)

    def __init__(self, config: transformers.GPT2Config, norm: Any = None, arithmetic: str | None = None) -> None:
        chosen = choice(config, {"norm": norm, "arithmetic": arithmetic}, self.by_default)
        super().__init__(config_of(config, chosen))
        attention: Any = self.config._attn_implementation
        self.transformer = GPT2(shape_of(self.config), attention=attention, arithmetic=chosen.arithmetic)
        self.transformer._modules.pop("lm_head", None)  # it is here instead, where checkpoints have it
        self.set_output_embeddings(nn.Linear(config.n_embd, config.vocab_size, bias=False))
        self.gradient_checkpointing = False
        # So that Trainer divides by the tokens that are predicted: all but a row's first.
        self.loss_type = "ForCausalLM"
        for layer in self.transformer.modules():
            layer.__class__ = ADAPTABLE.get(type(layer), type(layer))
        install_norms(self.transformer, chosen)
        self._norms_of_config = norm_kinds(self.transformer)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"] | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "rows seq"] | None = None,
        inputs_embeds: Float[Tensor, "batch seq embd"] | None = None,
        labels: Int[Tensor, "batch seq"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), the loss where there are labels, and the cache.

        Args:
            attention_mask: (B, S) with 0 for padding, on either side; or (B or 1, 1, T, S), taken as it is.
            token_type_ids: (B, T) tokens whose embeddings are added to those of the text, as a dialogue's speakers.
            position_ids: (B or 1, T); by default each token's place among the real tokens of its row. With neither a
                mask nor a cache, which is made by default, one that does not follow the last begins another text,
                which stays apart.
            labels: (B, T) ids to predict, not shifted; -100 is left out.
            logits_to_keep: how many of the last positions' logits are wanted, 0 being all; or which, (kept,) for all
                rows or (B, kept) for each; or a mask (B, T).
            more: what the loss is to know, ``num_items_in_batch``, ``shift_labels`` and ``ignore_index``; and what
                kernels elsewhere are told of places, which are here as the cache and ``position_ids`` have them. Where
                it says that texts are packed, no cache is made.

        Raises:
            ConfigError: attention weights are asked for.
            GenerationError: neither or both of input_ids and inputs_embeds, ids that are not (B, T), a mask of another
                shape, or texts are said to be packed without ``position_ids``, or with a mask or a cache.
            TypeError: ``more`` has something else in it.
        """
        config = self.config
        packed = is_packed(more, position_ids, attention_mask, past_key_values)
        require_one_input(input_ids, inputs_embeds)
        if output_attentions if output_attentions is not None else config.output_attentions:
            raise ConfigError("our attention hands out no weights; load the model with transformers to look at them")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        checkpointing = self.gradient_checkpointing and self.training
        use_cache = not (checkpointing or packed) and (config.use_cache if use_cache is None else use_cache)
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=config)

        if past_key_values is None and attention_mask is None and position_ids is not None:
            attention_mask = packed_mask(position_ids)  # (B or 1, 1, T, T) or None
        x: Any = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds  # (B, T, C)
        is_ready = attention_mask is not None and attention_mask.ndim == 4
        past = 0
        if past_key_values is not None and not (is_ready and position_ids is not None):  # else a compiler need not ask
            past = int(past_key_values.get_seq_length())
        types = None if token_type_ids is None else self.transformer.wte(token_type_ids)  # (B, T, C)
        x, mask = self._placed(x, types, attention_mask, is_ready, position_ids, past)
        cache = None
        if past_key_values is not None:
            cache = BorrowedCache(past_key_values, total=None if is_ready else past + x.shape[1])
        stream = deque(self._read(x, mask, cache, checkpointing), None if output_hidden_states else 1)

        logits = self.lm_head(kept(stream[-1], logits_to_keep))  # (B, kept, V), of a mask (kept, V)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=config.vocab_size, **more)
        hidden: Any = tuple(stream) if output_hidden_states else None
        handed_on = past_key_values if use_cache else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=handed_on, hidden_states=hidden)

    def _read(self, x: Tensor, mask: Tensor | None, cache: Any, checkpointing: bool) -> Iterator[Tensor]:
        """The stream (B, T, C) before the first block and after each, the last of them normalized."""
        for block in self._blocks():
            yield x
            x = self._gradient_checkpointing_func(block, x, mask, None) if checkpointing else block(x, mask, cache)
        yield self.transformer.ln_f(x)

    def _placed(
        self,
        x: Float[Tensor, "batch seq embd"],
        types: Float[Tensor, "batch seq embd"] | None,
        attention_mask: Tensor | None,
        is_ready: bool,
        position_ids: Int[Tensor, "rows seq"] | None,
        past: int,
    ) -> tuple[Float[Tensor, "batch seq embd"], Tensor | None]:
        """The embeddings with their positions and types added, and the mask for our attention."""
        body, (batch, seq) = self.transformer, x.shape[:2]
        real = None
        if attention_mask is not None and not is_ready:
            check_mask(attention_mask, batch, past + seq)
            real = None if has_values(attention_mask) and attention_mask.all() else attention_mask.bool()  # (B, S)
        if position_ids is None:
            position_ids = positions(real, past, seq, x.device)  # (B or 1, T)
        x = x + body.wpe(position_ids)
        x = body.drop(x if types is None else x + types)
        return x, attention_mask if is_ready else causal_mask(real, past, seq, x.device)

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.transformer.wte = value

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lm_head":
            vars(self.transformer)["lm_head"] = value  # past nn.Module's bookkeeping: it is no child there

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As transformers' own; our config follows, and of another size no longer says how many ids are in use."""
        embeddings: Any = super().resize_token_embeddings(*args, **kwargs)
        if (size := self.config.vocab_size) != self.transformer.config.vocab_size:
            self.transformer.config = dataclasses.replace(
                self.transformer.config, vocab_size=size, used_vocab_size=None
            )
            vars(self.config).pop("used_vocab_size", None)
        return embeddings

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers' own, for "sdpa" and "eager".

        Raises:
            ConfigError: another one, which our network does not have.
        """
        asked = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if asked is not None:
            check_option("attention", asked, ATTENTIONS)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        attention: Any = self.config._attn_implementation
        self.transformer.attention = attention
        for block in self._blocks():
            block.attn.attention = attention

    def prepare_inputs_for_generation(
        self, input_ids: Any, *args: Any, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers' own, without the tokenizers, which ``generate`` hands on to ``forward`` all the same.

        It looks for ``inputs_embeds`` and ``kwargs`` among these names to tell what a call may give.
        """
        mixin: Any = super()
        kwargs = {name: kwargs[name] for name in kwargs.keys() - {"tokenizer", "assistant_tokenizer"}}
        return mixin.prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what ``generate_batch`` begins with.

        Raises:
            ConfigError: always; it needs an attention over pages of a cache.
        """
        raise ConfigError(
            "continuous batching needs paged attention, which this network does not have; use generate, or "
            "minigpt.generation.complete on the .transformer, which takes many prompts"
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers' own.

        Raises:
            CheckpointError: the weights are in eight bits, for which a checkpoint has no place.
            NormError: the norms are not those that the config names, so that another model would be loaded.
        """
        require_unquantized(self.transformer)
        require_norms_of_config(self.transformer, self._norms_of_config, self.config.layer_norm_epsilon)
        super().save_pretrained(save_directory, *args, **kwargs)

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' own, which takes what is left of ``from_pretrained``'s arguments for generation settings."""
        mixin: Any = super()
        mixin.adjust_generation_fn(*args, **{name: kwargs[name] for name in kwargs.keys() - Choice._fields})

    def _init_weights(self, module: nn.Module) -> None:
        """Values for what a checkpoint lacks: GPT-2's for its own layers (section 2.3), a norm's as it was built."""
        for name, value in getattr(module, "_as_built", {}).items():
            initialization.copy_(getattr(module, name), value)
        if isinstance(module, Conv1D | nn.Linear | nn.Embedding):
            adds_to_stream = any(module is half.c_proj for block in self._blocks() for half in (block.attn, block.mlp))
            depth = 2 * self.config.n_layer if adds_to_stream else 1
            initialization.normal_(module.weight, std=self.config.initializer_range / depth**0.5)
        if isinstance(module, Conv1D):
            initialization.zeros_(module.bias)

    def _blocks(self) -> list[Any]:
        return list(self.transformer.h)
