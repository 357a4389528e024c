"""The same model, faster: every accelerator is a swap on the model's own Parameters.

- ``accelerate(model)`` gives the model and its parts their fast classes; ``plain(model)`` gives the plain classes back.
- ``quantize_int8(model)`` replaces the affine layers by layers with int8 weights.
- ``use_kernel(False)`` turns off the C kernel, which ``generate`` uses for decoding where it suits the model.

The network (``minigpt.model``) does not import this room. A module with hooks or of another class keeps its own
forward, and a model with hooks is decoded by its plain path.
"""

from minigpt.engine.int8 import quantize_int8
from minigpt.engine.kernel import use_kernel
from minigpt.engine.parts import accelerate, plain

__all__ = ["accelerate", "plain", "quantize_int8", "use_kernel"]
