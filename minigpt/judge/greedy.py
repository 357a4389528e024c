"""What the candidate and transformers write greedily, and the logits as they are while it is written.

A norm may be right on whole texts and wrong there: at one token a row, in the addition it then fuses, in a batch.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import GenerationError, NormError
from minigpt.generation import generate
from minigpt.generation.batch import left_padded, of_any_length
from minigpt.judge.contest import Contest, Judged
from minigpt.judge.measures import Distance
from minigpt.judge.report import Fields
from minigpt.model import GPT2

BATCH = 8  # prompts read at once: a step costs hardly more for 8 rows than for one


class Continued(NamedTuple):
    """A prompt with the new tokens that the candidate and transformers wrote after it."""

    prompt: list[int]
    candidate: list[int]
    reference: list[int]

    @property
    def text(self) -> list[int]:
        """The prompt with what transformers wrote: every logit is compared on this text."""
        return self.prompt + self.reference

    @property
    def before_new(self) -> slice:
        """The positions of ``text`` that predict the tokens transformers wrote."""
        return slice(len(self.prompt) - 1, len(self.text) - 1)


def continuations(contest: Contest, prompts: list[list[int]], most: int) -> list[Continued]:
    """Write up to ``most`` new tokens after each prompt, fewer where the context ends.

    Raises:
        NormError: if the candidate's logits are NaN.
    """
    room = [min(most, contest.config.n_positions - len(prompt)) for prompt in prompts]
    texts = [Continued(prompt, [], []) for prompt in prompts]
    for new, batch in batches(room):
        for i, text in zip(batch, _continued(contest, [prompts[i] for i in batch], new), strict=True):
            texts[i] = text
    return texts


def batches(lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Group texts that are written together: a length above 0, and the numbers of up to ``BATCH`` texts of it."""
    for length in sorted(set(lengths) - {0}):
        alike = [i for i, one in enumerate(lengths) if one == length]
        yield from ((length, alike[start : start + BATCH]) for start in range(0, len(alike), BATCH))


def _continued(contest: Contest, prompts: list[list[int]], new: int) -> list[Continued]:
    ids, mask = left_padded(prompts, contest.device)  # both (B, T)
    ends = contest.config.eos_token_ids
    try:
        ours = generate(contest.candidate, ids, mask, max_new_tokens=new)
    except GenerationError as error:
        raise NormError(f"with this norm {error}") from error
    theirs = contest.reference.greedy(ids, mask, new, ends)
    written = [[_to_its_end(row, ends) for row in rows[:, ids.shape[1] :].tolist()] for rows in (ours, theirs)]
    return [Continued(*texts) for texts in zip(prompts, *written, strict=True)]


def _to_its_end(new: list[int], ends: tuple[int, ...]) -> list[int]:
    """The new tokens of a row without the padding after its end."""
    last = next((i for i, token in enumerate(new) if token in ends), len(new))
    return new[: last + 1]


def compare_greedy(
    texts: list[Continued], truths: list[Float[Tensor, "_seq vocab"]], noise: float, judged: Judged
) -> Fields:
    """Compare what both wrote; the report names the first difference that noise does not explain, else the first.

    Args:
        truths: for each text the true logits (T, V) at every token.
        noise: two best true logits that are this close are within the noise.
    """
    compared, partings = 0, []
    for i, (text, truth) in enumerate(zip(texts, truths, strict=True)):
        j = first_difference(text.candidate, text.reference)
        compared += min(len(text.candidate), len(text.reference)) if j is None else j + 1
        if j is not None:
            best = truth[text.before_new][j].topk(2).values
            margin = float(best[0] - best[1])
            partings.append(
                Fields(
                    prompt=i,
                    token=j,
                    candidate_id=text.candidate[j],
                    reference_id=text.reference[j],
                    margin=margin,
                    noise=noise,
                    within_noise=margin <= noise,
                    prompt_text=judged.text(text.prompt),
                    candidate_text=judged.text(text.candidate),
                    reference_text=judged.text(text.reference),
                )
            )
    first = min(partings, key=lambda parting: parting.within_noise, default=None)
    return Fields(tokens_compared=compared, first_divergence=first)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first index at which two sequences differ; None if one begins with the other."""
    return next((j for j, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), None)


# B texts, T tokens, V vocabulary

Read = Callable[[Tensor, Tensor], Tensor]  # more ids (B, T) and the mask of all so far -> logits (B, V) after them
Begin = Callable[[int, int], Read]  # how many texts, and the most tokens of each


@of_any_length()
def decoding_distance(
    begin: Begin, texts: list[Continued], truths: list[Float[Tensor, "_seq vocab"]], device: torch.device
) -> Distance:
    """How far the logits are from the truth when each text is read as it was written, a token at a time.

    Args:
        begin: makes the reader of a batch: ``reader_of`` a model, or ``Reference.reading``.
        truths: for each text the true logits (T, V) at every token.
    """
    found = Distance()
    for new, batch in batches([len(text.reference) for text in texts]):
        few = [texts[i] for i in batch]
        ids, mask = left_padded([text.prompt for text in few], device)  # both (B, T)
        written = torch.tensor([text.reference for text in few], device=device)  # (B, new)
        read = begin(len(few), ids.shape[1] + new - 1)
        for step in range(new):
            if step > 0:
                ids = written[:, step - 1 : step]
                mask = torch.cat([mask, mask.new_ones(len(few), 1)], dim=1)
            found.add(read(ids, mask), torch.stack([truths[i][texts[i].before_new][step] for i in batch]))
    return found


def reader_of(model: GPT2) -> Begin:
    """Read with a model of ours."""

    def begin(batch: int, longest: int) -> Read:
        cache = model.new_cache(batch, longest)
        return lambda ids, mask: model.head(model.hidden_states(ids, mask, cache=cache)[:, -1:])[:, 0]

    return begin
