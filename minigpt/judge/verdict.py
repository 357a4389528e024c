"""Is it still the same model? A candidate held against an original, part by part, and the verdict."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from minigpt.checkpoint import open_checkpoint
from minigpt.checkpoint.opened import only_dtype
from minigpt.config import GPT2Config, norm_sites
from minigpt.device import Progress, Steps, dtype_name
from minigpt.errors import ConfigError, GenerationError, NormError
from minigpt.judge import search
from minigpt.judge.candidate import PARTS, Candidate, OurCandidate, Reading, candidate_of
from minigpt.judge.gradients import gradient_errors
from minigpt.judge.measures import (
    Distance,
    LogitsMeter,
    RowDistance,
    mean_by_rows,
    over_floor,
    over_noise,
    perplexity_of,
)  # fmt: skip
from minigpt.judge.original import NEW_TOKENS, Original, Prompts, Text, judging
from minigpt.judge.perplexity import window_losses
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.registry import lookup, require_on
from minigpt.recipe import Opening, Recipe, check_names
from minigpt.report.parity_report import MOST_NOISE, Fields, ParityReport, judged, parse_budget
from minigpt.swap.sites import matching
from minigpt.watch import watched

OF_BOTH = ("source", "device", "dtype", "attention", "local_files_only")  # options of opening that an original has too
FAR_OFF = 8.0  # a place is off from so many times transformers' own error there on


class Asked(TypedDict, total=False):
    """What a report has beside what every report has; see ``parity``."""

    gradients: bool | None
    sensitivity: bool
    remove: bool
    remove_file: str | Path | None
    bisect: bool
    budget: str | None
    progress: Progress | None


class How(Asked, Opening, total=False):
    """How a candidate is opened and judged."""


def parity(
    candidate: "str | Path | Recipe | nn.Module | Callable[[Tensor], Any]" = "demo",
    *,
    against: str | Path | None = None,
    prompts: Prompts | None = None,
    text: str | Path | None = None,
    max_new_tokens: int = NEW_TOKENS,
    **how: Unpack[How],
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
            logits (B, T, V), or to an object with ``logits``.
        against: the source of the original; by default the candidate's own. A module or a function needs one.
        prompts, text, max_new_tokens: as ``Original`` takes them.
        how: norm, sites, keep, center, fit, attention, device, dtype, quantize, revision and local_files_only are as
            ``Recipe`` takes them, for a candidate that is a source. The others, by default off:
            gradients: also compare the gradient of the loss for every Parameter.
            sensitivity: swap one site at a time, and rank the sites.
            remove: swap one site after another, the least harmful first, until all are swapped or the budget's kl is
            spent. With a budget the report is of the sites that it allows.
            remove_file: keeps what ``remove`` has measured; a search that is started again with it goes on.
            bisect: name the swapped sites that break parity, or the budget if there is one.
            budget: limits that decide in place of parity, e.g. "kl=1e-6,perplexity=0.01%".
            progress: called with a few words on each step as it begins, and the share of the steps that are done.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: if it cannot be judged; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """
    asked, opening = _divided(how)
    parse_budget(asked.get("budget"))
    progress, gradients = asked.get("progress"), asked.get("gradients", False)
    recipe = recipe_of(candidate, opening)
    texts: dict[str, Any] = dict(prompts=prompts, text=text, max_new_tokens=max_new_tokens, gradients=gradients)
    texts["progress"] = None if progress is None else lambda step, done: progress(step, 0.6 * done)
    if recipe is not None:
        original = read_original(recipe, against, **texts)
    elif against is None:
        raise ConfigError("must name the original of a candidate that is no source", argument="against")
    else:
        first = next(candidate.parameters(), None) if isinstance(candidate, nn.Module) else None
        opening["device"] = opening.get("device") or getattr(first, "device", None)
        opening["dtype"] = opening.get("dtype") or getattr(first, "dtype", None)
        opening["attention"] = getattr(candidate, "attention", opening.get("attention", "sdpa"))
        original = Original(against, **{name: opening[name] for name in OF_BOTH if name in opening}, **texts)
    if progress is not None:
        asked["progress"] = lambda step, done: progress(step, 0.6 + 0.4 * done)
    return judge(original, candidate if recipe is None else recipe, **asked)


