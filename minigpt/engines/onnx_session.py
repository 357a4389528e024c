"""Models in ONNX, computed by onnxruntime.

B batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.choices import check_option
from minigpt.engines.engine import Engine, StepFunction, check_exists, load_package, naming_option
from minigpt.engines.ports import Graph, Port
from minigpt.errors import CheckpointError, ConfigError
from minigpt.files import read_object

ENUMS = {"graph_optimization_level": "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
HEAD_SIZE = "kv_cache_dim"  # the size of a head, in files of onnxruntime-genai's builder
NUMPY_NAMES = {"float": "float32", "double": "float64"}  # onnxruntime's names where NumPy has others


def onnx(
    file: str | Path, *, providers: str | Sequence[str] = ("CPUExecutionProvider",), **options: Any
) -> "OnnxSession":
    """Return the causal language model of an ONNX file: a candidate, ids (B, T) -> logits (B, T, V).

    The file may take ids; ids and a mask; positions too; and a past, which is empty at first, as torch's exporter,
    optimum, onnxruntime's tools, onnxruntime-genai and transformers.js write them. With a past, tokens are judged one
    by one too. Weights in other files of its folder are read as well. No library of custom operators is loaded.

    Args:
        file: the path. Data outside its folder is refused by onnxruntime.
        providers: what computes, in onnxruntime's words.
        options: of onnxruntime's ``SessionOptions``: graph_optimization_level ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC",
            "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"), execution_mode, intra_op_num_threads, inter_op_num_threads,
            use_deterministic_compute, enable_mem_pattern and enable_cpu_mem_arena. A name with a dot is one of its
            session's configuration, as "session.set_denormal_as_zero".

    Raises:
        ConfigError: if onnxruntime is not installed, or does not take an option.
        CheckpointError: if onnxruntime cannot open the file, or it has other inputs or outputs.
    """
    return OnnxSession(file, providers, options)


class OnnxSession(Engine):
    """An ONNX file in a session of onnxruntime; ``onnx`` describes the arguments."""

    def __init__(self, file: str | Path, providers: str | Sequence[str], options: Mapping[str, Any]) -> None:
        runtime = load_package("onnxruntime", "onnx")
        super().__init__(check_exists(file), "onnxruntime")
        if isinstance(providers, str):
            providers = providers.split(",")
        available = runtime.get_available_providers()
        for name in providers:
            if name not in available:
                message = f"has {name}, which this onnxruntime lacks; it has {', '.join(available)}"
                raise ConfigError(message, argument="providers")
        how = session_options(runtime, options)
        with self.opening():
            self.session = runtime.InferenceSession(str(self.file), how, providers=list(providers))
        inputs = _with_head_size(_ports_of_session(self.session.get_inputs()), self.file.parent / "genai_config.json")
        outputs = _ports_of_session(self.session.get_outputs())
        self.graph = Graph(str(self.file), inputs, outputs)
        self.context = self.graph.fixed
        self.by_one = self.graph.by_one and self.graph.has_cache
        self.names = [port.name for port in outputs]
        self.settings = {
            "providers": ",".join(self.session.get_providers()),
            "graph_optimization_level": how.graph_optimization_level.name,
            "intra_op_num_threads": how.intra_op_num_threads or "of its own choice",
        }
        for name, value in options.items():
            if name not in ENUMS:
                self.settings[name] = value

    def _whole(self, ids: list[int]) -> np.ndarray:
        feeds = self.graph.feeds(ids, 0, {})
        (logits,) = self.session.run([self.graph.logits], feeds)
        return of_first_row(logits, len(ids))

    def _start(self, ids: list[int]) -> StepFunction | None:
        if not self.graph.has_cache:
            return None
        past: dict[str, Any] = {}
        read = 0

        def step(ids: list[int]) -> np.ndarray:
            nonlocal past, read
            feeds = self.graph.feeds(ids, read, past)
            values = self.session.run(self.names, feeds)
            outputs = dict(zip(self.names, values, strict=True))
            past = {}
            for port, name in self.graph.pasts.items():
                if name is not None:
                    past[port.name] = outputs[name]
            read += len(ids)
            return of_first_row(outputs[self.graph.logits], len(ids))

        return step


def of_first_row(logits: np.ndarray, tokens: int) -> np.ndarray:
    """Return the logits of the first text (T, V), without the logits of padding behind it."""
    if logits.ndim == 2:  # of the last position: (B, V)
        return logits[:1]
    return logits[0, :tokens]


def session_options(runtime: Any, options: Mapping[str, Any]) -> Any:
    """Return onnxruntime's SessionOptions.

    Raises:
        ConfigError: if onnxruntime does not know an option or its value.
    """
    how = runtime.SessionOptions()
    how.log_severity_level = 3  # errors, which are raised too
    for name, value in options.items():
        words = getattr(runtime, ENUMS[name]).__members__ if name in ENUMS else {}
        if words:
            check_option(name, value, list(words))
        with naming_option(name, value):
            if "." in name:
                how.add_session_config_entry(name, str(value))
            else:
                setattr(how, name, words.get(value, value))
    return how


def _with_head_size(ports: list[Port], file: Path) -> list[Port]:
    """Return the ports with the size of a head, where its dimension has a name in place of a size.

    Raises:
        CheckpointError: if onnxruntime-genai's file does not say the size.
    """
    if not any(HEAD_SIZE in port.shape for port in ports):
        return ports
    try:
        head_size = read_object(file, CheckpointError)["model"]["decoder"]["head_size"]
    except (KeyError, TypeError):
        head_size = None
    if type(head_size) is not int or not 0 < head_size < 2**16:
        raise CheckpointError(f"{file} must have a size of a head as model.decoder.head_size, got {head_size!r}")
    sized = []
    for port in ports:
        shape = tuple(head_size if size == HEAD_SIZE else size for size in port.shape)
        sized.append(port._replace(shape=shape))
    return sized


def _ports_of_session(nodes: Sequence[Any]) -> list[Port]:
    """Return the inputs or the outputs of a session."""
    ports = []
    for node in nodes:
        kind: str = node.type.removeprefix("tensor(").removesuffix(")")
        sizes = (int(size) if str(size).isdigit() else size for size in node.shape)  # a name may be a number
        ports.append(Port(node.name, NUMPY_NAMES.get(kind) or kind, tuple(sizes)))
    return ports
