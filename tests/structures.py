"""Odd checkpoints built as structures: in order as files, so that a reader gets past its first check, and no models."""

import dataclasses
import json
import math
from typing import Any

from hypothesis import strategies as st

import minigpt

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I64": 64, "I32": 32, "U8": 8, "BOOL": 8, "C64": 64}

numbers = st.integers(-2, 8) | st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, 10**12, -(2**63)]) | st.floats()
words = st.text(max_size=4) | st.sampled_from(
    ["", ".", "..", "/", "../x.safetensors", "a\0b", "\n", "gpt2", "gelu", "the"]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def spelled(value: Any) -> bytes:
    return json.dumps(value).encode()


# Tensors

PARTS = ["weight", "bias", "ln_1.weight", "attn.c_attn.weight", "attn.bias", "attn.masked_bias", "mlp.c_fc.bias", "g"]
names = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "transformer.", "_orig_mod.", "transformer.transformer.", "model/"]),
        st.sampled_from(
            ["", "wte.", "wpe.", "ln_f.", "lm_head.", "h.0.", "h.1.", "h.-1.", "h.00.", f"h.{10**20}.", "h.x."]
        ),
        st.sampled_from(PARTS) | words,
    ),
)
shapes = st.sampled_from([[], [0], [1], [4], [12], [300], [0, 2**40], [4, 4], [300, 4], [8, 4], [1, 1, 8, 8], [1] * 70])
tensors = st.dictionaries(names, st.tuples(st.sampled_from(sorted(BITS)), shapes), max_size=3)


def safetensors(found: dict[str, tuple[str, list[int]]], given: bytes, metadata: Any) -> bytes:
    """A file whose offsets are right, of these tensors and, where no name is taken, those of the file ``given``."""
    end = 8 + int.from_bytes(given[:8], "little")
    header, data = json.loads(given[8:end]), given[end:]
    for name, (dtype, shape) in found.items():
        if name not in header:
            size = math.prod(shape) * BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
            data += bytes(size)
    encoded = spelled(header | ({} if metadata is None else {"__metadata__": metadata}))
    return len(encoded).to_bytes(8, "little") + encoded + data


def files(given: bytes) -> st.SearchStrategy[bytes]:
    """Odd tensors alone, or beside those of a whole model; metadata now and then."""
    nothing = (2).to_bytes(8, "little") + b"{}"
    metadata = st.none() | st.dictionaries(words, words, max_size=2) | values
    return st.builds(safetensors, tensors, st.sampled_from([given, nothing]), metadata)


# JSON

FIELDS = sorted(field.name for field in dataclasses.fields(minigpt.GPT2Config))
MORE_FIELDS = ["n_ctx", "hidden_size", "num_hidden_layers", "model_type", "pruned_heads", "quantization_config", "_x"]


def configs(given: bytes) -> st.SearchStrategy[bytes]:
    """The config with some of its fields, and some that only other configs have, odd."""
    changes = st.dictionaries(st.sampled_from([*FIELDS, *MORE_FIELDS]) | words, values, max_size=3)
    return changes.map(lambda fields: spelled(json.loads(given) | fields))


def indices(given: bytes) -> st.SearchStrategy[bytes]:
    """The index with odd names, for the files that are there and for others."""
    whole = json.loads(given)
    places = st.sampled_from(sorted(set(whole["weight_map"].values()))) | words | values
    changes = st.dictionaries(st.sampled_from(sorted(whole["weight_map"])) | names, places, max_size=2)
    more = st.dictionaries(st.sampled_from(["metadata", "x"]), values, max_size=1)
    return st.builds(lambda change, rest: spelled(rest | {"weight_map": whole["weight_map"] | change}), changes, more)


def tokenizers(given: bytes) -> st.SearchStrategy[bytes]:
    """The tokenizer with odd added tokens, merges, and parts that do something to the text."""
    whole = json.loads(given)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), st.booleans())
    token = st.fixed_dictionaries({"id": st.integers(0, 300) | numbers, "content": words, **flags})
    part = st.none() | st.fixed_dictionaries(
        {"type": st.sampled_from(["ByteLevel", "BertPreTokenizer", "Sequence", "Replace", "NFC", "Strip", "Fuse"])},
        optional={"add_prefix_space": st.booleans(), "trim_offsets": st.booleans(), "use_regex": st.booleans(),
                  "content": words, "pattern": values, "normalizers": st.just([]), "pretokenizers": st.just([])},
    )  # fmt: skip
    pieces = st.sampled_from(sorted(whole["model"]["vocab"])) | words
    model = st.fixed_dictionaries(
        {},
        optional={
            "merges": st.lists(st.tuples(pieces, pieces), max_size=4),
            "dropout": numbers | st.none(),
            "unk_token": pieces | st.none(),
            "byte_fallback": st.booleans(),
            "ignore_merges": st.booleans(),
            "end_of_word_suffix": words,
            "continuing_subword_prefix": words,
        },
    )
    changes = st.fixed_dictionaries(
        {},
        optional={
            "added_tokens": st.lists(token, max_size=3),
            "model": model.map(lambda fields: whole["model"] | fields),
            **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"), part),
            "truncation": values,
            "padding": values,
        },
    )
    return changes.map(lambda fields: spelled(whole | fields))


STRUCTURES = {
    "tensors": ("single", "model.safetensors", files),
    "config": ("single", "config.json", configs),
    "index": ("sharded", "model.safetensors.index.json", indices),
    "tokenizer": ("tokenizer", "tokenizer.json", tokenizers),
}
