"""Text to ids and back: byte for byte, with the ids that transformers gives, from either kind of file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoints import END_OF_TEXT, gpt2_vocabulary, tiny_bpe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GPT2TokenizerFast

import minigpt
from minigpt import CheckpointError, GenerationError, Tokenizer

TEXTS = [
    "",
    " ",
    "The dog",
    " leading and trailing  ",
    "\n\n\t\r\n \x0b\x0c",
    "a\x00b\x01\x7f\x80\x9f",
    "naïve café — “quoted” … ½ ™",
    "狗は犬です 🐕‍🦺👩🏽‍🚀🇩🇪",
    "e\u0301 \u200b\u200d\u2028\ufeff\ufffd\uffff",
    "\U0010ffff\U00010000",
    "don't we'll I'M x'S",
    "1234567890 1,000.5e-3",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|>",
    "<|endoftext|",
    "Ġ Ċ ġ ÿ",
    "x" * 3000,
    " " * 300 + "\n" * 300,
]

UNICODE = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from(" \t\n\r\x00ab'.1狗🐕é\u00a0\u3000\u200d"), max_size=60),
    st.lists(st.sampled_from(TEXTS[:15]), max_size=4).map("".join),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small vocabulary of our own, as tokenizer.json."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_bpe().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tiny_original(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vocabulary as vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("original")
    model = json.loads((tiny / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ours(tiny: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained(gpt2_vocabulary())


@pytest.fixture(scope="module")
def gpt2_of_transformers() -> GPT2TokenizerFast:
    return GPT2TokenizerFast.from_pretrained(gpt2_vocabulary())


@settings(max_examples=100)
@given(UNICODE)
def test_every_text_comes_back_byte_for_byte(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert ours.decode_bytes(ids) == text.encode()
    assert ours.decode(ids) == text
    assert all(0 <= token_id < ours.vocab_size for token_id in ids)


def test_the_two_kinds_of_file_give_the_same_ids(tiny: Path, tiny_original: Path) -> None:
    one, other = Tokenizer.from_pretrained(tiny), Tokenizer.from_pretrained(tiny_original)
    assert one.vocab_size == other.vocab_size == 300
    assert one.end_of_text_id == other.end_of_text_id == 0
    for text in TEXTS:
        assert one.encode(text) == other.encode(text)


# --- GPT-2's own vocabulary


def test_known_ids(gpt2: Tokenizer) -> None:
    known = {
        "The dog": [464, 3290],
        "Hello my name is": [15496, 616, 1438, 318],
        "can": [5171],
        " can": [460],
        "<|endoftext|>": [50256],
        "": [],
    }
    assert {text: gpt2.encode(text) for text in known} == known
    assert (gpt2.vocab_size, gpt2.end_of_text_id) == (50257, 50256)


@settings(max_examples=300)
@given(UNICODE)
@example(" \u00a0 \u3000x")
@example("<|endoftext|> <|endoftext|>")
def test_ids_are_those_of_transformers(gpt2: Tokenizer, gpt2_of_transformers: GPT2TokenizerFast, text: str) -> None:
    ids = gpt2.encode(text)
    assert ids == gpt2_of_transformers(text)["input_ids"]
    assert gpt2.decode(ids) == text == gpt2_of_transformers.decode(ids, clean_up_tokenization_spaces=False)


def test_what_we_save_loads_with_the_same_ids(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    again, theirs = Tokenizer.from_pretrained(tmp_path), GPT2TokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == theirs(text)["input_ids"] == gpt2.encode(text)


def test_what_people_add_to_a_vocabulary_needs_no_merge(gpt2: Tokenizer, tmp_path: Path) -> None:
    vocab = json.loads((gpt2_vocabulary() / "vocab.json").read_text(encoding="utf-8"))
    added = {"<pad>": 50257, "[SEP]": 50258, "madeupword0000": 50259, "<|im|>x": 50260}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | added), encoding="utf-8")
    shutil.copy(gpt2_vocabulary() / "merges.txt", tmp_path / "merges.txt")
    assert Tokenizer.from_pretrained(tmp_path).encode("the dog") == gpt2.encode("the dog")


def test_no_file_of_an_earlier_tokenizer_stays(tmp_path: Path) -> None:
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"pad_token": "<stale>"}')
    (tmp_path / "chat_template.jinja").write_text("stale")
    (tmp_path / "README.md").write_text("mine")
    model, tokenizer = minigpt.from_pretrained("demo"), Tokenizer.from_pretrained("demo")
    minigpt.save_pretrained(model, tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file(), "without a tokenizer what there is stays"
    minigpt.save_pretrained(model, tmp_path, tokenizer)
    assert not Tokenizer.from_pretrained(tmp_path).settings.keys() & {"pad_token", "chat_template"}
    assert (tmp_path / "README.md").read_text() == "mine"


def test_what_transformers_knows_of_a_tokenizer_is_handed_on(tmp_path: Path) -> None:
    theirs = GPT2TokenizerFast.from_pretrained(gpt2_vocabulary(), padding_side="left")
    theirs.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "[PAD]"})
    theirs.chat_template = "{{ messages[0]['content'] }}"
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    Tokenizer.from_pretrained(tmp_path / "in").save(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (again.eos_token_id, again.pad_token_id, again.bos_token_id) == (50257, 50258, 50256)
    assert (again.chat_template, again.padding_side) == (theirs.chat_template, "left")


# --- bytes and characters


def test_parts_of_a_character_are_exact_bytes(ours: Tokenizer) -> None:
    ids = ours.encode("犬")
    assert ours.decode_bytes(ids[:1]) + ours.decode_bytes(ids[1:]) == "犬".encode()
    assert ours.decode(ids[:2]) == "\ufffd"
    assert ours.decode([*ids[:2], *ours.encode("a")]) == "\ufffda"


def test_special_tokens_of_any_spelling_come_back(tmp_path: Path) -> None:
    backend = tiny_bpe()
    backend.add_special_tokens(["<my token, ünïcode>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the<my token, ünïcode> dog")
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids)) == "the<my token, ünïcode> dog"


@pytest.mark.parametrize("token_id", [-1, 300, 2**32, 2**100])
def test_an_id_outside_the_vocabulary_is_named(ours: Tokenizer, token_id: int) -> None:
    with pytest.raises(GenerationError, match=rf"token id {token_id} is outside the tokenizer's vocabulary of 300"):
        ours.decode([1, token_id])


@pytest.mark.parametrize("text", ["a\udfffb", 3, None, b"the", ["the"]], ids=ascii)
def test_what_is_no_text_is_not_encoded(ours: Tokenizer, text: Any) -> None:
    with pytest.raises(GenerationError, match=r"^text must be a string of valid Unicode, got") as raised:
        ours.encode(text)
    assert str(raised.value).encode()  # the message itself can be printed


def test_a_long_text_is_not_cut_and_a_short_one_not_filled(tmp_path: Path) -> None:
    """A tokenizer.json remembers the truncation and padding of the last text that it was used on."""
    backend = tiny_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    text = "the dog saw the other dog there"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("dropout", [0.5, 1.0])
def test_no_merge_is_left_out_by_chance(ours: Tokenizer, tmp_path: Path, dropout: float) -> None:
    """BPE dropout is for training: a text has the same ids each time, as with transformers' GPT2Tokenizer."""
    backend = tiny_bpe()
    backend.model.dropout = dropout
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the dog saw the other dog there"
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert backend.encode(text).ids != ours.encode(text), "the file's own rule would have shown"
    assert all(tokenizer.encode(text) == ours.encode(text) for _ in range(5))
    theirs = GPT2TokenizerFast.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == ours.encode(text)
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


