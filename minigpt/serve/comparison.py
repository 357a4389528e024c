"""Two models continue one prompt, and each also reads the text of the other.

So every position of either text has two distributions over the same context, and their divergence. V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import RAISED
from minigpt.generation.batch import WASTE, Batch
from minigpt.generation.choosing import next_tokens
from minigpt.generation.row import Row
from minigpt.model import GPT2
from minigpt.serve.job import REASONS, Channel


class Comparison:
    """A request to compare two models.

    Args:
        models: the two.
        rows: the text of each, both with the same prompt.
        alternatives: how many of the likeliest tokens by each model to report.
        token_text: returns the text of a token.
    """

    def __init__(
        self, models: tuple[GPT2, GPT2], rows: tuple[Row, Row], alternatives: int, token_text: Callable[[int], str]
    ) -> None:
        self.models, self.rows, self.alternatives, self.token_text = models, rows, alternatives, token_text
        self.channel, self.is_over = Channel(), False
        self._batches: list[Batch] = []

    def step(self) -> None:
        """Add a token to each text that is not over, and report them or an error."""
        try:
            self._step()
        except RAISED as error:
            self.channel.fail(error)

    def _step(self) -> None:
        for batch in self._batches:
            batch.read()
        if not self._batches:
            for model in self.models:
                batch = Batch(model, 2, model.config.n_positions + WASTE)
                batch.join(list(self.rows))
                self._batches.append(batch)
        logits = [dict(zip(batch.rows, batch.logits.split(1), strict=True)) for batch in self._batches]
        events = [
            self._written(side, row, [of_model[row] for of_model in logits])
            for side, row in enumerate(self.rows)
            if row in logits[0]
        ]
        over = [row for row in self.rows if row.end]
        for batch in self._batches:
            batch.drop(over)
        self.is_over = len(over) == 2
        for event in events:
            self.channel.send(event, self.is_over and event is events[-1])

    @torch.inference_mode()
    def _written(self, side: int, row: Row, logits: list[Float[Tensor, "1 vocab"]]) -> dict[str, Any]:
        """Add a token to a text; return the report, as the client gets it.

        Its ``kl`` is the Kullback-Leibler divergence of the second model's distribution from the first's, in nats.
        """
        (token,) = next_tokens(logits[side], [row])
        position = len(row.new_ids)
        row.push(token)
        both = torch.cat([of_model.cpu() for of_model in logits]).double().log_softmax(-1)  # (2, V)
        probabilities = both.exp()
        kl = float(torch.where(probabilities[0] > 0, probabilities[0] * (both[0] - both[1]), 0.0).sum())
        likeliest = probabilities.topk(self.alternatives).indices.T.flatten().tolist()  # of both models, in turn

        def shown(id: int) -> dict[str, Any]:
            return {"id": id, "token": self.token_text(id), "probabilities": probabilities[:, id].tolist()}

        alternatives = sorted(map(shown, dict.fromkeys(likeliest)), key=lambda one: -sum(one["probabilities"]))
        return {
            "side": side, "position": position, "text": row.take_text(), "kl": max(kl, 0.0),
            "chosen": shown(token), "alternatives": alternatives, "finish_reason": REASONS[row.end],
        }  # fmt: skip
