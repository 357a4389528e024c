"""How a model is opened: which checkpoint, and what is done to it. Every command that opens a model makes a recipe."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from minigpt import norms
from minigpt.checkpoint import Checkpoint, folder_of, has_tokenizer, locate, open_checkpoint
from minigpt.checkpoint.locate import MODEL_FILES, PICKLED_FILES
from minigpt.checkpoint.norms import Norms, as_pairs, norm_at
from minigpt.checkpoint.pretrained import load
from minigpt.device import dtype_name, resolve_device, resolve_dtype
from minigpt.engine import quantize_int8
from minigpt.engine.int8 import check_roundable
from minigpt.errors import CheckpointError, ConfigError
from minigpt.files import hash_file, hash_json
from minigpt.model import GPT2
from minigpt.model.checks import check_option
from minigpt.norms import is_registered
from minigpt.norms.foreign.construct import source_file
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.foreign.locate import locate as locate_class
from minigpt.swap import center_writers, fit_on_text, swap_norms
from minigpt.swap.fit import Explained, require_fitted
from minigpt.swap.sites import KEEP, match_sites, patterns_of
from minigpt.tokenizer import Tokenizer

ATTENTIONS, ARITHMETICS, QUANTIZES = ("sdpa", "eager"), ("fast", "reference"), ("int8",)


class Opened(NamedTuple):
    """A model as a recipe says, and what was done to it.

    Attributes:
        model: in eval mode.
        tokenizer: the checkpoint's; None if it has none.
        swapped: the sites at which the recipe's norm stands, in the order of the data.
        fits: how well each fitted norm explains the one that it replaces, by site.
    """

    model: GPT2
    tokenizer: Tokenizer | None
    swapped: list[str]
    fits: dict[str, Explained]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is opened.

    Args:
        source: a directory, a file of weights with its config beside it, a Hugging Face repository id, or "demo".
        norm: the norm to swap in, as ``swap_norms`` takes it, or a dict from patterns of sites to norms. "fused" is
            ``torch.nn.functional.layer_norm``. None leaves the checkpoint's own norms.
            If config.json names a norm that is not registered, name its class here, since a file never makes code run.
            The class then stands at the checkpoint's sites for it only.
        sites, keep: as ``swap_norms`` takes them.
        center: apply ``center_writers`` before the norm is swapped in.
        fit: a UTF-8 text file; the swapped norms are fitted on it, as ``fit_norms`` does.
        attention: "sdpa" (PyTorch's fused kernel) or "eager" (the formula written out).
        arithmetic: "reference" computes every operation as transformers does; "fast" may fuse operations.
        device: None is CUDA where there is one, else the CPU.
        dtype: float32, bfloat16, float16 or float64; None or "auto" keeps the checkpoint's own.
        quantize: "int8" holds the weights that multiply in eight bits, a scale for each 64 inputs, on the CPU.
        revision: branch, tag or commit of a repository.
        local_files_only: never use the network.

    Raises:
        ConfigError: if a value is unknown, or an option would do nothing without another.
        NormError: if ``sites`` or ``keep`` cannot be read.
    """

    source: str | Path = "demo"
    _: dataclasses.KW_ONLY
    norm: Norms | None = None
    sites: str | Sequence[str] = "*"
    keep: Collection[str] = KEEP
    center: bool = False
    fit: str | Path | None = None
    attention: str = "sdpa"
    arithmetic: str = "fast"
    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    quantize: str | None = None
    revision: str | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        check_option("attention", self.attention, ATTENTIONS)
        check_option("arithmetic", self.arithmetic, ARITHMETICS)
        if self.quantize is not None:
            check_option("quantize", self.quantize, QUANTIZES)
            check_roundable(self.arithmetic)
        dtype = resolve_dtype(None if self.dtype == "auto" else self.dtype)
        object.__setattr__(self, "dtype", None if dtype is None else dtype_name(dtype))
        object.__setattr__(self, "sites", tuple(patterns_of(self.sites)))
        norms.check_keep(self.keep)
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.norm is None:
            idle = {"sites": self.sites != ("*",), "keep": set(self.keep) != set(KEEP), "fit": self.fit is not None}
            if name := next((name for name, is_set in idle.items() if is_set), None):
                raise ConfigError("is about a norm that is swapped in; give a norm too", argument=name)
        if isinstance(self.norm, Mapping) and self.sites != ("*",):
            raise ConfigError("must not be given beside a dict of norms, which names its sites", argument="sites")

    def open(self) -> tuple[GPT2, Tokenizer | None]:
        """Return the model in eval mode, and the checkpoint's tokenizer, if it has one.

        Raises:
            CheckpointError: if the source cannot be found, fetched or read, or does not hold exactly this model's
                tensors; or ``fit`` needs a tokenizer and there is none.
            ConfigError: if the config or the device cannot be honoured.
            NormError: if the norm is unknown or does not fit, or the checkpoint names one that is not registered.
            GenerationError: if the text to fit on cannot be read.
        """
        opened = self.opened()
        return opened.model, opened.tokenizer

    def opened(self, *, tokenizer: bool = True) -> Opened:
        """Return the model and what was done to it. Raises as ``open``.

        Args:
            tokenizer: whether to read the tokenizer, even if nothing here needs it.
        """
        place = self.place()
        read = has_tokenizer(place) and (tokenizer or self.fit is not None)
        words = Tokenizer.from_pretrained(place) if read else None
        if self.fit is not None and words is None:
            raise CheckpointError(f"needs a tokenizer to read {self.fit}, and {self.source} has none", argument="fit")
        checkpoint = open_checkpoint(place)
        pairs = self.pairs()
        code = [] if all(is_registered(norm) for _, norm in checkpoint.norms) else pairs
        model = load(
            checkpoint, code, attention=self.attention, arithmetic=self.arithmetic,
            device=resolve_device("cpu" if self.quantize and self.device is None else self.device),
            dtype=resolve_dtype(self.dtype),
        )  # fmt: skip
        if self.center:
            center_writers(model)
        swapped: set[str] = set()
        for pattern, norm in pairs:
            sites = match_sites(model, pattern)
            if code and not is_registered(norm):  # it stands at the checkpoint's sites for it, and only there
                sites = [site for site in sites if not _is_named(checkpoint, site)]
            swapped |= {*sites}
            others = [site for site in sites if norms.name_of(model.get_submodule(site)) != norms.name_of(norm)]
            if others:  # a trained norm that is the one asked for keeps its own Parameters
                swap_norms(model, norm, others, self.keep)
        sites = [site for site in model.norm_sites() if site in swapped]
        fits: dict[str, Explained] = {}
        if self.fit is not None and words is not None:
            fits = fit_on_text(model, words, self.fit, sites)
        require_fitted(model)
        return Opened(quantize_int8(model) if self.quantize else model, words, sites, fits)

    def place(self) -> Path:
        """Return the local folder, or file of weights, of ``source``; fetches a repository.

        Raises:
            CheckpointError: if there is no such thing, or it cannot be fetched.
            ConfigError: if there is a revision, but ``source`` is not a repository.
        """
        if self.revision is not None and (self.source == "demo" or Path(self.source).expanduser().exists()):
            raise ConfigError(f"is for a Hugging Face repository, which {self.source} is not", argument="revision")
        return locate(self.source, revision=self.revision, local_files_only=self.local_files_only)

    def pairs(self) -> list[tuple[str, norms.NormSpec]]:
        """Return the norms to swap in as pairs of a pattern of sites and a norm, in the order of application."""
        if self.norm is None:
            return []
        if isinstance(self.norm, Mapping | list):
            return as_pairs(self.norm)
        return [(pattern, self.norm) for pattern in self.sites]

    def fingerprint(self) -> str:
        """Return 16 digits that change with all that decides the model: settings, weights, norms' files, texts.

        Raises:
            CheckpointError: if the source cannot be found or fetched.
        """
        settings = {
            field.name: str(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("source", "norm", "local_files_only", "revision")
        }
        named = [(pattern, norms.name_of(norm)) for pattern, norm in self.pairs()]
        code = [file for _, norm in self.pairs() if (file := code_file(norm)) is not None]
        files = [*checkpoint_files(self.place()), *code, *([Path(self.fit)] if self.fit else [])]
        try:
            return hash_json([settings, named, [(file.name, hash_file(file)) for file in files]])
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    def command(self) -> list[str]:
        """Return the words of the shell that open this model, without what is the default.

        Raises:
            ConfigError: if the recipe has what the shell has no words for: a dict of norms.
        """
        if isinstance(self.norm, Mapping | list):
            raise ConfigError("is a dict of norms, which the command line has no words for", argument="norm")
        words = [] if self.source == "demo" else ["--model", str(self.source)]
        if self.norm is not None:
            words += ["--norm", norms.name_of(self.norm)]
        if self.sites != ("*",):
            words += ["--sites", ",".join(self.sites)]
        if set(self.keep) != set(KEEP):
            words += ["--keep", ",".join(self.keep) or "none"]
        for name in ("center", "fit", "attention", "device", "dtype", "quantize", "revision"):
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}

