"""The recipe of a model: a checkpoint, and what is done to it. Every command that opens a model makes a recipe.

To add an option of opening a model, in Python and in all commands: a field of ``Recipe``, and what it does in
``Recipe.load``. The command line reads its options from the fields, and must not wait for PyTorch; so whatever needs
PyTorch is imported inside of the functions.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from minigpt import choices
from minigpt.errors import CheckpointError, ConfigError, GenerationError, NormError
from minigpt.files import hash_file, hash_json, read_text

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
        values: the values that it takes, but for its default. The shell completes them.
        is_axis: whether a study takes a list of values, each of them a cell.
        difference: why a model that is opened with it is another one than the checkpoint's, with "{}" for the value;
            None if it is meant to compute the same.
    """
    metadata = {"kind": kind, "values": values, "is_axis": is_axis, "difference": difference}
    if about is not None:
        metadata["about"] = about
    return dataclasses.field(default=default, metadata=metadata)


def differences(opened: object) -> list[str]:
    """Return why a recipe, or a model that was opened by one, is another model than its checkpoint, by its options."""
    reasons = []
    for field in dataclasses.fields(Recipe):
        difference = field.metadata["difference"]
        value = getattr(opened, field.name, field.default)
        if difference and value != field.default:
            reasons.append(difference.format(value))
    return reasons


