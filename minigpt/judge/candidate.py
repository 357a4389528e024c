"""What is judged: a model of ours, anybody's module or function, or a file of what another program wrote.

Every candidate gives logits. What else it can give, it says itself; the report has the parts that were given.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minigpt.device import dtype_name
from minigpt.engine.kernel import StepKernel, step_of
from minigpt.engine.ragged import Ragged
from minigpt.errors import CheckpointError, ConfigError
from minigpt.generation import generate
from minigpt.judge.gradients import gradients_of
from minigpt.judge.original import Original, Recorder, Text, batches
from minigpt.model import GPT2
from minigpt.model.masking import left_padded
from minigpt.norms import is_exact, is_ours, name_of, notes
from minigpt.norms.foreign.construct import naming, title
from minigpt.recipe import Recipe
from minigpt.report.parity_report import Fields
from minigpt.swap import fit_norms, match_sites
from minigpt.swap.fit import original_norm, rows_of_text
from minigpt.tokenizer import Tokenizer
from minigpt.watch import changed_on_import

SHAPE = ("n_layer", "n_embd", "n_positions", "vocab_size")  # must be equal for two models to be compared
PARTS = ("norms and blocks", "tokens one by one", "gradients")


class Reading(NamedTuple):
    """What a candidate computes on a text.

    Attributes:
        logits: at the compared positions (T, V).
        outputs: of norms and blocks, by their names in a GPT-2 (T, C).
        norms: the modules at the norms' sites.
    """

    logits: Float[Tensor, "seq vocab"]
    outputs: Mapping[str, Float[Tensor, "seq embd"]] = {}
    norms: Mapping[str, nn.Module] = {}


class Candidate:
    """A function from ids (B, T) to logits (B, T, V), or to an object with ``logits``.

    Attributes:
        name: what the report calls it; ``norm`` and ``sites`` are what the report says of its norms.
        can: of ``PARTS``, what it gives beside logits.
        swapped: the sites that hold the norm in question.
        is_exact: whether it claims to be the same model as the original.
        notes: what a reader should know of it.
        changes: what its code changed in the process when it was imported.
        is_ours: whether no code but minigpt's runs.
    """

    can: tuple[str, ...] = ()
    norm, quantize, center, is_exact, is_ours = "its own", None, False, True, False
    sites: Sequence[str] = ("*",)
    fitted: list[Fields] | None = None

    def __init__(self, original: Original, call: Callable[[Tensor], Any], name: str) -> None:
        self.original, self.call, self.name = original, call, name
        self.swapped: list[str] = []
        self.notes: list[str] = []
        self.changes: tuple[str, ...] = changed_on_import(call)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Be in eval mode in the block; what foreign code raises there becomes an error that names it."""
        with contextlib.nullcontext() if self.is_ours else naming(self.call):
            yield

    def read(self, text: Text) -> Reading:
        """Read a text whole.

        Raises:
            ConfigError: if what it returns is not logits of that text.
        """
        return Reading(self.logits(text))

    def logits(self, text: Text) -> Float[Tensor, "seq vocab"]:
        """Return the logits at the compared positions of a text."""
        ids = self.original.tensor(text.ids)
        returned = self.call(ids)
        logits, shape = getattr(returned, "logits", returned), (*ids.shape, self.original.config.vocab_size)
        if not hasattr(logits, "shape"):
            raise ConfigError(
                f"must return logits, or an object with .logits, got a {type(logits).__name__}", argument="candidate"
            )
        if tuple(logits.shape) != shape:
            raise ConfigError(f"must return logits of shape {shape}, got {tuple(logits.shape)}", argument="candidate")
        logits = torch.as_tensor(logits)
        if not logits.is_floating_point():
            raise ConfigError(
                f"must return logits of a floating dtype, got {dtype_name(logits.dtype)}", argument="candidate"
            )
        return logits.to(self.original.device)[0, text.compared]

    def decoded(self) -> list[Float[Tensor, "new vocab"]] | None:
        """Return the logits as they are while each text is read token by token; None if it has no cache."""
        return None

    def gradients(self) -> dict[str, Tensor] | None:
        return None

    def continued(self, text: Text) -> list[int] | None:
        """Return what it writes greedily after the prompt."""
        return None


