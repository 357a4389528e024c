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

from minigpt.errors import ConfigError
from minigpt.files import Lines, hash_json
from minigpt.host import host_of, install
from minigpt.judge.candidate import Candidate
from minigpt.judge.measures import Distance, LogitsMeter
from minigpt.judge.original_data import OriginalData
from minigpt.offload import is_offloaded
from minigpt.recipe import Recipe
from minigpt.report.fields import Bisection, Removal, RemovalStep, SiteChange, SiteFit
from minigpt.report.noise import noise_ratio
from minigpt.swap import fit_norms, swap_norms
from minigpt.swap.fit import original_norm, rows_to_fit_on, tokens_to_fit_on

MOST_WINDOWS = 4  # of a text that every trial reads
SiteNorms = Mapping[str, nn.Module]


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
        self.model = cast("nn.Module", candidate.model)
        self.sites = candidate.claim.swapped
        self.host = host_of(self.model)
        self.present: SiteNorms = {site: self.host.root.get_submodule(site) for site in self.sites}
        self.old: SiteNorms
        self.new = self.present
        self.fit_rows = None
        self.fits: dict[str, SiteFit] = {}
        if candidate.recipe is None:
            self.old = {site: original_norm(norm, self.model) for site, norm in self.present.items()}
        else:
            self._open(candidate.recipe)

    def _open(self, recipe: Recipe) -> None:
        """Open the model of a recipe with the norms from before, and with new ones if they are fitted."""
        recipe_before = dataclasses.replace(recipe, norm=None, sites="*", keep=("scale", "shift"), fit=None)
        offload = any(map(is_offloaded, self.model.modules()))
        opened = recipe_before.load(any_architecture=True, offload=offload)
        self.old = host_of(opened.model).norms()
        if recipe.fit is None:
            return
        self.fit_rows = rows_to_fit_on(self.model, tokens_to_fit_on(opened.tokenizer, recipe.fit))
        for pattern, norm in recipe.pairs():
            swap_norms(opened.model, norm, pattern, recipe.keep)
        self.new = host_of(opened.model).norms()

    @contextlib.contextmanager
    def only(self, sites: Sequence[str]) -> Iterator[None]:
        """Have the norm in question at these of its sites only in the block, fitted one after the other."""
        norms: SiteNorms = {}
        if list(sites) == list(self.sites):
            norms = self.present
        else:
            for site in sites:
                norms = self.with_site(norms, site)
        try:
            self.install(norms)
            yield
        finally:
            self.install(self.present)

    def install(self, norms: SiteNorms) -> None:
        """Put these norms at their sites, and the norms from before at the others."""
        chosen: dict[str, nn.Module] = {}
        for site in self.sites:
            chosen[site] = norms.get(site, self.old[site])
        install(self.host.root, chosen)

    def with_site(self, norms: SiteNorms, site: str) -> SiteNorms:
        """Return these norms, and the one in question at one more site: fitted there, if norms are fitted."""
        new = self.new[site]
        if self.fit_rows is not None:
            new = copy.deepcopy(new)
            self.install({**norms, site: new})
            path = self.host.prefix + site
            fit = fit_norms(self.model, self.fit_rows, path)[path]
            self.fits[site] = SiteFit(site, *fit)
        return {**norms, site: new}


