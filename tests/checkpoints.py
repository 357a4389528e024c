"""Checkpoints as transformers itself saves them: small, random and asymmetric, for tests to load and to damage."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from helpers import SMALL, randomize
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

Tensors = dict[str, Tensor]

TINY = SMALL | {"vocab_size": 61, "n_positions": 48, "n_embd": 32}

END_OF_TEXT = "<|endoftext|>"

GPT2_SHA256 = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def reference(seed: int = 0, std: float = 0.15, **fields: Any) -> GPT2LMHeadModel:
    """transformers' GPT-2 in eval mode with every parameter random: no symmetric weight, no bias 0, no norm at 1."""
    model = GPT2LMHeadModel(GPT2Config(**{**TINY, **fields})).eval()
    randomize(model, seed, std=std, vector_std=std)
    return model


def saved(model: GPT2LMHeadModel, folder: Path, **how: Any) -> Path:
    """``folder``, after transformers has saved ``model`` in it."""
    logging.disable_progress_bar()  # which would stand on the standard error that a test reads
    model.save_pretrained(folder, **how)
    return folder


def noisy(dtype: str = "float32", **fields: Any) -> GPT2LMHeadModel:
    """A model whose norms subtract a mean so large that their input's other digits are lost at the dtype."""
    model = reference(std=0.3, **fields)
    with torch.no_grad():
        model.transformer.wte.weight += 1e4 if dtype == "float32" else 100
    return model


def talking(folder: Path, *, std: float = 0.3, n_layer: int = 1, **fields: Any) -> Path:
    """``folder``, with a checkpoint of one layer and a tokenizer of 300 tokens in it."""
    saved(reference(std=std, vocab_size=300, n_layer=n_layer, **fields), folder)
    tiny_bpe(300).save(str(folder / "tokenizer.json"))
    return folder


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors], file: str = "model.safetensors") -> Path:
    """``folder``, with the tensors of its file replaced by ``change`` of them."""
    tensors = change(load_file(folder / file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """``folder``, with fields of its config.json replaced."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def without_prefix(tensors: Tensors) -> Tensors:
    """The tensors as a GPT2Model's file, and OpenAI's own, names them."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def tokens(*shape: int, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> Tensor:
    """Random ids."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(ours: Tensor, expected: Tensor) -> str:
    """What an assertion about two tensors prints: the largest difference beside the scale of the values."""
    difference = (ours.double() - expected.double()).abs().max().item()
    return f"largest difference {difference:.3g} at a scale of {expected.double().std().item():.3g}"


def tiny_bpe(vocab_size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on the spot: 256 bytes, end-of-text, and a few merges, also inside characters."""
    text = [
        "the dog saw the other dog there",
        "naïve café — señor 狗狗狗 🐕🐕🐕 the the",
        "\n\n  tabs\tand   spaces\r\n",
    ] * 20
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    return backend


def gpt2_vocabulary() -> Path:
    """The folder of OpenAI's own vocab.json and merges.txt, their hashes verified; skips where there is none."""
    places = [Path(__file__).parents[2] / "shared/data/gpt2-tokenizer", *_cached_snapshots()]
    for folder in places:
        if all((folder / name).is_file() for name in GPT2_SHA256):
            assert {name: _sha256(folder / name) for name in GPT2_SHA256} == GPT2_SHA256
            return folder
    pytest.skip("GPT-2's own vocabulary is neither in ../shared/data/gpt2-tokenizer nor in the Hugging Face cache")


def _cached_snapshots() -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return sorted(Path(HF_HUB_CACHE).glob("models--*gpt2/snapshots/*"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
