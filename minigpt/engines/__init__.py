"""Models in other programs' files, as functions of ids to logits: ONNX, GGUF, OpenVINO and CTranslate2.

Each needs its program, which is an extra of the package: ``pip install -e '.[onnx]'``. ``minigpt.parity`` and
``minigpt.Original.judge`` take what these functions return.
"""

from minigpt.engines.ctranslate2_generator import ctranslate2
from minigpt.engines.engine import Engine
from minigpt.engines.llama_cpp_model import gguf
from minigpt.engines.onnx_session import onnx
from minigpt.engines.openvino_request import openvino

__all__ = ["Engine", "ctranslate2", "gguf", "onnx", "openvino"]
