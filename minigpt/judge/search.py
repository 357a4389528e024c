"""The search for the sites that matter: one search over a candidate's sites, on one original.

A trial puts the norm in question at some of its sites, and the norms from before at the others.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from torch import nn

from minigpt.files import Lines, hash_json
from minigpt.host import host_of, install
from minigpt.judge.candidate import Candidate
from minigpt.judge.measures import Distance, LogitsMeter
from minigpt.judge.truth import Truth
from minigpt.norms.foreign.fingerprint import describe
from minigpt.offload import is_offloaded
from minigpt.report.fields import Bisection, Removal, RemovalStep, SiteChange, SiteFit, noise_ratio
from minigpt.swap import fit_norms, swap_norms
from minigpt.swap.fit import original_norm, rows_of_text
from minigpt.tokenizer import Tokenizer

MOST_WINDOWS = 4  # of a text that every trial reads
Norms = Mapping[str, nn.Module]


class Trial(NamedTuple):
    """The candidate with its norm at some sites, of which ``step.site`` is the last."""

    step: RemovalStep
    rms_error: float


class SiteSwap:
    """The norm in question at some sites of a candidate's model, and the norms from before at the others.

    Attributes:
        fits: how well each norm that was fitted last explains the one that it replaces.
    """

    def __init__(self, candidate: Candidate) -> None:
        model, recipe = cast("nn.Module", candidate.model), candidate.recipe
        self.model, self.sites = model, candidate.claim.swapped
        self.host = host_of(model)
        self.present = {site: self.host.root.get_submodule(site) for site in self.sites}
        self.fit_rows, self.new = None, self.present
        self.fits: dict[str, SiteFit] = {}
        if recipe is None:
            self.old = {site: original_norm(norm, model) for site, norm in self.present.items()}
            return
        plain_recipe = dataclasses.replace(recipe, norm=None, sites="*", keep=("scale", "shift"), fit=None)
        offload = any(map(is_offloaded, model.modules()))
        plain, tokenizer = plain_recipe.load(any_architecture=True, offload=offload)[:2]
        self.old = host_of(plain).norms()
        if recipe.fit is not None:
            self.fit_rows = rows_of_text(model, cast("Tokenizer", tokenizer), recipe.fit)
            for pattern, norm in recipe.pairs():
                swap_norms(plain, norm, pattern, recipe.keep)
            self.new = host_of(plain).norms()

    @contextlib.contextmanager
    def only(self, sites: Sequence[str]) -> Iterator[None]:
        """Have the norm in question at these of its sites only in the block, fitted one after the other."""
        norms: Norms = {}
        if [*sites] == [*self.sites]:
            norms = self.present
        else:
            for site in sites:
                norms = self.with_site(norms, site)
        try:
            self.install(norms)
            yield
        finally:
            self.install(self.present)

    def install(self, norms: Norms) -> None:
        """Put these norms at their sites, and the norms from before at the others."""
        install(self.host.root, {site: norms.get(site, self.old[site]) for site in self.sites})

    def with_site(self, norms: Norms, site: str) -> Norms:
        """Return these norms, and the one in question at one more site: fitted there, if norms are fitted."""
        new = self.new[site]
        if self.fit_rows is not None:
            new = copy.deepcopy(new)
            self.install({**norms, site: new})
            path = self.host.prefix + site
            self.fits[site] = SiteFit(site, *fit_norms(self.model, self.fit_rows, path)[path])
        return {**norms, site: new}


class Search:
    """Trials of a candidate's sites, each on the first windows of the text, or on the prompts without one.

    Args:
        file: keeps the trials, a line each. A search that is started again goes on with it.

    Raises:
        MiniGPTError: if the file cannot be written, or holds something else.
    """

    def __init__(self, truth: Truth, candidate: Candidate, file: str | Path | None = None) -> None:
        self.truth, self.candidate = truth, candidate
        self.samples = truth.windows[:MOST_WINDOWS] if truth.text_file else truth.prompts
        floors = truth.floor.windows[:MOST_WINDOWS] if truth.text_file else [truth.floor.prompts]
        self.floor = sum(floors, Distance())
        self.trials: dict[tuple[str, ...], Trial] = {}
        self.lines, self.fingerprint = None, "" if file is None else self._fingerprint()
        if file is not None:
            self.lines = Lines(file)
            for row in self.lines.rows:
                if row.pop("search", None) == self.fingerprint:
                    figures: dict[str, Any] = {name: math.nan if x is None else x for name, x in row.items()}
                    key, rms_error = figures.pop("sites"), figures.pop("rms_error")
                    self.trials[tuple(key)] = Trial(RemovalStep(**figures), rms_error)
        self.swap = SiteSwap(candidate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.swap.install(self.swap.present)
        if self.lines is not None:
            self.lines.close()

    def sensitivity(self) -> list[SiteChange]:
        """Return what each swapped site alone does to the logits, most first."""
        floor, errors = self.floor, {site: trial.rms_error for site, trial in self._trials({}).items()}
        rows = [SiteChange(site, error, noise_ratio(error, floor.rms, floor.scale)) for site, error in errors.items()]
        return sorted(rows, key=lambda row: -row.rms_error)

    def removal(self, most_kl: float, say: Callable[[str], None]) -> Removal:
        """Swap site after site, the least harmful first, until all are swapped or the KL is above ``most_kl``."""
        steps: list[RemovalStep] = []
        norms: Norms = {}
        sites = self.candidate.claim.swapped
        while len(steps) < len(sites) and (not steps or steps[-1].kl_mean <= most_kl):
            say(f"choosing site {len(steps) + 1} of {len(sites)} to swap")
            trials = [trial.step for trial in self._trials(norms).values()]
            steps.append(min(trials, key=lambda step: (math.isnan(step.kl_mean), step.kl_mean)))
            norms = self.swap.with_site(norms, steps[-1].site)
        tokens = sum(sample.counted for sample in self.samples)
        return Removal(self._trial({}).step.loss, tokens, steps)

    def _trials(self, norms: Norms) -> dict[str, Trial]:
        """Try every site that is left beside those that hold ``norms``."""
        left = [site for site in self.candidate.claim.swapped if site not in norms]
        return {site: self._trial(norms, site) for site in left}

    def _trial(self, norms: Norms, site: str = "") -> Trial:
        """Measure the candidate with these norms, and the one in question at one more site."""
        key = (*norms, *([site] if site else []))
        if key not in self.trials:
            self.swap.install(self.swap.with_site(norms, site) if site else norms)
            meter = LogitsMeter()
            for sample in self.samples:
                logits = self.candidate.runner.logits(sample)
                meter.add(self.truth.logits(sample), logits, sample.targets(self.truth.device), sample.counted)
            step = RemovalStep(
                site, **meter.mean("kl", "kl_mean"), loss=meter.mean("loss")["loss"], **meter.mean("loss_change")
            )
            self.trials[key] = Trial(step, meter.distance.rms)
            if self.lines is not None:
                figures = dataclasses.asdict(step) | {"rms_error": meter.distance.rms}
                self.lines.append({"search": self.fingerprint, "sites": key, **figures})
        return self.trials[key]

    def _fingerprint(self) -> str:
        """Return what decides the trials: the texts, the recipe or the model's own values, the norms' names."""
        candidate, truth, recipe = self.candidate, self.truth, self.candidate.recipe
        model = cast("nn.Module", candidate.model)
        sums = {name: float(x.double().sum()) for name, x in model.state_dict().items()}
        texts = [sample.ids for sample in self.samples]
        norms = [describe(norm) for norm in host_of(model).norms().values()]
        how = [truth.source, str(truth.dtype), str(truth.device), truth.attention]
        return hash_json([texts, recipe.fingerprint() if recipe else sums, norms, candidate.claim.swapped, how])


def bisect_sites(sites: list[str], fails: Callable[[list[str]], bool]) -> Bisection:
    """Find the sites that must have their own norm back, as minimal failing sets, until the remaining sites pass.

    There is no such set if the verdict fails without any of them, since something else breaks it.

    Args:
        fails: whether the verdict fails with the norm at these sites only.
    """
    verdicts = 0

    def counted(tried: list[str]) -> bool:
        nonlocal verdicts
        verdicts += 1
        return fails(tried)

    sets: list[list[str]] = []
    remaining = list(sites)
    while remaining and counted(remaining):
        if not sets and counted([]):
            break
        sets.append(minimal_failing(remaining, counted))
        remaining = [site for site in remaining if site not in sets[-1]]
    return Bisection(sites=[site for site in sites if site not in remaining], sets=sets, verdicts=verdicts)


def minimal_failing(
    sites: list[str], fails: Callable[[list[str]], bool], beside: Sequence[str] = (), *, check_first: bool = False
) -> list[str]:
    """A subset that fails, and from which no site can be left out (QuickXplain, Junker 2004).

    Args:
        sites: a set that is known to fail with the norm at the sites of ``beside`` too.
        check_first: also test ``beside`` alone.
    """
    if check_first and fails([*beside]):
        return []
    if len(sites) == 1:
        return sites
    first, second = sites[: len(sites) // 2], sites[len(sites) // 2 :]
    needed = minimal_failing(second, fails, [*beside, *first], check_first=True)
    return minimal_failing(first, fails, [*beside, *needed], check_first=bool(needed)) + needed
