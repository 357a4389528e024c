"""Clues to a mistake that has no name: where a program's logits, norms and blocks are right, and where they are off.

T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minigpt.judge.evidence import Evidence
from minigpt.judge.original_data import OriginalData
from minigpt.report.fields import NormSiteError, ParityFigures, places
from minigpt.report.noise import FAR_OFF, MOST_NOISE, noise_ratio
from minigpt.report.numerals import brief

BIN = 64  # logits of about the same size, which a smooth function takes along a cubic
MOST_LOGITS = 2**20  # that are looked at
NEARLY_ALL = 0.9  # of the bins: those of the largest logits are wide
LEAST_ROWS = 16  # at least, in which an error grows, or that one text is right before it is off
MUCH_LARGER = 4.0  # of an error, from the first quarter of these rows to the last
RANKED = 0.8  # correlation of the ranks of error and position


def clues_of(truth: OriginalData, texts: Sequence[Evidence], figures: ParityFigures) -> list[str]:
    """Return a sentence for each clue that is clear.

    Args:
        texts: the prompts, and perhaps a longer text.
    """
    floor = truth.floor
    least = 1 / noise_ratio(1.0, 0.0, floor.prompts.scale)  # the rounding of float64
    return [
        *by_position(texts, floor.position or least),
        *by_size(texts, floor.prompts.rms or least),
        *by_place(truth, figures),
        *by_type(figures, truth.facts.layer_types),
    ]


# Positions


def rows_off(text: Evidence, noise: float) -> Tensor:
    """Return the RMS error (T) at each position, in units of the noise."""
    return (text.logits - text.truth).square().mean(-1).sqrt() / noise


def by_position(texts: Sequence[Evidence], noise: float) -> Iterator[str]:
    """Yield from which position on the logits are off, and whether the error grows.

    Args:
        noise: transformers' largest RMS error at a position.
    """
    ratios = [rows_off(text, noise) for text in texts]
    if any(not bool(ratio.isfinite().all()) for ratio in ratios):
        return
    firsts = [int((ratio > MOST_NOISE).long().argmax()) for ratio in ratios]
    off = [number for number, ratio in enumerate(ratios) if ratio.amax() > MOST_NOISE]
    if not off:
        return
    by = f"off by up to {brief(max(float(ratio.amax()) for ratio in ratios))} times the noise"
    longest = [number for number, text in enumerate(texts) if text.padding == 0]
    if len(off) + len(longest) == len(texts) and not {*off} & {*longest}:
        yield f"The longest prompt is right, and shorter ones are {by}: look at padding, its mask and its positions."
        return
    first, lengths = firsts[off[0]], {texts[number].new_from for number in off}
    can_show = [number for number, ratio in enumerate(ratios) if len(ratio) > first]
    if len(lengths) > 1 and all(firsts[number] == texts[number].new_from for number in off):
        yield f"Each prompt is right, and what is written behind it is {by}: look at the cache and at positions there."
    elif is_one_place(len(can_show), first) and all(number in off and firsts[number] == first for number in can_show):
        where = f"Each text is right before position {first}, and {by} from there on"
        hint = f"a length of {first}, as of a window, a cache or a table"
        if first == 1:
            where, hint = f"Position 0 is right in every text, and later ones are {by}", "scores, mask and positions"
        yield f"{where}: look for {hint}."
    yield from _growth(max(ratios, key=len))


def is_one_place(texts: int, first: int) -> bool:
    """Return whether texts that are off from position ``first`` on show a place that no single text explains."""
    return first >= LEAST_ROWS or (first > 0 and texts > 1)


def _growth(ratios: Tensor) -> Iterator[str]:
    """Yield whether the error grows along a text."""
    positions = (ratios > MOST_NOISE).nonzero()[:, 0]
    if len(positions) < LEAST_ROWS:
        return
    errors = ratios[positions]
    ranks = torch.stack([positions.argsort().argsort(), errors.argsort().argsort()]).double()
    quarter = len(errors) // 4
    before, after = float(errors[:quarter].mean()), float(errors[-quarter:].mean())
    if float(torch.corrcoef(ranks)[0, 1]) >= RANKED and after >= MUCH_LARGER * before:
        yield (
            f"The error grows along the text, from {brief(before)} to {brief(after)} times the noise, "
            "as errors of positions and of rotary angles do."
        )


# Sizes


def by_size(texts: Sequence[Evidence], noise: float) -> Iterator[str]:
    """Yield whether the logits are a monotone function of the right ones."""
    truth = torch.cat([text.truth.flatten() for text in texts])
    logits = torch.cat([text.logits.flatten() for text in texts])
    step = -(-len(truth) // MOST_LOGITS)
    order = truth[::step].argsort()
    order = order[: len(order) // BIN * BIN]
    x, y = (values[::step][order].view(-1, BIN) for values in (truth, logits))  # (bins, BIN)
    x = x - x.mean(-1, keepdim=True)
    size = x.square().mean(-1, keepdim=True).sqrt()
    powers = torch.stack([(x / size) ** power for power in range(4)], dim=-1)  # (bins, BIN, 4)
    fitted = torch.linalg.lstsq(powers, y[..., None]).solution  # (bins, 4, 1)
    slope = fitted[:, 1, 0] / size[:, 0]
    left = (y[..., None] - powers @ fitted)[..., 0].square().mean(-1).sqrt()
    ratios = left / (noise * slope.clamp(min=1))
    if len(ratios) and float(((ratios <= MOST_NOISE) & (slope > 0)).double().mean()) >= NEARLY_ALL:
        yield (
            f"The logits are a monotone function of the right ones, but for {brief(float(ratios.median()))} times the "
            "noise: look for a cap, a scale or a temperature of the logits."
        )


# Norms and blocks


def by_place(truth: OriginalData, figures: ParityFigures) -> Iterator[str]:
    """Yield whether the first output that is off is that of a norm, an attention or an MLP."""
    before: NormSiteError | None = None
    for place in places(figures):
        if is_off(place):
            break
        before = place
    else:
        return
    name, blocks = place.site, truth.facts.blocks
    local = place.local_error
    if local is not None and local > MOST_NOISE * place.noise:
        yield f"The first output that is off is a norm's: {name} is off by {brief(local)} with the right input too."
    elif before is not None and name not in blocks and before.site in blocks:
        yield f"The first output that is off is a norm's: {name} reads what {before.site} writes, which is right."
    elif before is not None and is_serial(truth, before.site, name):
        part = "an MLP's" if name in blocks else "an attention's"
        if local is None and name not in blocks:
            part += " or a norm's"
        yield f"The first output that is off is {part}: {before.site} is right, and {name} behind it is off."


def is_off(place: NormSiteError) -> bool:
    return noise_ratio(place.propagated_error, place.noise) > FAR_OFF


def is_serial(truth: OriginalData, before: str, place: str) -> bool:
    """Return whether blocks are norm, attention, norm, MLP, and one of these stands between two places of a block."""
    blocks, exact = truth.facts.blocks, truth.exact[truth.texts.prompts[0]]
    if len(blocks) < 2 or not exact.inputs:
        return False
    norms = [norms_of(truth, block) for block in blocks[:2]]
    if any(len(of_block) != 2 for of_block in norms):
        return False
    stream = exact.outputs[blocks[0]]
    first, second = (exact.inputs[norm] for norm in norms[1])
    is_before_attention = torch.equal(first, stream)
    is_parallel = torch.equal(second, stream)
    is_inside = any((before, place) in pairwise([*norms_of(truth, block), block]) for block in blocks)
    is_after = torch.allclose(truth.norms[norms[0][1]](exact.inputs[norms[0][1]]), stream.double())
    return is_before_attention and is_inside and not is_parallel and not is_after


def norms_of(truth: OriginalData, block: str) -> list[str]:
    """Return a block's own norms, not those within its attention."""
    return [site for site in truth.facts.sites if site.rpartition(".")[0] == block]


def by_type(figures: ParityFigures, layer_types: Sequence[str]) -> Iterator[str]:
    """Yield whether the first block that is off is the first of its type."""
    for number, (block, kind) in enumerate(zip(figures.blocks, layer_types, strict=False)):
        ratio = noise_ratio(block.error, block.noise)
        if ratio > FAR_OFF:
            if number > 0 and kind not in layer_types[:number]:
                yield (
                    f"The first block that is off, {block.block}, is the first of type {kind}: those before it are "
                    f"right, and it is {brief(ratio)} times the noise off."
                )
            return
