"""Which sites matter: one search over a candidate's sites, on one original.

A trial puts the norm in question at some of its sites, and the norms from before at the others.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from minigpt.files import Lines, hash_json
from minigpt.judge.candidate import OurCandidate
from minigpt.judge.measures import LogitsMeter, mean_by_rows, over_noise
from minigpt.judge.original import Original
from minigpt.norms import name_of
from minigpt.report.parity_report import Fields

MOST_WINDOWS = 4  # of a text that every trial reads


class Search:
    """Trials of a candidate's sites, each on the first windows of the text, or on the prompts without one.

    Args:
        file: keeps the trials, a line each. A search that is started again goes on with it.

    Raises:
        MiniGPTError: if the file cannot be written, or holds something else.
    """

    def __init__(self, original: Original, candidate: OurCandidate, file: str | Path | None = None) -> None:
        self.original, self.candidate = original, candidate
        self.texts = original.windows[:MOST_WINDOWS] if original.reads_file else original.texts
        self.lines, self.fingerprint = None, ""
        self.trials: dict[tuple[str, ...], Fields] = {}
        if file is not None:
            self.fingerprint = self._fingerprint()
            self.lines = Lines(file)
            for row in self.lines.rows:
                if row.pop("search", None) == self.fingerprint:
                    sites = tuple(row.pop("sites"))
                    self.trials[sites] = Fields({name: math.nan if x is None else x for name, x in row.items()})
        candidate.begin_search()

    def sensitivity(self) -> list[Fields]:
        """Return what each swapped site alone does to the logits, most first."""
        floor, rows = self.original.floor, []
        for site, trial in self._step({}).items():
            rows.append(Fields(trial, site=site, ratio=over_noise(trial.rms_error, floor.rms, floor.scale)))
        self.finish()
        return sorted(rows, key=lambda row: -row.rms_error)

    def curve(self, most_kl: float, begin: Callable[[str], None]) -> Fields:
        """Swap site after site, the least harmful first, until all are swapped or the KL is above ``most_kl``."""
        steps: list[Fields] = []
        norms: dict[str, nn.Module] = {}
        sites = self.candidate.swapped
        while len(steps) < len(sites) and (not steps or steps[-1].kl_mean <= most_kl):
            begin(f"choosing site {len(steps) + 1} of {len(sites)} to swap")
            trials = self._step(norms)
            best = min(trials, key=lambda site: (math.isnan(trials[site].kl_mean), trials[site].kl_mean))
            norms = self.candidate.with_site(norms, best)
            steps.append(Fields(trials[best], site=best))
        start = self._trial({})
        self.finish()
        return Fields(loss=start.loss, tokens=start.tokens, steps=steps, allowed=None)

    def finish(self) -> None:
        """Put the norm in question back at all of its sites."""
        self.candidate.put_new(self.candidate.swapped)

    def close(self) -> None:
        if self.lines is not None:
            self.lines.close()

    def _step(self, norms: dict[str, nn.Module]) -> dict[str, Fields]:
        """Try every site that is left beside those that hold ``norms``."""
        left = [site for site in self.candidate.swapped if site not in norms]
        return {site: self._trial(norms, site) for site in left}

    def _trial(self, norms: dict[str, nn.Module], site: str | None = None) -> Fields:
        """Return KL, loss and error of the candidate with these norms, and the one in question at one more site."""
        key = (*norms, *([] if site is None else [site]))
        if key not in self.trials:
            self.candidate.put(norms if site is None else self.candidate.with_site(norms, site))
            meter = LogitsMeter()
            for text in self.texts:
                targets = torch.tensor(text.targets, dtype=torch.long, device=self.original.device)
                meter.add(text.truth, self.candidate.logits(text), targets)
            counts = [row.targets for row in meter.rows]
            loss, loss_se = mean_by_rows([row.loss for row in meter.rows], counts)
            kept = ("tokens", "kl_mean", "kl_mean_se", "loss_change", "loss_change_se")
            measured = meter.distribution()
            trial = Fields(
                {name: measured[name] for name in kept}, loss=loss, loss_se=loss_se, rms_error=meter.distance.rms
            )
            self.trials[key] = trial
            if self.lines is not None:
                self.lines.append({"search": self.fingerprint, "sites": key, **trial})
        return self.trials[key]

    def _fingerprint(self) -> str:
        """Return what decides the trials: the texts, the recipe or the model's own values, the norms' names."""
        candidate, recipe = self.candidate, self.candidate.recipe
        sums = {name: float(x.double().sum()) for name, x in candidate.model.state_dict().items()}
        names = [name_of(norm) for norm in candidate.new.values()]
        what = [
            [text.ids for text in self.texts], sums if recipe is None else recipe.fingerprint(), names,
            candidate.swapped, self.original.source, str(self.original.dtype), str(self.original.device),
            self.original.attention,
        ]  # fmt: skip
        return hash_json(what)


def bisect(sites: list[str], fails: Callable[[list[str]], bool]) -> Fields:
    """Find the sites that must have their own norm back, as minimal failing sets, until the remaining sites pass.

    Nothing is found if the verdict fails without any of them, since something else breaks it.

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
    return Fields(sites=[site for site in sites if site not in remaining], sets=sets, verdicts=verdicts)


def minimal_failing(
    sites: list[str], fails: Callable[[list[str]], bool], beside: Sequence[str] = (), *, ask: bool = False
) -> list[str]:
    """A subset that fails, and from which no site can be left out (QuickXplain, Junker 2004).

    Args:
        sites: a set that is known to fail with the norm at the sites of ``beside`` too.
        ask: whether ``beside`` may fail by itself.
    """
    if ask and fails([*beside]):
        return []
    if len(sites) == 1:
        return sites
    first, second = sites[: len(sites) // 2], sites[len(sites) // 2 :]
    needed = minimal_failing(second, fails, [*beside, *first], ask=True)
    return minimal_failing(first, fails, [*beside, *needed], ask=bool(needed)) + needed
