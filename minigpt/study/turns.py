"""A norm that another one replaces at its turn, and the callback of Trainer that calls the turns."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.study.schedule import Schedule
from minigpt.swap import swap_norms

MOMENTUM = 0.1  # weight of the newest batch in the running average


class Turn(nn.Module):
    """The norm ``before`` until its turn, then the norm ``after``, on the same weight and bias.

    Both are there from the first step, so an optimizer, a checkpoint and distributed training always see the same
    parameters. Which one computes depends on the step alone, so nothing has to be restored when training resumes.

    Buffer ``average``: a running average of the deviation of the first position and of all others. Only a frozen norm
    needs it. It is NaN until the first batch.
    """

    average: Tensor

    def __init__(self, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.turned = False
        self.register_buffer("average", torch.full((2,), float("nan"), device=next(after.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.after, FrozenLayerNorm) and self.after.calibration is None and x.shape[1] > 1:
            if (self.training and not self.turned) or self.average.isnan().any():
                self.observe(x.detach())
            if self.turned:
                self.after.freeze(*self.average)
        return self.after(x) if self.turned else self.before(x)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Move the running average towards the deviations of ``x`` (B, T, C)."""
        assert isinstance(self.after, FrozenLayerNorm)
        deviation = self.after.deviation(x.float()).squeeze(-1)  # (B, T)
        batch = torch.stack([deviation[:, 0].mean(), deviation[:, 1:].mean()])
        self.average.copy_(torch.where(self.average.isnan(), batch, self.average.lerp(batch, MOMENTUM)))


def install_turns(body: Any, norm: Any, schedule: Schedule) -> dict[str, Turn]:
    """Put a Turn at every scheduled site of ``body``, a GPT2; return them by site."""
    before = {site: body.get_submodule(site) for site in schedule.steps}
    if not before:
        return {}
    swap_norms(body, norm, list(before))
    turns = {site: Turn(old, body.get_submodule(site)) for site, old in before.items()}
    for site, turn in turns.items():
        body.set_submodule(site, turn)
        if isinstance(turn.after, FrozenLayerNorm):
            turn.after.calibration = None
    return turns


class CallTurns(TrainerCallback):
    """Calls each site's turn before its step."""

    def __init__(self, turns: dict[str, Turn], schedule: Schedule) -> None:
        self.turns, self.schedule = turns, schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.call(state.global_step)

    def call(self, step: int) -> None:
        """Call the turns that are due at ``step``."""
        for site, turn in self.turns.items():
            if not turn.turned and step >= self.schedule.steps[site]:
                turn.turned = True
                logging.getLogger("minigpt").info("step %d: %s is swapped", step, site)
        if self.schedule.merge_first is not None and step >= self.schedule.merge_first:
            for turn in self.turns.values():
                if isinstance(turn.after, FrozenLayerNorm) and turn.after.calibration is not None:
                    usual = turn.after.calibration[0]
                    turn.after.freeze(usual, usual)
