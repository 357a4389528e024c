"""The structs of ``model.h``: the same fields in the same order."""

from ctypes import Structure, c_float, c_int64, c_void_p
from typing import TypeVar

import torch

BLOCK, PANEL = 64, 16  # inputs that share a scale in int8, and outputs that lie together
SLAB = 64  # the outputs of a row are padded to a multiple of it
ROWS_AT_ONCE = 512  # that are read or multiplied together, so that they take little memory
COLUMN_FORMS = {torch.float32: 0, torch.bfloat16: 1}  # of a weight (in, out)
ROW_FORMS = {torch.float32: 2, torch.bfloat16: 3}  # (out, in)
INT8_FORM = 4

AnyStruct = TypeVar("AnyStruct", bound=type[Structure])


def mirrored(struct: AnyStruct) -> AnyStruct:
    """Make the annotations of a class the fields of the struct."""
    struct._fields_ = list(struct.__annotations__.items())
    return struct


@mirrored
class CMatrix(Structure):
    weight: c_void_p
    bias: c_void_p
    inputs: c_int64
    outputs: c_int64
    form: c_int64


@mirrored
class CNorm(Structure):
    scale: c_void_p
    shift: c_void_p
    kind: c_int64
    eps: c_float
    constants: c_void_p


@mirrored
class CVector(Structure):
    half: c_void_p
    wide: c_void_p
    count: c_int64


@mirrored
class CLayer(Structure):
    ln_1: CNorm
    ln_2: CNorm
    c_attn: CMatrix
    attn_proj: CMatrix
    c_fc: CMatrix
    mlp_proj: CMatrix
    score_scale: c_float


@mirrored
class CModel(Structure):
    layers: c_int64
    width: c_int64
    heads: c_int64
    inner: c_int64
    is_half: c_int64
    activation: c_int64
    wte: c_void_p
    wpe: c_void_p
    h: c_void_p
    ln_f: CNorm
    head: CMatrix
    vector_count: c_int64
    vectors: c_void_p


@mirrored
class CRows(Structure):
    count: c_int64
    tokens: c_void_p
    slots: c_void_p
    columns: c_void_p
    outputs: c_int64
    output_rows: c_void_p
    cache: c_void_p
    is_half: c_int64
    layer_stride: c_int64
    value_stride: c_int64
    slot_stride: c_int64
    head_stride: c_int64
    logits: c_void_p
