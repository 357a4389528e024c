"""GPT2Config: the shape of a GPT-2, in the field names of a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.config_fields import check_ranges, known_fields
from minigpt.errors import ConfigError
from minigpt.json_file import read_object


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
        check_ranges(self)
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
    def parameter_count(self) -> int:
        """Return the number of values in a model of this shape. A tied head counts once."""
        c, inner = self.n_embd, self.inner_size
        block = 4 * c * c + 4 * c + 2 * c * inner + inner + c + 4 * c  # attention, MLP, two norms
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * c + self.n_positions * c + self.n_layer * block + 2 * c

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
        fields = read_object(Path(path), ConfigError)
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
        return cls(**known_fields(fields, {field.name for field in dataclasses.fields(cls)}))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a ``config.json`` that transformers reads as this same model."""
        fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **dataclasses.asdict(self)}
        if isinstance(self.eos_token_id, tuple):
            fields["eos_token_id"] = list(self.eos_token_id)
        if self.used_vocab_size is None:  # transformers does not know it
            del fields["used_vocab_size"]
        return fields


def presets_folder() -> Path:
    """Return the folder of presets: inside an installed package, beside it in a checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs"
