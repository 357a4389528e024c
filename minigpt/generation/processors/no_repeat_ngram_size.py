import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import at_least


@processor(order=20, rule=at_least(0), neutral=(0,), looks_back=True)
def no_repeat_ngram_size(logits: Logits, size: int, at: Situation) -> Logits:
    """Exclude tokens that would complete a run of ``size`` tokens that the text already has (arXiv 1705.04304)."""
    ids = at.ids
    if ids.shape[1] < size:
        return logits
    runs = ids.unfold(1, size, 1)  # (B, T - size + 1, size)
    begun = ids[:, ids.shape[1] - size + 1 :]  # (B, size - 1)
    again = (runs[..., :-1] == begun[:, None]).all(-1)  # (B, T - size + 1)
    row, place = again.nonzero(as_tuple=True)
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[row, runs[row, place, -1]] = True
    return logits.masked_fill(banned, -torch.inf)
