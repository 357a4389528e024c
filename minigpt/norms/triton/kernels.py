"""The kernels. Arguments in lower case are pointers to contiguous tensors, and sizes. Upper case is compiled in.

Offsets have 64 bits. ``stats`` holds the mean of every row, then the reciprocal deviation of every row, in the dtype of
the sums. The order of a row's sums depends on its width alone, so its bits do not depend on the other rows.
"""

# pyright: reportMissingImports=false

from typing import no_type_check  # Triton compiles the source, so a checker must not wrap the functions

import triton
import triton.language as tl

COUNTS = ("rows", "programs")  # Triton compiles no version for 1 of these. For one round it does, without a loop
STAGES = tl.constexpr(2)  # turns of a loop in flight: one is computed while the rows of the next are loaded


@triton.jit
@no_type_check
def rows_of_turn(turn, ROWS: tl.constexpr):
    """Return the numbers (ROWS, 1) of this program's rows in this turn. The rows of all programs are adjacent."""
    program = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0).to(tl.int64)
    return program * ROWS + tl.arange(0, ROWS)[:, None]


INTERPRETED = tl.constexpr(not isinstance(rows_of_turn, triton.JITFunction))


@triton.jit
@no_type_check
def rounded(value, pointer):
    """Round ``value`` to the dtype of ``pointer``, to nearest even.

    Devices round so. The interpreter truncates to bfloat16, so the value is rounded here first.
    """
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += tl.where(value == value, 0x7FFF + ((bits >> 16) & 1), 0)
        value = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return value.to(pointer.dtype.element_ty)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def forward_rows(
    x, delta, weight, bias, total, y, stats, rows, rounds,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ``rounds`` times ROWS rows a program. Registers hold whole rows: read once, sum twice, write once."""
    wide = stats.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(wide)
    for turn in tl.range(0, rounds, num_stages=STAGES):
        row = rows_of_turn(turn, ROWS)  # (ROWS, 1)
        inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
        place = row * WIDTH + column

        value = tl.load(x + place, mask=inside, other=0.0).to(wide)
        if delta is not None:
            value += tl.load(delta + place, mask=inside, other=0.0).to(wide)
            kept = rounded(value, total)
            tl.store(total + place, kept, mask=inside)
            value = kept.to(wide)  # normalize the sum as it was rounded

        mean = tl.sum(value, axis=1, keep_dims=True) / WIDTH  # (ROWS, 1)
        centred = tl.where(inside, value - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / WIDTH + EPS)
        tl.store(stats + row, mean, mask=row < rows)
        tl.store(stats + rows + row, rstd, mask=row < rows)

        result = centred * rstd * scale
        if bias is not None:
            result += shift
        tl.store(y + place, rounded(result, y), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def backward_rows(
    dy, dtotal, x, weight, stats, dx, partials, rows, rounds,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx of ``rounds`` times ROWS rows a program, and a row of partial sums for weight and for bias.

    With s the standardized row and g = dy * weight, dx = (g - mean(g) - s * mean(g * s)) * rstd (the derivative of
    arXiv 1607.06450, equation 4). ``dtotal`` is the gradient that reached the sum in other ways, and is added.
    ``partials`` is (2, programs, WIDTH): first weight, then bias.
    """
    wide = stats.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    dweight = tl.zeros([ROWS, BLOCK], wide)
    dbias = tl.zeros([ROWS, BLOCK], wide)
    # With several rows at a time and two stages, the compiler would change the layout, and so the order of the sums.
    for turn in tl.range(0, rounds, num_stages=STAGES if ROWS == 1 else 1):
        row = rows_of_turn(turn, ROWS)
        inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
        mean = tl.load(stats + row, mask=row < rows, other=0.0)
        rstd = tl.load(stats + rows + row, mask=row < rows, other=0.0)
        place = row * WIDTH + column
        value = tl.load(x + place, mask=inside, other=0.0).to(wide)
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(wide)
        standard = tl.where(inside, (value - mean) * rstd, 0.0)
        scaled = gradient * scale
        along_mean = tl.sum(scaled, axis=1, keep_dims=True) / WIDTH
        along_row = tl.sum(scaled * standard, axis=1, keep_dims=True) / WIDTH
        result = (scaled - along_mean - standard * along_row) * rstd
        if dtotal is not None:
            result += tl.load(dtotal + place, mask=inside, other=0.0).to(wide)
        tl.store(dx + place, rounded(result, dx), mask=inside)
        dweight += gradient * standard
        dbias += gradient

    columns = tl.arange(0, BLOCK)
    partials += program * WIDTH + columns
    tl.store(partials, tl.sum(dweight, axis=0), mask=columns < WIDTH)
    tl.store(partials + tl.num_programs(0).to(tl.int64) * WIDTH, tl.sum(dbias, axis=0), mask=columns < WIDTH)
