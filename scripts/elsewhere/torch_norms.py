"""Norms of packages on PyTorch: classes, which are taken as they are.

timm and torchtune import torchvision and torchao, which need a build for the same PyTorch. The files of their norms
need neither, so these are imported alone.
"""

import importlib
import importlib.util
import inspect
import sys
import types
from typing import Any

import x_transformers.x_transformers as x_transformers
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm


def empty_package(name: str, paths: list[str]) -> types.ModuleType:
    """Return a package that runs no code of its own."""
    package: Any = types.ModuleType(name)
    package.__path__ = paths
    return package


def alone(place: str) -> Any:
    """Import one file of a package, "timm.layers.norm", without what its package imports beside."""
    name, *folders, _ = place.split(".")
    if name not in sys.modules:
        found = importlib.util.find_spec(name)
        paths = list(found.submodule_search_locations or []) if found else []
        sys.modules[name] = empty_package(name, paths)
    for folder in folders:
        paths = [f"{path}/{folder}" for path in sys.modules[name].__path__]
        name = f"{name}.{folder}"
        sys.modules.setdefault(name, empty_package(name, paths))
    return importlib.import_module(place)


timm = alone("timm.layers.norm")
Fp32LayerNorm = alone("torchtune.modules.layer_norm").Fp32LayerNorm
TuneRMSNorm = alone("torchtune.modules.rms_norm").RMSNorm


def default(make: Any, name: str = "eps") -> float | None:
    """Return the default eps of a constructor; None without one."""
    parameter = inspect.signature(make).parameters.get(name)
    is_number = parameter is not None and isinstance(parameter.default, float)
    return parameter.default if is_number else None


ARRAYS = None
NORMS = [  # the package, its name there, the kind, a class, and the default eps
    ("torch", "nn.LayerNorm", "layer_norm", nn.LayerNorm, default(nn.LayerNorm)),
    ("torch", "nn.RMSNorm", "rms_norm", nn.RMSNorm, default(nn.RMSNorm)),
    ("timm", "LayerNorm", "layer_norm", timm.LayerNorm, default(timm.LayerNorm)),
    ("timm", "RmsNorm", "rms_norm", timm.RmsNorm, default(timm.RmsNorm)),
    ("timm", "SimpleNorm", "layer_norm", timm.SimpleNorm, default(timm.SimpleNorm)),
    ("x-transformers", "LayerNorm", "layer_norm", x_transformers.LayerNorm, default(x_transformers.LayerNorm)),
    ("x-transformers", "RMSNorm", "rms_norm", x_transformers.RMSNorm, default(x_transformers.RMSNorm)),
    ("x-transformers", "ScaleNorm", "rms_norm", x_transformers.ScaleNorm, default(x_transformers.ScaleNorm)),
    ("torchtune", "Fp32LayerNorm", "layer_norm", Fp32LayerNorm, default(nn.LayerNorm)),
    ("torchtune", "RMSNorm", "rms_norm", TuneRMSNorm, default(TuneRMSNorm)),
    ("transformers", "LlamaRMSNorm", "rms_norm", LlamaRMSNorm, default(LlamaRMSNorm)),
    ("transformers", "GemmaRMSNorm", "rms_norm", GemmaRMSNorm, default(GemmaRMSNorm)),
    ("transformers", "T5LayerNorm", "rms_norm", T5LayerNorm, default(T5LayerNorm)),
    ("transformers", "OlmoLayerNorm", "layer_norm", OlmoLayerNorm, default(OlmoLayerNorm)),
]
