"""The original, read once, and candidates held against it: ``minigpt.Original`` and ``minigpt.parity``."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from minigpt.device import require_values, resolve_device
from minigpt.engines.engine import Engine
from minigpt.errors import CheckpointError, ConfigError, MiniGPTError, NormError
from minigpt.judge.candidate import FileCandidate, candidate_of, gradient_texts
from minigpt.judge.door import architecture_of, open_source, state_of, unchanged
from minigpt.judge.engine_candidate import EngineCandidate
from minigpt.judge.finite import NotFiniteError, explain, require_finite, require_finite_gradients
from minigpt.judge.gradients import gradients_of, relative_error
from minigpt.judge.measures import Distance, RowDistance
from minigpt.judge.network import diagnosed
from minigpt.judge.perplexity import file_ids, window_losses, windows_of
from minigpt.judge.precision import read_precisions
from minigpt.judge.prompts import Prompts, built_in_windows, default_prompts, file_windows, read_prompts
from minigpt.judge.reference import Recorder, Reference, judging, milliseconds
from minigpt.judge.rules import decide, parse_budget
from minigpt.judge.truth import TrueNorm, Truth, load_truth
from minigpt.judge.verdict import Judgement
from minigpt.machine import versions
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.registry import lookup
from minigpt.precision import dtype_name
from minigpt.progress import Progress, Steps
from minigpt.recipe import RECIPE_OPTIONS, Recipe, check_names
from minigpt.report.numerals import brief
from minigpt.report.parity_report import ParityReport
from minigpt.swap.sites import matching
from minigpt.watch import watched

NEW_TOKENS = 32
OF_MODULES = {"attention", "device", "dtype", "local_files_only"}  # options of the original of a module
MOST_STREAM = 2**27  # numbers of the residual stream that are kept, in float64: 1 GiB

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


class Original(Truth):
    """A checkpoint as transformers computes it, read once. ``judge`` holds any number of candidates against it.

    transformers reads it at the dtype, and is freed; minigpt reads it in reference arithmetic; then transformers
    reads it in float64 on the weights as rounded to the dtype, and is freed. So there is one model in memory at a
    time, and none while a candidate is judged. What is kept: true logits in float64, of a text file the first 2**27
    in float32; the true input of each norm in float64, for the first prompts, 1 GiB at most.

    Args:
        source, attention, device, dtype, revision, local_files_only: as ``minigpt.Recipe`` takes them.
        prompts: texts, or lists of token ids; by default four texts, and one that fills the context; random ids if
            there is no tokenizer. That one has at most 1,024 tokens, and fewer for more than 195 million weights. Half
            of it walks over tokens that no other text has; the whole vocabulary of a small model is walked.
        text: a UTF-8 file that the models read in windows of the context.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none.
        gradients: also keep the gradient of the loss for every Parameter.
        progress: called with a few words on each step as it begins, and the share of the steps that are done.

    ``minigpt.judge.truth.Truth`` describes the attributes.

    Raises:
        CheckpointError, ConfigError, GenerationError: if it cannot be read; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """

    def __init__(
        self,
        source: str | Path = "demo",
        *,
        attention: str = "sdpa",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompts: Prompts | None = None,
        text: str | Path | None = None,
        max_new_tokens: int = NEW_TOKENS,
        gradients: bool = False,
        revision: str | None = None,
        local_files_only: bool = False,
        progress: Progress | None = None,
    ) -> None:
        say = Steps(progress, total=5)
        say(f"reading {source}")
        recipe = Recipe(source, attention=attention, revision=revision, local_files_only=local_files_only)
        place, resolved = recipe.place(), resolve_device(device)
        require_values(resolved)
        self.files = state_of(place)
        opened = open_source(place, dtype)
        config = opened.shape
        chosen = default_prompts(place, config) if prompts is None else read_prompts(place, prompts, config)
        text_ids = [] if text is None else file_ids(text, chosen.tokenizer, config)
        super().__init__(
            source=str(source), place=place, attention=attention, device=resolved, dtype=opened.dtype, config=config,
            described=chosen.described, tokenizer=chosen.tokenizer, text_file=None if text is None else str(text),
            text_ids=text_ids, why_random=chosen.why_random, norm=opened.norm,
        )  # fmt: skip
        if text is not None:
            self.windows = file_windows(text_ids, config)
        elif prompts is None:
            self.windows = built_in_windows(chosen, config, opened.weights)
        with judging(), unchanged(place):
            overflow = None
            try:
                self._read(chosen.ids, max_new_tokens, gradients, say)
            except NotFiniteError as error:
                overflow = error.overflow
            if overflow is not None:  # the model that overflowed is freed here
                raise explain(self, overflow, lambda reference: _gradients(reference, self))
            say("transformers in other dtypes")
            self.precisions = read_precisions(self, opened.weights)
        self.versions = versions(self.device) | {"float32_products": "full float32 (TF32 off)"}
        self._require_low_floors()

    def _read(self, prompts: list[list[int]], most: int, gradients: bool, say: Callable[[str], None]) -> None:
        """Read the original, with one model in memory at a time."""
        say(f"transformers at {dtype_name(self.dtype)}")
        rounded = _read_rounded(self, prompts, most, gradients)
        if architecture_of(self.place) is None:
            say("minigpt in reference arithmetic")
            _read_ours(self, rounded.logits)
        say("transformers in float64")
        _read_exact(self, rounded)

    def _require_low_floors(self) -> None:
        """Check that transformers at the dtype is near enough to its float64 self.

        Raises:
            MiniGPTError: if it is not, or the distance is not finite.
        """
        for floor, way in ((self.noise_floor, ""), (self.decoding_floor, ", token by token,")):
            most = MOST_FLOOR[self.dtype] * floor.scale
            if not floor.rms <= most:  # written so that NaN is refused
                raise MiniGPTError(
                    f"transformers at {dtype_name(self.dtype)}{way} is {brief(floor.rms)} from itself in float64, on "
                    f"logits of scale {brief(floor.scale)}, so it cannot be the reference; update transformers, or try "
                    "another --attention or --dtype"
                )

    @classmethod
    def load(cls, file: str | Path, *, device: str | torch.device | None = None) -> Self:
        """Return the original that ``save`` wrote. transformers need not be installed.

        Raises:
            CheckpointError: if the file is not such a record, or another version of minigpt wrote it.
            MiniGPTError: if the noise floor in it is not finite, or too high to judge by.
        """
        self = cls.__new__(cls)
        self.__dict__ |= vars(load_truth(file, device)) | {"files": None}
        self._require_low_floors()
        return self

    def judge(
        self,
        candidate: Any = None,
        *,
        gradients: bool | None = None,
        sensitivity: bool = False,
        remove: bool = False,
        remove_file: str | Path | None = None,
        bisect: bool = False,
        budget: str | None = None,
        diagnose: bool | None = None,
        progress: Progress | None = None,
        **opening: Any,
    ) -> ParityReport:
        """Judge a candidate; ``minigpt.parity`` describes the arguments.

        Args:
            candidate: by default the original's own source, with what ``opening`` does to it.
            gradients: by default whether the original has them.

        Raises:
            CheckpointError: if the checkpoint was saved again since the original was read.
        """
        check_names(opening, RECIPE_OPTIONS, "judge")
        limits, say = parse_budget(budget), Steps(progress, total=3)
        gradients = self.gradients is not None if gradients is None else gradients
        if gradients and self.gradients is None:
            raise ConfigError("needs an original that has gradients; read it with gradients too", argument="gradients")
        if candidate is None or isinstance(candidate, str | Path):
            opening = {"attention": self.attention} | opening
            candidate = Recipe(self.place if candidate is None else candidate, **opening)
        elif opening:
            raise ConfigError("is for a candidate that is a source", argument=next(iter(opening)))
        if isinstance(candidate, Recipe):
            candidate = self._like_the_original(candidate)
        searches = {"sensitivity": sensitivity, "remove": remove, "bisect": bisect}
        with judging():
            with watched() as changes:  # which has what was changed at the end of the block
                say("loading the candidate")
                if isinstance(candidate, Engine):
                    candidate = EngineCandidate(self, candidate)
                judged = candidate_of(self, candidate)
                judgement = Judgement(self, judged, limits, say)
                with judged.eval_mode():
                    if any(searches.values()):
                        report = judgement.search(remove_file, gradients, **searches)
                    else:
                        report = judgement.report(judged.swapped, gradients)
            report = dataclasses.replace(report, changes=sorted({*changes, *judged.changes}))
            report = decide(report, limits)
            with watched(), judged.eval_mode():
                return diagnosed(self, judged, report, diagnose, say)

    def judge_outputs(self, file: str | Path, **options: Any) -> ParityReport:
        """Judge what another program wrote: a safetensors file with ``logits.N`` for each text of the record.

        Args:
            options: of ``judge``: gradients, budget, diagnose, progress.

        Raises:
            CheckpointError: if it cannot be read, lacks logits, or a tensor is unknown or has another shape.
        """
        return self.judge(FileCandidate(self, Path(file)), **options)

    def _like_the_original(self, recipe: Recipe) -> Recipe:
        """Return a recipe on the original's device and at its dtype.

        Raises:
            ConfigError: if the recipe has others.
            CheckpointError: if the original's files were written since it was read.
        """
        for name, expected in (("device", self.device), ("dtype", dtype_name(self.dtype))):
            value = getattr(recipe, name)
            if value is not None and (resolve_device(value) if name == "device" else value) != expected:
                raise ConfigError(f"must be the original's, {expected}, got {value}", argument=name)
        is_own = recipe.place().resolve() == self.place.resolve()
        if is_own and self.files is not None and state_of(self.place) != self.files:
            raise CheckpointError(f"{self.source} was saved to since the original was read; read the original again")
        return dataclasses.replace(recipe, device=self.device, dtype=dtype_name(self.dtype))


@dataclasses.dataclass
class Rounded:
    """What transformers at the dtype says, until the truth is known.

    Attributes:
        logits, outputs: of every text; of norms and blocks, by text.
        decoded: logits of each continuation, read token by token.
        gradients: by Parameter; empty if the caller did not ask for them.
    """

    logits: list[Tensor]
    outputs: list[dict[str, Tensor]]
    decoded: list[Tensor]
    gradients: dict[str, Tensor]


def _read_rounded(truth: Truth, prompts: list[list[int]], most: int, gradients: bool) -> Rounded:
    """Let transformers at the dtype write and read."""
    reference = Reference(truth.place, attention=truth.attention, dtype=truth.dtype, device=truth.device)
    host = reference.host
    truth.attention = reference.model.config._attn_implementation
    truth.kept = reference.kept(truth.dtype)
    truth.prompts, decoded = reference.write(prompts, most, truth.config.eos_token_ids)
    places, logits, outputs = [*host.sites, *host.blocks], list[Tensor](), []
    room = MOST_STREAM // max(1, len(host.sites) * truth.config.n_embd)
    with Recorder(host.root, places) as recorder:
        for number, sample in enumerate(truth.prompts):
            logits.append(reference(truth.tensor(sample.ids))[0])
            require_finite(f"the outputs of prompt {number}", sample.ids, [logits[-1], *recorder.outputs.values()])
            require_finite(f"the logits of prompt {number}, token by token,", sample.ids, [decoded[number]])
            room -= len(sample.ids)
            outputs.append({place: y[0] for place, y in recorder.outputs.items()} if room >= 0 else {})
        order = list(recorder.outputs)
    truth.sites = [place for place in order if place in host.sites]
    truth.blocks = [place for place in order if place in host.blocks]
    truth.noise, truth.embedding = dict.fromkeys(order, 0.0), host.embedding
    for number, sample in enumerate(truth.windows):
        logits.append(reference(truth.tensor(sample.ids))[0, sample.compared].clone())
        require_finite(f"the logits of window {number}", sample.ids, logits[-1:])
    if not reference.is_gpt2:
        truth.losses = _losses(truth, reference.model)
    truth.reference_ms = milliseconds(lambda: reference(truth.tensor(truth.longest.ids)), truth.device)
    computed = _gradients(reference, truth) if gradients else {}
    require_finite_gradients(computed)
    return Rounded(logits, outputs, decoded, computed)


def _losses(truth: Truth, model: nn.Module) -> list[Sequence[float]]:
    """Return tokens and loss of each window of the whole text file.

    Raises:
        NotFiniteError: if a window's logits hold NaN.
    """
    losses = list[Sequence[float]]()
    windows = windows_of(len(truth.text_ids), truth.config.window)
    for number, (row, window) in enumerate(zip(window_losses(model, truth.text_ids), windows, strict=True)):
        start, _, end = window
        require_finite(f"the logits of window {number}", truth.text_ids[start:end], [torch.tensor(row.loss)])
        losses.append((row.tokens, row.loss))
    return losses


def _gradients(reference: Reference, truth: Truth) -> dict[str, Tensor]:
    """Return the gradients that transformers computes, by Parameter.

    Raises:
        MiniGPTError: if it can compute none.
    """
    host = reference.host
    try:
        with reference.exactly():
            return gradients_of(host.model, gradient_texts(truth), host.embedding, host.prefix, host.sites)
    except NormError as error:
        name = type(host.model).__name__
        raise MiniGPTError(f"{name} of transformers has no gradients to compare with: {error.message}") from error


def _read_ours(truth: Truth, logits: list[Tensor]) -> None:
    """Let minigpt in reference arithmetic read: it has transformers' bits."""
    recipe = Recipe(
        truth.place, norm=None if truth.norm == "frozen" else "fused", attention=truth.attention,
        arithmetic="reference", device=truth.device, dtype=truth.dtype,
    )  # fmt: skip
    model = recipe.open()[0]
    for sample, reference_logits in zip(truth.prompts, logits, strict=False):
        truth.bitwise_error.add(model(truth.tensor(sample.ids))[0], reference_logits)
    truth.losses = _losses(truth, model)


