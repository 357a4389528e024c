"""A decoding step, sampling included, as a fixed sequence of kernels on fixed memory, for CUDA graphs.

B places, S columns of the cache, C embedding, V vocabulary.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.engine.compiled import FixedCache, hiding, read_fixed
from minigpt.generation.choosing import drawn, next_logits
from minigpt.generation.processors import Situation, warp_by
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.generation.slots import Slots


class Step:
    """Reads the last token at every place and chooses the next.

    Rows are data, so they may join and leave between steps. An empty place computes a text too. It starts when the rows
    are seated, so it is shorter than theirs and stays in range.

    Attributes:
        rows: the rows at the first places.
        report: (2, B) the chosen tokens, and the largest logit of each row, which is NaN if any logit is.
        logits: (B, V) of the last step.
    """

    def __init__(self, model: GPT2, slots: Slots, settings: GenerationSettings, places: int) -> None:
        device, config = model.wte.weight.device, model.config
        self.model, self.slots, self.places = model, slots, places
        self.compiled = model.step if model.step is not None and model.step.holds(places, slots.max_length) else None
        self.logits = torch.empty(0, config.vocab_size)
        self.rows: list[Row] = []
        self.tokens, self.starts = torch.zeros(2, places, dtype=torch.long, device=device)  # each (B,)
        self.column, self.turn = torch.zeros(2, 1, dtype=torch.long, device=device)  # each (1,)
        self.mask = torch.zeros(places, slots.max_length, dtype=model.wte.weight.dtype, device=device)  # (B, S)
        self.chances = torch.zeros(places, slots.max_length, dtype=torch.float64, device=device)
        self.report = torch.zeros(2, places, dtype=torch.float64, device=device)
        self.at = Situation(settings, torch.empty(0, 0), 0, ())

    def seat(self, rows: list[Row]) -> None:
        """Set the rows of the next steps, each at the place of its slot."""
        self.rows, idle = list(rows), self.places - len(rows)
        room, length = self.slots.max_length, self.slots.length
        starts, columns = torch.tensor(self.slots.starts + [length] * idle), torch.arange(room)
        self.tokens.copy_(torch.tensor([row.ids[-1] for row in rows] + [0] * idle))
        self.starts.copy_(starts)
        self.mask.copy_(hiding((columns >= starts[:, None]) & (columns < length), self.mask.dtype))
        self.column.fill_(length)
        self.turn.zero_()
        if self.at.settings.samples:
            chances = torch.zeros(self.chances.shape, dtype=torch.float64)
            for place, row in enumerate(rows):
                chances[place] = row.chances(room)
            self.chances.copy_(chances)

    def __call__(self) -> None:
        """Run the step in place, without waiting for the host."""
        model = self.model
        self.mask.index_fill_(1, self.column, 0)
        x = model.wte(self.tokens[:, None]) + model.wpe((self.column - self.starts)[:, None])  # (B, 1, C)
        self.logits = next_logits(model, model.head(self._read(x))[:, 0])
        scores = warp_by(self.logits, self.at)
        best, tokens = scores.max(-1)  # (B,)
        if self.at.settings.samples:
            tokens = drawn(scores, self.chances.index_select(1, self.turn)[:, 0])
        self.tokens.copy_(tokens)
        self.report[0].copy_(tokens)
        self.report[1].copy_(best if scores is self.logits else self.logits.amax(-1))
        self.column.add_(1)
        if self.at.settings.samples:
            self.turn.add_(1)

    def _read(self, x: Float[Tensor, "batch 1 embd"]) -> Float[Tensor, "batch 1 embd"]:
        layers = self.slots.room.unbind()  # each (2, B, H, S, D)
        if self.compiled is not None:
            return self.compiled.read(x, self.mask, layers, self.column)
        return read_fixed(self.model, x, self.mask, FixedCache(layers, self.column))
