"""Time minigpt beside CTranslate2, llama.cpp and OpenVINO GenAI: ``minigpt bench generate`` with more programs.

    python scripts/bench/others.py --quantize int8 --against ctranslate2:int8,llama.cpp:q8_0
    python scripts/bench/others.py --model MODEL --against llama.cpp:model-q4_k_m.gguf,openvino:EXPORTED:f32

The options are those of ``minigpt bench generate``. llama.cpp's kinds are f32, f16, bf16 and q8_0, or a GGUF file of
the same model. OpenVINO's kind is a folder that optimum-intel exported, and a hint of precision if it gets one. Needs
``pip install ctranslate2 llama-cpp-python gguf openvino-genai``.
"""

# pyright: reportArgumentType=false

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.bench.generate import KIND_NAMES, OTHERS
from minigpt.checkpoint.contents import TOKENIZER_FILES, known_files
from minigpt.cli import main
from minigpt.errors import ConfigError
from minigpt.inputs import left_padded
from minigpt.judge.reference import quiet_transformers
from minigpt.recipe import from_pretrained
from minigpt.tokenizer import Tokenizer

Prompts = list[list[int]]
GGML_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}  # our kinds, and GGML's names
MORE_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1")  # which the package gguf can write too


class CTranslate2:
    """CTranslate2, with the weights in its own format."""

    def __init__(self, folder: str, prompts: Prompts, kind: str, draft: str | None = None, room: int = 0) -> None:
        import ctranslate2  # pyright: ignore[reportMissingImports]

        place, threads = write_ctranslate2(folder, kind), torch.get_num_threads()
        self.model = ctranslate2.Generator(place, device="cpu", compute_type=kind, intra_threads=threads)
        self.prompts = prompts

    def prefill(self) -> object:
        return self.model.forward_batch(self.prompts)

    def generate(self, new: int) -> int:
        how = dict(beam_size=1, sampling_topk=1, include_prompt_in_result=False, end_token=[])
        words = [[f"t{token}" for token in prompt] for prompt in self.prompts]
        results = self.model.generate_batch(words, max_length=new, min_length=0, **how)
        return sum(len(result.sequences_ids[0]) for result in results)


def write_ctranslate2(folder: str, kind: str) -> str:
    """Write the checkpoint in CTranslate2's format into its folder; return the place.

    CTranslate2's converter needs a tokenizer, to count the tokens: they are t0, t1, t2 and so on, in a copy.

    Raises:
        ConfigError: if CTranslate2 does not compute in that kind on this processor.
    """
    import ctranslate2  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer as Words
    from tokenizers import models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    kinds = ctranslate2.get_supported_compute_types("cpu")
    if kind not in kinds:
        raise ConfigError(f"CTranslate2 has no {kind} on this processor; it has {', '.join(sorted(kinds))}")
    vocabulary = {f"t{token}": token for token in range(AutoConfig.from_pretrained(folder).vocab_size)}
    words = Words(models.WordLevel(vocabulary, unk_token="t0"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), f"t{len(vocabulary) - 1}")
    with tempfile.TemporaryDirectory() as copy, quiet_transformers():
        for file in known_files(Path(folder)):
            if file.name not in TOKENIZER_FILES:
                Path(copy, file.name).symlink_to(file.resolve())
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(copy)
        return TransformersConverter(copy).convert(f"{folder}/ctranslate2-{kind}", quantization=kind, force=True)


class LlamaCpp:
    """llama.cpp with its default settings: the file mapped, flash attention where it has it, a cache in float16."""

    def __init__(self, folder: str, prompts: Prompts, kind: str, draft: str | None = None, room: int = 1024) -> None:
        """Load the checkpoint or the file that ``kind`` names, with a cache of ``room`` tokens for each prompt."""
        lib: Any = importlib.import_module("llama_cpp")
        self.lib, self.prompts = lib, prompts
        self.model = lib.llama_model_load_from_file(
            os.fsencode(kind if kind.endswith(".gguf") else write_gguf(folder, kind)), lib.llama_model_default_params()
        )
        how, rows, tokens = lib.llama_context_default_params(), len(prompts), sum(map(len, prompts))
        how.n_ctx, how.n_seq_max, how.n_batch = room * rows, rows, max(how.n_batch, tokens)
        how.n_threads = how.n_threads_batch = torch.get_num_threads()
        self.context = lib.llama_init_from_model(self.model, how)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(tokens, 0, 1)

    def prefill(self) -> Float[Tensor, "rows vocab"]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        return self.logits(self.prompts, [0] * len(self.prompts))

    def generate(self, new: int) -> int:
        written = [self.prefill().argmax(-1).tolist()]
        places = [len(prompt) for prompt in self.prompts]
        while len(written) < new:
            written.append(self.logits([[token] for token in written[-1]], places).argmax(-1).tolist())
            places = [place + 1 for place in places]
        return sum(map(len, written))

    def logits(
        self, rows: list[list[int]], places: list[int], every: bool = False
    ) -> Float[Tensor, "rows_or_tokens vocab"]:
        """Read each row's tokens from its place on. Return the logits of its last token, or of every token."""
        batch, count, expected = self.batch, 0, []
        for row, (tokens, place) in enumerate(zip(rows, places, strict=True)):
            for i, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, place + i
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = every or i == len(tokens) - 1
                if batch.logits[count]:
                    expected.append(count)
                count += 1
        batch.n_tokens = count
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        logits = [self.lib.llama_get_logits_ith(self.context, place) for place in expected]
        return torch.from_numpy(np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in logits]))


