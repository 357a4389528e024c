"""A candidate held against an original: it reads the texts, what it computes is measured, sites are searched.

Behind the verdict: the precision that an error is like, and the mistakes that give the candidate's logits.

T tokens, V vocabulary, C embedding.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minigpt.errors import ConfigError, NormError
from minigpt.judge.candidate import Candidate
from minigpt.judge.figures import all_figures
from minigpt.judge.gradients import relative_errors
from minigpt.judge.measures import Measures, measure, precision_of
from minigpt.judge.original_data import OriginalData
from minigpt.judge.runners import Runner
from minigpt.judge.verdict import decide
from minigpt.norms.registry import require_on
from minigpt.progress import Steps
from minigpt.report import fields
from minigpt.report.fields import Causes, ParityFigures, ReportFields, is_near
from minigpt.report.noise import MOST_NOISE

if TYPE_CHECKING:
    from minigpt.judge.diagnosis import FileTruth
    from minigpt.judge.site_search import SiteSearch, SiteSwap


QUICK = 2e7  # weights of a model in memory that is diagnosed without being asked, in a few seconds


@dataclass(frozen=True)
class Searches:
    """The searches of the swapped sites that a caller asks for.

    Attributes:
        sensitivity: swap one site at a time.
        remove: swap one site after another; ``file`` keeps what that has measured.
        bisect: name the sites that break the verdict.
    """

    sensitivity: bool = False
    remove: bool = False
    bisect: bool = False
    file: str | Path | None = None


@dataclass(eq=False)
class Judgement:
    """One candidate under judgement. Its methods only read it, but for the sites of a search.

    Attributes:
        limits: of the budget, by quantity.
        has_gradients: whether to compare these too.
        say: called as a step begins, and for each text of the longest.
    """

    original: OriginalData
    candidate: Candidate
    limits: Mapping[str, float]
    has_gradients: bool
    say: Steps

    def figures(self, searches: Searches) -> ParityFigures:
        """Return all that is measured.

        Raises:
            ConfigError: if there is a search, and the candidate's norms cannot be swapped back.
        """
        names = [name for name in ("sensitivity", "remove", "bisect") if getattr(searches, name)]
        if not names:
            return self._all_figures(self.candidate.claim.swapped)
        if self.candidate.model is None:
            raise ConfigError(
                "needs a model whose norms can be swapped: a source, or a GPT2 of minigpt", argument=names[0]
            )
        from minigpt.judge.site_search import SiteSearch  # imported here: only a search needs it

        with SiteSearch(self.original, self.candidate, searches.file) as search:
            return self._searched(search, searches)

    def _all_figures(self, sites: list[str]) -> ParityFigures:
        """Return the figures of everything that is asked for, with the norm in question at some sites."""
        self.say("comparing logits and norms")
        measures = self._measure()
        if self.has_gradients:
            self.say("comparing gradients")
            gradients = self.candidate.runner.gradients(self.original.texts.of_gradients)
            if gradients is not None:
                measures.gradients = relative_errors(gradients, self.original.gradients or {})
        require_on(self.candidate.claim.norm, self.original.facts.device)
        if self.original.texts.file:
            self.say(f"perplexity of {self.original.texts.file}")
        return self._figures(measures, sites, writer=self.candidate.runner)

    def _searched(self, search: "SiteSearch", searches: Searches) -> ParityFigures:
        swapped = self.candidate.claim.swapped
        sites, sensitivity, removal, bisection = swapped, None, None, None
        if searches.sensitivity or searches.remove:
            self.say("swapping one site at a time")
            sensitivity = search.sensitivity()
        if searches.remove:
            removal = search.removal(self.limits.get("kl", torch.inf), self.say)
        if removal is not None and self.limits:
            sites = self._allowed(search.swap, [step.site for step in removal.steps])
            removal = replace(removal, allowed=len(sites))
        with search.swap.only(sites):
            figures = self._all_figures(sites)
        fits = figures.fit
        if fits is not None and sites != swapped:
            fits = [search.swap.fits[site] for site in sites]
        if searches.bisect:
            from minigpt.judge.site_search import bisect_sites

            self.say("searching for the sites that break it")
            bisection = bisect_sites(swapped, lambda sites: self._fails(search.swap, sites))
        return replace(figures, sensitivity=sensitivity, removal=removal, bisect=bisection, fit=fits)

    def _allowed(self, swap: "SiteSwap", sites: list[str]) -> list[str]:
        """Return the longest beginning of a list of sites that the budget allows on all texts."""
        self.say(f"checking {len(sites)} sites on all texts")
        while sites and self._fails(swap, sites):
            sites = sites[:-1]
            self.say(f"checking {len(sites)} sites on all texts")
        return sites

    def _fails(self, swap: "SiteSwap", sites: list[str]) -> bool:
        """Return whether the verdict is a fail with the norm at these of its sites only."""
        with swap.only(sites):
            figures = self._figures(self._measure(places=False), sites)
        return not decide(figures, self.limits).passed

    def _measure(self, *, places: bool = True) -> Measures:
        """Measure what the candidate computes of each text.

        Args:
            places: whether to measure norms and blocks of the prompts too.

        Raises:
            NormError: if logits or outputs are NaN because of a norm that was swapped in.
        """
        original, runner = self.original, self.candidate.runner
        prompts = original.texts.prompts
        inputs = [original.exact[prompt].inputs if places else {} for prompt in prompts]
        readings = runner.read_with_norms(prompts, inputs, places=places)
        readings = itertools.chain(readings, runner.read(original.texts.windows, places=False))
        if places:
            readings = self.say.each(readings, len(original.texts.all))
        true_readings = original.readings(places=places)
        measures = measure(original.facts.dtype, original.texts, readings, true_readings, original.norms)
        if measures.first_nan and self.candidate.model is not None:  # of another program it is a result
            claim = self.candidate.claim
            raise NormError(
                f"with {claim.norm} {measures.first_nan} of {claim.name} are NaN, so their error cannot be measured"
            )
        new = [len(prompt.written) for prompt in prompts]
        decoded = runner.decode(prompts, new) if any(new) else []
        if decoded:
            measures.add_decoded(prompts, decoded, [original.logits(prompt) for prompt in prompts])
        return measures

    def _figures(self, measures: Measures, sites: list[str], writer: Runner | None = None) -> ParityFigures:
        """Return the figures of measures, as ``all_figures`` takes them, with the losses on a whole text file."""
        original, losses = self.original, None
        if original.texts.file is not None:
            losses = self.candidate.runner.window_losses(original.texts.file_ids)
        has_written = any(prompt.written for prompt in original.texts.prompts)
        lacking = {
            fields.Unjudged.PLACES: not measures.places,
            fields.Unjudged.ALONE: bool(original.facts.sites and measures.places) and not measures.alone,
            fields.Unjudged.DECODED: has_written and measures.decoded is None,
            fields.Unjudged.GRADIENTS: self.has_gradients and measures.gradients is None,
        }
        missing = [part for part, is_lacking in lacking.items() if is_lacking]
        return all_figures(measures, original, self.candidate.claim, sites, losses, missing, writer)


# Causes


def is_off_at_once(figures: ParityFigures) -> bool:
    """Return whether the first block is off, or the second norm, as in a narrower format; True if neither is known."""
    errors = [(block.error, block.noise) for block in figures.blocks[:1]]
    if not errors:
        errors = [(site.propagated_error, site.noise) for site in figures.norm_sites[1:2]]
    return all(error > MOST_NOISE * noise for error, noise in errors)


def explain(
    truth: OriginalData,
    runner: Runner,
    report: ReportFields,
    diagnose: bool | None,
    say: Steps,
    of_file: "FileTruth | None" = None,
) -> Causes:
    """Return whose precision an error is like, and the mistakes that give it, if a diagnosis is due.

    Args:
        diagnose: None for a FAIL of a small model alone.
        of_file: the truth of another program's file that is off.
    """
    # Windows, or tokens read one by one, may be off all the same.
    are_prompts_right = report.logits.ratio <= MOST_NOISE
    is_long_text_off = report.text is not None and not report.text.logits.ratio <= MOST_NOISE
    is_off_later = are_prompts_right and is_long_text_off
    precision = None
    if report.passed or (is_off_at_once(report) and not is_off_later):
        precision = precision_of(report.logits.rms_error, truth.floor.precisions)
    if diagnose is None:
        is_explained = report.account is not None and report.account.is_by_rounding
        is_off = not is_explained and (not are_prompts_right or is_long_text_off)
        is_quick = truth.facts.weights <= QUICK and not truth.facts.offload
        diagnose = report.outcome == "FAIL" and is_quick and is_off
    if not diagnose:
        return Causes(precision=precision)
    if are_prompts_right and not is_long_text_off and not report.passed:
        note = "The diagnosis compares the logits of texts that are read whole, and these are right."
        return Causes(precision=precision, notes=[note])
    # A diagnosis alone needs the mistakes, which are many.
    from minigpt.judge.diagnosis import DiagnosisError, find_clues, find_mistakes, one_answer, unseen_mistakes

    try:
        if report.passed:
            unseen = "; ".join(unseen_mistakes(truth, runner, say))
            note = "Each of the commonest mistakes would be seen."
            if unseen:
                note = f"With these weights and texts, these mistakes would not be seen: {unseen}."
            return Causes(precision=precision, notes=[note])
        if changes := one_answer(truth, runner):
            return Causes(diagnosis=[], notes=changes)
        diagnosis, may_be_rounded = find_mistakes(truth, runner, say, of_windows=are_prompts_right, file=of_file)
    except DiagnosisError as error:
        return Causes(precision=precision, notes=[f"{error}."])
    precision = precision if may_be_rounded else None
    clues = [] if diagnosis or is_near(precision) else find_clues(truth, runner, report, of_windows=are_prompts_right)
    if truth.facts.offload:
        clues.append("The weights stay in their files: no mistake in attention, MLP or positions was tried.")
    return Causes(precision=precision, diagnosis=diagnosis, notes=clues)
