"""Candidates: a model of ours, anybody's module or function, or the outputs of another program.

T tokens, V vocabulary, C embedding.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from minigpt.checkpoint.offloading import free_memory
from minigpt.checkpoint.transformers_model import note_on_left_out
from minigpt.engines.engine import Engine
from minigpt.errors import ConfigError, listing
from minigpt.host import host_of, is_compiled, probe_norm
from minigpt.judge.checkpoint_facts import require_room
from minigpt.judge.original_data import OriginalData
from minigpt.judge.reference import tensors_of
from minigpt.judge.runners import FunctionRunner, ModuleRunner, Naming, OurRunner, Runner
from minigpt.machine import return_memory
from minigpt.model import GPT2
from minigpt.norms.foreign.adapt import inner_norm
from minigpt.norms.foreign.builder import is_exact, is_ours, name_of, notes
from minigpt.norms.foreign.construct import naming, title
from minigpt.norms.registry import KINDS
from minigpt.precision import DTYPES, HALVES
from minigpt.recipe import Recipe, differences
from minigpt.report.fields import OWN_NORM, SiteFit
from minigpt.shape import Shape
from minigpt.swap import match_sites
from minigpt.watch import changed_on_import

SHAPE = ("n_layer", "n_embd", "n_positions", "vocab_size")  # must be equal for two models to be compared
ROUNDS = {  # by ``NormSite.rounds``
    "once": "rounded once, after the weight has multiplied it",
    "row": "rounded before the weight multiplies it, and after",
    "other": "rounded otherwise",
}


@dataclass
class Claim:
    """The claims of a candidate about itself.

    Attributes:
        name: what the report calls it; ``norm`` and ``sites`` are what the report says of its norms.
        swapped: the sites that hold the norm in question.
        fits: how well each fitted norm explains the one that it replaces.
        quantize, center: as its recipe has them.
        is_exact: whether it claims to be the same model as the original.
        attention: its implementation of attention, if it is known.
        difference: why it is another one by an option of opening; None if it is not.
        adds_errors: whether errors may begin at several of its norms and blocks: it is another program.
        notes: what a reader should know of it.
        changes: what its code changed in the process when it was imported.
    """

    name: str
    norm: str = OWN_NORM
    sites: Sequence[str] = ("*",)
    swapped: list[str] = field(default_factory=list)
    fits: list[SiteFit] | None = None
    quantize: str | None = None
    center: bool = False
    is_exact: bool = True
    attention: str | None = None
    difference: str | None = None
    adds_errors: bool = False
    notes: list[str] = field(default_factory=list)
    changes: Sequence[str] = ()


class OutputsFile(NamedTuple):
    """What another program wrote for the texts of a record."""

    file: Path


@dataclass
class Candidate:
    """The runner that reads the texts, and its claims.

    Attributes:
        module: what computes, if it is a module; it is in eval mode while it is judged.
        model: the same, if its norms can be swapped back one by one.
        recipe: how it was opened; None for what the caller holds.
    """

    runner: Runner
    claim: Claim
    module: nn.Module | None = None
    model: nn.Module | None = None
    recipe: Recipe | None = None

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Be in eval mode in the block, part by part: a module of torch.export refuses ``eval``."""
        modes: dict[nn.Module, bool] = {}
        for part in () if self.module is None else self.module.modules():
            if hasattr(part, "training"):  # frozen TorchScript has no mode
                modes[part] = part.training
        try:
            for part in modes:
                part.training = False
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode


def candidate_of(original: OriginalData, candidate: Any) -> Candidate:
    """Return a candidate: a recipe's model, a model of ours, a module, a function, an engine.

    Raises:
        ConfigError: if it is none of these.
        CheckpointError: if an engine does not fit the original.
    """
    if isinstance(candidate, Recipe):
        return candidate_of_recipe(original, candidate)
    if isinstance(candidate, GPT2):
        return candidate_of_model(original, candidate)
    if isinstance(candidate, nn.Module):
        return candidate_of_module(original, candidate)
    from minigpt.judge.file_runner import EngineRunner, FileRunner  # imported here: they alone have files

    if isinstance(candidate, OutputsFile):
        return Candidate(FileRunner(original, candidate.file), Claim(str(candidate.file), adds_errors=True))
    if isinstance(candidate, Engine):
        return_memory()  # a program has memory of its own
        claim = Claim(candidate.name, notes=[candidate.note])
        return Candidate(EngineRunner(original, candidate), claim)
    if callable(candidate):
        name = title(candidate)
        runner = FunctionRunner(candidate, original.facts, partial(naming, candidate, name))
        return Candidate(runner, Claim(name, changes=changed_on_import(candidate)))
    raise ConfigError(
        f"must be a source, a Recipe, a model, or a function of ids to logits, got a {type(candidate).__name__}",
        argument="candidate",
    )


