"""Norms of packages with kernels of their own, as functions of arrays: MLX, tinygrad, Paddle, onnxruntime, OpenVINO."""

import functools
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core
import mlx.nn
import numpy as np
import onnx
import onnxruntime
import openvino
import paddle
from onnx import TensorProto, helper

# tinygrad calls a compiler of this name. ziglang brings one, which wants another name of the target, and a file
CLANG = Path(sys.executable).with_name("clang")
CLANG.write_text(
    f"""#!/bin/sh
made=$(mktemp)
{sys.executable} -m ziglang cc -c -x c -O2 -fPIC -ffreestanding -fno-math-errno -nostdlib -fno-ident \\
    -g0 -fno-sanitize=all -target x86_64-linux-musl -mcpu=native - -o "$made" && cat "$made"
rm -f "$made"
"""
)
CLANG.chmod(0o755)
os.environ["PATH"] = f"{CLANG.parent}{os.pathsep}{os.environ['PATH']}"
os.environ["DEV"], os.environ["CACHELEVEL"] = "CPU", "0"

import tinygrad
import tinygrad.nn


def mlx_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return mlx.core.fast.layer_norm(x, weight, bias, eps)


def mlx_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return mlx.core.fast.rms_norm(x, weight, eps)


def tinygrad_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = tinygrad.nn.LayerNorm(weight.shape[0], eps=eps)
    norm.weight, norm.bias = weight, bias
    return norm(x)


def tinygrad_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    norm = tinygrad.nn.RMSNorm(weight.shape[0], eps=eps)
    norm.weight = weight
    return norm(x)


def paddle_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return paddle.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def paddle_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return paddle.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)[0]


@functools.cache
def graph(operator: str, dtype: str, rank: int, inputs: tuple[str, ...], eps: float) -> Any:
    """Return an ONNX model of one operator, with x, weight and bias as its inputs."""
    if dtype == "bfloat16":
        raise TypeError("its Python takes no bfloat16 from NumPy")
    kind = getattr(TensorProto, {"float32": "FLOAT", "float16": "FLOAT16", "float64": "DOUBLE"}[dtype])
    sizes = [f"d{axis}" for axis in range(rank)]
    shapes = {"x": sizes, "weight": sizes[-1:], "bias": sizes[-1:]}
    values = [helper.make_tensor_value_info(name, kind, shapes[name]) for name in inputs]
    node = helper.make_node(operator, list(inputs), ["y"], axis=-1, epsilon=eps)
    output = helper.make_tensor_value_info("y", kind, sizes)
    made = helper.make_graph([node], "norm", values, [output])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@functools.cache
def onnx_session(*key: Any) -> Any:
    return onnxruntime.InferenceSession(graph(*key).SerializeToString(), providers=["CPUExecutionProvider"])


@functools.cache
def openvino_model(*key: Any) -> Any:
    core = openvino.Core()
    model = core.read_model(model=graph(*key).SerializeToString())
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def key_of(operator: str, eps: float, x: np.ndarray, *names: str) -> tuple[Any, ...]:
    return operator, x.dtype.name, x.ndim, names, eps


def onnx_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    session = onnx_session(*key_of("LayerNormalization", eps, x, "x", "weight", "bias"))
    return session.run(None, {"x": x, "weight": weight, "bias": bias})[0]


def onnx_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    session = onnx_session(*key_of("RMSNormalization", eps, x, "x", "weight"))
    return session.run(None, {"x": x, "weight": weight})[0]


def openvino_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    model = openvino_model(*key_of("LayerNormalization", eps, x, "x", "weight", "bias"))
    return model({"x": x, "weight": weight, "bias": bias})[0]


def default(make: Any, name: str = "eps") -> float:
    """Return the default eps of a constructor."""
    return float(inspect.signature(make).parameters[name].default)


of_onnx = round(onnx.defs.get_schema("LayerNormalization").attributes["epsilon"].default_value.f, 12)
for function in (onnx_layer_norm, onnx_rms_norm, openvino_layer_norm):
    function.arrays = "numpy"
for function in (tinygrad_layer_norm, tinygrad_rms_norm):
    function.arrays = "tinygrad"
for function in (paddle_layer_norm, paddle_rms_norm):
    function.arrays = "paddle"

ARRAYS = "mlx"
NORMS = [  # the package, its name there, the kind, a function, and the default eps
    ("mlx", "nn.LayerNorm", "layer_norm", mlx_layer_norm, default(mlx.nn.LayerNorm)),
    ("mlx", "nn.RMSNorm", "rms_norm", mlx_rms_norm, default(mlx.nn.RMSNorm)),
    ("tinygrad", "nn.LayerNorm", "layer_norm", tinygrad_layer_norm, default(tinygrad.nn.LayerNorm)),
    ("tinygrad", "nn.RMSNorm", "rms_norm", tinygrad_rms_norm, default(tinygrad.nn.RMSNorm)),
    ("paddlepaddle", "nn.LayerNorm", "layer_norm", paddle_layer_norm, default(paddle.nn.LayerNorm, "epsilon")),
    ("paddlepaddle", "rms_norm", "rms_norm", paddle_rms_norm, default(paddle.nn.functional.rms_norm)),
    ("onnxruntime", "LayerNormalization", "layer_norm", onnx_layer_norm, of_onnx),
    ("onnxruntime", "RMSNormalization", "rms_norm", onnx_rms_norm, of_onnx),
    ("openvino", "LayerNormalization", "layer_norm", openvino_layer_norm, of_onnx),
]