class FileCandidate(Candidate):
    """What another program wrote for the texts of a record.

    Raises:
        CheckpointError: if the file cannot be read, lacks logits, or a tensor is unknown or has another shape.
    """

    def __init__(self, original: Original, file: Path) -> None:
        super().__init__(original, lambda _: None, str(file))
        texts = [*original.texts, *original.windows]
        size, width = original.config.vocab_size, original.config.n_embd
        shapes = {f"logits.{n}": (len(text.truth), size) for n, text in enumerate(texts)}
        shapes |= {
            f"{place}.{n}": (len(text.ids), width)
            for n, text in enumerate(texts) if text.inputs
            for place in (*original.sites, *original.blocks)
        }  # fmt: skip
        try:
            with safe_open(file, "pt") as stored:
                self.tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
        self.tensors = {name: x for name, x in self.tensors.items() if not name.startswith("ids.")}
        for name, x in self.tensors.items():
            if name not in shapes:
                raise CheckpointError(f"{file} has {name!r}, which is no key of the record; see docs/parity.md")
            if tuple(x.shape) != shapes[name] or not x.is_floating_point():
                raise CheckpointError(
                    f"{file}: {name} must have shape {shapes[name]} and a floating dtype, got {tuple(x.shape)} and "
                    f"{dtype_name(x.dtype)}"
                )
        for n in range(len(texts)):
            if f"logits.{n}" not in self.tensors:
                raise CheckpointError(f"{file} has no logits.{n}, the logits for ids.{n}")
        if len(self.tensors) > len(texts):
            self.can = PARTS[:1]

    def read(self, text: Text) -> Reading:
        n = next(n for n, one in enumerate((*self.original.texts, *self.original.windows)) if one is text)
        outputs = {name.rpartition(".")[0]: x for name, x in self.tensors.items() if name.rpartition(".")[2] == str(n)}
        device = self.original.device
        logits = outputs.pop("logits").to(device)
        return Reading(logits, {place: x.to(device) for place, x in outputs.items()})

    def logits(self, text: Text) -> Tensor:
        return self.read(text).logits


class ModuleCandidate(Candidate):
    """Anybody's module; its norms, blocks and Parameters are those whose names end as a GPT-2's do."""

    def __init__(self, original: Original, module: nn.Module, name: str) -> None:
        super().__init__(original, module, name)
        self.module = module
        ends = [path for path, _ in module.named_modules() if path == "h.0.ln_1" or path.endswith(".h.0.ln_1")]
        self.prefix = ends[0].removesuffix("h.0.ln_1") if ends else None
        self.places = [] if self.prefix is None else [*original.sites, *original.blocks]
        parts = dict(module.named_modules())
        if self.prefix is not None and all(self.prefix + place in parts for place in self.places):
            self.can = (PARTS[0], PARTS[2])
        else:
            self.prefix = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            with super().evaluating():
                yield
        finally:
            for part, mode in modes:
                part.training = mode

    def read(self, text: Text) -> Reading:
        if self.prefix is None:
            return Reading(self.logits(text))
        with Recorder(self.module.get_submodule(self.prefix.rstrip(".")), self.places) as recorder:
            logits = self.logits(text)
        norms = {site: recorder.modules[site] for site in self.original.sites}
        return Reading(logits, {place: y[0] for place, y in recorder.outputs.items()}, norms)

    def gradients(self) -> dict[str, Tensor] | None:
        return None if self.prefix is None else gradients_of(self.module, self.original, self.prefix)