class SiteSearch:
    """Trials of a candidate's sites, each on the first windows of the text, or on the prompts without one.

    Args:
        file: keeps the trials, a line each. A search that is started again goes on with it.

    Raises:
        MiniGPTError: if the file cannot be written, or holds something else.
        ConfigError: if there is a file, and the candidate is no recipe whose norms have names.
    """

    def __init__(self, original: OriginalData, candidate: Candidate, file: str | Path | None = None) -> None:
        self.original = original
        self.candidate = candidate
        if original.texts.file:
            self.texts = original.texts.windows[:MOST_WINDOWS]
            self.floor = sum(original.floor.windows[:MOST_WINDOWS], Distance())
        else:
            self.texts = original.texts.prompts
            self.floor = original.floor.prompts
        self.trials: dict[tuple[str, ...], Trial] = {}
        self.lines = None
        self.fingerprint = ""
        if file is not None:
            self.fingerprint = self._fingerprint()
            self.lines = Lines(file)
            for row in self.lines.rows:
                if row.pop("search", None) == self.fingerprint:
                    self._remember(row)
        self.swap = SiteSwap(candidate)

    def _remember(self, row: Mapping[str, Any]) -> None:
        """Keep the trial that a row of the file holds."""
        figures: dict[str, Any] = {}
        for name, figure in row.items():
            figures[name] = math.nan if figure is None else figure
        sites = tuple(figures.pop("sites"))
        rms_error = figures.pop("rms_error")
        self.trials[sites] = Trial(RemovalStep(**figures), rms_error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.swap.install(self.swap.present)
        if self.lines is not None:
            self.lines.close()

    def sensitivity(self) -> list[SiteChange]:
        """Return what each swapped site alone does to the logits, most first."""
        floor = self.floor
        rows: list[SiteChange] = []
        for trial in self._trials({}):
            error = trial.rms_error
            ratio = noise_ratio(error, floor.rms, floor.scale)
            rows.append(SiteChange(trial.step.site, error, ratio))
        return sorted(rows, key=lambda row: -row.rms_error)

    def removal(self, most_kl: float, say: Callable[[str], None]) -> Removal:
        """Swap site after site, the least harmful first, until all are swapped or the KL is above ``most_kl``."""
        steps: list[RemovalStep] = []
        norms: SiteNorms = {}
        sites = self.candidate.claim.swapped
        while len(steps) < len(sites):
            say(f"choosing site {len(steps) + 1} of {len(sites)} to swap")
            trials = [trial.step for trial in self._trials(norms)]
            step = min(trials, key=lambda step: (math.isnan(step.kl_mean), step.kl_mean))
            steps.append(step)
            norms = self.swap.with_site(norms, step.site)
            if not step.kl_mean <= most_kl:  # NaN ends it too
                break
        loss = self._trial({}).step.loss
        tokens = sum(text.counted for text in self.texts)
        return Removal(loss, tokens, steps)

    def _trials(self, norms: SiteNorms) -> list[Trial]:
        """Try every site that is left, one at a time, with the sites that hold ``norms``."""
        left = [site for site in self.candidate.claim.swapped if site not in norms]
        return [self._trial(norms, site) for site in left]

    def _trial(self, norms: SiteNorms, site: str = "") -> Trial:
        """Measure the candidate with these norms, and the one in question at one more site."""
        sites = (*norms, site) if site else tuple(norms)
        if sites not in self.trials:
            self.swap.install(self.swap.with_site(norms, site) if site else norms)
            trial = self._measured(site)
            self.trials[sites] = trial
            if self.lines is not None:
                row = {"search": self.fingerprint, "sites": sites, **dataclasses.asdict(trial.step)}
                self.lines.append(row | {"rms_error": trial.rms_error})
        return self.trials[sites]

    def _measured(self, site: str) -> Trial:
        """Measure the candidate with the norms that it has now.

        Args:
            site: the last of those with the norm in question.
        """
        meter = LogitsMeter()
        for text in self.texts:
            logits = self.candidate.runner.logits(text)
            targets = text.targets(self.original.facts.device)
            meter.add(self.original.logits(text), logits, targets, text.counted)
        loss = meter.mean("loss")["loss"]
        step = RemovalStep(site, **meter.mean("kl", "kl_mean"), loss=loss, **meter.mean("loss_change"))
        return Trial(step, meter.distance.rms)

    def _fingerprint(self) -> str:
        """Return what decides the trials: the texts, the recipe, the sites and the original.

        Raises:
            ConfigError: if the candidate is no recipe whose norms have names.
        """
        facts, recipe = self.original.facts, self.candidate.recipe
        if recipe is None:
            raise ConfigError("needs a source and the name of a norm, got a model", argument="remove_file")
        texts = [text.ids for text in self.texts]
        original = [facts.source, str(facts.dtype), str(facts.device), facts.attention]
        return hash_json([texts, recipe.fingerprint(), self.candidate.claim.swapped, original])


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
        failing = minimal_failing(remaining, counted)
        sets.append(failing)
        remaining = [site for site in remaining if site not in failing]
    restored = [site for site in sites if site not in remaining]
    return Bisection(sites=restored, sets=sets, verdicts=verdicts)


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
    half = len(sites) // 2
    first, second = sites[:half], sites[half:]
    of_second = minimal_failing(second, fails, [*beside, *first], check_first=True)
    of_first = minimal_failing(first, fails, [*beside, *of_second], check_first=bool(of_second))
    return of_first + of_second
