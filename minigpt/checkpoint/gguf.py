"""GGUF files, which llama.cpp computes from, as checkpoints: their weights dequantized, as transformers names them."""

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minigpt.checkpoint.formats import CONFIG, LINEARS, SAFETENSORS
from minigpt.choices import GPT2_TYPE
from minigpt.engines.gguf_file import Metadata
from minigpt.errors import CheckpointError, MiniGPTError, listing, raised
from minigpt.files import TemporaryFolder, file_state, write_json
from minigpt.progress import quiet_transformers

Types = dict[str, str]  # how a tensor is stored, by its name

KEPT = 4  # folders at once
UNUSED = 5  # a token's type in GGUF: padding of the vocabulary
CONTROL = 3  # a special token's
PLAIN_SPLITS = (None, "gpt-2", "gpt2")  # names of GPT-2's way to split a text
PART_NAMES = {
    "token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head", "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
GPT2_FIELDS = {
    "n_inner": "gpt2.feed_forward_length", "n_layer": "gpt2.block_count", "n_head": "gpt2.attention.head_count",
    "n_positions": "gpt2.context_length", "layer_norm_epsilon": "gpt2.attention.layer_norm_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id",
}  # fmt: skip
MEANT = {  # metadata that change what is computed, and the field of transformers' config that then has them
    "rope.scaling.type": "rope_parameters",
    "attention.sliding_window": "sliding_window",
}
LINEAR_WEIGHTS = tuple(f"{name}.weight" for name in LINEARS)


def folder_of(file: Path) -> Path:
    """Return a folder with the model of a GGUF file as transformers saves one, its weights in float32.

    It is temporary, and written again when it is asked for after the file has changed.

    Raises:
        ConfigError: if the package gguf is not installed.
        CheckpointError: if the file is damaged, contradicts itself, or holds no model that transformers reads.
    """
    folder, _ = _folder_written(file.resolve(), file_state(file))
    return folder.path


def types_of(file: Path) -> Types:
    """Return how a GGUF file stores its tensors, as "Q4_K", by the names that ``folder_of`` gives them.

    Raises:
        CheckpointError, ConfigError: as ``folder_of``.
    """
    _, types = _folder_written(file.resolve(), file_state(file))
    return types


@functools.lru_cache(maxsize=KEPT)
def _folder_written(file: Path, _state: tuple[int, ...] | None) -> tuple[TemporaryFolder, Types]:
    folder = TemporaryFolder("gguf")
    try:
        metadata = Metadata(file)
        if metadata["split.count"] not in (None, 0, 1):
            raise ValueError(f"it is one of {metadata['split.count']} files; join them by llama-gguf-split --merge")
        if metadata["general.type"] not in (None, "model"):
            raise ValueError(f"it holds no model, but the {metadata['general.type']} of one")
        if metadata["general.architecture"] == GPT2_TYPE:
            types = _write_gpt2(metadata, folder.path)
        else:
            types = _write_other(metadata, file, folder.path)
    except MiniGPTError:
        raise
    except raised() as error:  # the package gguf and transformers raise many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        if "ignore_mismatched_sizes" in reason:  # transformers has logged the rest
            reason = "its tensors have other shapes than its metadata say"
        raise CheckpointError(f"{file} cannot be read as a GGUF file: {reason:.300}") from error
    return folder, types


def gpt2_name(name: str) -> str:
    """Return our name of a GPT-2's tensor in a GGUF file, if it is known."""
    path, dot, role = name.rpartition(".")
    block, _, part = path.rpartition(".")
    path = PART_NAMES.get(part, part)
    if block:
        path = f"{block.replace('blk.', 'h.')}.{path}"
    return f"{path}{dot}{role}"


def _write_gpt2(metadata: Metadata, folder: Path) -> Types:
    """Write a GPT-2, and its tokenizer if it has one; return how its tensors are stored."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in metadata.tensors():
        path = gpt2_name(name)
        is_linear = path.endswith(LINEAR_WEIGHTS)
        if is_linear:
            tensor = tensor.mT.contiguous()
        tensors[path] = tensor
    vocab_size, width = tensors["wte.weight"].shape
    fields: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": GPT2_TYPE,
        "activation_function": "gelu_new",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "n_embd": width,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    for field, key in GPT2_FIELDS.items():
        fields[field] = metadata[key]
    write_json(folder / CONFIG, fields)
    save_file(tensors, folder / SAFETENSORS, {"format": "pt"})
    if metadata["tokenizer.ggml.model"] == "gpt2" and metadata["tokenizer.ggml.pre"] in PLAIN_SPLITS:
        _write_tokenizer(metadata, folder)
    types: Types = {}
    for name, kind in metadata.types().items():
        types[gpt2_name(name)] = kind
    return types


def _write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write a byte-level BPE."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"] or [None] * len(tokens)
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != UNUSED and token != f"[PAD{token_id}]":
            vocabulary[token] = token_id
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    known = [(one, other) for one, other in merges if one + other in vocabulary]  # others are there for llama.cpp
    backend = Tokenizer(models.BPE(vocabulary, known))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special = {token_id for token_id, kind in enumerate(types) if kind == CONTROL}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        token_id = metadata[f"tokenizer.ggml.{key}_token_id"]
        if token_id is not None:
            special.add(token_id)
            settings[name] = tokens[token_id]
    backend.add_special_tokens([AddedToken(tokens[token_id], normalized=False) for token_id in sorted(special)])
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)


def _write_other(metadata: Metadata, file: Path, folder: Path) -> Types:
    """Write a model of another architecture, and its tokenizer, as transformers reads the file; return the same.

    Raises:
        ValueError: if the file lacks tensors, or has some that transformers leaves out.
    """
    import transformers  # imported here, since it takes seconds

    how: dict[str, Any] = dict(gguf_file=file.name, local_files_only=True, trust_remote_code=False)
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # it shows a bar, whatever it is told
        config = transformers.AutoConfig.from_pretrained(file.parent, **how)
        for key, field in MEANT.items():
            value = metadata[f"{metadata['general.architecture']}.{key}"]
            if value not in (None, "none") and str(value) not in str(getattr(config, field, None)):
                raise ValueError(f"transformers does not read its {key}, {value}, without which it is another model")
        if hasattr(transformers, "GgufConfig"):  # else the weights may stay in their blocks
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        how |= dict(config=config, dtype=torch.float32, output_loading_info=True)
        opened: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **how)
        model, report = opened
        if report["missing_keys"]:
            raise ValueError(f"it has no {listing(sorted(report['missing_keys']))}")
        held, read = metadata.value_count, sum(parameter.numel() for parameter in model.parameters())
        if held != read:  # as a table of rotary frequencies, without which it is another model
            name = type(model).__name__
            raise ValueError(f"transformers' {name} has {read:,} values, and the file {held:,}: some would be left out")
        model.save_pretrained(folder)
        if metadata["tokenizer.ggml.tokens"] is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **how)
            tokenizer.save_pretrained(folder)
    in_file, stored = metadata.names(), metadata.types()
    types: Types = {}
    for name in model.state_dict():
        path, _, role = name.rpartition(".")
        there = f"{in_file.get_name(path)}.{role}"
        if there in stored:
            types[name] = stored[there]
    return types
