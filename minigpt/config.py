"""GPT2Config: the shape of a GPT-2, in the field names of a Hugging Face config.json.

Below the class is what each field may hold, and which fields of other people's config.json are ignored or refused.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from minigpt.errors import ConfigError
from minigpt.files import as_path, read_object

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")

# Fields of a config.json that cannot change the logits: bookkeeping, heads we do not have, defaults for generation.
_WITHOUT_EFFECT = re.compile(
    r"_\w+|summary_\w+|task_\w+|\w+_version|architectures|use_cache|dtype|torch_dtype|num_labels|id2label|label2id"
    r"|problem_type|finetuning_task|classifier_dropout|return_dict\w*|output_\w+"
    r"|torchscript|gradient_checkpointing|keys_to_ignore_at_inference|prefix|tokenizer_class|use_bfloat16|tf_legacy_loss"
    r"|max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p"
    r"|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids"
    r"|num_return_sequences|forced_bos_token_id|forced_eos_token_id|remove_invalid_values|exponential_decay_length_penalty"
    r"|suppress_tokens|begin_suppress_tokens|(sep|cls|unk|mask|decoder_start)_token_id"
    r"|n_special|predict_special_tokens|eos_token_ids|xla_device|attn_implementation|transformers_weights"
)

# Other names of a field: transformers' attribute names, and the one that GPT-2's first config files had.
_ALIASES = {
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "n_ctx": "n_positions",
}

# Fields that would change the model, each with the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True, None),  # a GPT-2 is causal either way
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0, None),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Everything that decides what a GPT-2 computes. Defaults are GPT-2 124M's.

    Names and meanings are those of Hugging Face's ``config.json`` for ``model_type: gpt2``. ``n_inner=None`` means four
    times ``n_embd``. Dropout acts in training mode only. ``used_vocab_size`` is our own field: ids from there on only
    fill up the vocabulary and are never generated.

    Raises:
        ConfigError: if a value is of the wrong kind or out of range, or two values contradict each other.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None
    used_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_id, list):  # as JSON gives it; a tuple keeps the config hashable
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for names, (fits, wanted) in _RANGES.items():
            for name in names.split():
                value, optional = getattr(self, name), name in _OPTIONAL
                if not (fits(value) or (optional and value is None)):
                    raise ConfigError(f"{name} must be {wanted}{', or null' * optional}, got {value!r:.200}")
        for name in ("layer_norm_epsilon", "initializer_range"):
            object.__setattr__(self, name, float(getattr(self, name)))  # transformers takes no whole number here
        if (used := self.used_vocab_size) is not None and used > self.vocab_size:
            raise ConfigError(f"used_vocab_size must be at most vocab_size={self.vocab_size}, got {used}")
        if self.n_embd % self.n_head:
            raise ConfigError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")

    @property
    def head_size(self) -> int:
        """Return the width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """Return the width of the MLP's hidden layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return every id that ends a text."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def preset(cls, name: str) -> "GPT2Config":
        """Return a published shape: "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", or "demo".

        Raises:
            ConfigError: if the name is unknown.
        """
        files = {path.stem: path for path in presets_folder().glob("*.json")}
        if name not in files:
            raise ConfigError(f"unknown preset {name!r}; known are {', '.join(sorted(files))}")
        return cls.from_json_file(files[name])

    @classmethod
    def from_json_file(cls, path: str | Path) -> "GPT2Config":
        """Read a Hugging Face ``config.json``.

        Raises:
            ConfigError: if the file cannot be read, or ``from_dict`` refuses its fields.
        """
        fields = read_object(as_path(path, "path", ConfigError), ConfigError)
        try:
            return cls.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "GPT2Config":
        """Return a config from the fields of a ``config.json``. Each is honoured, known to have no effect, or refused.

        Raises:
            ConfigError: if a field has a value that would make another model, or its name is unknown.
        """
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise ConfigError(f"config fields must be a dict with names as keys, got {fields!r:.100}")
        _refuse_other_models(fields)
        ours = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in fields.items() if name not in _ALIASES}
        for alias, name in _ALIASES.items():  # n_ctx may contradict n_positions: transformers does not read it
            if alias in fields and known.setdefault(name, fields[alias]) != fields[alias] and alias != "n_ctx":
                raise ConfigError(
                    f"{alias}={fields[alias]!r:.200} contradicts {name}={known[name]!r:.200}; they are one field"
                )
        others = known.keys() - ours - _NEUTRAL.keys()
        if unknown := sorted(name for name in others if not _WITHOUT_EFFECT.fullmatch(name)):
            raise ConfigError(f"unknown config fields: {', '.join(unknown)}; remove those that do not change the model")
        return cls(**{name: value for name, value in known.items() if name in ours})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a ``config.json`` that transformers reads as this same model."""
        fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **dataclasses.asdict(self)}
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        if self.used_vocab_size is None:  # transformers does not know it
            del fields["used_vocab_size"]
        return fields


def norm_sites(n_layer: int) -> list[str]:
    """Return the names of a GPT-2's norms in the order of the data: h.0.ln_1, h.0.ln_2, ..., ln_f."""
    return [f"h.{i}.{norm}" for i in range(n_layer) for norm in ("ln_1", "ln_2")] + ["ln_f"]


def presets_folder() -> Path:
    """Return the folder of presets: inside an installed package, beside it in a checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"


def _refuse_other_models(fields: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            wanted = " or ".join(json.dumps(value) for value in neutral if value is not None) or "null"
            way_out = "; AutoModelForCausalLM reads it, with its norms and arithmetic, after minigpt.hf.register()"
            raise ConfigError(
                f"{name}={json.dumps(fields[name], default=str)} is not supported, only {wanted}"
                + way_out * (fields[name] == "minigpt-gpt2")
            )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return _is_int(value) and -(2**31) <= value < 2**31  # some write -1 for none


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


# What each field must be.
_OPTIONAL = ("n_inner", "used_vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "vocab_size n_positions n_embd n_layer n_head n_inner used_vocab_size": (
        lambda size: _is_int(size) and 0 < size < 2**31, "a whole number above 0 and below 2^31",
    ),
    "activation_function": (lambda name: name in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
    "resid_pdrop embd_pdrop attn_pdrop": (lambda p: _is_number(p, 1), "within [0, 1]"),
    "layer_norm_epsilon initializer_range": (
        lambda x: _is_number(x, sys.float_info.max), "0 or more, and no more than a float can hold",
    ),
    "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn tie_word_embeddings": (
        lambda flag: isinstance(flag, bool), "true or false",
    ),
    "bos_token_id pad_token_id": (_is_id, "a token id of 32 bits"),
    "eos_token_id": (
        lambda end: all(map(_is_id, end if isinstance(end, tuple) else [end])),
        "a token id of 32 bits, or a list of them",
    ),
}  # fmt: skip
