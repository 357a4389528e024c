"""When each site gets its new norm, and the modules that change over: ``'h.*.ln_2@20+2, ln_f@40, first@50'``."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.swap import swap_norms
from minigpt.swap.fit import fit_to, separate
from minigpt.swap.sites import KEEP, matching

MERGES = ("first", "eot")  # stages that take a kind of row's own deviation away from frozen norms
READERS = (".qk", ".v")  # who reads ln_1: queries and keys, and values
MOMENTUM = 0.1  # weight of the newest batch in the running average
FIRST, USUAL, EOT = range(3)  # the kinds of rows that a frozen norm may divide by a deviation of their own

_STAGE = re.compile(r"(?P<pattern>[^@\s]+)@(?P<start>\d+)(?:\+(?P<gap>\d+))?")


@dataclass(frozen=True)
class Schedule:
    """The step before which each site is swapped.

    Attributes:
        steps: by site; "h.0.ln_1.qk" and "h.0.ln_1.v" if queries and keys have another turn than values.
        merges: by kind of row, "first" or "eot": the step from which frozen norms divide the first position, or
            end-of-text tokens, by the usual deviation.
    """

    steps: dict[str, int]
    merges: dict[str, int] = field(default_factory=dict)


def site_of(turn: str) -> str:
    """Return the norm site of a key of ``Schedule.steps``."""
    return turn.removesuffix(".qk").removesuffix(".v")


def parse_schedule(text: str | None, sites: Sequence[str]) -> Schedule:
    """Return the schedule that ``text`` asks for.

    Args:
        text: stages ``PATTERN@START+GAP`` with commas between. The first site of a pattern is swapped before step START
            and each further one GAP steps later. Without ``+GAP`` all are swapped at once. ``h.*.ln_1.qk`` is ln_1 for
            queries and keys, ``h.*.ln_1.v`` for values. The stages ``first@START`` and ``eot@START`` end the special
            treatment of the first position, and of end-of-text tokens. None swaps every site before step 0.
        sites: the model's norm sites in the order of the data.

    Raises:
        NormError: if a stage has another form, a pattern matches no site, or a site has two turns. Also if queries
            and keys have a turn and values have none, or the reverse.
    """
    if text is None:
        return Schedule(dict.fromkeys(sites, 0))
    steps: dict[str, int] = {}
    merges: dict[str, int] = {}
    for stage in text.split(","):
        match = _STAGE.fullmatch(stage.strip())
        if match is None:
            raise NormError(
                f"a stage of the schedule must be PATTERN@START or PATTERN@START+GAP, got {stage.strip()!r}"
            )
        pattern, start, gap = match["pattern"], int(match["start"]), int(match["gap"] or 0)
        if pattern in MERGES:
            merges[pattern] = start
            continue
        reader = next((reader for reader in READERS if pattern.endswith(reader)), "")
        known = [site for site in sites if not reader or site.endswith("ln_1")]
        matched = [f"{site}{reader}" for site in matching(pattern.removesuffix(reader), known)]
        taken = {*steps, *(site_of(turn) for turn in steps)} if not reader else {*steps}
        if twice := [turn for turn in matched if turn in taken or (reader and site_of(turn) in steps)]:
            raise NormError(f"schedule: {site_of(twice[0])} has two turns; the second is in {stage.strip()!r}")
        steps |= {turn: start + gap * place for place, turn in enumerate(matched)}
    halves = [turn for turn in steps if turn != site_of(turn)]
    for turn in halves:
        if any(f"{site_of(turn)}{reader}" not in steps for reader in READERS):
            raise NormError(f"schedule: {turn} has a turn; give {', '.join(READERS)} of {site_of(turn)} both one")
    return Schedule(steps, merges)


class Turn(nn.Module):
    """The norm ``before`` until its turn, then the norm ``after``.

    Both are there from the first step, so an optimizer, a checkpoint and distributed training always see the same
    parameters. Which one computes depends on the step alone, so nothing has to be restored when training resumes.

    Buffer ``average``: a running average of the deviations of the first position, of the usual rows, and of end-of-text
    tokens. Only a frozen norm needs it. It is NaN until the first batch with such rows.

    Attributes:
        turned: whether the output is the new norm's.
        values_turned: whether the values of the attention are computed from the new norm's output.
        values: what they are computed from if that is another norm's than the output, until the attention reads it.
        ends: where the batch has end-of-text tokens (B, T), if they have a deviation of their own; else None.
    """

    average: Tensor
    after: Any

    def __init__(self, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.turned = self.values_turned = False
        self.values: Tensor | None = None
        self.ends: Tensor | None = None
        self.register_buffer("average", torch.full((3,), float("nan"), device=next(after.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.after, FrozenLayerNorm) and self.after.calibration is None and x.shape[1] > 1:
            if (self.training and not self.has_begun) or self.average[:EOT].isnan().any():
                self.observe(x.detach())
            if self.has_begun:
                self.after.freeze(self.average[FIRST], self.average[USUAL])
        if self.turned != self.values_turned:
            self.values = self.replaced(x) if self.values_turned else self.before(x)
        return self.replaced(x) if self.turned else self.before(x)

    def replaced(self, x: Tensor) -> Tensor:
        """Return the new norm's output. End-of-text tokens are divided by their own deviation if they have one."""
        y = self.after(x)
        if self.ends is None or self.average[EOT].isnan():
            return y
        scaled = (x - x.mean(-1, keepdim=True)) / self.average[EOT] * self.after.weight
        return torch.where(self.ends[..., None], scaled if self.after.bias is None else scaled + self.after.bias, y)

    @property
    def has_begun(self) -> bool:
        """True if a part of the attention or more reads the new norm."""
        return self.turned or self.values_turned

    @property
    def present(self) -> nn.Module:
        """The norm whose output is this site's now."""
        return self.after if self.turned else self.before

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Move the running average towards the deviations of ``x`` (B, T, C)."""
        deviation = self.after.deviation(x.float()).squeeze(-1)  # (B, T)
        usual, ends = deviation[:, 1:], deviation.new_empty(0)
        if self.ends is not None:
            usual, ends = usual[~self.ends[:, 1:]], deviation[self.ends]
        batch = torch.stack([deviation[:, 0].mean(), usual.mean(), ends.mean()])
        moved = torch.where(self.average.isnan(), batch, self.average.lerp(batch, MOMENTUM))
        self.average.copy_(torch.where(batch.isnan(), self.average, moved))


class Turns:
    """The turns of a model, and the schedule that calls them.

    Attributes:
        of: the Turn at each scheduled site.
        ends_apart: whether end-of-text tokens have a deviation of their own at this step.
    """

    ends_apart = False

    def __init__(
        self, body: Any, norm: Any, schedule: Schedule, *, keep: Collection[str] = KEEP,
        end_of_text: int | None = None, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Put a Turn at every scheduled site of ``body``, a GPT-2 of transformers' layout.

        Args:
            norm, keep: as ``swap_norms`` takes them.
            end_of_text: the id of that token, whose rows may have a deviation of their own.
            rows: token ids (B, T) that the new norms are fitted on at their turn.
        """
        before = {site: body.get_submodule(site) for site in map(site_of, schedule.steps)}
        if before:
            swap_norms(body, norm, list(before), keep)
        self.body, self.schedule, self.rows = body, schedule, rows
        self.of = {site: Turn(old, body.get_submodule(site)) for site, old in before.items()}
        for site, turn in self.of.items():
            body.set_submodule(site, turn)
            if isinstance(turn.after, FrozenLayerNorm):
                turn.after.calibration = None
            if rows is not None:
                separate(turn.after)  # before there is an optimizer, which holds the Parameters from the first step
        self.end_of_text = end_of_text
        if "eot" in schedule.merges and end_of_text is not None:
            body.register_forward_pre_hook(self._mark, with_kwargs=True)

    def split_attention(self, body: Any) -> None:
        """Let the attention's values be computed from another norm's output, where they have another turn."""
        for site, turn in self.of.items():
            if f"{site}.v" in self.schedule.steps:
                layer = body.get_submodule(f"{site.removesuffix('.ln_1')}.attn.c_attn")
                layer.register_forward_hook(lambda layer, _, qkv, turn=turn: _with_values(layer, qkv, turn))

    def call(self, step: int, *, fits: bool = True) -> None:
        """Call the turns that are due at ``step``.

        Args:
            fits: False if the new norms' values come from a checkpoint.
        """
        called = [name for name, start in self.schedule.steps.items() if step >= start]
        due = [site for site in dict.fromkeys(map(site_of, called)) if not self.of[site].has_begun]
        if due and fits and self.rows is not None:
            self._fit(due, self.rows)
        for name in called:
            turn = self.of[site_of(name)]
            turn.turned |= not name.endswith(".v")
            turn.values_turned |= not name.endswith(".qk")
        merges = self.schedule.merges
        self.ends_apart = step < merges.get("eot", 0)
        for turn in self.of.values():
            if not self.ends_apart:
                turn.ends = None
            if step >= merges.get("first", math.inf) and getattr(turn.after, "calibration", None) is not None:
                usual = turn.after.calibration[0]
                turn.after.freeze(usual, usual)

    def _fit(self, sites: list[str], rows: Tensor) -> None:
        """Fit the new norms at ``sites`` to the old ones, in the model as it is at this step."""
        for site in sites:
            self.body.set_submodule(site, self.of[site].after)
        fit_to(self.body, rows.to(self.body.wte.weight.device), {site: self.of[site].before for site in sites})
        for site in sites:
            self.body.set_submodule(site, self.of[site])

    def _mark(self, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.ends_apart:
            ends = (args[0] if args else keywords["input_ids"]) == self.end_of_text
            ends[:, 0] = False  # the first position is another kind
            for turn in self.of.values():
                turn.ends = ends


def _with_values(layer: nn.Module, qkv: Tensor, turn: Turn) -> Tensor:
    """Return ``qkv`` (B, T, 3C) with the values of ``turn.values``; the layer reads them a second time."""
    if turn.values is None:
        return qkv
    values, turn.values = turn.values, None
    width = qkv.shape[-1] // 3
    return torch.cat([qkv[..., : 2 * width], layer.forward(values)[..., 2 * width :]], dim=-1)
