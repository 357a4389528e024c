"""The reading of new tokens as one call into ``kernel.c``.

R rows, each a new token, W rows whose logits are returned, C width of the residual stream, V vocabulary, K inputs of a
product.
"""

from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof, byref
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.engine.kernel import aligned_memory, functions, padded_outputs
from minigpt.engine.snapshot import Snapshot
from minigpt.engine.structs import (
    COLUMN_FORMS,
    INT8_FORM,
    ROW_FORMS,
    ROWS_AT_ONCE,
    CLayer,
    CMatrix,
    CModel,
    CNorm,
    CRows,
    CVector,
)
from minigpt.engine.supported import NORMS, activation_of, why_not


def step_of(model: nn.Module) -> "StepKernel | None":
    """Return the kernel for decoding this model, or None if it takes the PyTorch path."""
    if why_not(model) is not None:
        return None
    return StepKernel(model)


class StepKernel:
    """Reads new tokens. Holds the addresses of the model's Parameters, which must not move meanwhile.

    Each step reads the values at these addresses, so it sees any change in place. ``is_outdated`` sees a replacement,
    and a change in place of what is copied: a tensor that is not contiguous, or is rounded to eight bits.

    Args:
        panels_of: returns int8 panels to take in place of a weight, given the weight and whether it is (out, in).
        ids: the tokens that the panels of the head have, in ascending order; all others get the logit -inf.
    """

    def __init__(
        self, model: Any, panels_of: Callable[[Tensor, bool], Tensor] | None = None,
        ids: Int[Tensor, " ids"] | None = None,
    ) -> None:  # fmt: skip
        self.functions = functions()
        self.vocabulary, self.ids = model.config.vocab_size, ids
        self.head_outputs = self.vocabulary if ids is None else len(ids)
        self.panels_of = panels_of
        self.has_copies = panels_of is not None
        self.keep_alive: list[Tensor] = []
        self.memory: Tensor | None = None
        self.vectors: list[CVector] = []
        layers = [self._layer(block, model.config) for block in model.h]
        self.layers = (CLayer * len(layers))(*layers)  # self.model has its address, and that of self.vector_array
        self.model = self._model(model)
        self.snapshot = Snapshot(model, self.has_copies)

    def is_outdated(self) -> bool:
        """Return True if the kernel would compute another model than the modules now do.

        A module, an attribute, a tensor or its memory was replaced since, or a hook was added. If the kernel has copies
        of tensors, also if a tensor was changed in place.
        """
        return self.snapshot.is_outdated()

    def __call__(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor,
        output_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "outputs vocab"]:  # fmt: skip
        """Return logits (W, V) after some of the tokens. The keys and values of all go to the cache.

        Several tokens may be of one text, in the order of their columns, without a gap. Each sees all columns of its
        text up to its own. The bits of its logits depend on them alone.

        Args:
            tokens: the new tokens.
            slots: the place of each one's text in the cache. The text begins at its column 0.
            columns: the token's own column, which is its position.
            store: (L, 2, B, H, S, D), the keys and values of a cache in float32 or bfloat16.
            output_rows: rows whose logits are returned, in ascending order; by default all.
        """
        if output_rows is None:
            output_rows = range(len(tokens))
        logits = torch.empty(len(output_rows), padded_outputs(self.head_outputs), dtype=torch.float32, device="cpu")
        done = 0
        for first in range(0, len(tokens), ROWS_AT_ONCE):
            piece = slice(first, first + ROWS_AT_ONCE)
            outputs = array("q")
            for row in output_rows[done : done + ROWS_AT_ONCE]:
                if row < piece.stop:
                    outputs.append(row - first)
            self._read(tokens[piece], slots[piece], columns[piece], store, outputs, logits[done:])
            done += len(outputs)
        logits = logits[:, : self.head_outputs]
        if self.ids is None:
            return logits
        among_all = logits.new_full((len(logits), self.vocabulary), -torch.inf)
        among_all[:, self.ids] = logits
        return among_all

    def _read(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor, outputs: "array[int]",
        logits: Tensor,
    ) -> None:  # fmt: skip
        token_array, slot_array, column_array = array("q", tokens), array("q", slots), array("q", columns)
        layer_stride, value_stride, slot_stride, head_stride = store.stride()[:4]
        rows = CRows(
            count=len(tokens),
            tokens=_place_of(token_array),
            slots=_place_of(slot_array),
            columns=_place_of(column_array),
            outputs=len(outputs),
            output_rows=_place_of(outputs),
            cache=store.data_ptr(),
            is_half=store.dtype == torch.bfloat16,
            layer_stride=layer_stride,
            value_stride=value_stride,
            slot_stride=slot_stride,
            head_stride=head_stride,
            logits=logits.data_ptr(),
        )
        arguments = byref(self.model), byref(rows), torch.get_num_threads(), max(columns) + 1
        size = self.functions.memory(*arguments)
        if self.memory is None or len(self.memory) < size:
            self.memory = aligned_memory(size)
        self.functions.step(*arguments, self.memory.data_ptr())

    def _model(self, model: Any) -> CModel:
        config = model.config
        is_embedding = config.tie_word_embeddings and model.quantize is None
        head = model.wte if is_embedding else model.lm_head
        ln_f = self._norm(model.ln_f)
        head_matrix = self._matrix(head, config.n_embd, self.head_outputs, by_rows=True)
        self.vector_array = (CVector * len(self.vectors))(*self.vectors)  # of all norms and biases
        return CModel(
            layers=len(model.h),
            width=config.n_embd,
            heads=config.n_head,
            inner=config.inner_size,
            is_half=model.wte.weight.dtype == torch.bfloat16,
            activation=activation_of(model.h[0]),
            wte=self._address(model.wte.weight),
            wpe=self._address(model.wpe.weight),
            h=addressof(self.layers),
            ln_f=ln_f,
            head=head_matrix,
            vector_count=len(self.vectors),
            vectors=addressof(self.vector_array),
        )

    def _layer(self, block: Any, config: Any) -> CLayer:
        c, inner = config.n_embd, config.inner_size
        return CLayer(
            ln_1=self._norm(block.ln_1),
            ln_2=self._norm(block.ln_2),
            c_attn=self._matrix(block.attn.c_attn, c, 3 * c),
            attn_proj=self._matrix(block.attn.c_proj, c, c),
            c_fc=self._matrix(block.mlp.c_fc, c, inner),
            mlp_proj=self._matrix(block.mlp.c_proj, inner, c),
            score_scale=block.attn.scale,
        )

    def _norm(self, norm: Any) -> CNorm:
        constants = getattr(norm, "calibration", None)
        return CNorm(
            scale=self._vector(norm.weight),
            shift=self._vector(norm.bias),
            kind=NORMS[type(norm)],
            eps=norm.eps,
            constants=self._vector(constants),
        )

    def _matrix(self, layer: Any, inputs: int, outputs: int, by_rows: bool = False) -> CMatrix:
        """Pass the weight of a layer. The head's has shape (out, in), and is passed by rows."""
        bias = self._vector(getattr(layer, "bias", None))
        panels = self._panels(layer, by_rows)
        if panels is not None:
            return CMatrix(self._address(panels), bias, inputs, outputs, INT8_FORM)
        rows = layer.weight if by_rows else layer.weight.t()  # (out, in)
        if rows.shape != (outputs, inputs):
            raise ValueError(f"weight must have shape ({inputs}, {outputs}), got {tuple(rows.t().shape)}")
        if by_rows or rows.is_contiguous():
            weight, forms = rows, ROW_FORMS
        else:
            weight, forms = rows.t(), COLUMN_FORMS
        return CMatrix(self._address(weight), bias, inputs, outputs, forms[rows.dtype])

    def _panels(self, layer: Any, by_rows: bool) -> Tensor | None:
        panels = getattr(layer, "panels", None)
        if panels is None and self.panels_of is not None:
            panels = self.panels_of(layer.weight, by_rows)
        return panels

    def _vector(self, tensor: Tensor | None) -> int | None:
        """Return the address of a vector's values in float32, which each step writes anew if it is in bfloat16."""
        if tensor is None:
            return None
        if tensor.dtype == torch.float32:
            return self._address(tensor)
        wide = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        self.vectors.append(CVector(self._address(tensor), self._address(wide), tensor.numel()))
        return wide.data_ptr()

    def _address(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            self.has_copies = True
        contiguous = tensor.detach().contiguous()
        self.keep_alive.append(contiguous)
        return contiguous.data_ptr()


def _place_of(values: "array[int]") -> int:
    return values.buffer_info()[0]