class Loaded(NamedTuple):
    """A model as a recipe says, and what was done to it.

    Attributes:
        model: in eval mode.
        tokenizer: the checkpoint's; None if it has none.
        swapped: the sites that have the recipe's norm, in the order of the data.
        fits: how well each fitted norm explains the one that it replaces, by site.
    """

    model: "GPT2"
    tokenizer: "Tokenizer | None"
    swapped: list[str]
    fits: "dict[str, Explained]"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A checkpoint, and what is done to it when it is opened.

    Args:
        source: a directory, a file of weights in the folder of its config, a Hugging Face repository id, or "demo".
        norm: the norm to swap in, as ``swap_norms`` takes it, or a dict from patterns of sites to norms. "fused" is
            ``torch.nn.functional.layer_norm``. None leaves the checkpoint's own norms.
            If config.json names a norm that is not registered, name its class here, since a file never makes code run.
            It is used only at the sites for which config.json names it. Another class of a dict is used where the dict
            says.
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
        choices.KEEP,
        "Pretrained Parameters that stay where --norm has none of its own: 'scale,shift', 'scale', 'shift' or 'none'.",
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
            values, value = field.metadata["values"], getattr(self, field.name)
            if values and value != field.default and field.name != "dtype":
                choices.check_option(field.name, value, values)
        choices.check_quantize(self.quantize, self.arithmetic)
        dtype = None if self.dtype in (None, "auto") else str(self.dtype).removeprefix("torch.")
        if dtype is not None:
            choices.check_option("dtype", dtype, choices.DTYPE_NAMES)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "sites", tuple(choices.patterns_of(self.sites)))
        if self.memory is not None:
            choices.bytes_of(self.memory)
        choices.check_keep(self.keep)
        roles = [role for role in choices.KEEP if role in self.keep]
        object.__setattr__(self, "keep", tuple(roles))
        if isinstance(self.norm, Mapping) and self.sites != ("*",):
            raise ConfigError("must not be given with a dict of norms, which names its sites", argument="sites")
        if self.norm is not None:
            return
        for name, default in {"sites": ("*",), "keep": choices.KEEP, "fit": None}.items():
            if getattr(self, name) != default:
                raise ConfigError("has no effect without a norm to swap in; give a norm too", argument=name)

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
        from minigpt.checkpoint.pretrained import load_model
        from minigpt.device import resolve_device
        from minigpt.engine import quantize_int8
        from minigpt.norms.frozen import needs_text
        from minigpt.precision import resolve_dtype

        self.check_fit()
        place = self.place()
        read = partial(_read_files, with_weights=not offload)
        checkpoint, architecture, tokenizer, generation_fields = read_stable(place, read)
        if checkpoint is None and not any_architecture:
            raise ConfigError(
                f"{self.source} is a {architecture}, and this needs a GPT-2; minigpt parity, study, perplexity "
                "and sites support other architectures; generate text with transformers"
            )
        to_fit_on: list[int] = []
        if self.fit is not None:
            from minigpt.swap.fit import tokens_to_fit_on

            to_fit_on = tokens_to_fit_on(tokenizer, self.fit)
        if checkpoint is None:
            memory = 0 if offload else self.memory
            model, sites = self._load_with_transformers(place, architecture, memory)
        else:
            model = load_model(
                checkpoint, self.pairs(), attention=self.attention, arithmetic=self.arithmetic,
                device=resolve_device(self.wanted_device), dtype=resolve_dtype(self.dtype),
            )  # fmt: skip
            model.generation_fields = generation_fields
            if self.center:
                from minigpt.swap import center_writers

                center_writers(model)
            sites = self._put_norms(model, checkpoint)
        fits: dict[str, Explained] = {}
        if to_fit_on:
            from minigpt.host import host_of
            from minigpt.swap.fit import fit_norms, rows_to_fit_on

            prefix = host_of(model).prefix  # of a GPT-2 whose weights are elsewhere: its sites are named as ours
            for path, fit in fit_norms(model, rows_to_fit_on(model, to_fit_on), sites).items():
                fits[path.removeprefix(prefix)] = fit
        for path, module in model.named_modules():
            if needs_text(module):
                raise NormError(
                    f"must name a text: the frozen norm at {path} takes its deviations from one", argument="fit"
                )
        if self.quantize:
            model = quantize_int8(model)
        return Loaded(model, tokenizer, sites, fits)

    def _put_norms(self, model: "GPT2", checkpoint: "Checkpoint") -> list[str]:
        """Put the recipe's norms at their sites; return these in the order of the data.

        A norm that the checkpoint already has at a site keeps its trained Parameters.
        """
        if self.norm is None:
            return []
        from minigpt.checkpoint.norms import sites_for
        from minigpt.norms.foreign.builder import is_same
        from minigpt.swap import match_sites, swap_norms

        swapped: set[str] = set()
        by_site = isinstance(self.norm, Mapping)
        for pattern, norm in self.pairs():
            sites = sites_for(norm, match_sites(model, pattern), checkpoint.norms, by_site=by_site)
            swapped.update(sites)
            others = [site for site in sites if not is_same(norm, model.get_submodule(site))]
            if others:
                swap_norms(model, norm, others, self.keep)
        return [site for site in model.site_names() if site in swapped]

    def _load_with_transformers(
        self, place: Path, architecture: str | None, memory: str | int | None
    ) -> "tuple[Any, list[str]]":
        """Return transformers' model of another architecture with the recipe's norms, and their sites."""
        from minigpt.checkpoint.transformers_model import load_with_transformers
        from minigpt.device import resolve_device
        from minigpt.host import host_of
        from minigpt.precision import resolve_dtype
        from minigpt.swap import swap_norms
        from minigpt.swap.sites import matching

        self.check_architecture(architecture)
        model: Any = load_with_transformers(
            place,
            attention=self.attention,
            dtype=resolve_dtype(self.dtype),
            device=resolve_device(self.device),
            memory=memory,
        )
        host = host_of(model)
        swapped: set[str] = set()
        for pattern, norm in self.pairs():
            sites = [pattern]
            if host.prefix:  # a GPT-2, whose sites are those of ours
                sites = [host.prefix + site for site in matching(pattern, host.sites)]
            swapped.update(swap_norms(model, norm, sites, self.keep))
        return model, [site for site in host.sites if host.prefix + site in swapped]

    def check_fit(self) -> None:
        """Check that the text to fit on can be read.

        Raises:
            GenerationError: if it cannot.
        """
        if self.fit is not None:
            read_text(Path(self.fit), GenerationError)

    def check_architecture(self, architecture: str | None) -> None:
        """Check that no option is for a GPT-2 alone, if the architecture is another.

        Raises:
            ConfigError: if one is.
        """
        name = self._option_of_gpt2()
        if name is not None and architecture is not None:
            raise ConfigError(f"is for a GPT-2, and {self.source} is a {architecture}", argument=name)

    def _option_of_gpt2(self) -> str | None:
        """Return the name of an option that only our GPT-2 has, if one is set."""
        of_gpt2 = {"center": self.center, "quantize": self.quantize, "arithmetic": self.arithmetic != "fast"}
        for name, is_set in of_gpt2.items():
            if is_set:
                return name
        return None

    def why_whole(self) -> str | None:
        """Return why the weights cannot stay in their files, in words; None if they can."""
        from minigpt.checkpoint.contents import Files
        from minigpt.checkpoint.offloading import why_whole

        option = self._option_of_gpt2()
        if option is not None:
            return f"{option} is for the GPT-2 of minigpt"
        files = Files.at(self.place())
        return why_whole(files) if files.architecture is None else None

    @property
    def wanted_device(self) -> "str | torch.device | None":
        """The device that is asked for: the CPU by default for weights in int8; None for CUDA if there is one."""
        if self.quantize is not None and self.device is None:
            return "cpu"
        return self.device

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
        if isinstance(self.norm, Mapping | list):
            return as_pairs(self.norm)
        return [(pattern, self.norm) for pattern in self.sites]

    def fingerprint(self) -> str:
        """Return 16 digits that change with all that decides the model: settings, weights, norms' files, texts.

        Raises:
            CheckpointError: if the source cannot be found or fetched.
            ConfigError: if a norm is a class or a function, and no name.
        """
        apart = ("source", "norm", "local_files_only", "revision", "memory")
        settings = {name: str(value) for name, value in vars(self).items() if name not in apart}
        norms = self.pairs()
        for _, norm in norms:
            if not isinstance(norm, str):
                raise ConfigError(
                    f"must be a name, so that a later run finds the same norm, got {norm!r}", argument="norm"
                )
        try:
            hashes = [(file.name, hash_file(file)) for file in self._files()]
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
        return hash_json([settings, norms, hashes])

    def _files(self) -> list[Path]:
        """Return the files that decide the model: its own, its norms' code, and the text to fit on."""
        from minigpt.checkpoint.contents import known_files
        from minigpt.norms.foreign.locate import code_files

        code: list[Path] = []
        for _, norm in self.pairs():
            code += code_files(norm)
        files = [*known_files(self.place()), *code]
        if self.fit:
            files.append(Path(self.fit))
        return files

    def command(self) -> list[str]:
        """Return the words of the shell that open this model, without what is the default.

        Raises:
            ConfigError: if the shell has no words for a value: a dict of norms, a partial, a lambda, or ``arithmetic``.
        """
        words: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "norm" and value is not None:
                value = _norm_word(value)
            if field.name == "local_files_only" or _shell_word(value) == _shell_word(field.default):
                continue
            if "about" not in field.metadata:
                raise ConfigError("is no option of the command line", argument=field.name)
            name = "model" if field.name == "source" else field.name.replace("_", "-")
            words.append(f"--{name}")
            if value is not True:
                words.append(_shell_word(value))
        return words


