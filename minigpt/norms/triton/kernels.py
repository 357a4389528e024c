"""The kernels. Arguments in lower case are pointers, sizes and strides; those in upper case are compiled in.

Row i of an input starts at ``i // inner * outer_stride + i % inner * inner_stride``, counted in 64 bits; what is
written is contiguous. ``stats`` has the dtype that sums are kept in: the mean of every row, and then of every row the
reciprocal deviation. A row's sums are taken in an order that depends on its width alone: it comes out the same in any
company.
"""

# pyright: reportMissingImports=false

from typing import no_type_check  # of kernels there is source code alone: a checker's wrapper could not be compiled

import triton
import triton.language as tl

from minigpt.norms.triton import interpreting

INTERPRETED = tl.constexpr(interpreting())
COUNTS = ("rows", "programs")  # not compiled anew where they are 1; ``rounds`` is, and there is no loop then
STAGES = tl.constexpr(2)  # turns of a loop: while one is computed, the rows of the next are on their way


@triton.jit
@no_type_check
def row_start(row, inner, outer_stride, inner_stride):
    return row // inner * outer_stride + row % inner * inner_stride


@triton.jit
@no_type_check
def rows_of_turn(turn, ROWS: tl.constexpr):
    """Numbers (ROWS, 1) of the rows that are this program's in this turn; all programs' rows together are adjacent."""
    program = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0).to(tl.int64)
    return program * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
