"""How a model is opened: which checkpoint, and what is done to it. Every command that opens a model makes a recipe.

To add an option of opening a model, in Python and in all commands: a field of ``Recipe``, and what it does in
``Recipe.load``. The command line reads its options from the fields, and must not wait for PyTorch; so whatever needs
PyTorch is imported inside of the functions.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from minigpt import choices
from minigpt.errors import CheckpointError, ConfigError
from minigpt.files import hash_file, hash_json

if TYPE_CHECKING:
    import torch

    from minigpt.checkpoint.contents import Files
    from minigpt.checkpoint.norms import Norms
    from minigpt.checkpoint.read import Checkpoint
    from minigpt.model import GPT2
    from minigpt.norms import NormSpec
    from minigpt.swap.fit import Explained
    from minigpt.tokenizer import Tokenizer

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def recipe_field(
    default: Any = None, about: str | None = None, *, kind: Any = str | None, values: Sequence[str] = (),
    is_axis: bool = False, difference: str | None = None,
) -> Any:  # fmt: skip
    """Return a field of ``Recipe``, with all that the package needs to know of an option of opening.

    Args:
        about: the help of the option of the command line; None for a field that the shell does not have.
        kind: the option's type in the shell and in a study file.
        values: the values that it takes beside its default. The shell completes them.
        is_axis: whether a study takes a list of values, each of them a cell.
        difference: why a model that is opened with it is another one than the checkpoint's, with "{}" for the value;
            None if it is meant to compute the same.
    """
    metadata = {"kind": kind, "values": values, "is_axis": is_axis, "difference": difference}
    metadata |= {} if about is None else {"about": about}
    return dataclasses.field(default=default, metadata=metadata)


def differences(opened: object) -> list[str]:
    """Return why a recipe, or a model that was opened by one, is another model than its checkpoint, by its options."""
    values = [(field, getattr(opened, field.name, field.default)) for field in dataclasses.fields(Recipe)]
    return [
        field.metadata["difference"].format(value)
        for field, value in values
        if field.metadata.get("difference") and value != field.default
    ]


class Loaded(NamedTuple):
    """A model as a recipe says, and what was done to it.

    Attributes:
        model: in eval mode.
        tokenizer: the checkpoint's; None if it has none.
        swapped: the sites at which the recipe's norm stands, in the order of the data.
        fits: how well each fitted norm explains the one that it replaces, by site.
        generation_fields: of the checkpoint's generation_config.json; empty without one.
    """

    model: "GPT2"
    tokenizer: "Tokenizer | None"
    swapped: list[str]
    fits: "dict[str, Explained]"
    generation_fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is opened.

    Args:
        source: a directory, a file of weights with its config beside it, a Hugging Face repository id, or "demo".
        norm: the norm to swap in, as ``swap_norms`` takes it, or a dict from patterns of sites to norms. "fused" is
            ``torch.nn.functional.layer_norm``. None leaves the checkpoint's own norms.
            If config.json names a norm that is not registered, name its class here, since a file never makes code run.
            The class then stands at the checkpoint's sites for it only. Another class of a dict stands where it says.
        sites, keep: as ``swap_norms`` takes them.
        center: apply ``center_writers`` before the norm is swapped in.
        fit: a UTF-8 text file; the swapped norms are fitted on it, as ``fit_norms`` does.
        attention: "sdpa" (PyTorch's fused kernel) or "eager" (the formula written out).
        arithmetic: "reference" computes every operation as transformers does; "fast" may fuse operations.
        device: None is CUDA where there is one, else the CPU.
        dtype: float32, bfloat16, float16 or float64; None or "auto" keeps the checkpoint's own.
        quantize: "int8" holds the weights that multiply in eight bits, a scale for each 64 inputs, on the CPU.
        memory: the bytes that another architecture than GPT-2 may take, or a size as "8GB"; by default half of those
            that are free. The weights of a larger one stay in their files, and are brought block by block.
        revision: branch, tag or commit of a repository.
        local_files_only: never use the network.

    Raises:
        ConfigError: if a value is unknown, or an option would do nothing without another.
        NormError: if ``sites`` or ``keep`` cannot be read.
    """

    source: str | Path = recipe_field("demo", "A directory, a file of weights, a Hugging Face id, or 'demo'.")
    _: dataclasses.KW_ONLY
    norm: "Norms | None" = recipe_field(
        None, "Norm to swap in: a registered one, package.module:Name or path/to/file.py:Name."
    )
    sites: str | Sequence[str] = recipe_field(
        "*", "Where to put --norm, e.g. 'h.*.ln_1', 'ln_f,h.0.*', or a third of the blocks: early, middle, late."
    )
    keep: Collection[str] = recipe_field(
        choices.KEEP, "What of the model's norms stays beside a --norm that lacks it: scale,shift, one of them, none.",
        is_axis=True,
    )  # fmt: skip
    center: bool = recipe_field(
        False, "Centre what writes to the residual stream first, so that rms is a LayerNorm.", kind=bool, is_axis=True
    )
    fit: str | Path | None = recipe_field(
        None, "File to fit the swapped norms on: closest to the original norms' outputs.", is_axis=True
    )
    attention: str = recipe_field(
        "sdpa", "sdpa (fused) or eager (written out).", kind=str, values=choices.ATTENTIONS, is_axis=True
    )
    arithmetic: str = recipe_field("fast", kind=str, values=choices.ARITHMETICS, is_axis=True)
    device: "str | torch.device | None" = recipe_field(None, "cpu, cuda, cuda:N; by default CUDA if there is one.")
    dtype: "str | torch.dtype | None" = recipe_field(
        None,
        f"{', '.join(choices.DTYPE_NAMES)}; by default the checkpoint's.",
        values=choices.DTYPE_NAMES,
        is_axis=True,
    )  # fmt: skip
    quantize: str | None = recipe_field(
        None, "int8: weights in eight bits, for the CPU; norms stay exact.", values=choices.QUANTIZES, is_axis=True,
        difference="{} weights are other weights",
    )  # fmt: skip
    memory: str | int | None = recipe_field(
        None, "What a model may take, as 8GB; a larger one is read block by block. By default half of the free memory."
    )
    revision: str | None = recipe_field(None, "Branch, tag or commit of a Hugging Face repository.")
    local_files_only: bool = recipe_field(False, kind=bool)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, values = getattr(self, field.name), field.metadata.get("values")
            if values and field.name != "dtype" and value != field.default:
                choices.check_option(field.name, value, values)
        choices.check_quantize(self.quantize, self.arithmetic)
        dtype = self.dtype if isinstance(self.dtype, str) else str(self.dtype or "auto").removeprefix("torch.")
        if dtype != "auto":
            choices.check_option("dtype", dtype, choices.DTYPE_NAMES)
        object.__setattr__(self, "dtype", None if dtype == "auto" else dtype)
        object.__setattr__(self, "sites", tuple(choices.patterns_of(self.sites)))
        if self.memory is not None:
            choices.bytes_of(self.memory)
        choices.check_keep(self.keep)
        object.__setattr__(self, "keep", tuple(role for role in choices.KEEP if role in self.keep))
        if self.norm is None:
            idle = {"sites": self.sites != ("*",), "keep": self.keep != choices.KEEP, "fit": self.fit is not None}
            if name := next((name for name, is_set in idle.items() if is_set), None):
                raise ConfigError("is about a norm that is swapped in; give a norm too", argument=name)
        if isinstance(self.norm, Mapping) and self.sites != ("*",):
            raise ConfigError("must not be given beside a dict of norms, which names its sites", argument="sites")

    def open(self) -> "tuple[GPT2, Tokenizer | None]":
        """Return the model in eval mode, and the checkpoint's tokenizer, if it has one.

        Raises:
            CheckpointError: if the source cannot be found, fetched or read, or does not hold exactly this model's
                tensors; or ``fit`` needs a tokenizer and there is none.
            ConfigError: if the config or the device cannot be honoured.
            NormError: if the norm is unknown or does not fit, or the checkpoint names one that is not registered.
            GenerationError: if the text to fit on cannot be read.
        """
        loaded = self.load()
        return loaded.model, loaded.tokenizer

    def load(self, *, any_architecture: bool = False, offload: bool = False) -> Loaded:
        """Return the model and what was done to it. Raises as ``open``.

        Args:
            any_architecture: whether it may be another one than GPT-2. The model is transformers' own then.
            offload: whether its weights stay in their files, whatever ``memory`` says. It is transformers' own then,
                a GPT-2 too.
        """
        from minigpt.checkpoint.contents import read_stable
        from minigpt.engine import quantize_int8
        from minigpt.swap import fit_on_text
        from minigpt.swap.fit import require_fitted

        place = self.place()
        read = _read_small_files if offload else _read_files
        checkpoint, tokenizer, generation_fields = read_stable(place, read)
        if isinstance(checkpoint, str) and not any_architecture:
            raise ConfigError(
                f"{self.source} is a {checkpoint}, and this needs a GPT-2; minigpt parity, study, perplexity and sites "
                "read other architectures, and transformers writes with them"
            )
        if self.fit is not None and tokenizer is None:
            raise CheckpointError(f"needs a tokenizer to read {self.fit}, and {self.source} has none", argument="fit")
        if isinstance(checkpoint, str):
            model, sites = self._opened_by_transformers(place, checkpoint, 0 if offload else self.memory)
        else:
            model, sites = self._opened_as_ours(checkpoint)
        fits: dict[str, Explained] = {}
        if self.fit is not None and tokenizer is not None:
            fits = fit_on_text(model, tokenizer, self.fit, sites)
        require_fitted(model)
        return Loaded(quantize_int8(model) if self.quantize else model, tokenizer, sites, fits, generation_fields)

    def _opened_as_ours(self, checkpoint: "Checkpoint") -> "tuple[GPT2, list[str]]":
        """Return the model with the recipe's norms, and the sites at which they stand."""
        from minigpt.checkpoint.pretrained import load_model
        from minigpt.device import resolve_device
        from minigpt.precision import resolve_dtype
        from minigpt.swap import center_writers

        model = load_model(
            checkpoint, self._code_for(checkpoint), attention=self.attention, arithmetic=self.arithmetic,
            device=resolve_device("cpu" if self.quantize and self.device is None else self.device),
            dtype=resolve_dtype(self.dtype),
        )  # fmt: skip
        if self.center:
            center_writers(model)
        return model, self._swap_norms(model, checkpoint)

    def _opened_by_transformers(
        self, place: Path, architecture: str, memory: str | int | None
    ) -> "tuple[Any, list[str]]":
        """Return transformers' model with the recipe's norms, and their sites."""
        from minigpt.checkpoint.transformers_model import load_with_transformers
        from minigpt.device import resolve_device
        from minigpt.host import host_of
        from minigpt.precision import resolve_dtype
        from minigpt.swap import swap_norms

        self.check_architecture(architecture)
        model: Any = load_with_transformers(
            place,
            attention=self.attention,
            dtype=resolve_dtype(self.dtype),
            device=resolve_device(self.device),
            memory=memory,
        )
        swapped = set[str]()
        for pattern, norm in self.pairs():
            swapped |= {*swap_norms(model, norm, pattern, self.keep)}
        host = host_of(model)
        return model, [site for site in host.sites if host.prefix + site in swapped]

    def check_architecture(self, architecture: str | None) -> None:
        """Check that no option is for a GPT-2 alone, if the architecture is another.

        Raises:
            ConfigError: if one is.
        """
        of_gpt2 = {"center": self.center, "quantize": self.quantize, "arithmetic": self.arithmetic != "fast"}
        name = next((name for name, is_set in of_gpt2.items() if is_set), None)
        if name is not None and architecture is not None:
            raise ConfigError(f"is for a GPT-2, and {self.source} is a {architecture}", argument=name)

    def _code_for(self, checkpoint: "Checkpoint") -> "list[tuple[str, NormSpec]]":
        """Return the recipe's norms if config.json names one that is not registered, whose class they are."""
        from minigpt.norms import is_registered

        return [] if all(is_registered(norm) for _, norm in checkpoint.norms) else self.pairs()

    def _swap_norms(self, model: "GPT2", checkpoint: "Checkpoint") -> list[str]:
        """Put the recipe's norms at their sites; return the sites at which they stand, in the order of the data.

        A norm that the checkpoint already has at a site keeps its trained Parameters. A class that config.json names
        stands at the checkpoint's sites for it, and only there.
        """
        from minigpt import norms
        from minigpt.norms.registry import is_same
        from minigpt.swap import swap_norms
        from minigpt.swap.sites import match_sites

        swapped = set[str]()
        for pattern, norm in self.pairs():
            sites = match_sites(model, pattern)
            of_code = self._sites_of_code(checkpoint, sites)
            if of_code and self._is_code(norm, checkpoint):
                sites = of_code
            swapped |= {*sites}
            present = {site: model.get_submodule(site) for site in sites}
            others = [
                site for site, module in present.items()
                if not is_same(norm, module) and norms.name_of(module) != norms.name_of(norm)
            ]  # fmt: skip
            if others:
                swap_norms(model, norm, others, self.keep)
        return [site for site in model.site_names() if site in swapped]

    @staticmethod
    def _sites_of_code(checkpoint: "Checkpoint", sites: Sequence[str]) -> list[str]:
        """Return those of the sites for which config.json names a norm that is not registered."""
        from minigpt.checkpoint.norms import norm_at
        from minigpt.norms import is_registered

        named = {site: norm_at(checkpoint.norms, site) for site in sites}
        return [site for site, name in named.items() if name is not None and not is_registered(name)]

    def _is_code(self, norm: "NormSpec", checkpoint: "Checkpoint") -> bool:
        """Return whether a norm is the class of one that config.json names and that is not registered.

        A dict of norms says where each stands, so there the class must have the name that config.json has.
        """
        from minigpt.norms import is_registered, name_of

        if is_registered(norm):
            return False
        named = {str(name).rpartition(":")[2] for _, name in checkpoint.norms if not is_registered(name)}
        return not isinstance(self.norm, Mapping) or name_of(norm).rpartition(":")[2] in named

    def place(self) -> Path:
        """Return the local folder, or file of weights, of ``source``; fetches a repository.

        Raises:
            CheckpointError: if there is no such thing, or it cannot be fetched.
            ConfigError: if there is a revision, but ``source`` is not a repository.
        """
        from minigpt.checkpoint import local_place

        if self.revision is not None and (self.source == "demo" or Path(self.source).expanduser().exists()):
            raise ConfigError(f"is for a Hugging Face repository, which {self.source} is not", argument="revision")
        return local_place(self.source, revision=self.revision, local_files_only=self.local_files_only)

    def pairs(self) -> "list[tuple[str, NormSpec]]":
        """Return the norms to swap in as pairs of a pattern of sites and a norm, in the order of application."""
        from minigpt.checkpoint.norms import as_pairs

        if self.norm is None:
            return []
        return as_pairs(self.norm) if isinstance(self.norm, Mapping | list) else [(at, self.norm) for at in self.sites]

    def fingerprint(self) -> str:
        """Return 16 digits that change with all that decides the model: settings, weights, norms' files, texts.

        Raises:
            CheckpointError: if the source cannot be found or fetched.
        """
        from minigpt.checkpoint.contents import known_files
        from minigpt.norms.foreign.fingerprint import describe
        from minigpt.norms.foreign.locate import code_files

        apart = ("source", "norm", "local_files_only", "revision", "memory")
        settings = {name: str(value) for name, value in vars(self).items() if name not in apart}
        named = [(pattern, norm if isinstance(norm, str) else describe(norm)) for pattern, norm in self.pairs()]
        try:
            code = [file for _, norm in self.pairs() for file in code_files(norm)]
            files = [*known_files(self.place()), *code, *([Path(self.fit)] if self.fit else [])]
            return hash_json([settings, named, [(file.name, hash_file(file)) for file in files]])
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    def command(self) -> list[str]:
        """Return the words of the shell that open this model, without what is the default.

        Raises:
            ConfigError: if the shell has no words for a value: a dict of norms, a partial, a lambda, or ``arithmetic``.
        """
        from minigpt.norms import name_of

        if isinstance(self.norm, Mapping | list):
            raise ConfigError("is a dict of norms, which the command line has no words for", argument="norm")
        if self.norm is not None and not re.fullmatch(r"[^()<>]+", name_of(self.norm)):
            raise ConfigError(f"is {name_of(self.norm)}, which the command line has no words for", argument="norm")
        words = []
        for field in dataclasses.fields(self):
            name, value = "model" if field.name == "source" else field.name, getattr(self, field.name)
            value = name_of(value) if name == "norm" and value is not None else value
            if _word(value) == _word(field.default) or name == "local_files_only":
                continue
            if "about" not in field.metadata:
                raise ConfigError("is no option of the command line", argument=name)
            name = name.replace("_", "-")
            words += [f"--{name}"] if value is True else [f"--{name}", _word(value)]
        return words


