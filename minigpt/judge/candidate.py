"""What is judged: a model of ours, anybody's module or function, or a file of what another program wrote.

Every candidate gives logits. What else it cannot give is None, and the report says so.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minigpt.engine.reader import Reader
from minigpt.errors import RAISED, CheckpointError, ConfigError, NormError, listing
from minigpt.files import require_file
from minigpt.generation import generate
from minigpt.host import Shape, hooked, host_of, is_compiled, prefix_of, probe_norm
from minigpt.judge.gradients import gradients_of
from minigpt.judge.perplexity import Scored, window_losses
from minigpt.judge.reference import Recorder, arguments_of, batches, reader_of, tensors_of
from minigpt.judge.truth import Sample, Truth
from minigpt.model import GPT2
from minigpt.norms import is_exact, is_ours, name_of, notes
from minigpt.norms.foreign.construct import naming, title
from minigpt.norms.registry import KINDS
from minigpt.precision import DTYPES, HALVES, dtype_name
from minigpt.recipe import Recipe, differences
from minigpt.report.fields import SiteFit
from minigpt.swap import match_sites
from minigpt.watch import changed_on_import

SHAPE = ("n_layer", "n_embd", "n_positions", "vocab_size")  # must be equal for two models to be compared
ROUNDS = {  # by ``NormSite.rounds``
    "once": "rounded once, after the weight has multiplied it",
    "row": "rounded before the weight multiplies it, and after",
    "other": "rounded otherwise",
}
MOST_GRADIENT = 512  # tokens of a longer text: a backward in float64 keeps all attention weights


class Reading(NamedTuple):
    """What a candidate computes on a text.

    Attributes:
        logits: at the compared positions (T, V).
        outputs: of norms and blocks, by their names in the original (T, C).
    """

    logits: Float[Tensor, "seq vocab"]
    outputs: Mapping[str, Float[Tensor, "seq *rows"]] = {}


class Candidate:
    """A function from ids (B, T) to logits (B, T, V), or to an object with ``logits``.

    Attributes:
        name: what the report calls it; ``norm`` and ``sites`` are what the report says of its norms.
        swapped: the sites that hold the norm in question.
        fits: how well each fitted norm explains the one that it replaces.
        is_exact: whether it claims to be the same model as the original.
        attention: its implementation of attention, if it is known.
        difference: why it is another one by an option of opening; None if it is not.
        adds_errors: whether its norms and blocks may each add an error of their own: it is another program.
        notes: what a reader should know of it.
        changes: what its code changed in the process when it was imported.
    """

    norm, quantize, center, is_exact = "its own", None, False, True
    attention: str | None = None
    difference: str | None = None
    adds_errors = False
    sites: Sequence[str] = ("*",)
    fits: list[SiteFit] | None = None

    def __init__(self, truth: Truth, call: Callable[[Tensor], Any], name: str) -> None:
        self.truth, self.call, self.name = truth, call, name
        self.swapped: list[str] = []
        self.notes: list[str] = []
        self.changes: tuple[str, ...] = changed_on_import(call)

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        """Be in eval mode in the block."""
        return contextlib.nullcontext()

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Turn what foreign code raises in the block into a NormError that names the candidate."""
        return naming(self.call, self.name)

    def read(self, sample: Sample) -> Reading:
        """Read a text whole.

        Raises:
            ConfigError: if what it returns is not logits of that text.
        """
        return Reading(self.logits(sample))

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        """Return the logits at the compared positions of a text."""
        ids = self.truth.tensor(sample.ids)
        with self.naming():
            returned = self.call(ids)
        logits, shape = getattr(returned, "logits", returned), (*ids.shape, self.truth.config.vocab_size)
        if not hasattr(logits, "shape"):
            raise ConfigError(
                f"must return logits, or an object with .logits, got a {type(logits).__name__}", argument="candidate"
            )
        logits = torch.as_tensor(logits)
        if tuple(logits.shape) != shape or not logits.is_floating_point():
            described = f"{tuple(logits.shape)} and {dtype_name(logits.dtype)}"
            raise ConfigError(
                f"must return logits of shape {shape} and a floating dtype, got {described}", argument="candidate"
            )
        return logits.to(self.truth.device)[0, sample.compared]

    def normalize(self, site: str, x: Float[Tensor, "1 seq *rows"]) -> Float[Tensor, "1 seq *rows"] | None:
        """Return the output of the norm at a site."""
        return None

    def decode(self) -> list[Float[Tensor, "new vocab"]] | None:
        """Return the logits as they are while each prompt's continuation is read token by token."""
        return None

    def gradients(self) -> dict[str, Tensor] | None:
        """Return the gradient of the loss by Parameter; see ``gradient_texts``."""
        return None

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        """Return what it writes greedily after the prompt."""
        return None

    def window_losses(self) -> list[Scored] | None:
        """Return tokens and loss of each window of the whole text file."""
        return None

    def refuse_nan(self, where: str) -> None:
        """Raise NormError if NaN means that nothing can be measured; for other programs it is a result."""


