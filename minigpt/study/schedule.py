"""The step of each site's new norm, and the modules that change over: ``'h.*.ln_2@20+2, ln_f@40, first@50'``."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.choices import KEEP
from minigpt.errors import NormError
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.swap import swap_norms
from minigpt.swap.fit import fit_to, separate
from minigpt.swap.sites import matching

MERGE = "first"  # the stage at which frozen norms divide the first position as all others
MOMENTUM = 0.1  # weight of the newest batch in the running average

STAGE = re.compile(r"(?P<pattern>[^@\s]+)@(?P<start>\d+)(?:\+(?P<gap>\d+))?")


@dataclass(frozen=True)
class Schedule:
    """The step before which each site is swapped.

    Attributes:
        steps: by site.
        merge: the step from which frozen norms divide the first position by the usual deviation, or None.
    """

    steps: dict[str, int]
    merge: int | None = None


def parse_schedule(text: str | None, sites: Sequence[str]) -> Schedule:
    """Return the schedule that ``text`` describes.

    Args:
        text: stages ``PATTERN@START+GAP`` with commas between. The first site of a pattern is swapped before step START
            and each further one GAP steps later. Without ``+GAP`` all are swapped at once. The stage ``first@START``
            ends the separate deviation of the first position. None swaps every site before step 0.
        sites: the model's norm sites in the order of the data.

    Raises:
        NormError: if a stage has another form, a pattern matches no site, or a site has two steps.
    """
    if text is None:
        return Schedule(dict.fromkeys(sites, 0))
    steps: dict[str, int] = {}
    merge = None
    for part in text.split(","):
        stage = part.strip()
        match = STAGE.fullmatch(stage)
        if match is None:
            raise NormError(f"a stage of the schedule must be PATTERN@START or PATTERN@START+GAP, got {stage!r}")
        start = int(match["start"])
        gap = int(match["gap"] or 0)
        if match["pattern"] == MERGE:
            merge = start
            continue
        for number, site in enumerate(matching(match["pattern"], sites)):
            if site in steps:
                raise NormError(f"schedule: {site} has two steps; the second is in {stage!r}")
            steps[site] = start + gap * number
    return Schedule(steps, merge)


class ScheduledNorm(nn.Module):
    """The norm ``old`` until its step, then the norm ``new``.

    Both are there from the first step, so an optimizer, a checkpoint and distributed training always see the same
    parameters. Which one computes depends on the step alone, so nothing has to be restored when training resumes.

    Buffer ``average``: running averages (2,) of the deviations of the first position and of all others. Only a frozen
    norm needs them. They are NaN until the first batch.

    Attributes:
        is_on: whether the new norm computes.
    """

    average: Tensor
    new: Any

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old = old
        self.new = new
        self.is_on = False
        device = next(new.parameters()).device
        self.register_buffer("average", torch.full((2,), math.nan, device=device))

    def forward(self, x: Tensor) -> Tensor:
        needs_constants = isinstance(self.new, FrozenLayerNorm) and self.new.calibration is None
        if needs_constants and x.shape[1] > 1:
            is_before = self.training and not self.is_on
            if is_before or self.average.isnan().any():
                self.observe(x.detach())
            if self.is_on:
                self.new.freeze(*self.average)
        return self.present(x)

    @property
    def present(self) -> nn.Module:
        """The norm that computes now."""
        if self.is_on:
            return self.new
        return self.old

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Move the running averages towards the deviations of ``x`` (B, T, C)."""
        deviation = self.new.deviation(x.float()).squeeze(-1)  # (B, T)
        batch = torch.stack([deviation[:, 0].mean(), deviation[:, 1:].mean()])
        moved = self.average.lerp(batch, MOMENTUM)
        self.average.copy_(torch.where(self.average.isnan(), batch, moved))


class NormSchedule:
    """The scheduled norms of a model.

    Attributes:
        norms: the ScheduledNorm at each site.
    """

    def __init__(
        self, body: Any, norm: Any, schedule: Schedule, *, keep: Collection[str] = KEEP, rows: Tensor | None = None
    ) -> None:
        """Put a ScheduledNorm at every scheduled site of ``body``, a GPT-2 of transformers' layout.

        Args:
            norm, keep: as ``swap_norms`` takes them.
            rows: token ids (B, T) that the new norms are fitted on at their step.
        """
        old = {site: body.get_submodule(site) for site in schedule.steps}
        if old:
            swap_norms(body, norm, list(old), keep)
        self.body = body
        self.schedule = schedule
        self.rows = rows
        self.norms: dict[str, ScheduledNorm] = {}
        for site, module in old.items():
            scheduled = ScheduledNorm(module, body.get_submodule(site))
            self.norms[site] = scheduled
            body.set_submodule(site, scheduled)
            if isinstance(scheduled.new, FrozenLayerNorm):
                scheduled.new.calibration = None
            if rows is not None:
                separate(scheduled.new)  # before there is an optimizer, which holds the Parameters from the first step

    def before_step(self, step: int, *, fits: bool = True) -> None:
        """Switch on the norms that start at ``step`` or before.

        Args:
            fits: False if the new norms' values come from a checkpoint.
        """
        starting: dict[str, ScheduledNorm] = {}
        for site, start in self.schedule.steps.items():
            scheduled = self.norms[site]
            if start <= step and not scheduled.is_on:
                starting[site] = scheduled
        if starting and fits and self.rows is not None:
            self._fit(starting, self.rows)
        for scheduled in starting.values():
            scheduled.is_on = True
        if self.schedule.merge is not None and step >= self.schedule.merge:
            self._merge_first()

    def _fit(self, starting: Mapping[str, ScheduledNorm], rows: Tensor) -> None:
        """Fit new norms to the old ones on rows (B, T), in the model as it is at this step."""
        for site, scheduled in starting.items():
            self.body.set_submodule(site, scheduled.new)
        old = {site: scheduled.old for site, scheduled in starting.items()}
        fit_to(self.body, rows.to(self.body.wte.weight.device), old)
        for site, scheduled in starting.items():
            self.body.set_submodule(site, scheduled)

    def _merge_first(self) -> None:
        """Let frozen norms divide the first position by the usual deviation."""
        for scheduled in self.norms.values():
            norm = scheduled.new
            if isinstance(norm, FrozenLayerNorm) and norm.calibration is not None:
                usual = norm.calibration[0]
                norm.freeze(usual, usual)