def test_no_token_is_added(tmp_path: Path) -> None:
    backend = tiny_bpe()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path).encode("the") == Tokenizer(tiny_bpe()).encode("the")


# --- files that are damaged or of another kind


def test_damaged_files(tiny: Path, tiny_original: Path, tmp_path: Path) -> None:
    whole = (tiny / "tokenizer.json").read_text()
    for content in ("", "{}", "[]", '{"model": null}', whole[: len(whole) // 2]):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"the tokenizer files in \S+ are damaged: "):
            Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and no vocab\.json with a merges\.txt"):
        Tokenizer.from_pretrained(tmp_path)
    damages = [("vocab.json", b"[1]"), ("vocab.json", b'{"a": -1}'), ("vocab.json", b""), ("merges.txt", b"\xff\xfe")]
    for file, data in damages:
        shutil.copytree(tiny_original, tmp_path, dirs_exist_ok=True)
        (tmp_path / file).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"the tokenizer files in \S+ are damaged: "):
            Tokenizer.from_pretrained(tmp_path)


SOME_BYTES = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])


@pytest.mark.parametrize(
    ("part", "value"),
    [("model", SOME_BYTES), ("normalizer", normalizers.Lowercase()), ("pre_tokenizer", pre_tokenizers.Whitespace())],
    ids=["some bytes", "lowercase", "at spaces"],
)
def test_a_tokenizer_that_loses_text_is_refused(part: str, value: Any, tmp_path: Path) -> None:
    backend = tiny_bpe()
    setattr(backend, part, value)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="must be byte-level"):
        Tokenizer.from_pretrained(tmp_path)
