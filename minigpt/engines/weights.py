"""The weights in files of ONNX, OpenVINO and CTranslate2, dequantized by what the files say of their scales.

Names are those of the files, which exporters choose. Shapes, masks and other constants are returned too.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigpt.engines.engine import load_package, reason_of
from minigpt.errors import CheckpointError, MiniGPTError, raised

KEEPS_SIZE = {"Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}  # ONNX's words
KEEPS_SIZE_OV = {"Convert", "Multiply", "Reshape", "Subtract", "Transpose"}  # OpenVINO's
OPERANDS = {  # of a weight, its scale and its zero among the inputs of ONNX's quantized operators
    "DynamicQuantizeMatMul": (1, 2, 3),
    "MatMulIntegerToFloat": (1, 3, 5),
    "QAttention": (1, 4, 7),
    "QGemm": (3, 4, 5),
    "QLinearMatMul": (3, 4, 5),
}
IN_BLOCKS = {"GatherBlockQuantized": 0, "MatMulNBits": 1}  # the place of a weight with a scale for each block of a row
OF_INTEGERS = ", times inputs in 8 bits"  # of a weight in ONNX that is multiplied as integers
IN_GROUPS = f"{OF_INTEGERS} in groups of "
ONE_SCALE = "one scale"
INT8_INPUTS = 4  # accuracy_level of MatMulNBits
STEPS_BEHIND = 4  # nodes behind a product of integers, among which is its scale
CT2_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
CT2_VERSIONS = range(4, 7)


class Constant(NamedTuple):
    """A constant of a file.

    Attributes:
        name: in the file.
        kind: how it is stored: the dtype, and for how many values there is a scale.
        values: in float32.
        is_table: whether rows of it are looked up, as of an embedding.
    """

    name: str
    kind: str
    values: np.ndarray
    is_table: bool


def constants_of(file: Path) -> list[Constant]:
    """Return the constants of an .onnx file, of an .xml file of OpenVINO with its .bin, or of CTranslate2's folder.

    Raises:
        ConfigError: if the package that reads such a file is not installed.
        CheckpointError: if the file is damaged, or stores weights in a way that is not known.
    """
    read = {".onnx": _of_onnx, ".xml": _of_openvino}.get(file.suffix, _of_ctranslate2)
    try:
        return [constant for constant in read(file) if constant.values.size > 1]
    except MiniGPTError:
        raise
    except raised() as error:  # each package raises its own kinds
        raise CheckpointError(f"the weights of {file} cannot be read: {reason_of(error)}") from error


def _of_onnx(file: Path) -> Iterator[Constant]:
    onnx = load_package("onnx", "onnx")
    graph = OnnxGraph(onnx, onnx.load(file))
    seen: set[str] = set()
    for node in graph.nodes:
        for place, name in enumerate(node.input):
            if name not in graph.values or name in seen:
                continue
            dense = graph.dequantized(node, place)
            if dense is not None:
                seen.add(name)
                values, kind = dense
                yield Constant(graph.sources[name], kind, values, "Gather" in node.op_type and place == 0)


class OnnxGraph:
    """The constants of an ONNX graph, and the nodes that compute with them.

    Attributes:
        values: of constants, and of what is made of them alone without more values, by name.
        sources: the name of the stored tensor of each.
        nodes: all others.
    """

    def __init__(self, onnx: Any, model: Any) -> None:
        to_array = onnx.numpy_helper.to_array
        evaluator = load_package("onnx.reference", "onnx").ReferenceEvaluator
        opsets = {opset.domain: opset.version for opset in model.opset_import}
        self.values = {tensor.name: to_array(tensor) for tensor in model.graph.initializer}
        self.sources = {name: name for name in self.values}
        self.nodes: list[Any] = []
        self.producers: dict[str, Any] = {}
        self.consumers: dict[str, list[Any]] = {}
        for node in model.graph.node:
            inputs = {name: self.values[name] for name in node.input if name in self.values}
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self._keep(node, to_array(node.attribute[0].t))
            elif node.op_type in KEEPS_SIZE and len(inputs) == len(node.input):
                node.domain = ""  # onnxruntime has some under its own
                alone = evaluator(node, opsets=opsets)
                (value,) = alone.run(None, inputs)
                self._keep(node, value)
            else:
                self.nodes.append(node)
                self.producers |= dict.fromkeys(node.output, node)
                for name in node.input:
                    self.consumers.setdefault(name, []).append(node)

    def _keep(self, node: Any, value: np.ndarray) -> None:
        name = node.output[0]
        source = node.input[0] if node.input else name
        self.values[name] = value
        self.sources[name] = self.sources.get(source, name)

    def dequantized(self, node: Any, place: int) -> tuple[np.ndarray, str] | None:
        """Return the values of an input, and how they are stored; None if it is not a weight."""
        name = node.input[place]
        value = self.values[name]
        kind = node.op_type
        if kind in IN_BLOCKS:
            return self._in_blocks(node, value) if place == IN_BLOCKS[kind] else None
        weight, scale, zero = OPERANDS.get(kind, (-1, -1, -1))
        if kind == "MatMulInteger":
            weight, zero = 1, 3
        if place == weight:
            scales = self._scale_behind(node) if kind == "MatMulInteger" else self._at(node, scale)
            values, stored = _with_scale(value, scales, self._at(node, zero))
            return values, f"{stored}{OF_INTEGERS}"
        if kind == "Gather" and place == 0:
            for after in self.consumers.get(node.output[0], ()):
                if after.op_type == "DequantizeLinear":
                    return _with_scale(value, self._at(after, 1), self._at(after, 2))
        if value.dtype.name.startswith(("int", "uint", "bool", "str", "object")):
            return None
        stored = self.values[self.sources[name]]
        return value.astype(np.float32), stored.dtype.name

    def _at(self, node: Any, place: int) -> np.ndarray | None:
        """Return an input, if it is a constant."""
        return self.values.get(node.input[place]) if place < len(node.input) else None

    def _scale_behind(self, node: Any) -> np.ndarray | None:
        """Return the scale of a weight that multiplies a product of integers, by itself or with the inputs' own."""
        for _ in range(STEPS_BEHIND):
            node = self.consumers.get(node.output[0], [node])[0]
            if node.op_type != "Mul":
                continue
            for name in node.input:
                factors = self.producers[name].input if name in self.producers else [name]
                for factor in factors:
                    if factor in self.values:
                        return self.values[factor]
        return None

    def _in_blocks(self, node: Any, weight: np.ndarray) -> tuple[np.ndarray, str]:
        """Return a weight (rows, columns) that has a scale for each block of a row."""
        how = {attribute.name: attribute.i for attribute in node.attribute}
        bits = how.get("bits", 4)
        size = how["block_size"]
        scale = self._at(node, 2)
        zero = self._at(node, 3)
        along = how.get("quantize_axis", 1)
        has_order = any(node.input[4:5])
        if scale is None or bits not in (2, 4, 8) or along != 1 or has_order:
            raise CheckpointError(f"{node.op_type} of {bits} bits in this form is not known")
        rows = len(weight)
        scale = scale.astype(np.float32).reshape(rows, -1, 1)
        count = scale.shape[1]
        blocks = _unpacked(weight, bits).reshape(rows, count, -1)
        if zero is not None:
            zeros = _unpacked(zero, bits).reshape(rows, -1, 1)
            blocks -= zeros[:, :count]
        elif weight.dtype == np.uint8:
            blocks -= 2 ** (bits - 1)
        blocks *= scale
        dense = blocks.reshape(rows, -1)
        columns = how.get("K", dense.shape[1])
        kind = f"int{bits}, a scale for {size}"
        if how.get("accuracy_level") == INT8_INPUTS:
            kind = f"{kind}{IN_GROUPS}{size}"
        return dense[:, :columns], kind


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of so many bits that bytes hold, the lowest bits first; others as they are."""
    if packed.dtype != np.uint8:
        return packed.astype(np.float32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    mask = 2**bits - 1
    numbers = packed[..., None] >> shifts
    numbers &= mask
    return numbers.reshape(*packed.shape[:-1], -1).astype(np.float32)


def _with_scale(weight: np.ndarray, scale: np.ndarray | None, zero: np.ndarray | None) -> tuple[np.ndarray, str]:
    """Return a weight that has one scale, or one for each column, or row of a table."""
    kind = weight.dtype.name
    if scale is None:
        raise CheckpointError(f"a weight of {kind} has no scale")
    values = weight.astype(np.float32)
    if zero is not None:
        values -= zero.astype(np.float32)
    values *= np.broadcast_to(scale.astype(np.float32), values.shape)
    if scale.size == 1:
        return values, f"{kind}, {ONE_SCALE}"
    return values, f"{kind}, a scale for each row"


def _of_openvino(file: Path) -> Iterator[Constant]:
    program = load_package("openvino", "openvino")
    core = program.Core()
    folded: dict[str, Any] = {}  # the constant that a value is made of, by the name of what makes it
    model = core.read_model(str(file))
    widen(program, model)
    how = {"INFERENCE_PRECISION_HINT": "f32"}
    for node in model.get_ordered_ops():
        operator = node.get_type_name()
        sources = [value.get_node() for value in node.input_values()]
        made_of = [source.get_friendly_name() for source in sources]
        name = node.get_friendly_name()
        if operator == "Constant":
            folded[name] = node
            continue
        if operator in KEEPS_SIZE_OV and folded.keys() >= set(made_of):
            largest = max(np.prod(source.get_output_shape(0)) for source in sources)
            size = np.prod(node.get_output_shape(0))
            if size <= largest:
                folded[name] = folded[made_of[0]]
                continue
        for place, (name, source) in enumerate(zip(made_of, sources, strict=True)):
            if name not in folded or not source.get_element_type().is_real():
                continue
            alone = program.Model([source.output(0)], [], "weight")
            compiled = core.compile_model(alone, "CPU", how)
            outputs = compiled([])
            values = np.array(outputs[0], np.float32)
            kind = folded[name].get_element_type()
            is_table = operator == "Gather" and place == 0
            yield Constant(name, kind.get_type_name(), values, is_table)


def widen(program: Any, model: Any) -> None:
    """Dequantize in float32, as OpenVINO computes, where a file says float16."""
    half, single = program.Type.f16, program.Type.f32
    for node in model.get_ordered_ops():
        operator = node.get_type_name()
        if operator not in ("Constant", "Convert") or node.get_element_type() != half:
            continue
        if operator == "Convert":
            node.set_attribute("destination_type", single.get_type_name())
        else:
            readers = node.output(0).get_target_inputs()
            wide = program.opset13.convert(node, single.get_type_name())
            for reader in readers:
                reader.replace_source_output(wide.output(0))
    model.validate_nodes_and_infer_types()


def _of_ctranslate2(folder: Path) -> Iterator[Constant]:
    data = (folder / "model.bin").read_bytes()
    place = 0

    def take(form: str) -> int:
        nonlocal place
        (number,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(form)
        return number

    def take_bytes(size: int) -> bytes:
        nonlocal place
        taken = data[place : place + size]
        if len(taken) < size:
            raise ValueError("it ends before a tensor does")
        place += size
        return taken

    version = take("I")
    if version not in CT2_VERSIONS:
        raise ValueError(f"model.bin has the version {version}, which is not known")
    take_bytes(take("H"))  # the name of the kind of model
    take("I")  # the kind's revision
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}
    for _ in range(take("I")):
        letters = take_bytes(take("H"))
        name = letters.rstrip(b"\0").decode()
        shape = [take("I") for _ in range(take("B"))]
        kind = CT2_TYPES[take("B")]
        stored = take_bytes(take("I"))
        if kind == "bfloat16":  # the upper half of a float32
            halves = np.frombuffer(stored, np.uint16)
            values = halves.astype(np.uint32) << 16
            values = values.view(np.float32)
        else:
            values = np.frombuffer(stored, kind)
        tensors[name] = values.reshape(shape)
        kinds[name] = kind
    for name, values in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if scale is not None:
            ones = [1] * (values.ndim - 1)
            scale = 1 / scale.reshape(-1, *ones)
            values, kinds[name] = _with_scale(values, scale, None)
        if values.dtype.kind == "f" and not name.endswith("_scale"):
            yield Constant(name, kinds[name], values.astype(np.float32), "embeddings" in name)
