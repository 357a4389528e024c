"""GPT2Config: the shape of a GPT-2, in the field names of a Hugging Face config.json.

Above the class is what each field may hold, and which fields of other people's config.json are ignored or refused.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from minigpt.choices import AMOUNT, GPT2_TYPE, MINIGPT_TYPE, Rule, between
from minigpt.errors import ConfigError, listing, near
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
    r"|is_decoder|cross_attention_hidden_size|tie_encoder_decoder|chunk_size_feed_forward"
)

# Other names of a field: transformers' attribute names, and the one that GPT-2's first config files had.
_ALIASES = {
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "n_ctx": "n_positions",
}

# Fields of networks that compute other logits than a GPT-2, refused unless they are null, false or empty.
OTHER_NETWORKS = re.compile(
    r"pruned_heads|rotary_\w+|rope_\w+|\w*alibi\w*|multi_query|position_embedding_type"
    r"|add_cross_attention|is_encoder_decoder|quantization_config|auto_map"
)


def field_with(default: Any, rule: Rule) -> Any:
    """Return a field of the config whose values obey a rule."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31  # some write -1 for none


SIZE = Rule(lambda value: type(value) is int and 0 < value < 2**31, "be a whole number above 0 and below 2^31")
ID = Rule(_is_id, "be a token id of 32 bits")
ID_OR_IDS = Rule(
    lambda value: all(map(_is_id, value if isinstance(value, tuple) else (value,))),
    f"{ID.requirement}, or a list of them",
)
FRACTION = between(0, 1)
BOOLEAN = Rule(lambda value: isinstance(value, bool), "be true or false")
ACTIVATION = Rule(lambda value: value in ACTIVATIONS, f"be one of {', '.join(ACTIVATIONS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Everything that decides what a GPT-2 computes. Defaults are GPT-2 124M's.

    Names and meanings are as in Hugging Face's ``config.json`` for ``model_type: gpt2``. ``n_inner=None`` means four
    times ``n_embd``. Dropout acts in training mode only. ``used_vocab_size`` is our own field: ids from there on only
    fill up the vocabulary and are never generated.

    Raises:
        ConfigError: if a value is of the wrong kind or out of range, or two values contradict each other.
    """

    vocab_size: int = field_with(50257, SIZE)
    n_positions: int = field_with(1024, SIZE)
    n_embd: int = field_with(768, SIZE)
    n_layer: int = field_with(12, SIZE)
    n_head: int = field_with(12, SIZE)
    n_inner: int | None = field_with(None, SIZE)
    activation_function: str = field_with("gelu_new", ACTIVATION)
    resid_pdrop: float = field_with(0.1, FRACTION)
    embd_pdrop: float = field_with(0.1, FRACTION)
    attn_pdrop: float = field_with(0.1, FRACTION)
    layer_norm_epsilon: float = field_with(1e-5, AMOUNT)
    initializer_range: float = field_with(0.02, AMOUNT)
    scale_attn_weights: bool = field_with(True, BOOLEAN)
    scale_attn_by_inverse_layer_idx: bool = field_with(False, BOOLEAN)
    reorder_and_upcast_attn: bool = field_with(False, BOOLEAN)
    tie_word_embeddings: bool = field_with(True, BOOLEAN)
    bos_token_id: int | None = field_with(50256, ID)
    eos_token_id: int | tuple[int, ...] | None = field_with(50256, ID_OR_IDS)
    pad_token_id: int | None = field_with(None, ID)
    used_vocab_size: int | None = field_with(None, SIZE)

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_id, list):  # as JSON gives it; a tuple keeps the config hashable
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for field in dataclasses.fields(self):
            rule, value = field.metadata["rule"], getattr(self, field.name)
            may_be_null = type(None) in get_args(field.type)
            if not (rule.accepts(value) or (may_be_null and value is None)):
                or_null = ", or null" if may_be_null else ""
                raise ConfigError(f"{field.name} must {rule.requirement}{or_null}, got {value!r:.200}")
        for name in ("layer_norm_epsilon", "initializer_range"):
            object.__setattr__(self, name, float(getattr(self, name)))  # transformers takes no whole number here
        used = self.used_vocab_size
        if used is not None and used > self.vocab_size:
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
        if self.n_inner is None:
            return 4 * self.n_embd
        return self.n_inner

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return every id that ends a text."""
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, tuple):
            return self.eos_token_id
        return (self.eos_token_id,)

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

        A note names others, as an author or a license. transformers does not read them either.

        Raises:
            ConfigError: if a field has a value that would make another model, or its name is almost a field's.
        """
        kind = fields.get("model_type", GPT2_TYPE)
        if kind != GPT2_TYPE:
            way_out = ""
            if kind == MINIGPT_TYPE:
                way_out = "; AutoModelForCausalLM reads it, with its norms and arithmetic, after minigpt.hf.register()"
            raise ConfigError(f'model_type must be "gpt2", got {kind!r}{way_out}')
        for name, value in fields.items():
            if value and OTHER_NETWORKS.fullmatch(name):
                raise ConfigError(f"{name}={value!r:.200} is of another network than GPT-2; it must be null")
        known = {name: value for name, value in fields.items() if name not in _ALIASES}
        for alias, name in _ALIASES.items():
            if alias not in fields:
                continue
            value = known.setdefault(name, fields[alias])
            if value != fields[alias] and alias != "n_ctx":  # transformers does not read n_ctx, which may contradict
                both = f"{alias}={fields[alias]!r:.200} contradicts {name}={value!r:.200}"
                raise ConfigError(f"{both}; they are one field")
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = []
        for name in sorted(known.keys() - names - {"model_type"}):
            if not (OTHER_NETWORKS.fullmatch(name) or _WITHOUT_EFFECT.fullmatch(name)):
                unknown.append(name)
        for name in unknown:
            if meant := near(name, [*names, *_ALIASES], 0.85):
                raise ConfigError(f"unknown config field {name}; did you mean {meant}?")
        if unknown:
            _note_unread(tuple(unknown))
        return cls(**{name: value for name, value in known.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a ``config.json`` that transformers reads as this same model."""
        fields = {"model_type": GPT2_TYPE, "architectures": ["GPT2LMHeadModel"], **dataclasses.asdict(self)}
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        if self.used_vocab_size is None:  # transformers does not know it
            del fields["used_vocab_size"]
        return fields


@functools.cache  # once
def _note_unread(names: tuple[str, ...]) -> None:
    logging.getLogger("minigpt").warning("config.json has fields that no GPT-2 reads: %s", listing(names))


def site_names(n_layer: int) -> list[str]:
    """Return the names of a GPT-2's norms in the order of the data: h.0.ln_1, h.0.ln_2, ..., ln_f."""
    names = []
    for layer in range(n_layer):
        names += [f"h.{layer}.ln_1", f"h.{layer}.ln_2"]
    return [*names, "ln_f"]


def presets_folder() -> Path:
    """Return the folder of presets: inside an installed package, next to it in a checkout."""
    installed = Path(__file__).parent / "configs"
    if installed.is_dir():
        return installed
    return Path(__file__).parents[1] / "configs"