def candidate_of_recipe(original: OriginalData, recipe: Recipe) -> Candidate:
    """Return a recipe's model as a candidate. Its weights stay in their files if the original's did, and they can.

    Raises:
        CheckpointError: if they cannot, and take more than is free.
    """
    why_whole = recipe.why_whole() if original.facts.offload else None
    if why_whole is not None:
        size = original.facts.shape.weights * original.facts.dtype.itemsize
        require_room(str(recipe.source), size, free_memory(original.facts.device), why_whole)
    opened = recipe.load(any_architecture=True, offload=original.facts.offload and why_whole is None)
    fits = [SiteFit(site, *fit) for site, fit in opened.fits.items()]
    reasons: list[str] = []
    if not is_own_source(original, recipe):
        reasons += note_on_left_out(opened.model)
    if why_whole is not None:
        reasons.append(f"{recipe.source} is in memory as a whole, since {why_whole}.")
    return candidate_of_model(original, opened.model, recipe, opened.swapped, fits or None, reasons)


def candidate_of_module(original: OriginalData, module: nn.Module) -> Candidate:
    """Return anybody's module as a candidate."""
    name = type(module).__name__
    runner = ModuleRunner(module, original.facts, partial(naming, module, name))
    claim = Claim(name, adds_errors=True, notes=notes_on_module(original, runner), changes=changed_on_import(module))
    return Candidate(runner, claim, module)


def candidate_of_model(
    original: OriginalData,
    model: Any,
    recipe: Recipe | None = None,
    swapped: Sequence[str] = (),
    fits: list[SiteFit] | None = None,
    reasons: Sequence[str] = (),
) -> Candidate:
    """Return a model of minigpt or of transformers, whose norms can be swapped back one by one, as a candidate.

    Args:
        recipe: how it was opened; None for a model that the caller holds.
        swapped: the sites that have the recipe's norm; of a model that the caller holds, all count.
        fits: how well each fitted norm explains the one that it replaces.
        reasons: what a reader should know of how it was opened.

    Raises:
        ConfigError: if it has another shape than the original.
    """
    name, sites, is_same = "the model", ("*",), True
    if recipe is not None:
        is_same = is_own_source(original, recipe)
        name, sites = (original.facts.source if is_same else str(recipe.source)), tuple(recipe.sites)
    require_shape(original, name, Shape.of(model.config))
    attention = getattr(model, "attention", None) or model.config._attn_implementation
    host = host_of(model)
    norms = host.norms()
    swapped = list(swapped)
    if norms and not swapped:
        swapped = [path.removeprefix(host.prefix) for path in match_sites(model, sites)]
    new = {site: norms[site] for site in swapped}
    norm = norm_title(recipe, [*new.values()]) or OWN_NORM
    naming_norm: Naming = contextlib.nullcontext
    for inner in map(inner_norm, norms.values()):
        if not is_ours(type(inner)):
            naming_norm = partial(naming, inner, f"{name} with {norm}")
            break
    kind = OurRunner if isinstance(model, GPT2) else ModuleRunner
    runner: ModuleRunner = kind(model, original.facts, naming_norm)
    if recipe is not None and not isinstance(model, GPT2):
        runner.together = True  # as the original was read
    changes: dict[str, None] = {}  # by what the code of the norms changed
    for part in nn.ModuleList(new.values()).modules():
        changes |= dict.fromkeys(changed_on_import(part))
    difference = first_difference(original, model, recipe, norm, new)
    quantize, center = getattr(model, "quantize", None), recipe is not None and recipe.center
    sentences = notes_on_module(original, runner)
    sentences += sorted({sentence for norm in new.values() for sentence in notes(norm)})
    if quantize is not None:
        sentences.append(f"The weights that multiply are {quantize}, with a scale for each 64 inputs.")
    if center:
        sentences.append("The model was folded and centred first, so a norm's input and output are not the original's.")
    claim = Claim(
        name,
        norm,
        sites,
        swapped,
        fits,
        quantize,
        center,
        is_exact=is_same and difference is None,
        attention=attention,
        difference=difference,
        notes=[*sentences, *reasons],
        changes=tuple(changes),
    )
    return Candidate(runner, claim, model, model, recipe)


