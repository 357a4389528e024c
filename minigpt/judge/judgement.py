"""A candidate held against an original: it reads the texts, what it computes is measured, sites are searched.

T tokens, V vocabulary, C embedding.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minigpt.errors import ConfigError, NormError
from minigpt.judge import figures as figures_of
from minigpt.judge.candidate import Candidate
from minigpt.judge.figures import Places
from minigpt.judge.gradients import gradient_rows, relative_errors
from minigpt.judge.measured import Measures, measure
from minigpt.judge.prompts import BUILT_IN
from minigpt.judge.rules import decide
from minigpt.judge.search import Search, SiteSwap, bisect_sites
from minigpt.judge.truth import Truth
from minigpt.norms.registry import require_on
from minigpt.precision import dtype_name
from minigpt.progress import Steps
from minigpt.report import fields
from minigpt.report.fields import ParityFigures


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

    @property
    def first(self) -> str | None:
        """The name of the first that is asked for; None if none is."""
        for name in ("sensitivity", "remove", "bisect"):
            if getattr(self, name):
                return name
        return None


class Judgement:
    """One candidate under judgement. Its methods only read it, but for the sites of a search.

    Args:
        limits: of the budget, by quantity.
        gradients: whether to compare these too.
        say: called as a step begins, and for each text of the longest.
    """

    def __init__(
        self,
        truth: Truth,
        candidate: Candidate,
        limits: Mapping[str, float],
        gradients: bool,
        say: Steps,
    ) -> None:
        self.truth, self.candidate, self.limits = truth, candidate, limits
        self.runner, self.claim = candidate.runner, candidate.claim
        self.has_gradients, self.say = gradients, say

    def figures(self, searches: Searches) -> ParityFigures:
        """Return all that is measured.

        Raises:
            ConfigError: if there is a search, and the candidate's norms cannot be swapped back.
        """
        if searches.first is None:
            return self._figures(self.claim.swapped)
        if self.candidate.model is None:
            raise ConfigError(
                "needs a model whose norms can be swapped: a source, or a GPT2 of minigpt", argument=searches.first
            )
        with Search(self.truth, self.candidate, searches.file) as search:
            return self._searched(search, searches)

    def _searched(self, search: Search, searches: Searches) -> ParityFigures:
        swapped = self.claim.swapped
        sites, sensitivity, removal, bisection = swapped, None, None, None
        if searches.sensitivity or searches.remove:
            self.say("swapping one site at a time")
            sensitivity = search.sensitivity()
        if searches.remove:
            removal = search.removal(self._most_kl, self.say)
        if removal is not None and self.limits:
            sites = self._allowed(search.swap, [step.site for step in removal.steps])
            removal = replace(removal, allowed=len(sites))
        with search.swap.only(sites):
            figures = self._figures(sites)
        fits = figures.fit
        if fits is not None and sites != swapped:
            fits = [search.swap.fits[site] for site in sites]
        if searches.bisect:
            self.say("searching for the sites that break it")
            bisection = bisect_sites(swapped, lambda sites: self._fails(search.swap, sites))
        return replace(figures, sensitivity=sensitivity, removal=removal, bisect=bisection, fit=fits)

    @property
    def _most_kl(self) -> float:
        """The limit of the budget on the mean KL divergence; infinite without one."""
        return self.limits.get("kl", torch.inf)

    def _allowed(self, swap: SiteSwap, sites: list[str]) -> list[str]:
        """Return the longest beginning of a list of sites that the budget allows on all texts."""
        self.say(f"checking {len(sites)} sites on all texts")
        while sites and self._fails(swap, sites):
            sites = sites[:-1]
            self.say(f"checking {len(sites)} sites on all texts")
        return sites

    def _fails(self, swap: SiteSwap, sites: list[str]) -> bool:
        """Return whether the verdict is a fail with the norm at these of its sites only."""
        with swap.only(sites):
            figures = self._of_logits(self._measure_logits(), sites)
        return not decide(figures, self.limits).passed

    def _measure_logits(self) -> Measures:
        """Measure what the candidate computes of each text, but for norms and blocks."""
        truth = self.truth
        measures = Measures(truth.facts.dtype)
        readings = self.runner.read(truth.samples, places=False)
        measure(measures, truth.prompts, truth.windows, readings, truth.logits_alone())
        self._measure_decoding(measures)
        return measures

    def _measure(self) -> Measures:
        """Measure what the candidate computes of each text; of the prompts, norms and blocks too."""
        truth = self.truth
        measures = Measures(truth.facts.dtype)
        inputs = [truth.exact[prompt].inputs for prompt in truth.prompts]
        prompts = self.runner.read_with_norms(truth.prompts, inputs)
        windows = self.runner.read(truth.windows, places=False)
        readings = self.say.each(itertools.chain(prompts, windows), len(truth.samples))
        measure(measures, truth.prompts, truth.windows, readings, truth.whole_readings(), truth.norms)
        self._measure_decoding(measures)
        return measures

    def _measure_decoding(self, measures: Measures) -> None:
        """Measure what the candidate computes token by token.

        Raises:
            NormError: if logits or outputs are NaN because of a norm that was swapped in.
        """
        truth, claim = self.truth, self.claim
        if measures.first_nan and self.candidate.model is not None:  # of another program it is a result
            raise NormError(
                f"with {claim.norm} {measures.first_nan} of {claim.name} are NaN, so their error cannot be measured"
            )
        new = [len(prompt.written) for prompt in truth.prompts]
        decoded = self.runner.decode(truth.prompts, new) if any(new) else []
        if decoded:
            measures.add_decoded(truth.prompts, decoded, [truth.logits(prompt) for prompt in truth.prompts])

    def _of_logits(self, measures: Measures, sites: list[str]) -> ParityFigures:
        """Return the figures of logits alone.

        Args:
            sites: those that hold the norm in question now.
        """
        truth, claim = self.truth, self.claim
        losses = None
        if truth.text_file is not None:
            losses = self.runner.window_losses(truth.text_ids)
        return ParityFigures(
            model=claim.name,
            against=None if claim.name == truth.facts.source else truth.facts.source,
            norm=claim.norm,
            against_norm=truth.facts.norm,
            sites=self._shown_sites(sites),
            device=str(truth.facts.device),
            dtype=dtype_name(truth.facts.dtype),
            attention=claim.attention or truth.facts.attention,
            quantize=claim.quantize,
            center=claim.center,
            difference=claim.difference,
            exact=claim.is_exact,
            versions=truth.versions,
            prompts=truth.described,
            built_in=truth.described == BUILT_IN,
            bitwise=bitwise_of(truth),
            logits=figures_of.logits_error(measures, truth),
            distribution=figures_of.distribution(measures, truth),
            greedy=figures_of.greedy(measures.chosen, truth),
            decoding=figures_of.decoding_error(measures, truth),
            text=figures_of.text_error(measures, truth),
            perplexity=figures_of.perplexity_change(losses, truth),
            prompt_off=figures_of.first_prompt_off(measures.prompts, truth),
            stored=figures_of.stored_logits(measures, truth),
            coverage=coverage_of(truth),
            nan=measures.nan,
            fit=claim.fits,
        )

    def _figures(self, sites: list[str]) -> ParityFigures:
        """Return the figures of everything that is asked for.

        Args:
            sites: those that hold the norm in question now.
        """
        truth = self.truth
        self.say("comparing logits and norms")
        measures = self._measure()
        if truth.text_file:
            self.say(f"perplexity of {truth.text_file}")
        figures = self._of_logits(measures, sites)
        greedy = figures_of.with_texts(figures.greedy, self.runner, truth)
        if self.has_gradients:
            self.say("comparing gradients")
            gradients = self.runner.gradients(truth.gradient_texts)
            if gradients is not None:
                measures.gradients = relative_errors(gradients, truth.gradients or {})
        require_on(self.claim.norm, truth.facts.device)
        places = Places(measures, truth)
        rows = None
        if measures.gradients is not None:
            rows = gradient_rows(measures.gradients, truth.floor.gradients)
        notes = [*truth.facts.notes, *self.claim.notes]
        if truth.why_random is not None:
            notes.append(f"The texts are random ids, since {truth.why_random}.")
        notes += places.notes()
        return replace(
            figures,
            greedy=greedy,
            norm_sites=places.sites(sites),
            blocks=places.blocks(),
            new_errors=places.grown() if self.claim.adds_errors else [],
            every_place=places.is_complete,
            tokens=figures_of.along_the_longest(measures, truth),
            gradients=rows,
            missing=self._missing(measures),
            notes=notes,
        )

    def _shown_sites(self, sites: Sequence[str]) -> list[str]:
        """Return the sites as the report names them: patterns, or single sites if a search has left some out."""
        if len(sites) == len(self.claim.swapped):
            return list(self.claim.sites)
        return [site for site in self.truth.facts.sites if site in sites]

    def _missing(self, measures: Measures) -> list[fields.Unjudged]:
        """Return the parts that the candidate does not give."""
        has_written = any(prompt.written for prompt in self.truth.prompts)
        lacking = {
            fields.Unjudged.PLACES: not measures.places,
            fields.Unjudged.ALONE: bool(self.truth.facts.sites and measures.places) and not measures.alone,
            fields.Unjudged.DECODED: has_written and measures.decoded is None,
            fields.Unjudged.GRADIENTS: self.has_gradients and measures.gradients is None,
        }
        return [part for part, is_lacking in lacking.items() if is_lacking]


def bitwise_of(truth: Truth) -> fields.Bitwise | None:
    """Return whether our reference arithmetic has transformers' bits; None of another architecture."""
    error = truth.bitwise_error
    if not error.count:
        return None
    return fields.Bitwise(error.largest == 0, error.largest)


def coverage_of(truth: Truth) -> fields.Coverage:
    """Return what the texts reach."""
    tokens: set[int] = set()
    for sample in truth.samples:
        tokens.update(sample.ids)
    longest = max(len(sample.ids) for sample in truth.samples)
    return fields.Coverage(longest, truth.facts.shape.n_positions, len(tokens), truth.facts.shape.vocab_size)
