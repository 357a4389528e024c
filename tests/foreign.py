"""One GPT-2 as other families write it: made from transformers' tensors by hand, and not by the project's tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

Tensors = dict[str, Tensor]
LINEARS = ("c_attn", "c_proj", "c_fc")
BOOK_LINEARS = {"att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc", "ff.layers.2": "mlp.c_proj"}


def parts(model: GPT2LMHeadModel) -> Tensors:
    """The model's tensors as they are, without a prefix and without the head."""
    state = model.state_dict()
    return {
        name.removeprefix("transformer."): tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"
    }


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


def nanogpt_tensors(model: GPT2LMHeadModel, prefix: str = "") -> Tensors:
    state = {
        f"{prefix}transformer.{name}": tensor.T.contiguous() if is_linear(name) else tensor
        for name, tensor in parts(model).items()
    }
    return state | {f"{prefix}lm_head.weight": state[f"{prefix}transformer.wte.weight"]}


def write_nanogpt(model: GPT2LMHeadModel, folder: Path, *, prefix: str = "_orig_mod.", **args: Any) -> Path:
    """ckpt.pt as nanoGPT's trainer leaves it, its optimizer and all. GELU is the exact one there."""
    assert model.config.activation_function == "gelu"
    c = model.config
    shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.n_positions, vocab_size=c.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    weights = nanogpt_tensors(model, prefix)
    checkpoint = {
        "model": weights,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": {**shape, "bias": True, "dropout": 0.1, **args},
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.25),
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
    }
    torch.save(checkpoint, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def book_tensors(model: GPT2LMHeadModel) -> Tensors:
    tensors, c = parts(model), model.config
    state = {
        "tok_emb.weight": tensors["wte.weight"], "pos_emb.weight": tensors["wpe.weight"],
        "final_norm.scale": tensors["ln_f.weight"], "final_norm.shift": tensors["ln_f.bias"],
        "out_head.weight": model.lm_head.weight.detach().clone(),
    }  # fmt: skip
    for i in range(c.n_layer):
        block, ours = f"trf_blocks.{i}", f"h.{i}"
        for part, name in enumerate(("query", "key", "value")):
            columns = slice(part * c.n_embd, (part + 1) * c.n_embd)
            state[f"{block}.att.W_{name}.weight"] = tensors[f"{ours}.attn.c_attn.weight"][:, columns].T.contiguous()
            state[f"{block}.att.W_{name}.bias"] = tensors[f"{ours}.attn.c_attn.bias"][columns].clone()
        for source, name in BOOK_LINEARS.items():
            state[f"{block}.{source}.weight"] = tensors[f"{ours}.{name}.weight"].T.contiguous()
            state[f"{block}.{source}.bias"] = tensors[f"{ours}.{name}.bias"]
        for number in "12":
            state[f"{block}.norm{number}.scale"] = tensors[f"{ours}.ln_{number}.weight"]
            state[f"{block}.norm{number}.shift"] = tensors[f"{ours}.ln_{number}.bias"]
        state[f"{block}.att.mask"] = torch.ones(c.n_positions, c.n_positions).triu(1)
    return state


def write_book(model: GPT2LMHeadModel, folder: Path, *, nested: bool = False) -> Path:
    """A .pth of the state dict, and the shape in the book's words beside it."""
    c = model.config
    shape = dict(
        vocab_size=c.vocab_size, context_length=c.n_positions, emb_dim=c.n_embd, n_heads=c.n_head, n_layers=c.n_layer,
        drop_rate=0.0, qkv_bias=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    state = book_tensors(model)
    torch.save({"model_state_dict": state, "optimizer_state_dict": {}} if nested else state, folder / "model.pth")
    return folder / "model.pth"


def write_pickle(model: GPT2LMHeadModel, folder: Path, *, legacy: bool = False, shards: int = 1) -> Path:
    """pytorch_model.bin, whole or sharded, as transformers wrote it until it took to safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(model.config.to_json_string())
    state = {f"transformer.{name}": tensor for name, tensor in parts(model).items()}
    if shards == 1:
        tied = state | {"lm_head.weight": state["transformer.wte.weight"]}
        torch.save(tied, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return folder
    weight_map = {}
    for number in range(shards):
        shard = dict(list(state.items())[number::shards])
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


WRITERS: dict[str, Callable[[GPT2LMHeadModel, Path], Path]] = {
    "bin": write_pickle,
    "bin, before 1.6": lambda model, folder: write_pickle(model, folder, legacy=True),
    "bin, sharded": lambda model, folder: write_pickle(model, folder, shards=3),
    "nanoGPT": write_nanogpt,
    "nanoGPT, plain": lambda model, folder: write_nanogpt(model, folder, prefix=""),
    "book": write_book,
    "book, nested": lambda model, folder: write_book(model, folder, nested=True),
}