def gradient_texts(truth: Truth) -> list[Tensor]:
    """Return the texts whose loss has its gradients compared: the prompts, and the beginning of a longer text."""
    longer = [sample.ids[:MOST_GRADIENT] for sample in truth.windows[:1]]
    return [truth.tensor(ids) for ids in (*(prompt.ids for prompt in truth.prompts), *longer)]


class FileCandidate(Candidate):
    """What another program wrote for the texts of a record: logits, and norms and blocks for as many as it likes.

    Where it holds ``ids.N`` too, they must be the record's.

    Raises:
        CheckpointError: if the file cannot be read, lacks logits or has those of other ids, or a tensor is unknown or
            has another shape.
    """

    adds_errors = True

    def __init__(self, truth: Truth, file: Path) -> None:
        super().__init__(truth, lambda _: None, str(file))
        self.tensors = _tensors_in(file)
        shapes = self._shapes()
        for n, sample in enumerate(truth.samples):
            if f"logits.{n}" not in self.tensors:
                raise CheckpointError(f"{file} has no logits.{n}, the logits for ids.{n}")
            if f"ids.{n}" in self.tensors:
                self._check_ids(n, self.tensors.pop(f"ids.{n}"), sample)
        for name, x in self.tensors.items():
            if name not in shapes:
                raise CheckpointError(f"{file} has {name!r}, which is no key of the record; see docs/parity.md")
            if tuple(x.shape) not in shapes[name] or not x.is_floating_point():
                raise CheckpointError(
                    f"{file}: {name} must have shape {shapes[name][0]} and a floating dtype, got {tuple(x.shape)} and "
                    f"{dtype_name(x.dtype)}"
                )

    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes that each tensor may have."""
        truth, size, width = self.truth, self.truth.config.vocab_size, self.truth.config.n_embd
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for n, sample in enumerate(truth.samples):
            shapes[f"logits.{n}"] = [(len(sample.ids), size), (len(sample.truth), size)]
            for place in (*truth.sites, *truth.blocks):
                shapes[f"{place}.{n}"] = [(len(sample.ids), width)]
            for site, x in sample.inputs.items():
                shapes[f"{site}.{n}"] = [tuple(x.shape)]
        return shapes

    def _check_ids(self, number: int, x: Tensor, sample: Sample) -> None:
        """Check that logits were written for the record's ids."""
        ids = x.flatten().tolist()
        if ids == sample.ids:
            return
        name = f"{self.name}: ids.{number}"
        if len(ids) != len(sample.ids):
            raise CheckpointError(f"{name} must be the record's {len(sample.ids):,} ids, got {len(ids):,}")
        pairs = zip(ids, sample.ids, strict=True)
        position = next(i for i, (actual, expected) in enumerate(pairs) if actual != expected)
        raise CheckpointError(
            f"{name} must be the record's, but at position {position} it has {ids[position]} in place of "
            f"{sample.ids[position]}, so its logits answer other ids"
        )

    def read(self, sample: Sample) -> Reading:
        end = f".{next(n for n, other in enumerate(self.truth.samples) if other is sample)}"
        outputs = {
            name.removesuffix(end): x.to(self.truth.device) for name, x in self.tensors.items() if name.endswith(end)
        }
        logits = outputs.pop("logits")
        return Reading(logits if len(logits) == len(sample.truth) else logits[sample.compared], outputs)

    def logits(self, sample: Sample) -> Tensor:
        return self.read(sample).logits