def _divided(how: Mapping[str, Any]) -> tuple[Asked, dict[str, Any]]:
    """Return what a report is asked for, and how the candidate is opened.

    Raises:
        ConfigError: if a name is unknown.
    """
    check_names(how, How.__annotations__, "parity")
    asked: Any = {name: value for name, value in how.items() if name not in Opening.__annotations__}
    return asked, {name: value for name, value in how.items() if name not in asked}


def read_original(
    recipe: Recipe, against: str | Path | None = None, *, check: Iterable[Recipe] = (), **texts: Any
) -> Original:
    """Read the original of a recipe's model, before any code of a norm runs: its own source, or ``against``.

    It is read at the dtype that the recipe's model has.

    Args:
        check: more recipes that will be judged; of all, what can be known of norms and sites is checked first.
        texts: prompts, text, max_new_tokens, gradients and progress, as ``Original`` takes them.
    """
    checkpoint = open_checkpoint(recipe.place())
    for one in (recipe, *check):
        _check_named(one, checkpoint.config)
    dtype, revision = recipe.dtype, recipe.revision
    if against is not None:
        dtype, revision = dtype or only_dtype(checkpoint.tensors, recipe.place()), None
    del checkpoint
    return Original(
        recipe.source if against is None else against, attention=recipe.attention, dtype=dtype, revision=revision,
        device=recipe.device or ("cpu" if recipe.quantize else None), local_files_only=recipe.local_files_only, **texts,
    )  # fmt: skip


def recipe_of(candidate: Any, opening: Mapping[str, Any]) -> Recipe | None:
    """Return how a candidate is opened; None for one that is a model or a function already.

    Raises:
        ConfigError: if such a one comes with options of opening.
    """
    if isinstance(candidate, str | Path):
        return Recipe(candidate, **opening)
    for field in dataclasses.fields(Recipe):
        if field.name not in OF_BOTH and opening.get(field.name, field.default) != field.default:
            raise ConfigError("is for a candidate that is a source", argument=field.name)
    return candidate if isinstance(candidate, Recipe) else None


def _check_named(recipe: Recipe, config: GPT2Config) -> None:
    """Check the names of norms and the patterns of sites. No code runs for that."""
    for pattern, norm in recipe.pairs():
        matching(pattern, norm_sites(config.n_layer))
        if not isinstance(norm, str):
            continue
        if (file := file_of(norm)) is None:
            if ":" not in norm:
                lookup(norm)
        elif not file.is_file():
            raise NormError(f"cannot read {file}: there is no such file")


def judge(original: Original, candidate: Any = None, **how: Unpack[How]) -> ParityReport:
    """Judge a candidate against an original that was read.

    Args:
        candidate: as ``parity`` takes it; by default the original's own source, with what ``how`` does to it.
        how: as ``parity`` takes it; by default the gradients are compared if the original has them.
    """
    asked, opening = _divided(how)
    limits, has_gradients = parse_budget(asked.get("budget")), original.gradients is not None
    gradients = has_gradients if (wanted := asked.get("gradients")) is None else wanted
    if gradients and not has_gradients:
        raise ConfigError("needs an original that was read with gradients=True", argument="gradients")
    if "perplexity" in limits and not original.reads_file and max(len(text.prompt) for text in original.texts) < 2:
        raise GenerationError("the budget limits perplexity, but no prompt has two tokens; give longer ones, or a text")
    candidate = original.place if candidate is None else candidate
    recipe = recipe_of(candidate, opening) if not isinstance(candidate, Candidate) else None
    if recipe is not None:
        dtype = dtype_name(original.dtype)
        if recipe.dtype not in (None, dtype):
            raise ConfigError(f"must be the original's, {dtype}, got {recipe.dtype}", argument="dtype")
        attention = original.attention if recipe.attention == "sdpa" else recipe.attention
        recipe = dataclasses.replace(recipe, device=original.device, dtype=dtype, attention=attention)
    searches = bool(asked.get("sensitivity") or asked.get("remove")) + bool(asked.get("bisect"))
    total = 2 + gradients + searches + original.reads_file
    steps = Steps(asked.get("progress"), total)
    with judging(), watched() as changes:
        steps("loading the candidate")
        judgement = _Judgement(original, candidate_of(original, candidate, recipe), limits, steps)
        with judgement.candidate.evaluating():
            report = judgement.report(asked, gradients=gradients)
    report["changes"] = sorted({*changes, *judgement.candidate.changes})
    return judged(report, limits)


