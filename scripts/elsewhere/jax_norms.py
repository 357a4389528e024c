"""Norms of packages on JAX, as functions of arrays: Flax, Equinox, Haiku, penzai and Keras."""

import inspect
import os
from typing import Any

import jax

os.environ["KERAS_BACKEND"] = "jax"

import equinox
import flax.linen
import haiku
import keras
from flax import nnx
from penzai import pz


def linen_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return flax.linen.LayerNorm(epsilon=eps, dtype=x.dtype).apply({"params": {"scale": weight, "bias": bias}}, x)


def linen_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return flax.linen.RMSNorm(epsilon=eps, dtype=x.dtype).apply({"params": {"scale": weight}}, x)


def nnx_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = nnx.LayerNorm(len(weight), epsilon=eps, dtype=x.dtype, rngs=nnx.Rngs(0))
    norm.scale = nnx.Param(weight)
    norm.bias = nnx.Param(bias)
    return norm(x)


def nnx_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    norm = nnx.RMSNorm(len(weight), epsilon=eps, dtype=x.dtype, rngs=nnx.Rngs(0))
    norm.scale = nnx.Param(weight)
    return norm(x)


def equinox_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = equinox.nn.LayerNorm(len(weight), eps=eps)
    norm = equinox.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    return jax.vmap(norm)(rows).reshape(x.shape)


def equinox_rms_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = equinox.nn.RMSNorm(len(weight), eps=eps)
    norm = equinox.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    return jax.vmap(norm)(rows).reshape(x.shape)


def haiku_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = haiku.without_apply_rng(haiku.transform(lambda x: haiku.LayerNorm(-1, True, True, eps=eps)(x)))
    return norm.apply({"layer_norm": {"scale": weight, "offset": bias}}, x)


def haiku_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    norm = haiku.without_apply_rng(haiku.transform(lambda x: haiku.RMSNorm(-1, eps=eps)(x)))
    return norm.apply({"rms_norm": {"scale": weight}}, x)


def penzai_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    rows = pz.nx.wrap(x.reshape(-1, x.shape[-1])).tag("row", "channel")
    row = pz.nn.Standardize(across=("channel",), epsilon=eps)(rows).unwrap("row", "channel")
    return (row * weight + bias).reshape(x.shape)


def penzai_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    rows = pz.nx.wrap(x.reshape(-1, x.shape[-1])).tag("row", "channel")
    row = pz.nn.RMSStandardize(across=("channel",), epsilon=eps)(rows).unwrap("row", "channel")
    return (row * weight).reshape(x.shape)


def keras_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    norm = keras.layers.LayerNormalization(epsilon=eps, dtype=str(x.dtype))
    norm.build((None, len(weight)))
    norm.gamma.assign(weight)
    norm.beta.assign(bias)
    return norm(x)


def keras_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    norm = keras.layers.RMSNormalization(epsilon=eps, dtype=str(x.dtype))
    norm.build((None, len(weight)))
    norm.scale.assign(weight)
    return norm(x)


def jax_standardize(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return jax.nn.standardize(x, epsilon=eps) * weight + bias


def default(make: Any, name: str = "epsilon") -> float:
    """Return the default eps of a constructor."""
    return float(inspect.signature(make).parameters[name].default)


ARRAYS = "jax"
NORMS = [  # the package, its name there, the kind, a function, and the default eps
    ("flax", "linen.LayerNorm", "layer_norm", linen_layer_norm, flax.linen.LayerNorm.epsilon),
    ("flax", "linen.RMSNorm", "rms_norm", linen_rms_norm, flax.linen.RMSNorm.epsilon),
    ("flax", "nnx.LayerNorm", "layer_norm", nnx_layer_norm, default(nnx.LayerNorm.__init__)),
    ("flax", "nnx.RMSNorm", "rms_norm", nnx_rms_norm, default(nnx.RMSNorm.__init__)),
    ("equinox", "nn.LayerNorm", "layer_norm", equinox_layer_norm, default(equinox.nn.LayerNorm.__init__, "eps")),
    ("equinox", "nn.RMSNorm", "rms_norm", equinox_rms_norm, default(equinox.nn.RMSNorm.__init__, "eps")),
    ("dm-haiku", "LayerNorm", "layer_norm", haiku_layer_norm, default(haiku.LayerNorm.__init__, "eps")),
    ("dm-haiku", "RMSNorm", "rms_norm", haiku_rms_norm, default(haiku.RMSNorm.__init__, "eps")),
    ("penzai", "nn.LayerNorm", "layer_norm", penzai_layer_norm, default(pz.nn.LayerNorm.from_config)),
    ("penzai", "nn.RMSLayerNorm", "rms_norm", penzai_rms_norm, default(pz.nn.RMSLayerNorm.from_config)),
    ("keras", "LayerNormalization", "layer_norm", keras_layer_norm, default(keras.layers.LayerNormalization.__init__)),
    ("keras", "RMSNormalization", "rms_norm", keras_rms_norm, default(keras.layers.RMSNormalization.__init__)),
    ("jax", "nn.standardize", "layer_norm", jax_standardize, default(jax.nn.standardize)),
]