def _tensors_in(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: if it cannot be read.
    """
    require_file(file, CheckpointError)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensors[name] = stored.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    return tensors


class ModuleCandidate(Candidate):
    """Anybody's module; its norms, blocks and Parameters are those whose names end as the original's do.

    Attributes:
        reads_tokens: whether it can be read token by token: a model of minigpt or of transformers.
    """

    pads = False  # texts of several lengths
    adds_errors = True

    def __init__(self, truth: Truth, module: nn.Module, name: str) -> None:
        super().__init__(truth, module, name)
        self.module, self.reads_tokens = module, isinstance(module, GPT2) or bool(arguments_of(module))
        if is_compiled(module):
            self.notes.append(
                "The logits of whole texts are the compiled model's; the rest is computed without torch.compile."
            )
        self.prefix = prefix_of(module, [*truth.sites, *truth.blocks])
        self.notes += [*self._roundings(), *self._casts()]

    @property
    def root(self) -> nn.Module:
        """The module that has the sites; only if ``prefix`` is not None."""
        return self.module.get_submodule((self.prefix or "").rstrip("."))

    def _roundings(self) -> list[str]:
        """Return a sentence for each way of rounding that is not the original's, with the sites that have it."""
        sites = defaultdict[tuple[str, str], list[str]](list)
        for site, true in self.truth.norms.items():
            if self.prefix is None or self.truth.dtype not in HALVES or true.weight is None or true.rounds is None:
                continue
            with contextlib.suppress(*RAISED):  # somebody's norm may run elsewhere only
                here = probe_norm(self.root.get_submodule(site), len(true.weight))
                if here.kind == true.kind and here.rounds not in (None, true.rounds):
                    sites[here.rounds, true.rounds].append(site)
        return [
            f"at {'every site' if len(places) == len(self.truth.norms) else listing(places)} a row is {ROUNDS[here]}; "
            f"in the original it is {ROUNDS[before]}"
            for (here, before), places in sites.items()
        ]

    def _casts(self) -> list[str]:
        """Return a sentence if tensors are narrower than transformers keeps them, as after ``model.to(dtype)``."""
        if self.prefix is None:
            return []
        narrower, tensors = [], tensors_of(self.module)
        for name, kept in self.truth.kept.items():
            here = tensors.get(self.prefix + name)
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

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def read(self, sample: Sample) -> Reading:
        if self.prefix is None:
            return Reading(self.logits(sample))
        compiled = self.logits(sample) if is_compiled(self.module) else None
        with hooked(self.module), Recorder(self.root, [*self.truth.sites, *self.truth.blocks]) as recorder:
            logits = self.logits(sample)
        logits = logits if compiled is None else compiled
        return Reading(logits, {place: y[0] for place, y in recorder.outputs.items()})

    def normalize(self, site: str, x: Tensor) -> Tensor | None:
        if self.prefix is None:
            return None
        with self.naming():
            return self.root.get_submodule(site)(x)

    def gradients(self) -> dict[str, Tensor] | None:
        if self.prefix is None:
            return None
        with self.naming():
            texts, norms = gradient_texts(self.truth), self.truth.sites
            return gradients_of(self.module, texts, self.truth.embedding, self.prefix, norms)

    def decode(self) -> list[Float[Tensor, "new vocab"]] | None:
        if not self.reads_tokens:
            return None
        prompts = self.truth.prompts
        logits = [prompt.truth[:0] for prompt in prompts]
        with self.naming(), hooked(self.module):
            for _, batch in batches([(len(p.written), 0 if self.pads else p.new_from) for p in prompts]):
                rows = torch.stack(list(self._decoded([prompts[i] for i in batch])), dim=1)  # (B, new, V)
                for i, row in zip(batch, rows, strict=True):
                    logits[i] = row
        return logits if any(map(len, logits)) else None

    def _decoded(self, samples: list[Sample]) -> Iterator[Float[Tensor, "batch vocab"]]:
        """Read prompts, then what was written after them, a token a step; yield the logits of each next token."""
        read, first = reader_of(self.module), samples[0].new_from
        ids = torch.cat([self.truth.tensor(sample.ids) for sample in samples])  # (B, all)
        for end in range(first, ids.shape[1]):
            yield read(ids[:, :end] if end == first else ids[:, end - 1 : end], torch.ones_like(ids[:, :end]))

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        if not self.reads_tokens:
            return None
        read, ids = reader_of(self.module), sample.prompt
        new = self.truth.tensor(ids)
        with self.naming(), hooked(self.module):
            for _ in sample.written:
                new = read(new, torch.ones(1, len(ids), dtype=torch.long, device=new.device)).argmax(-1, keepdim=True)
                ids = [*ids, int(new)]
        return ids[sample.new_from :]

    def window_losses(self) -> list[Scored] | None:
        if not self.reads_tokens:
            return None
        with self.naming():
            return window_losses(self.module, self.truth.text_ids)


class HostCandidate(ModuleCandidate):
    """A model of minigpt or of transformers that decodes with a cache, and whose norms can be swapped back one by one.

    Args:
        recipe: how the model was opened; None for a model that the caller holds.
        swapped: the sites at which the recipe's norm stands.
    """

    adds_errors = False  # its norms may, and each of them is judged by itself

    def __init__(
        self, truth: Truth, model: nn.Module, recipe: Recipe | None = None, swapped: Sequence[str] = (),
        fits: list[SiteFit] | None = None,
    ) -> None:  # fmt: skip
        if recipe is None:
            is_same, name = True, "the model"
        else:
            is_same = truth.source == str(recipe.source) or truth.place.resolve() == recipe.place().resolve()
            name = truth.source if is_same else str(recipe.source)
        super().__init__(truth, model, name)
        self.model: Any = model
        self.recipe, self.fits = recipe, fits
        self.attention = getattr(model, "attention", None) or self.model.config._attn_implementation
        shape = Shape.of(model.config)
        for name in SHAPE:
            if (size := getattr(shape, name)) != (true_size := getattr(truth.config, name)):
                raise ConfigError(
                    f"{self.name} and {truth.source} must have the same shape to be compared, but {name} is {size} "
                    f"and {true_size}"
                )
        norms = host_of(model).norms()
        self.sites = ("*",) if recipe is None else tuple(recipe.sites)
        self.swapped = list(swapped)
        if norms and not self.swapped:
            self.swapped = match_sites(model, self.sites)
        self.norm = norm_title(recipe, [norms[site] for site in self.swapped]) or self.norm
        self.quantize = getattr(model, "quantize", None)
        self.center = recipe is not None and recipe.center
        kinds = [truth.norms[site].kind if site in truth.norms else "other" for site in self.swapped]
        of_norms = [
            f"{self.norm} is not {KINDS.get(kind, 'what the site computes')}"
            for site, kind in zip(self.swapped, kinds, strict=True)
            if not is_exact(norms[site], kind)
        ]
        self.difference = next(iter([*differences(recipe), *differences(model), *of_norms]), None)
        self.is_exact = is_same and self.difference is None
        self.foreign = next((norm for norm in norms.values() if not is_ours(type(norm))), None)
        classes = {type(part): part for site in self.swapped for part in norms[site].modules()}
        self.changes = tuple(dict.fromkeys(change for part in classes.values() for change in changed_on_import(part)))
        self.notes += sorted({note for site in self.swapped for note in notes(norms[site])})
        if self.quantize is not None:
            self.notes.append(f"The weights that multiply are {self.quantize}, with a scale for each 64 inputs.")
        if self.center:
            self.notes.append(
                "The model was folded and centred first, so a norm's input and output are not the original's."
            )

    def naming(self) -> contextlib.AbstractContextManager[None]:
        if self.foreign is None:
            return contextlib.nullcontext()
        return naming(self.foreign, f"{self.name} with {self.norm}")

    def refuse_nan(self, where: str) -> None:
        raise NormError(f"with {self.norm} {where} of {self.name} are NaN, so their error cannot be measured")

    def gradients(self) -> dict[str, Tensor] | None:
        return None if self.quantize is not None else super().gradients()


class OurCandidate(HostCandidate):
    """A ``minigpt.GPT2``, which reads and writes as ``generate`` does."""

    pads = True

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        with self.naming():
            hidden = self.model.hidden_states(self.truth.tensor(sample.ids))[:, sample.compared]
            return self.model.head(hidden)[0]

    def _decoded(self, samples: list[Sample]) -> Iterator[Float[Tensor, "batch vocab"]]:
        reader = Reader(self.model, len(samples), max(len(sample.ids) for sample in samples))
        yield reader.read({row: sample.prompt for row, sample in enumerate(samples)})
        for step in range(len(samples[0].written) - 1):
            yield reader.read({row: sample.written[step : step + 1] for row, sample in enumerate(samples)})

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        ids = self.truth.tensor(sample.prompt)
        with self.naming():
            return generate(self.model, ids, max_new_tokens=len(sample.written))[0, len(sample.prompt) :].tolist()


def norm_title(recipe: Recipe | None, modules: Sequence[nn.Module]) -> str:
    """Return the name of the recipe's norm, else of those that stand in the model."""
    norm = None if recipe is None else recipe.norm
    if norm is not None and not isinstance(norm, Mapping | list):
        return norm if isinstance(norm, str) else title(norm)
    return ", ".join(dict.fromkeys(name_of(module) for module in modules))


def candidate_of(truth: Truth, candidate: Any) -> Candidate:
    """Return a candidate: a recipe's model, a model of ours, a module, a function.

    Raises:
        ConfigError: if it is none of these.
    """
    if isinstance(candidate, Candidate):
        return candidate
    if isinstance(candidate, Recipe):
        loaded = candidate.load(any_architecture=True)
        fits = [SiteFit(site, *fit) for site, fit in loaded.fits.items()]
        kind = OurCandidate if isinstance(loaded.model, GPT2) else HostCandidate
        return kind(truth, loaded.model, candidate, loaded.swapped, fits or None)
    if isinstance(candidate, GPT2):
        return OurCandidate(truth, candidate)
    if isinstance(candidate, nn.Module):
        return ModuleCandidate(truth, candidate, type(candidate).__name__)
    if callable(candidate):
        return Candidate(truth, candidate, title(candidate))
    raise ConfigError(
        f"must be a source, a Recipe, a model, or a function of ids to logits, got a {type(candidate).__name__}",
        argument="candidate",
    )