# What other libraries call an argument of ``from_pretrained``.
OTHER_NAMES = {
    "torch_dtype": "dtype", "device_map": "device", "attn_implementation": "attention", "load_in_8bit": "quantize",
    "cache_dir": "the environment variable HF_HOME", "token": "the environment variable HF_TOKEN",
}  # fmt: skip


P = ParamSpec("P")
R = TypeVar("R")


def _known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse an argument that it does not have with a sentence that says what to use."""

    @functools.wraps(function)
    def call(*args: P.args, **arguments: P.kwargs) -> R:
        for name in arguments:
            if name not in _DEFAULTS:
                instead = f"use {OTHER_NAMES[name]}" if name in OTHER_NAMES else f"known are {', '.join(_DEFAULTS)}"
                raise ConfigError(f"is not an argument of {function.__name__}; {instead}", argument=name)
        return function(*args, **arguments)

    return call


@_known_arguments
def from_pretrained(
    source: str | Path = "demo",
    *,
    norm: Norms | None = None,
    sites: str | Sequence[str] = "*",
    keep: Collection[str] = KEEP,
    center: bool = False,
    fit: str | Path | None = None,
    attention: str = "sdpa",
    arithmetic: str = "fast",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> GPT2:
    """Return a pretrained GPT-2 in eval mode: the model of ``Recipe(source, ...).open()``, without the tokenizer.

    On the CPU, in the checkpoint's own dtype, the parameters of a Hugging Face checkpoint are the file itself, mapped
    into memory. Nothing is copied or transposed, and a page is read when first used. Do not overwrite the file in place
    meanwhile.

    Args: as ``Recipe`` takes them.

    Raises:
        ConfigError: if an argument is unknown; the message says what to use for transformers' names.
        CheckpointError, ConfigError, NormError, GenerationError: as ``Recipe`` and ``Recipe.open``.
    """
    recipe = Recipe(
        source, norm=norm, sites=sites, keep=keep, center=center, fit=fit, attention=attention, arithmetic=arithmetic,
        device=device, dtype=dtype, quantize=quantize, revision=revision, local_files_only=local_files_only,
    )  # fmt: skip
    return recipe.opened(tokenizer=False).model


def checkpoint_files(place: Path) -> list[Path]:
    """Return the files that a checkpoint is read from, its tokenizer's included, sorted by name."""
    known = [
        file for file in folder_of(place).iterdir()
        if any(fnmatchcase(file.name, pattern) for pattern in (*MODEL_FILES, *PICKLED_FILES))
    ]  # fmt: skip
    if place.is_file():
        known = [place, *(file for file in known if file.suffix == ".json")]
    return sorted(known)


def code_file(norm: norms.NormSpec) -> Path | None:
    """Return the file that a norm's class is written in; None if there is none."""
    if isinstance(norm, str) and (file := file_of(norm)) is not None:
        return file
    written = source_file(locate_class(norm) if isinstance(norm, str) else norm)
    return Path(written) if written and Path(written).is_file() else None


def _is_named(checkpoint: Checkpoint, site: str) -> bool:
    """Return True if config.json leaves a site to LayerNorm or to a registered norm."""
    named = norm_at(checkpoint.norms, site)
    return named is None or is_registered(named)