def _read_exact(truth: Truth, rounded: Rounded) -> None:
    """Let transformers in float64 read, and count how far it is from itself at the dtype."""
    other = "eager" if truth.attention == "sdpa" else "sdpa"  # so that float64 has a noise floor too
    reference = Reference(truth.place, attention=other, dtype=truth.dtype, device=truth.device, compute=torch.float64)
    host = reference.host
    truth.norms = {site: TrueNorm.of(norm, host.site_of(norm)) for site, norm in host.norms().items()}
    noise = {place: RowDistance() for place in truth.noise}
    with Recorder(reference.host.root, noise) as recorder:
        for sample, logits, outputs, decoded in zip(
            truth.prompts, rounded.logits, rounded.outputs, rounded.decoded, strict=False
        ):
            sample.truth = reference(truth.tensor(sample.ids))[0]
            truth.noise_floor.add(logits, sample.truth)
            truth.position_noise = max(truth.position_noise, _largest_error(logits, sample.truth))
            truth.decoding_floor.add(decoded, sample.truth[sample.before_new])
            if outputs:
                sample.inputs = {site: recorder.inputs[site][0] for site in truth.sites}
                sample.outputs = {block: recorder.outputs[block][0] for block in truth.blocks}
            for name, output in outputs.items():
                noise[name].add(output, recorder.outputs[name][0])
    truth.noise = {name: distance.relative for name, distance in noise.items()}
    narrow = torch.float64 if truth.dtype == torch.float64 else torch.float32
    for sample, logits in zip(truth.windows, rounded.logits[len(truth.prompts) :], strict=True):
        exact = reference(truth.tensor(sample.ids))[0, sample.compared]
        truth.window_floors.append(Distance())
        truth.window_floors[-1].add(logits, exact)
        truth.position_noise = max(truth.position_noise, _largest_error(logits, exact))
        sample.truth = exact.to(narrow, copy=True)
    if rounded.gradients:
        gradients = _gradients(reference, truth)
        truth.gradients = {name: gradient.to(narrow) for name, gradient in gradients.items()}
        truth.gradient_noise = {
            name: relative_error(rounded.gradients[name], gradient) for name, gradient in gradients.items()
        }


