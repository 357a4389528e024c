"""The kernel of ``one_launch``. Arguments in lower case are pointers, sizes and strides; those in upper case are
compiled in.

B rows, H heads, S tokens that there is room for, D width of a head.
"""

# pyright: reportMissingImports=false

from typing import no_type_check

import triton
import triton.language as tl

from minigpt.norms.triton.kernels import rounded

STAGES = tl.constexpr(2)  # turns of the loop: while one is computed, the keys and values of the next are on their way


# One program for one mask and for many, so that a row has the same bits by both.
@triton.jit(do_not_specialize=("mask_stride",))
@no_type_check
def attend_newest(
    qkv, room, mask, column, y, heads, kind_stride, row_stride, head_stride, mask_stride,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Attend with one head of one row in each program. Each of PLACES has a separate softmax over some columns.

    Nothing is exchanged until the end. There these are combined with the new token's (Rabe and Staats 2021, arXiv
    2112.05682, section 2).
    """
    wide = tl.float64 if room.dtype.element_ty == tl.float64 else tl.float32
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    last = tl.load(column)
    along = tl.arange(0, BLOCK)  # (D)
    inside = along < WIDTH
    qkv += (row * 3 * heads + head) * WIDTH + along
    keys = room + row * row_stride + head * head_stride
    values = keys + kind_stride
    mask += row * mask_stride

    query = tl.load(qkv, mask=inside, other=0.0).to(wide) * SCALE
    key = tl.load(qkv + heads * WIDTH, mask=inside, other=0.0)
    value = tl.load(qkv + 2 * heads * WIDTH, mask=inside, other=0.0)
    tl.store(keys + last * WIDTH + along, key, mask=inside)
    tl.store(values + last * WIDTH + along, value, mask=inside)

    # The new token's own score is finite, where others may be minus infinity, which less itself would be NaN.
    own = tl.sum(query * key.to(wide), axis=0)
    best = tl.zeros([PLACES], wide) + own
    total = tl.zeros([PLACES], wide)
    mixed = tl.zeros([PLACES, BLOCK], wide)
    for first in tl.range(0, last, PLACES, num_stages=STAGES):
        place = first + tl.arange(0, PLACES)  # (PLACES)
        written = place < last
        at, known = place[:, None] * WIDTH + along[None, :], written[:, None] & inside[None, :]
        score = tl.sum(tl.load(keys + at, mask=known, other=0.0).to(wide) * query[None, :], axis=1)
        score += tl.load(mask + place, mask=written, other=float("-inf")).to(wide)
        better = tl.maximum(best, score)
        kept, weight = tl.exp(best - better), tl.exp(score - better)
        total = total * kept + weight
        mixed = mixed * kept[:, None] + weight[:, None] * tl.load(values + at, mask=known, other=0.0).to(wide)
        best = better

    top = tl.max(best, axis=0)
    share, own = tl.exp(best - top), tl.exp(own - top)
    mixed = tl.sum(mixed * share[:, None], axis=0) + own * value.to(wide)
    mixed /= tl.sum(total * share, axis=0) + own
    tl.store(y + (row * heads + head) * WIDTH + along, rounded(mixed, y), mask=inside)
