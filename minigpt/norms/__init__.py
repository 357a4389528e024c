"""Every LayerNorm, one file each. They know no config and no model."""

import importlib
from typing import TYPE_CHECKING, Any

from minigpt.norms.build import build
from minigpt.norms.frozen import AtPositions
from minigpt.norms.registry import NormInfo, NormSpec, available, is_registered, lookup, register
from minigpt.norms.textbook import LayerNorm

if TYPE_CHECKING:
    from minigpt.norms.foreign.builder import build_raw, is_exact, is_ours, name_of, notes

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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what somebody else's norms need when it is first used."""
        return getattr(importlib.import_module("minigpt.norms.foreign.builder"), name)
