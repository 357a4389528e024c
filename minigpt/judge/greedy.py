"""Greedy continuations: do candidate and transformers write the same tokens, and if not, was it a close call?"""

from collections.abc import Iterator
from typing import NamedTuple

from minigpt.errors import GenerationError, NormError
from minigpt.generation import generate
from minigpt.generation.padding import left_padded
from minigpt.judge.contest import Contest, Judged
from minigpt.judge.parity_report import Divergence, Greedy

BATCH = 8  # prompts read at once: a step of a batch costs hardly more than one of a single row


class Continued(NamedTuple):
    """A prompt with the new tokens that each wrote after it."""

    prompt: list[int]
    candidate: list[int]
    reference: list[int]

    @property
    def text(self) -> list[int]:
        """The prompt as transformers goes on from it: what every logit is compared on."""
        return self.prompt + self.reference

    @property
    def before_new(self) -> slice:
        """The places of ``text`` at which each token that transformers wrote is foreseen."""
        return slice(len(self.prompt) - 1, len(self.text) - 1)


def continuations(contest: Contest, prompts: list[list[int]], most: int) -> list[Continued]:
    """Up to ``most`` new tokens after each prompt, fewer where the context ends, in the order of the prompts.

    Raises:
        NormError: the candidate's logits are NaN.
    """
    room = [min(most, contest.config.n_positions - len(prompt)) for prompt in prompts]
    texts = {i: Continued(prompt, [], []) for i, prompt in enumerate(prompts)}
    for new, batch in batches(room):
        texts.update(zip(batch, _continued(contest, [prompts[i] for i in batch], new), strict=True))
    return [texts[i] for i in range(len(prompts))]


def batches(lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Which texts are written together: those of one length above 0, and that length; by their numbers."""
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
    """The new tokens of a row without what fills it after its end."""
    last = next((i for i, token in enumerate(new) if token in ends), len(new))
    return new[: last + 1]


def compare_greedy(texts: list[Continued], margins: list[list[float]], noise: float, judged: Judged) -> Greedy:
    """The first difference that noise does not explain, else the first.

    Args:
        margins: for each text, what parts the two best true logits before each new token.
        noise: margins up to this are within the noise.
    """
    compared, partings = 0, []
    for i, (text, margin) in enumerate(zip(texts, margins, strict=True)):
        j = first_difference(text.candidate, text.reference)
        compared += min(len(text.candidate), len(text.reference)) if j is None else j + 1
        if j is not None:
            partings.append(
                Divergence(
                    prompt=i,
                    token=j,
                    candidate_id=text.candidate[j],
                    reference_id=text.reference[j],
                    margin=margin[j],
                    noise=noise,
                    prompt_text=judged.text(text.prompt),
                    candidate_text=judged.text(text.candidate),
                    reference_text=judged.text(text.reference),
                )
            )
    return Greedy(compared, min(partings, key=lambda parting: parting.within_noise, default=None))


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two sequences first differ, as far as both go."""
    return next((j for j, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), None)
