"""Models in OpenVINO's intermediate representation, or in ONNX, computed by OpenVINO.

B batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.engines.engine import Engine, StepFunction, check_exists, load_package
from minigpt.engines.onnx_session import of_first_row
from minigpt.engines.ports import Graph, Port
from minigpt.errors import CheckpointError, raised

SUFFIXES = (".xml", ".onnx")  # other formats that OpenVINO reads are of other programs, and may hold code
GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"  # numbers that share a scale where inputs are rounded to 8 bits; 0: none
PRECISION = "INFERENCE_PRECISION_HINT"
REPORTED = (PRECISION, "EXECUTION_MODE_HINT", GROUP_SIZE, "INFERENCE_NUM_THREADS")
OF_STATES = "KV_CACHE_PRECISION"


def openvino(file: str | Path, *, device: str = "CPU", **options: Any) -> "OpenVinoRequest":
    """Return the causal language model of an OpenVINO file: a candidate, ids (B, T) -> logits (B, T, V).

    The model may take ids, a mask, positions and a past, and it may keep its past as states, as optimum's export does.
    With a past or states, tokens are judged one by one too.

    Args:
        file: an .xml file with its .bin file in the same folder, or an .onnx file.
        device: in OpenVINO's words.
        options: of OpenVINO's ``compile_model``, by their own names: INFERENCE_PRECISION_HINT ("f32", "f16", "bf16"),
            KV_CACHE_PRECISION, EXECUTION_MODE_HINT, DYNAMIC_QUANTIZATION_GROUP_SIZE, INFERENCE_NUM_THREADS.

    Raises:
        ConfigError: if OpenVINO is not installed.
        CheckpointError: if OpenVINO cannot open the file with these options, or it has other inputs or outputs.
    """
    return OpenVinoRequest(file, device, options)


class OpenVinoRequest(Engine):
    """A file that OpenVINO has compiled; ``openvino`` describes the arguments.

    Attributes:
        is_fused: whether attention is one operator of the file.
    """

    def __init__(self, file: str | Path, device: str, options: Mapping[str, Any]) -> None:
        program = load_package("openvino", "openvino")
        super().__init__(check_exists(file), "openvino")
        if self.file.suffix not in SUFFIXES:
            raise CheckpointError(f"{self.file} must be an .xml or an .onnx file")
        core = program.Core()
        with self.opening():
            model = core.read_model(str(self.file))
        operators = {node.get_type_name() for node in model.get_ordered_ops()}
        self.is_fused = "ScaledDotProductAttention" in operators
        outputs = _ports(model.outputs)
        self.graph = Graph(str(self.file), _ports(model.inputs), outputs)
        self.context = self.graph.fixed
        with self.opening():
            compiled = core.compile_model(model, device, dict(options))
            self.request = compiled.create_infer_request()
        self.places: dict[str, int] = {}
        for place, port in enumerate(outputs):
            self.places[port.name] = place
        self.has_states = bool(self.request.query_state())
        self.by_one = self.graph.by_one and (self.has_states or self.graph.has_cache)
        reported = REPORTED
        if self.has_states:
            reported = (*REPORTED, OF_STATES)
        self.settings = {"device": device} | dict(options) | properties_of(compiled, reported)

    def _whole(self, ids: list[int]) -> np.ndarray:
        return self._begin()(ids)

    def _start(self, ids: list[int]) -> StepFunction | None:
        if self.has_states or self.graph.has_cache:
            return self._begin()
        return None

    def _begin(self) -> StepFunction:
        """Return a function that reads a new text piece by piece; its states are reset."""
        past: dict[str, Any] = {}
        read = 0
        if self.has_states:
            self.request.reset_state()

        def step(ids: list[int]) -> np.ndarray:
            nonlocal past, read
            self.request.infer(list(self.graph.feeds(ids, read, past).values()))
            past = {}
            for port, name in self.graph.pasts.items():
                if name is not None:
                    past[port.name] = self._output(name)
            read += len(ids)
            return of_first_row(self._output(self.graph.logits), len(ids))

        return step

    def _output(self, name: str) -> np.ndarray:
        """Return a copy of an output: the request writes the next one into the same memory."""
        return self.request.get_output_tensor(self.places[name]).data.copy()


def properties_of(compiled: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the properties of a compiled model that it has, by the words that OpenVINO uses."""
    properties = {}
    known = compiled.get_property("SUPPORTED_PROPERTIES")
    for name in names:
        if name in known:
            properties[name] = _word(compiled.get_property(name))
    return properties


def _word(value: Any) -> str:
    """Return OpenVINO's word for a value: a type's own name, and a member of an enumeration without its class."""
    name = value.get_type_name() if hasattr(value, "get_type_name") else str(value)
    return name.rpartition(".")[2]


def _ports(nodes: Sequence[Any]) -> list[Port]:
    """Return the inputs or the outputs of a model. One without a name is called by its place."""
    ports = []
    for place, node in enumerate(nodes):
        name = f"input{place}"
        if node.get_names():
            name = node.get_any_name()
        sizes: list[int | None] = []
        for size in node.get_partial_shape():
            sizes.append(size.get_length() if size.is_static else None)
        ports.append(Port(name, _dtype(node), tuple(sizes)))
    return ports


def _dtype(node: Any) -> str:
    """Return NumPy's name of a dtype, or OpenVINO's where NumPy has none."""
    kind = node.get_element_type()
    try:
        return np.dtype(kind.to_dtype()).name
    except raised():
        return kind.get_type_name()