@no_type_check
def rounded(value, pointer):
    """``value`` in the dtype that ``pointer`` points to, to nearest even.

    Devices do so by themselves. The interpreter truncates to bfloat16, so there the value is rounded before.
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
    x_inner, x_outer_stride, x_inner_stride, delta_inner, delta_outer_stride, delta_inner_stride,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``rounds`` times ROWS rows a program, whole in its registers: read once, summed twice, written once."""
    wide = stats.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(wide)
    for turn in tl.range(0, rounds, num_stages=STAGES):
        row = rows_of_turn(turn, ROWS)  # (ROWS, 1)
        inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
        out = row * WIDTH + column

        start = row_start(row, x_inner, x_outer_stride, x_inner_stride)
        value = tl.load(x + start + column, mask=inside, other=0.0).to(wide)
        if delta is not None:
            start = row_start(row, delta_inner, delta_outer_stride, delta_inner_stride)
            value += tl.load(delta + start + column, mask=inside, other=0.0).to(wide)
            kept = rounded(value, total)
            tl.store(total + out, kept, mask=inside)
            value = kept.to(wide)  # the norm is that of the sum as it is kept

        mean = tl.sum(value, axis=1, keep_dims=True) / WIDTH  # (ROWS, 1)
        centred = tl.where(inside, value - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / WIDTH + EPS)
        tl.store(stats + row, mean, mask=row < rows)
        tl.store(stats + rows + row, rstd, mask=row < rows)

        result = centred * rstd * scale
        if bias is not None:
            result += shift
        tl.store(y + out, rounded(result, y), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def forward_long(
    x, weight, bias, y, stats, rows, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, too long for its registers: read three times, piece by piece."""
    wide = stats.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += row_start(row, inner, outer_stride, inner_stride)
    y += row * WIDTH

    sums = tl.zeros([BLOCK], wide)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        sums += tl.load(x + column, mask=column < WIDTH, other=0.0).to(wide)
    mean = tl.sum(sums, axis=0) / WIDTH

    squares = tl.zeros([BLOCK], wide)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < WIDTH, other=0.0).to(wide)
        centred = tl.where(column < WIDTH, value - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + EPS)
    tl.store(stats + row, mean)
    tl.store(stats + rows + row, rstd)

    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        result = (tl.load(x + column, mask=inside, other=0.0).to(wide) - mean) * rstd
        result *= tl.load(weight + column, mask=inside, other=0.0).to(wide)
        if bias is not None:
            result += tl.load(bias + column, mask=inside, other=0.0).to(wide)
        tl.store(y + column, rounded(result, y), mask=inside)


@triton.jit
@no_type_check
def read_back(
    turn, column, rows, dy, x, stats,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of this turn: which and where they are, their gradients, and they standardized."""
    wide = stats.dtype.element_ty
    row = rows_of_turn(turn, ROWS)
    inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
    mean = tl.load(stats + row, mask=row < rows, other=0.0)
    rstd = tl.load(stats + rows + row, mask=row < rows, other=0.0)
    start = row_start(row, x_inner, x_outer_stride, x_inner_stride)
    value = tl.load(x + start + column, mask=inside, other=0.0).to(wide)
    start = row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
    gradient = tl.load(dy + start + column, mask=inside, other=0.0).to(wide)
    return row, inside, rstd, gradient, tl.where(inside, (value - mean) * rstd, 0.0)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def backward_rows(
    dy, dtotal, x, weight, stats, dx, partials, rows, rounds,
    dy_inner, dy_outer_stride, dy_inner_stride, dtotal_inner, dtotal_outer_stride, dtotal_inner_stride,
    x_inner, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``rounds`` times ROWS rows a program, and what they bring to weight and bias as a row of partial sums of each.

    With s the standardized row and g = dy * weight, dx = (g - mean(g) - s * mean(g * s)) * rstd (the derivative of
    arXiv 1607.06450, equation 4); ``dtotal``, what reached the sum by other ways, is added to it.
    """
    wide = stats.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    dweight = tl.zeros([ROWS, BLOCK], wide)
    dbias = tl.zeros([ROWS, BLOCK], wide)
    # Of several rows at a time, the compiler would lay out those on their way otherwise, and take the sums so.
    for turn in tl.range(0, rounds, num_stages=STAGES if ROWS == 1 else 1):
        row, inside, rstd, gradient, standard = read_back(
            turn, column, rows, dy, x, stats, dy_inner, dy_outer_stride, dy_inner_stride,
            x_inner, x_outer_stride, x_inner_stride, WIDTH, ROWS,
        )  # fmt: skip
        scaled = gradient * scale
        along_mean = tl.sum(scaled, axis=1, keep_dims=True) / WIDTH
        along_row = tl.sum(scaled * standard, axis=1, keep_dims=True) / WIDTH
        result = (scaled - along_mean - standard * along_row) * rstd
        if dtotal is not None:
            start = row_start(row, dtotal_inner, dtotal_outer_stride, dtotal_inner_stride)
            result += tl.load(dtotal + start + column, mask=inside, other=0.0).to(wide)
        tl.store(dx + row * WIDTH + column, rounded(result, dx), mask=inside)
        dweight += gradient * standard
        dbias += gradient

    columns = tl.arange(0, BLOCK)
    store_partials(partials, program, columns, dweight, dbias, WIDTH)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def backward_long(
    dy, dtotal, x, weight, stats, dx, rows,
    dy_inner, dy_outer_stride, dy_inner_stride, dtotal_inner, dtotal_outer_stride, dtotal_inner_stride,
    x_inner, x_outer_stride, x_inner_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The input's gradient of one row a program, piece by piece; as ``backward_rows``."""
    wide = stats.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(stats + row), tl.load(stats + rows + row)
    x += row_start(row, x_inner, x_outer_stride, x_inner_stride)
    dy += row_start(row, dy_inner, dy_outer_stride, dy_inner_stride)
    dx += row * WIDTH

    sums = tl.zeros([BLOCK], wide)
    products = tl.zeros([BLOCK], wide)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        scaled = tl.load(dy + column, mask=inside, other=0.0).to(wide)
        scaled *= tl.load(weight + column, mask=inside, other=0.0).to(wide)
        sums += scaled
        products += scaled * (tl.load(x + column, mask=inside, other=0.0).to(wide) - mean) * rstd
    along_mean, along_row = tl.sum(sums, axis=0) / WIDTH, tl.sum(products, axis=0) / WIDTH

    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        scaled = tl.load(dy + column, mask=inside, other=0.0).to(wide)
        scaled *= tl.load(weight + column, mask=inside, other=0.0).to(wide)
        standard = (tl.load(x + column, mask=inside, other=0.0).to(wide) - mean) * rstd
        result = (scaled - along_mean - standard * along_row) * rstd
        if dtotal is not None:
            start = row_start(row, dtotal_inner, dtotal_outer_stride, dtotal_inner_stride)
            result += tl.load(dtotal + start + column, mask=inside, other=0.0).to(wide)
        tl.store(dx + column, rounded(result, dx), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def backward_long_weights(
    dy, x, stats, partials, rows, rounds,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the partial sums a program, over every row that ``program_id(0)`` comes by."""
    wide = stats.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    column = columns[None, :]
    dweight = tl.zeros([ROWS, BLOCK], wide)
    dbias = tl.zeros([ROWS, BLOCK], wide)
    for turn in tl.range(0, rounds, num_stages=STAGES):
        _, _, _, gradient, standard = read_back(
            turn, column, rows, dy, x, stats, dy_inner, dy_outer_stride, dy_inner_stride,
            x_inner, x_outer_stride, x_inner_stride, WIDTH, ROWS,
        )  # fmt: skip
        dweight += gradient * standard
        dbias += gradient
    store_partials(partials, program, columns, dweight, dbias, WIDTH)


@triton.jit
@no_type_check
def store_partials(partials, program, columns, dweight, dbias, WIDTH: tl.constexpr):
    """``partials`` is (2, programs, WIDTH): the first of the two for weight, the second for bias."""
    place = partials + program * WIDTH + columns
    tl.store(place, tl.sum(dweight, axis=0), mask=columns < WIDTH)
    tl.store(place + tl.num_programs(0).to(tl.int64) * WIDTH, tl.sum(dbias, axis=0), mask=columns < WIDTH)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def sum_partials(
    partials, dweight, dbias, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of weight's gradient, or where ``program_id(1)`` is 1 of bias', ROWS partial sums at a time."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = columns[None, :]
    partials += tl.program_id(1).to(tl.int64) * programs * WIDTH
    sums = tl.zeros([ROWS, BLOCK], partials.dtype.element_ty)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        sums += tl.load(partials + row * WIDTH + column, mask=(row < programs) & (column < WIDTH), other=0.0)
    found = tl.sum(sums, axis=0)
    if tl.program_id(1) == 0:
        tl.store(dweight + columns, rounded(found, dweight), mask=columns < WIDTH)
    else:
        tl.store(dbias + columns, rounded(found, dbias), mask=columns < WIDTH)
