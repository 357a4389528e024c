"""Greedy continuations: do candidate and transformers write the same tokens, and if not, was it a close call?"""

from typing import NamedTuple

from minigpt.errors import GenerationError, NormError
from minigpt.generation import generate
from minigpt.lab.contest import Contest, Judged
from minigpt.lab.report import Divergence, Greedy


class Continued(NamedTuple):
    """A prompt with the new tokens that each wrote after it."""

    prompt: list[int]
    candidate: list[int]
    reference: list[int]

    @property
    def text(self) -> list[int]:
        """The prompt as transformers goes on from it: what every logit is compared on."""
        return self.prompt + self.reference


def continued(contest: Contest, prompt: list[int], most: int) -> Continued:
    """Up to ``most`` new tokens each, fewer where the context ends."""
    config, ids = contest.config, contest.tensor(prompt)
    new = min(most, config.n_positions - len(prompt))
    if new < 1:
        return Continued(prompt, [], [])
    try:
        ours = generate(contest.candidate, ids, max_new_tokens=new)[0, len(prompt) :].tolist()
    except GenerationError as error:
        raise NormError(f"with this norm {error}") from error
    return Continued(prompt, ours, contest.reference.greedy(ids, new, config.eos_token_ids))


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
