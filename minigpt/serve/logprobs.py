"""The model's own log-probabilities, before any setting changes the logits.

R tokens, V vocabulary.
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.generation.choosing import next_logits

LOWEST = -9999.0  # instead of -inf, which JSON does not have
AT_ONCE = 128  # positions of a prompt whose logits are computed at a time


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a prompt or of a completion.

    Attributes:
        logprob: natural logarithm of its probability; None for the first token of a prompt, which has no context.
        top: the likeliest ids at its position with their log-probabilities, the likeliest first.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]


@torch.inference_mode()
def tokens_of(logits: Float[Tensor, "rows vocab"], ids: list[int], alternatives: int) -> list[Token]:
    """Return the token ``ids[i]`` of each row with its log-probability and the row's likeliest ``alternatives``."""
    logprobs = logits.log_softmax(-1).clamp_min(LOWEST)  # (R, V)
    chosen = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    if not alternatives:
        return [Token(id, logprob, []) for id, logprob in zip(ids, chosen, strict=True)]
    values, likeliest = (part.tolist() for part in logprobs.topk(min(alternatives, logits.shape[-1])))
    tops = [list(zip(*pair, strict=True)) for pair in zip(likeliest, values, strict=True)]
    return [Token(*token) for token in zip(ids, chosen, tops, strict=True)]


@torch.inference_mode()
def prompt_tokens(model: GPT2, ids: list[int], alternatives: int) -> list[Token]:
    """Return the tokens of a prompt with their log-probabilities, from one forward."""
    hidden = model.hidden_states(torch.tensor([ids], device=model.wte.weight.device))[:, :-1]  # (1, T - 1, C)
    tokens = [Token(ids[0], None, [])]
    for part in hidden.split(AT_ONCE, dim=1):
        if part.shape[1]:
            logits = next_logits(model, model.head(part)[0])  # (R, V)
            tokens += tokens_of(logits, ids[len(tokens) : len(tokens) + len(logits)], alternatives)
    return tokens