def _largest_error(logits: Tensor, exact: Tensor) -> float:
    """Return the largest RMS error at a position, of logits (T, V)."""
    return float((logits.double() - exact).square().mean(-1).sqrt().max())


def parity(
    candidate: "str | Path | Recipe | nn.Module | Callable[[Tensor], Any]" = "demo",
    *,
    against: str | Path | None = None,
    prompts: Prompts | None = None,
    text: str | Path | None = None,
    max_new_tokens: int = NEW_TOKENS,
    gradients: bool = False,
    sensitivity: bool = False,
    remove: bool = False,
    remove_file: str | Path | None = None,
    bisect: bool = False,
    budget: str | None = None,
    diagnose: bool | None = None,
    progress: Progress | None = None,
    **opening: Any,
) -> ParityReport:
    """Judge a model against transformers with the original's weights.

    The truth is transformers in float64 on the weights as rounded to ``dtype``, on every prompt and its greedy
    continuation. The noise floor is how far transformers itself is from that truth when it computes in ``dtype``. The
    candidate passes if its RMS error is at most twice the noise floor, on the prompts and on every window of a longer
    text, and at most four times when it decodes the continuations token by token. Its greedy tokens must also agree
    with those of transformers, or differ only where the two best logits are closer than the noise. TF32 is off
    meanwhile. What the candidate's code changes in the process is undone, and fails it.

    ``minigpt.Original`` reads the original once for many candidates.

    Args:
        candidate: a source or a ``Recipe``; a ``GPT2`` or any ``nn.Module`` in eval mode; a function of ids (B, T) to
            logits (B, T, V), or to an object with ``logits``; or what a function of ``minigpt.engines`` returns.
        against: the source of the original; by default the candidate's own. A module or a function needs one.
        prompts, text, max_new_tokens: as ``Original`` takes them.
        gradients: also compare the gradient of the loss for every Parameter.
        sensitivity: swap one site at a time, and rank the sites.
        remove: swap one site after another, the least harmful first, until all are swapped or the budget's kl is
            spent. With a budget the report is of the sites that it allows.
        remove_file: keeps what ``remove`` has measured; a search that is started again with it goes on.
        bisect: name the swapped sites that break parity, or the budget if there is one.
        budget: limits that decide in place of parity, e.g. "kl=1e-6,perplexity=0.01%".
        diagnose: whether to look for the mistake that gives the candidate's logits. By default after a FAIL, if the
            model is so small that it takes a few seconds.
        progress: called with a few words on each step as it begins, and the share of the steps that are done.
        opening: norm, sites, keep, center, fit, attention, arithmetic, device, dtype, quantize, revision and
            local_files_only, as ``Recipe`` takes them, for a candidate that is a source. For a module or a function,
            attention, device, dtype and local_files_only are the original's.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: if it cannot be judged; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """
    check_names(opening, RECIPE_OPTIONS, "parity")
    parse_budget(budget)
    texts: dict[str, Any] = dict(
        prompts=prompts, text=text, max_new_tokens=max_new_tokens, gradients=gradients,
        progress=_part_of(progress, 0.0, 0.6),
    )  # fmt: skip
    if isinstance(candidate, str | Path):
        candidate, opening = Recipe(candidate, **opening), {}
    is_recipe = isinstance(candidate, Recipe)
    for name in {*opening} - (set() if is_recipe else OF_MODULES):
        why = "is part of the Recipe; set it there" if is_recipe else "is for a candidate that is a source"
        raise ConfigError(why, argument=name)
    if is_recipe:
        original = read_original(candidate, against, **texts)
    elif against is None:
        raise ConfigError("must name the original of a candidate that is no source", argument="against")
    else:
        original = Original(against, **_options_of(candidate) | opening, **texts)
    return original.judge(
        candidate, gradients=gradients, sensitivity=sensitivity, remove=remove, remove_file=remove_file, bisect=bisect,
        budget=budget, diagnose=diagnose, progress=_part_of(progress, 0.6, 0.4),
    )  # fmt: skip


