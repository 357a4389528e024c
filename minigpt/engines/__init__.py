"""Models in other programs' files, as functions of ids to logits: ONNX, GGUF, OpenVINO and CTranslate2.

Each needs its program, which is an extra of the package: ``pip install -e '.[onnx]'``. ``minigpt.parity`` and
``minigpt.Original.judge`` take what these functions return. They are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.engines.ctranslate2_generator import ctranslate2
    from minigpt.engines.engine import Engine
    from minigpt.engines.llama_cpp_model import gguf
    from minigpt.engines.onnx_session import onnx
    from minigpt.engines.openvino_request import openvino

_FILES = {
    "Engine": "engine", "ctranslate2": "ctranslate2_generator", "gguf": "llama_cpp_model", "onnx": "onnx_session",
    "openvino": "openvino_request",
}  # fmt: skip

__all__ = ["Engine", "ctranslate2", "gguf", "onnx", "openvino"]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _FILES:
            raise AttributeError(f"module 'minigpt.engines' has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
