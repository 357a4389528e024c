"""Every LayerNorm, one file each. They know no config and no model."""

from minigpt.norms.build import NormSpec, build, build_raw, is_exact, name_of
from minigpt.norms.foreign.adapt import is_ours, notes
from minigpt.norms.frozen import AtPositions
from minigpt.norms.registry import NormInfo, available, is_registered, lookup, register
from minigpt.norms.textbook import LayerNorm

__all__ = [
    "AtPositions",
    "LayerNorm",
    "NormInfo",
    "NormSpec",
    "available",
    "build",
    "build_raw",
    "is_exact",
    "is_ours",
    "is_registered",
    "lookup",
    "name_of",
    "notes",
    "register",
]