def _part_of(progress: Progress | None, begin: float, share: float) -> Progress | None:
    """Return a progress from 0 to 1 that is a share of another."""
    return None if progress is None else lambda step, done: progress(step, begin + share * done)


def _options_of(candidate: Any) -> dict[str, Any]:
    """Return the device, the dtype and the attention of a model that the caller holds."""
    options = {"attention": getattr(candidate, "attention", None)}
    parameters = candidate.parameters() if isinstance(candidate, nn.Module) else ()
    for parameter in parameters:
        if parameter.is_floating_point() and not parameter.is_meta:  # neither quantized nor offloaded
            options |= {"device": parameter.device, "dtype": parameter.dtype}
            break
    return {name: value for name, value in options.items() if isinstance(value, str | torch.device | torch.dtype)}


def read_original(
    recipe: Recipe, against: str | Path | None = None, *, check: Iterable[Recipe] = (), **texts: Any
) -> Original:
    """Read the original of a recipe's model, before any code of a norm runs: its own source, or ``against``.

    It is read at the dtype that the recipe's model has.

    Args:
        check: more recipes that will be judged; of all, what can be known of norms and sites is checked first.
        texts: prompts, text, max_new_tokens, gradients and progress, as ``Original`` takes them.
    """
    recipe.check_architecture(architecture_of(recipe.place()))
    opened = open_source(recipe.place(), recipe.dtype)
    for other in (recipe, *check):
        _check_named(other, opened.sites)
    dtype, revision = (recipe.dtype, recipe.revision) if against is None else (opened.dtype, None)
    return Original(
        recipe.source if against is None else against, attention=recipe.attention, dtype=dtype, revision=revision,
        device=recipe.device or ("cpu" if recipe.quantize else None), local_files_only=recipe.local_files_only, **texts,
    )  # fmt: skip


def _check_named(recipe: Recipe, sites: list[str]) -> None:
    """Check the names of norms and the patterns of sites. No code runs for that."""
    for pattern, norm in recipe.pairs():
        matching(pattern, sites)
        if not isinstance(norm, str):
            continue
        if (file := file_of(norm)) is None:
            if ":" not in norm:
                lookup(norm)
        elif not file.is_file():
            raise NormError(f"cannot read {file}: there is no such file")
