"""The same model, sooner: every accelerator is a swap on the model's own Parameters.

- ``GPT2`` is the network with all of it: what ``minigpt.GPT2`` and ``from_pretrained`` make.
- ``accelerate(model)`` gives modules their fast classes; ``plain(model)`` gives the plain classes back.
- ``quantize_int8(model)`` puts modules with weights of eight bits in place of the affine layers.
- ``lay_out(model)`` lays the weights out as this processor multiplies them fastest, for inference alone.
- ``compile_steps(model)`` compiles the decoding of one token with ``torch.compile``.
- ``use_kernel(False)`` turns the compiled decoding step off, which ``generate`` takes by itself where it suits.
- ``read_each(model, texts)`` reads texts of several shapes in one forward.

The network (``minigpt.model``) knows nothing of this room. A module with hooks, or of somebody else's class, keeps its
own forward; a model that has hooks is decoded by its plain path.
"""

from minigpt.engine.compiled import compile_steps
from minigpt.engine.int8 import quantize_int8
from minigpt.engine.kernel import use_kernel
from minigpt.engine.layout import lay_out
from minigpt.engine.parts import accelerate, plain
from minigpt.engine.root import GPT2
from minigpt.engine.together import Text, read_each

__all__ = [
    "GPT2",
    "Text",
    "accelerate",
    "compile_steps",
    "lay_out",
    "plain",
    "quantize_int8",
    "read_each",
    "use_kernel",
]