def _read_small_files(files: "Files") -> "tuple[str, Tokenizer | None, dict[str, Any]]":
    """Return a checkpoint's architecture, and what is in its files of other things than weights."""
    from minigpt.tokenizer import Tokenizer

    tokenizer = Tokenizer.read(files.folder) if files.has_tokenizer else None
    return files.architecture or "gpt2", tokenizer, files.generation_fields()


def _read_files(files: "Files") -> "tuple[Checkpoint | str, Tokenizer | None, dict[str, Any]]":
    """Return what is in a checkpoint's files, each of which is read once; its architecture if that is not GPT-2."""
    from minigpt.checkpoint.read import read_checkpoint
    from minigpt.tokenizer import Tokenizer

    tokenizer = Tokenizer.read(files.folder) if files.has_tokenizer else None
    checkpoint = files.architecture or read_checkpoint(files, tokenizer.id_count if tokenizer else 0)
    return checkpoint, tokenizer, files.generation_fields()


def _word(value: Any) -> str:
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)


# What other libraries call an argument of ``from_pretrained``.
OTHER_NAMES = {
    "torch_dtype": "dtype", "device_map": "device", "attn_implementation": "attention", "load_in_8bit": "quantize",
    "cache_dir": "the environment variable HF_HOME", "token": "the environment variable HF_TOKEN",
}  # fmt: skip


