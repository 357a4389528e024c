"""A decoding step as one call into ``kernel.c``: which models it is for, and how their tensors are handed over.

R rows, C width of the residual stream, V vocabulary, H heads, S columns of a cache, D width of a head.
"""

import ctypes
import os
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK, PANEL = 64, 16  # inputs that share a scale in int8, and outputs that lie together; as in kernel.c
FORMS = {"columns": {torch.float32: 0, torch.bfloat16: 1}, "rows": {torch.float32: 2, torch.bfloat16: 3}, "int8": 4}
ACTIVATIONS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "gelu": 1, "relu": 2, "silu": 3, "swish": 3, "tanh": 4}


class Matrix(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inp", c_int64), ("out", c_int64), ("form", c_int64)]


class Norm(Structure):
    _fields_ = [
        ("scale", c_void_p), ("shift", c_void_p), ("kind", c_int64),
        ("eps", c_float), ("usual", c_float), ("massive", c_float), ("boundary", c_float),
    ]  # fmt: skip


class Layer(Structure):
    _fields_ = [
        ("ln_1", Norm), ("ln_2", Norm),
        ("c_attn", Matrix), ("attn_proj", Matrix), ("c_fc", Matrix), ("mlp_proj", Matrix),
        ("score_scale", c_float),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "width", "heads", "inner", "is_half", "activation")),
        ("wte", c_void_p), ("wpe", c_void_p), ("h", POINTER(Layer)), ("ln_f", Norm), ("head", Matrix),
    ]  # fmt: skip


class Rows(Structure):
    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("tokens", "positions", "starts", "ends", "cache")),
        *((name, c_int64) for name in ("layer_stride", "value_stride", "row_stride", "head_stride")),
        ("logits", c_void_p),
    ]
