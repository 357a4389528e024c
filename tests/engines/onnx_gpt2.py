"""GPT-2 as ONNX graphs, with the inputs that torch's exporter, optimum, onnxruntime's tools and transformers.js give.

B batch, T tokens, P tokens of the past, H heads, D dimensions of a head, C embedding.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from transformers import GPT2LMHeadModel

OPSET, IR = 20, 9  # the first opset with Gelu; onnxruntime 1.20 reads both
BEGIN, ENDLESS = 0, np.iinfo(np.int64).max


class Nodes:
    """A graph that grows by a node at a time; values are known by their names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def keep(self, value: Any, dtype: Any = None) -> str:
        """Add a constant."""
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(self, kind: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        """Add a node with one output."""
        output = to or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def size(self, value: str, axis: int) -> str:
        """Add the size of a dimension, as a scalar."""
        return self.add("Gather", self.add("Shape", value), self.keep(axis, np.int64), axis=0)


class Writer:
    """Writes a GPT-2 of transformers as a graph.

    Args:
        past: none; "layers", a key and a value of each layer (B, H, P, D); "cache", the same as transformers' exporter
            names them, with sizes for names; or "stacked", both in one (2, B, H, P, D).
        named_heads: whether the size of a head is a name, which genai_config.json says, as with onnxruntime-genai.
        merged: whether the graph is told if there is a past, and else leaves it out.
        mask, positions: whether it takes them.
        last: whether it gives the logits of the last position only.
    """

    def __init__(
        self, model: GPT2LMHeadModel, *, ids: str = "input_ids", int32: bool = False, mask: bool = False,
        positions: bool = False, past: str | None = None, merged: bool = False, last: bool = False,
        tokens: int | str = "sequence_length", named_heads: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.config, self.g = model, model.config, Nodes()
        self.w = {name: x.detach().numpy() for name, x in model.state_dict().items()}
        self.past, self.merged, self.named_heads = past, merged, named_heads
        self.kind = TensorProto.INT32 if int32 else TensorProto.INT64
        self.inputs, self.outputs = [], []
        self.ids = self._input(ids, ["batch_size", tokens])
        total = "past_sequence_length + sequence_length" if past else tokens
        self.mask = self._input("attention_mask", ["batch_size", total]) if mask else None
        self.positions = self._input("position_ids", ["batch_size", tokens]) if positions else None
        if merged:
            self._input("use_cache_branch", [1], TensorProto.BOOL)
        self._write(last)

    def _input(self, name: str, shape: list[Any], kind: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind or self.kind, shape))
        return name

    def save(self, file: Path, **how: Any) -> Path:
        graph = helper.make_graph(self.g.nodes, "gpt2", self.inputs, self.outputs, self.g.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        onnx.save(model, file, **how)
        if self.named_heads:
            sizes = {"head_size": self.config.n_embd // self.config.n_head}
            (file.parent / "genai_config.json").write_text(json.dumps({"model": {"decoder": sizes}}))
        return file

    def _write(self, last: bool) -> None:
        g, config = self.g, self.config
        self.pasts = [self._past(layer) for layer in range(config.n_layer)] if self.past else []
        given = g.size(self.ids, 1)
        before = g.size(self.pasts[0][0], 2) if self.pasts else g.keep(0, np.int64)
        total = g.add("Add", before, given)
        one = g.keep(1, np.int64)
        places = g.add("Range", before, total, one)  # of the tokens that are given
        keys = g.add("Range", g.keep(0, np.int64), total, one)
        column = g.add("Unsqueeze", places, g.keep([1]))
        self.seen = g.add("LessOrEqual", keys, column)  # (T, P + T)
        if self.mask:
            wide = g.add("Unsqueeze", self.mask, g.keep([1, 2]))  # (B, 1, 1, P + T)
            kept = g.add("Greater", wide, g.keep(0, np.int32 if self.kind == TensorProto.INT32 else np.int64))
            self.seen = g.add("And", self.seen, kept)
        embedding = g.keep(self.w["transformer.wte.weight"])
        at = g.add("Gather", g.keep(self.w["transformer.wpe.weight"]), self.positions or places)
        x = g.add("Add", g.add("Gather", embedding, self.ids), at)
        for layer in range(config.n_layer):
            place = f"transformer.h.{layer}"
            x = g.add("Add", x, self._attention(self._norm(x, f"{place}.ln_1"), place, layer))
            hidden = self._affine(self._norm(x, f"{place}.ln_2"), f"{place}.mlp.c_fc")
            hidden = g.add("Gelu", hidden, approximate="tanh")
            x = g.add("Add", x, self._affine(hidden, f"{place}.mlp.c_proj"))
        x = self._norm(x, "transformer.ln_f")
        if last:
            x = g.add("Slice", x, g.keep([-1]), g.keep([ENDLESS]), g.keep([1]))
        g.add("MatMul", x, g.add("Transpose", embedding, perm=[1, 0]), to="logits")
        shape = ["batch_size", 1 if last else "sequence_length", config.vocab_size]
        self.outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))

    def _past(self, layer: int) -> tuple[str, str]:
        """Add the inputs of a layer's past; return its keys and values."""
        g, heads = self.g, self.config.n_head
        head_size = "kv_cache_dim" if self.named_heads else self.config.n_embd // heads
        sizes = ["batch_size", heads, "past_sequence_length", head_size]
        if self.past == "stacked":
            both = self._input(f"past_{layer}", [2, *sizes], TensorProto.FLOAT)
            parts = [g.add("Gather", both, g.keep(i, np.int64), axis=0) for i in range(2)]
        else:
            names = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
            if self.past == "cache":
                names = [f"input.cache.layers.{layer}.{part}" for part in ("keys", "values")]
                sizes = [1, str(heads), "s12", str(head_size)]
            parts = [self._input(name, sizes, TensorProto.FLOAT) for name in names]
        if self.merged:
            none = g.keep([0])
            end = g.add("Where", "use_cache_branch", g.keep([ENDLESS]), none)
            parts = [g.add("Slice", part, none, end, g.keep([2])) for part in parts]
        return parts[0], parts[1]

    def _norm(self, x: str, name: str) -> str:
        weight, bias = self.g.keep(self.w[f"{name}.weight"]), self.g.keep(self.w[f"{name}.bias"])
        return self.g.add("LayerNormalization", x, weight, bias, epsilon=self.config.layer_norm_epsilon)

    def _affine(self, x: str, name: str) -> str:
        product = self.g.add("MatMul", x, self.g.keep(self.w[f"{name}.weight"]))
        return self.g.add("Add", product, self.g.keep(self.w[f"{name}.bias"]))

    def _attention(self, x: str, place: str, layer: int) -> str:
        g, heads, width = self.g, self.config.n_head, self.config.n_embd
        size = width // heads
        qkv = self._affine(x, f"{place}.attn.c_attn")
        split = g.add("Reshape", qkv, g.keep([0, 0, 3, heads, size]))
        parts = [g.add("Gather", split, g.keep(i, np.int64), axis=2) for i in range(3)]
        q, k, v = (g.add("Transpose", part, perm=[0, 2, 1, 3]) for part in parts)  # (B, H, T, D)
        if self.pasts:
            k, v = (g.add("Concat", old, new, axis=2) for old, new in zip(self.pasts[layer], (k, v), strict=True))
            self._present(k, v, layer)
        scores = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.add("Mul", scores, g.keep(size**-0.5, np.float32))
        scores = g.add("Where", self.seen, scores, g.keep(-1e30, np.float32))
        y = g.add("MatMul", g.add("Softmax", scores, axis=-1), v)
        y = g.add("Reshape", g.add("Transpose", y, perm=[0, 2, 1, 3]), g.keep([0, 0, width]))
        return self._affine(y, f"{place}.attn.c_proj")

    def _present(self, k: str, v: str, layer: int) -> None:
        g, heads = self.g, self.config.n_head
        sizes = ["batch_size", heads, "total", self.config.n_embd // heads]
        names = {f"present.{layer}.key": k, f"present.{layer}.value": v}
        if self.past == "cache":
            names = {f"output.cache.layers.{layer}.keys": k, f"output.cache.layers.{layer}.values": v}
        if self.past == "stacked":
            both = [g.add("Unsqueeze", part, g.keep([0])) for part in (k, v)]
            names, sizes = {f"present_{layer}": g.add("Concat", *both, axis=0)}, [2, *sizes]
        for name, value in names.items():
            g.add("Identity", value, to=name)
            self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))


def write(model: GPT2LMHeadModel, file: Path, save: dict[str, Any] | None = None, **how: Any) -> Path:
    """Write a GPT-2 as an ONNX file; return its path."""
    return Writer(model, **how).save(file, **save or {})