def check_names(names: Collection[str], known: Collection[str], function: str) -> None:
    """Check the names of a function's arguments.

    Raises:
        ConfigError: if one is unknown; the message says what to use for transformers' names.
    """
    for name in names:
        if name not in known:
            instead = f"use {OTHER_NAMES[name]}" if name in OTHER_NAMES else f"known are {', '.join(known)}"
            raise ConfigError(f"is not an argument of {function}; {instead}", argument=name)


RECIPE_OPTIONS = [field.name for field in dataclasses.fields(Recipe) if field.name != "source"]


def takes_options_of(
    recipe: Callable[Arguments, Recipe],
) -> Callable[[Callable[..., Returned]], Callable[Arguments, Returned]]:
    """Return a decorator that gives a function the parameters of ``Recipe``, for type checkers and for ``help``."""

    def decorate(function: Callable[..., Returned]) -> Callable[Arguments, Returned]:
        function.__signature__ = inspect.signature(recipe)  # type: ignore[attr-defined]
        return function

    return decorate


@takes_options_of(Recipe)
def from_pretrained(source: str | Path = "demo", **options: Any) -> "GPT2":
    """Return a pretrained GPT-2 in eval mode: the model of ``Recipe(source, ...).open()``, without the tokenizer.

    On the CPU, in the checkpoint's own dtype, the parameters of a Hugging Face checkpoint are the file itself, mapped
    into memory. Nothing is copied or transposed, and a page is read when first used. Do not overwrite the file in place
    meanwhile.

    Args:
        source: as ``Recipe`` takes it.
        options: norm, sites, keep, center, fit, attention, arithmetic, device, dtype, quantize, memory,
            revision and local_files_only, as ``Recipe`` takes them.

    Raises:
        ConfigError: if an argument is unknown; the message says what to use for transformers' names.
        CheckpointError, ConfigError, NormError, GenerationError: as ``Recipe`` and ``Recipe.open``.
    """
    check_names(options, RECIPE_OPTIONS, "from_pretrained")
    return Recipe(source, **options).load().model