class OpenVino:
    """OpenVINO GenAI's pipeline with its default settings. It keeps the keys and values of prompts that it has read."""

    def __init__(self, folder: str, prompts: Prompts, kind: str, draft: str | None = None, room: int = 0) -> None:
        """Load what optimum-intel exported: ``kind`` is its folder, and behind a colon a hint of precision, if any."""
        self.genai: Any = importlib.import_module("openvino_genai")
        self.tensor: Any = importlib.import_module("openvino").Tensor
        place, _, hint = kind.partition(":")
        options = {"INFERENCE_PRECISION_HINT": hint} if hint else {}
        self.model, self.prompts = self.genai.LLMPipeline(place, "CPU", **options), prompts

    def prefill(self) -> object:
        return self.generate(1)

    def generate(self, new: int) -> int:
        how = self.genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, apply_chat_template=False)
        ids, mask = (self.tensor(part.numpy()) for part in left_padded(self.prompts))
        return sum(map(len, self.model.generate(self.genai.TokenizedInputs(ids, mask), how).tokens))


def write_gguf(folder: str | Path, kind: str, tokenizer: Tokenizer | None = None) -> Path:
    """Write the checkpoint in ``folder`` as a GGUF file beside it, and return the file's path.

    Matrices are converted to ``kind``; positions, norms and biases stay float32, as llama.cpp's own converter leaves
    them. Without a tokenizer, ids go in and come out.

    Raises:
        ConfigError: if the kind is none that the package gguf writes.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    kinds = (*GGML_TYPES.values(), *MORE_TYPES)
    if kind not in kinds:
        raise ConfigError(f"the kinds of llama.cpp are {', '.join(kinds)}, got {kind}")
    model, path = from_pretrained(str(folder), device="cpu", dtype="float32"), Path(folder) / f"{kind}.gguf"
    config, matrix_type = model.config, gguf.GGMLQuantizationType[kind.upper()]
    names, file = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer), gguf.GGUFWriter(path, "gpt2")
    file.add_context_length(config.n_positions)
    file.add_embedding_length(config.n_embd)
    file.add_feed_forward_length(config.inner_size)
    file.add_block_count(config.n_layer)
    file.add_head_count(config.n_head)
    file.add_layer_norm_eps(config.layer_norm_epsilon)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab" if tokenizer is None else "gpt2")
    if tokenizer is not None:
        backend = tokenizer.backend
        merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
        file.add_tokenizer_pre("gpt-2")
        file.add_token_list([backend.id_to_token(i) or f"[PAD{i}]" for i in range(config.vocab_size)])
        file.add_token_merges(merges or ["! !"])  # llama.cpp needs one
        file.add_eos_token_id(tokenizer.end_of_text_id or 0)
    for name, tensor in model.state_dict().items():
        part, _, field = name.rpartition(".")
        rows = tensor.t() if part.rpartition(".")[2].startswith("c_") and tensor.ndim == 2 else tensor  # (out, in)
        stored = matrix_type if tensor.ndim == 2 and part != "wpe" else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(rows.contiguous().numpy(), stored)
        site = names.get_name(part if part == "lm_head" else f"transformer.{part}")
        file.add_tensor(f"{site}.{field}", data, raw_dtype=stored)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/, where the processes of the programs look too
    homes = {"ctranslate2": "CTranslate2", "llama.cpp": "LlamaCpp", "openvino": "OpenVino"}
    OTHERS.update({name: f"bench.others:{home}" for name, home in homes.items()})
    KIND_NAMES["llama.cpp"] = GGML_TYPES
    sys.argv[1:1] = ["bench", "generate"]
    main()
