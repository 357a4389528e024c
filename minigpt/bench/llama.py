# pyright: reportArgumentType=false
"""llama.cpp as a contestant, through llama-cpp-python: a GGUF file of the checkpoint, and greedy decoding of token ids.

B rows, V vocabulary.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import ConfigError
from minigpt.recipe import from_pretrained
from minigpt.tokenizer import Tokenizer

GGML_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}  # our kinds, and GGML's names


def write_gguf(folder: str | Path, kind: str, tokenizer: Tokenizer | None = None) -> Path:
    """Write the checkpoint in ``folder`` as a GGUF file beside it, and return the file's path.

    Matrices are converted to ``kind``; positions, norms and biases stay float32, as llama.cpp's own converter leaves
    them. Without a tokenizer, ids go in and come out.

    Args:
        kind: "f32", "f16", "bf16" or "q8_0".

    Raises:
        ConfigError: if it is another kind.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    if kind not in GGML_TYPES.values():
        raise ConfigError(f"the kinds of llama.cpp are {', '.join(GGML_TYPES.values())}, got {kind}")
    model, path = from_pretrained(str(folder), device="cpu", dtype="float32"), Path(folder) / f"{kind}.gguf"
    config, matrix_type = model.config, gguf.GGMLQuantizationType[kind.upper()]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    file = gguf.GGUFWriter(path, "gpt2")
    file.add_context_length(config.n_positions)
    file.add_embedding_length(config.n_embd)
    file.add_feed_forward_length(config.inner_size)
    file.add_block_count(config.n_layer)
    file.add_head_count(config.n_head)
    file.add_layer_norm_eps(config.layer_norm_epsilon)
    file.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        file.add_tokenizer_model("no_vocab")
    else:
        backend = tokenizer.backend
        merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("gpt-2")
        file.add_token_list([backend.id_to_token(i) or f"[PAD{i}]" for i in range(config.vocab_size)])
        file.add_token_merges(merges or ["! !"])  # llama.cpp needs one
        file.add_eos_token_id(tokenizer.end_of_text_id or 0)
    for name, tensor in model.state_dict().items():
        part, _, field = name.rpartition(".")
        rows = tensor.t() if part.rpartition(".")[2].startswith("c_") and tensor.ndim == 2 else tensor  # (out, in)
        kept = matrix_type if tensor.ndim == 2 and part != "wpe" else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(rows.contiguous().numpy(), kept)
        found = names.get_name(part if part == "lm_head" else f"transformer.{part}")
        file.add_tensor(f"{found}.{field}", data, raw_dtype=kept)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


class LlamaCpp:
    """llama.cpp with its default settings: the file mapped, flash attention where it has it, a cache in float16."""

    def __init__(self, folder: str, prompts: list[list[int]], kind: str, room: int) -> None:
        """Load ``write_gguf``'s file, with a cache of ``room`` tokens for each prompt."""
        lib: Any = importlib.import_module("llama_cpp")
        self.lib, self.prompts = lib, prompts
        path = str(Path(folder) / f"{kind}.gguf").encode()
        self.model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
        how, rows, tokens = lib.llama_context_default_params(), len(prompts), sum(map(len, prompts))
        how.n_ctx, how.n_seq_max, how.n_batch = room * rows, rows, max(how.n_batch, tokens)
        how.n_threads = how.n_threads_batch = torch.get_num_threads()
        self.context = lib.llama_init_from_model(self.model, how)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(tokens, 0, 1)

    def prefill(self) -> Float[Tensor, "rows vocab"]:
        self.forget()
        return self.logits(self.prompts, [0] * len(self.prompts))

    def generate(self, new: int) -> int:
        written = [self.prefill().argmax(-1).tolist()]
        places = [len(prompt) for prompt in self.prompts]
        while len(written) < new:
            written.append(self.logits([[token] for token in written[-1]], places).argmax(-1).tolist())
            places = [place + 1 for place in places]
        return sum(map(len, written))

    def forget(self) -> None:
        """Empty the cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def logits(
        self, rows: list[list[int]], places: list[int], every: bool = False
    ) -> Float[Tensor, "rows_or_tokens vocab"]:
        """Read each row's tokens from its place on. Return the logits of its last token, or of every token."""
        batch, count, asked = self.batch, 0, []
        for row, (tokens, place) in enumerate(zip(rows, places, strict=True)):
            for i, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, place + i
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = every or i == len(tokens) - 1
                if batch.logits[count]:
                    asked.append(count)
                count += 1
        batch.n_tokens = count
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = [self.lib.llama_get_logits_ith(self.context, place) for place in asked]
        return torch.from_numpy(np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in found]))