def is_own_source(original: OriginalData, recipe: Recipe) -> bool:
    """Return whether a recipe opens the original's own checkpoint.

    One name may have several revisions, so the places decide. A record may come from a machine with other places: there
    the name decides.
    """
    if original.facts.place.exists():
        return original.facts.place.resolve() == recipe.place().resolve()
    return original.facts.source == str(recipe.source)


def require_shape(original: OriginalData, name: str, shape: Shape) -> None:
    """Check that a model has the original's sizes.

    Raises:
        ConfigError: if not.
    """
    for field_name in SHAPE:
        size, true_size = getattr(shape, field_name), getattr(original.facts.shape, field_name)
        if size != true_size:
            raise ConfigError(
                f"{name} and {original.facts.source} must have the same shape to be compared, but {field_name} is "
                f"{size} and {true_size}"
            )


def first_difference(
    original: OriginalData, model: nn.Module, recipe: Recipe | None, norm: str, norms: Mapping[str, nn.Module]
) -> str | None:
    """Return why a model is another one than the original by how it was opened, or by its norms.

    Args:
        norm: what these norms are called.
        norms: the swapped ones, by site.
    """
    for reason in (*differences(recipe), *differences(model)):
        return reason
    for site, module in norms.items():
        kind = original.norms[site].kind if site in original.norms else "other"
        if not is_exact(module, kind):
            return f"{norm} is not {KINDS.get(kind, 'what the site computes')}"
    return None


def norm_title(recipe: Recipe | None, modules: Sequence[nn.Module]) -> str:
    """Return the name of the recipe's norm, else of those that are in the model."""
    norm = None if recipe is None else recipe.norm
    if isinstance(norm, str):
        return norm
    if norm is not None and not isinstance(norm, Mapping | list):
        return title(norm)
    return ", ".join(dict.fromkeys(name_of(module) for module in modules))


# What a reader should know of a module


def notes_on_module(original: OriginalData, runner: ModuleRunner) -> list[str]:
    """Return sentences on how a module computes, where that differs from the original."""
    sentences: list[str] = []
    if is_compiled(runner.model):
        sentences.append(
            "The logits of whole texts are the compiled model's; the rest is computed without torch.compile."
        )
    if runner.prefix is None:
        return sentences
    return [*sentences, *notes_on_rounding(original, runner), *notes_on_casts(original, runner)]


def notes_on_rounding(original: OriginalData, runner: ModuleRunner) -> list[str]:
    """Return a sentence for each way of rounding that is not the original's, with the sites that have it."""
    if original.facts.dtype not in HALVES:
        return []
    sites = defaultdict[tuple[str, str], list[str]](list)
    for site, true in original.norms.items():
        if true.weight is None or true.rounds is None:
            continue
        with contextlib.suppress(Exception):  # somebody's norm may run elsewhere only
            here = probe_norm(runner.root.get_submodule(site), len(true.weight))
            if here.kind == true.kind and here.rounds not in (None, true.rounds):
                sites[here.rounds, true.rounds].append(site)
    sentences: list[str] = []
    for (here, before), places in sites.items():
        where = "every site" if len(places) == len(original.norms) else listing(places)
        sentences.append(f"at {where} a row is {ROUNDS[here]}; in the original it is {ROUNDS[before]}")
    return sentences


def notes_on_casts(original: OriginalData, runner: ModuleRunner) -> list[str]:
    """Return a sentence if tensors are narrower than transformers keeps them, as after ``model.to(dtype)``."""
    narrower, tensors = list[str](), tensors_of(runner.model)
    for name, kept in original.facts.kept.items():
        here = tensors.get(f"{runner.prefix}{name}")
        if here is None or not here.is_floating_point():
            continue
        if torch.finfo(here.dtype).eps > torch.finfo(DTYPES[kept]).eps:
            narrower.append(name)
    if not narrower:
        return []
    return [
        f"from_pretrained(dtype=) keeps {listing(narrower)} in a wider dtype than this model has them; a cast of "
        "the whole model, as by model.to(dtype), rounds them"
    ]