def _read_files(
    files: "Files", *, with_weights: bool
) -> "tuple[Checkpoint | None, str | None, Tokenizer | None, dict[str, Any] | None]":
    """Return what is in a checkpoint's files, each of which is read once.

    Returns:
        The checkpoint of a GPT-2 whose weights are read, else the name of the architecture; the tokenizer, and the
        fields of generation_config.json, where there are some.
    """
    from minigpt.checkpoint.read import read_checkpoint
    from minigpt.tokenizer import Tokenizer

    tokenizer, known_ids = None, 0
    if files.has_tokenizer:
        tokenizer = Tokenizer.read(files.folder, files.config or {})
        known_ids = tokenizer.id_count
    checkpoint, architecture = None, files.architecture
    if architecture is None and with_weights:
        checkpoint = read_checkpoint(files, known_ids)
    elif architecture is None:
        architecture = "gpt2"
    return checkpoint, architecture, tokenizer, files.generation_fields()


def _norm_word(norm: Any) -> str:
    """Return the name of a norm as a word of the shell.

    Raises:
        ConfigError: if it has none: a dict of norms, a partial or a lambda.
    """
    from minigpt.norms import name_of

    if isinstance(norm, Mapping | list):
        raise ConfigError("is a dict of norms, which the command line has no words for", argument="norm")
    name = name_of(norm)
    if not re.fullmatch(r"[^()<>]+", name):
        raise ConfigError(f"is {name}, which the command line has no words for", argument="norm")
    return name


def _shell_word(value: Any) -> str:
    """Return a value as a word of the shell."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value)


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
        if name in known:
            continue
        instead = f"known are {', '.join(known)}"
        if name in OTHER_NAMES:
            instead = f"use {OTHER_NAMES[name]}"
        raise ConfigError(f"is not an argument of {function}; {instead}", argument=name)


RECIPE_OPTIONS = [field.name for field in dataclasses.fields(Recipe) if field.name != "source"]


def takes_options_of(
    recipe: Callable[Arguments, Recipe], function: Callable[..., Returned]
) -> Callable[Arguments, Returned]:
    """Give a function the parameters of ``Recipe``, for type checkers and for ``help``."""
    function.__signature__ = inspect.signature(recipe)  # type: ignore[attr-defined]
    return function


@partial(takes_options_of, Recipe)
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