class _Judgement:
    """One candidate under judgement."""

    def __init__(self, original: Original, candidate: Candidate, limits: dict[str, float], steps: Steps) -> None:
        self.original, self.candidate, self.limits, self.begin = original, candidate, limits, steps

    def report(self, asked: Asked, *, gradients: bool) -> dict[str, Any]:
        """Return the report without the verdict."""
        original, candidate = self.original, self.candidate
        report = dict.fromkeys(("sensitivity", "removal", "bisect", "gradients"))
        searcher = None
        if asked.get("sensitivity") or asked.get("remove") or asked.get("bisect"):
            if not isinstance(candidate, OurCandidate):
                raise ConfigError("needs a model of minigpt, whose norms can be swapped", argument="sensitivity")
            searcher = search.Search(original, candidate, asked.get("remove_file"))
            if asked.get("sensitivity") or asked.get("remove"):
                self.begin("swapping one site at a time")
                report["sensitivity"] = searcher.sensitivity()
            if asked.get("remove"):
                report["removal"] = self._remove(searcher, candidate)
        report |= self._measured()
        if searcher is not None:
            if asked.get("bisect"):
                self.begin("searching for the sites that break it")
                report["bisect"] = search.bisect(candidate.swapped, partial(self._fails, searcher.candidate))
                searcher.finish()
            searcher.close()
        if gradients:
            self.begin("comparing gradients")
            if (found := candidate.gradients()) is not None:
                report["gradients"] = gradient_errors(found, original)
        require_on(candidate.norm, original.device)
        wanted = {"norms and blocks": True, "tokens one by one": any(text.written for text in original.texts),
                  "gradients": gradients}  # fmt: skip
        missing = [part for part in PARTS if wanted[part] and part not in candidate.can]
        return self._about() | report | {"missing": missing}

    def _about(self) -> dict[str, Any]:
        """Return what was judged."""
        original, candidate = self.original, self.candidate
        return dict(
            model=candidate.name,
            against=None if candidate.name == original.source else original.source,
            against_norm=original.norm,
            norm=candidate.norm,
            sites=list(candidate.sites),
            device=str(original.device),
            dtype=dtype_name(original.dtype),
            attention=original.attention,
            versions=original.versions,
            prompts=original.described,
            quantize=candidate.quantize,
            center=candidate.center,
            exact=candidate.is_exact,
            fit=candidate.fitted,
            notes=candidate.notes,
            bitwise=Fields(equal=original.bits.largest == 0, max_abs_error=original.bits.largest),
        )

    def _measured(self, *, deciding: bool = False) -> dict[str, Any]:
        """Measure what decides, and unless it is all that is asked, each norm and block and the time."""
        original, candidate = self.original, self.candidate
        if not deciding:
            self.begin("comparing logits and norms")
        drift, meter, chosen = Drift(original, candidate), LogitsMeter(), []
        longest = max(original.texts, key=lambda text: len(text.ids))
        for text in original.texts:
            reading = candidate.read(text)
            _require_numbers(reading.logits, candidate)
            if not deciding:
                drift.add(text, reading)
            meter.add(text.truth, reading.logits, _targets(original, text))
            chosen.append(reading.logits[text.before_new].argmax(-1).tolist())
        decoded = candidate.decoded()
        if decoded is not None:
            chosen = [logits.argmax(-1).tolist() for logits in decoded]
        windows = LogitsMeter()
        for text in original.windows:
            windows.add(text.truth, candidate.logits(text), _targets(original, text))
        parts: dict[str, Any] = dict(
            logits=over_floor(meter.distance, original.floor),
            distribution=(windows if original.reads_file else meter).distribution(),
            greedy=_compare_greedy(original, candidate, chosen, show=not deciding),
            decoding=self._decoding(decoded),
            text=_compare_windows(original, windows),
            perplexity=self._perplexity(quiet=deciding),
            most_kl=max(one.distribution().kl_mean for one in (meter, windows) if one.rows),
        )
        if deciding:
            return parts
        start = time.perf_counter()
        candidate.logits(longest)
        return parts | dict(
            norm_sites=drift.norm_sites(),
            blocks=drift.block_drift(),
            first_off=drift.first_off(),
            tokens=Fields(
                prompt=(number := original.texts.index(longest)),
                pieces=[original.text([token]) or f"#{token} " for token in longest.ids],
                kl=meter.kl[number].tolist(),
                new_from=longest.new_from,
            ),
            speed=Fields(candidate_ms=1000 * (time.perf_counter() - start), reference_ms=original.reference_ms),
        )

    def _decoding(self, decoded: list[Tensor] | None) -> Fields | None:
        if decoded is None or not any(len(logits) for logits in decoded):
            return None
        distance = Distance()
        for text, logits in zip(self.original.texts, decoded, strict=True):
            distance.add(logits, text.truth[text.before_new])
        # Of few tokens the reference's error may be small by chance.
        floor = max(self.original.decoding_floor, self.original.floor, key=lambda distance: distance.rms)
        return over_floor(distance, floor)

    def _perplexity(self, *, quiet: bool) -> Fields | None:
        """Return the perplexity of the whole text file before and after, by windows that overlap."""
        original, candidate = self.original, self.candidate
        if not original.reads_file or not isinstance(candidate, OurCandidate):
            return None
        if not quiet:
            self.begin(f"perplexity of {original.text_file}")
        rows, before = window_losses(candidate.model, original.text_ids), original.losses
        counts, losses = [row.tokens for row in rows], [row.loss for row in rows]
        window = original.config.n_positions
        change, change_se = mean_by_rows([b - a for (_, a), b in zip(before, losses, strict=True)], counts)
        return Fields(
            file=original.text_file, tokens=len(original.text_ids), window=window, stride=max(1, window // 2),
            reference=perplexity_of(sum(loss for _, loss in before), sum(counts)),
            candidate=perplexity_of(sum(losses), sum(counts)),
            loss_se=mean_by_rows(losses, counts)[1],
            loss_change=change, loss_change_se=change_se,
            entropy=sum(row.entropy for row in rows) / sum(counts),
            rows=[[row.tokens, row.loss] for row in rows],
        )  # fmt: skip

    def _remove(self, searcher: "search.Search", candidate: OurCandidate) -> Fields:
        """Search for the order of the sites; with a budget, leave the candidate with those that it allows."""
        most_kl = self.limits.get("kl", torch.inf)
        removal = searcher.curve(most_kl, self.begin)
        if not self.limits:
            return removal
        sites = [step.site for step in removal.steps if not step.kl_mean > most_kl]
        self.begin(f"checking {len(sites)} sites on all texts")
        while self._fails(candidate, sites, most_kl) and sites:
            sites = sites[:-1]
            self.begin(f"checking {len(sites)} sites on all texts")
        if len(sites) < len(candidate.swapped):  # the report is of the sites that the budget allows
            candidate.sites = tuple(site for site in self.original.sites if site in sites)
        removal["allowed"], candidate.swapped = len(sites), sites
        return removal

    def _fails(self, candidate: OurCandidate, sites: list[str], most_kl: float = torch.inf) -> bool:
        """Return whether the report would fail with the norm at these of its sites only."""
        candidate.put_new(sites)
        parts = self._measured(deciding=True)
        idle = dict.fromkeys(("gradients", "removal", "first_off")) | {"norm_sites": [], "changes": []}
        return not judged(self._about() | idle | parts, self.limits).passed or parts["most_kl"] > most_kl


def _targets(original: Original, text: Text) -> Tensor:
    return torch.tensor(text.targets, dtype=torch.long, device=original.device)


def _require_numbers(logits: Tensor, candidate: Candidate) -> None:
    if logits.isnan().any():
        raise NormError(
            f"with {candidate.norm} the logits of {candidate.name} are NaN, so their error cannot be measured"
        )


class Drift:
    """The error at each norm, by itself and after everything before it, and in the residual stream after each block."""

    def __init__(self, original: Original, candidate: Candidate) -> None:
        self.original, self.candidate = original, candidate
        self.local: defaultdict[str, RowDistance] = defaultdict(RowDistance)
        self.propagated: defaultdict[str, RowDistance] = defaultdict(RowDistance)

    def add(self, text: Text, reading: Reading) -> None:
        """Count what a candidate computed on a text.

        Raises:
            NormError: if a norm returned NaN where the truth is a number.
        """
        for place, truth in self.original.true_outputs(text).items():
            if place not in reading.outputs:
                continue
            output = reading.outputs[place][: len(truth)]
            if output.isnan().any():
                raise NormError(
                    f"{place} returns NaN where the reference returns numbers, so its error cannot be measured"
                )
            self.propagated[place].add(output, truth)
        for site, norm in reading.norms.items():
            if site in text.inputs:
                x = text.inputs[site][None].to(reading.outputs[site].dtype)  # (1, T, C): the true input, rounded
                self.local[site].add(norm(x.clone())[0], self.original.norms[site](x[0]))

    def norm_sites(self) -> list[Fields]:
        """Every site, in the order of the forward."""
        return [
            Fields(
                site=site,
                swapped=site in self.candidate.swapped,
                local_error=self.local[site].relative if site in self.local else None,
                propagated_error=self.propagated[site].relative,
                noise=self.original.noise[site],
            )
            for site in self.original.sites
            if site in self.propagated
        ]

    def block_drift(self) -> list[Fields]:
        """The residual stream after every block."""
        return [
            Fields(
                block=block,
                error=self.propagated[block].relative,
                noise=self.original.noise[block],
            )
            for block in self.original.blocks
            if block in self.propagated
        ]

    def first_off(self) -> Fields | None:
        """Return the first norm or block whose output is off, in the order of the data."""
        order = [place for block in self.original.blocks for place in (f"{block}.ln_1", f"{block}.ln_2", block)]
        for place in (*order, "ln_f"):
            if place in self.propagated:
                error, noise = self.propagated[place].relative, self.original.noise[place]
                if not over_noise(error, noise, 1.0) <= FAR_OFF:
                    return Fields(place=place, error=error, noise=noise)
        return None


def _compare_windows(original: Original, meter: LogitsMeter) -> Fields | None:
    """Compare the logits of each window of a text; name the first window and position where they are off."""
    if not original.windows:
        return None
    total = Distance()
    for floor in original.window_floors:
        total = Distance(
            max(total.largest, floor.largest), total.count + floor.count, total.squares + floor.squares,
            total.true_squares + floor.true_squares,
        )  # fmt: skip
    first_off = None
    for i, (text, distance, floor) in enumerate(
        zip(original.windows, meter.distances, original.window_floors, strict=True)
    ):
        ratio = over_noise(distance.rms, max(floor.rms, total.rms), distance.scale)
        if not ratio <= MOST_NOISE:  # written so that NaN is off
            errors, limit = meter.errors[i], MOST_NOISE * original.position_noise
            over = [j for j, error in enumerate(errors.tolist()) if not error <= limit] or [int(errors.argmax())]
            position = text.compared.start + over[0]
            first_off = Fields(
                window=i, position=position, token=text.start + position, error=float(errors[over[0]]),
                noise=original.position_noise, ratio=ratio,
            )  # fmt: skip
            break
    return Fields(
        file=original.text_file, tokens=sum(map(len, meter.kl)), windows=len(original.windows),
        window=original.config.n_positions, logits=over_floor(meter.distance, total), first_off=first_off,
    )  # fmt: skip


def _compare_greedy(original: Original, candidate: Candidate, chosen: list[list[int]], *, show: bool) -> Fields:
    """Compare what the candidate chooses, given the tokens before, with what transformers wrote.

    The report names the first difference that noise does not explain, else the first.
    """
    compared, partings = 0, []
    noise = 2 * original.floor.largest  # can swap two logits this close: each may be off by the floor's maximum
    for i, (text, tokens) in enumerate(zip(original.texts, chosen, strict=True)):
        j = next((j for j, (a, b) in enumerate(zip(tokens, text.written, strict=True)) if a != b), None)
        compared += len(text.written) if j is None else j + 1
        if j is not None:
            best = text.truth[text.before_new][j].topk(2).values
            margin = float(best[0] - best[1])
            partings.append(
                Fields(prompt=i, token=j, candidate_id=tokens[j], reference_id=text.written[j], margin=margin,
                       noise=noise, within_noise=margin <= noise)
            )  # fmt: skip
    first = min(partings, key=lambda parting: parting.within_noise, default=None)
    if first is not None and show:
        text = original.texts[first.prompt]
        new = candidate.continued(text) or [*text.written[: first.token], first.candidate_id]
        first["prompt_text"] = original.text(text.prompt)
        first["candidate_text"], first["reference_text"] = original.text(new), original.text(text.written)
    return Fields(tokens_compared=compared, first_divergence=first)