class OurCandidate(ModuleCandidate):
    """A ``minigpt.GPT2``: it also decodes with a cache, and its norms can be swapped back one by one.

    Args:
        recipe: how the model was opened; None for a model that the caller holds.
    """

    can = PARTS

    def __init__(self, original: Original, model: GPT2, recipe: Recipe | None = None) -> None:
        name = "the model" if recipe is None else str(recipe.source)
        is_same = recipe is None or name in (original.source, str(original.place))
        super().__init__(original, model, original.source if is_same and recipe is not None else name)
        self.can, self.prefix, self.model, self.recipe = PARTS, "", model, recipe
        for name in SHAPE:
            if (size := getattr(model.config, name)) != (true_size := getattr(original.config, name)):
                raise ConfigError(
                    f"{self.name} and {original.source} must have the same shape to be compared, but {name} is {size} "
                    f"and {true_size}"
                )
        self.new = model.norm_modules()
        self.sites = ("*",) if recipe is None else tuple(recipe.sites)
        self.swapped = match_sites(model, self.sites)
        self.norm = norm_title(recipe, [self.new[site] for site in self.swapped])
        self.quantize = getattr(model, "quantize", None)
        self.center = recipe is not None and recipe.center
        self.fit_rows: Tensor | None = None
        self.is_exact = is_same and self.quantize is None and all(is_exact(self.new[site]) for site in self.swapped)
        self.is_ours = all(is_ours(type(norm)) for norm in self.new.values())
        classes = {type(part): part for site in self.swapped for part in self.new[site].modules()}
        self.changes = tuple(dict.fromkeys(change for part in classes.values() for change in changed_on_import(part)))
        self.notes = sorted({note for site in self.swapped for note in notes(self.new[site])})
        if self.quantize is not None:
            self.notes.append(f"The weights that multiply are {self.quantize}, with a scale for each 64 inputs.")
        if self.center:
            self.notes.append(
                "The model was folded and centred first, so a norm's input and output are not the original's."
            )

    def logits(self, text: Text) -> Float[Tensor, "seq vocab"]:
        hidden = self.model.hidden_states(self.original.tensor(text.ids))[:, text.compared]
        return self.model.head(hidden)[0]

    def decoded(self) -> list[Float[Tensor, "new vocab"]] | None:
        logits = [text.truth[:0] for text in self.original.texts]
        read = self._read_by_torch if (kernel := step_of(self.model)) is None else partial(self._read_by_kernel, kernel)
        for _, batch in batches([len(text.written) for text in self.original.texts]):
            rows = torch.stack(list(read([self.original.texts[i] for i in batch])), dim=1)  # (B, new, V)
            for i, row in zip(batch, rows, strict=True):
                logits[i] = row
        return logits

    def _read_by_torch(self, texts: list[Text]) -> Iterator[Float[Tensor, "batch vocab"]]:
        """Read prompts, then what was written after them, a token a step; yield the logits of each next token."""
        device, new = self.original.device, len(texts[0].written)
        ids, mask = left_padded([text.prompt for text in texts], device)  # both (B, T)
        written = torch.tensor([text.written for text in texts], device=device)  # (B, new)
        cache = self.model.new_cache(len(texts), ids.shape[1] + new - 1)
        for step in range(new):
            hidden = self.model.hidden_states(ids, mask, cache=cache)[:, -1:]
            yield self.model.head(hidden)[:, 0]
            ids, mask = written[:, step : step + 1], torch.cat([mask, mask.new_ones(len(texts), 1)], dim=1)

    def _read_by_kernel(self, kernel: StepKernel, texts: list[Text]) -> Iterator[Float[Tensor, "batch vocab"]]:
        """The same by the kernel, as ``generate`` reads."""
        rows = Ragged(self.model.new_cache(len(texts), max(len(text.ids) for text in texts)), kernel)
        yield rows.read({rows.add(): text.prompt for text in texts}, last=1)
        for step in range(len(texts[0].written) - 1):
            yield rows.read({row: text.written[step : step + 1] for row, text in enumerate(texts)})

    def gradients(self) -> dict[str, Tensor] | None:
        return None if self.quantize is not None else gradients_of(self.model, self.original)

    def continued(self, text: Text) -> list[int] | None:
        ids = self.original.tensor(text.prompt)
        return generate(self.model, ids, max_new_tokens=len(text.written))[0, len(text.prompt) :].tolist()

    # Its norms, one by one

    def begin_search(self) -> None:
        """Prepare to put norms back: open the norms that the model had before the one in question was swapped in."""
        if self.recipe is None:
            self.before = {site: original_norm(self.new[site], self.model) for site in self.swapped}
            return
        unfitted = dataclasses.replace(self.recipe, fit=None)
        plain = dataclasses.replace(self.recipe, norm=None, sites="*", keep=("scale", "shift"), fit=None)
        self.before = plain.open()[0].norm_modules()
        if self.recipe.fit is not None:
            self.model, tokenizer = unfitted.open()
            self.module = self.call = self.model
            self.fit_rows = rows_of_text(self.model, cast("Tokenizer", tokenizer), self.recipe.fit)
            self.new = self.model.norm_modules()

    def put(self, norms: Mapping[str, nn.Module]) -> None:
        """Put these norms at their sites, and the norms from before at the others that are swapped."""
        for site in self.swapped:
            self.model.set_submodule(site, norms.get(site, self.before[site]))

    def put_new(self, sites: Sequence[str]) -> None:
        """Put the norm in question at these of its sites only, fitted one after the other if norms are fitted."""
        norms: dict[str, nn.Module] = {}
        for site in sites:
            norms = self.with_site(norms, site)
        self.put(norms)

    def with_site(self, norms: Mapping[str, nn.Module], site: str) -> dict[str, nn.Module]:
        """Return these norms, and the one in question at one more site: fitted there, if norms are fitted."""
        new = self.new[site]
        if self.fit_rows is not None:
            new = copy.deepcopy(new)
            self.put({**norms, site: new})
            fit_norms(self.model, self.fit_rows, site)
        return {**norms, site: new}


def norm_title(recipe: Recipe | None, standing: Sequence[nn.Module]) -> str:
    """Return the name of the norm that was asked for, else of those that stand in the model."""
    asked = None if recipe is None else recipe.norm
    if asked is not None and not isinstance(asked, Mapping | list):
        return asked if isinstance(asked, str) else title(asked)
    return ", ".join(dict.fromkeys(name_of(norm) for norm in standing))


def candidate_of(original: Original, what: Any, recipe: Recipe | None) -> Candidate:
    """Return a candidate: a recipe's model, a model of ours, a module, a function.

    Raises:
        ConfigError: if it is none of these.
    """
    if isinstance(what, Candidate):
        return what
    if recipe is not None:
        opened = recipe.opened()
        candidate = OurCandidate(original, opened.model, recipe)
        candidate.swapped = opened.swapped or candidate.swapped
        if opened.fits:
            candidate.fitted = [Fields(site=site, **fit._asdict()) for site, fit in opened.fits.items()]
        return candidate
    if isinstance(what, GPT2):
        return OurCandidate(original, what)
    if isinstance(what, nn.Module):
        return ModuleCandidate(original, what, type(what).__name__)
    if callable(what):
        return Candidate(original, what, title(what))
    raise ConfigError(
        f"must be a source, a Recipe, a model, or a function of ids to logits, got a {type(what).__name__}",
        argument="candidate",
    )
