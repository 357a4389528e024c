"""Text to ids and back: byte for byte, with the ids that transformers gives to the same folder."""

import copy
import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoints import END_OF_TEXT, gpt2_vocabulary, reference, saved, tiny_bpe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, GPT2TokenizerFast
from transformers.utils import logging

import minigpt
from minigpt import CheckpointError, ConfigError, GenerationError, Tokenizer
from minigpt.tokenizer import LONG_TEXT

TEXTS = [
    "",
    " leading and trailing  ",
    "\n\n\t\r\n \x0b\x0c",
    "a\x00b\x01\x7f\x80\x9f",
    "naïve café — “quoted” … ½ ™",
    "狗は犬です 🐕‍🦺👩🏽‍🚀🇩🇪",
    "e\u0301 \u200b\u200d\u2028\ufeff\ufffd\uffff\U0010ffff",
    "don't we'll I'M x'S 1234567890 1,000.5e-3",
    "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|>",
    "<|user|>the  dog<|bot|> x<|far|>",
    "x" * 3000,
]

UNICODE = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from(" \t\n\r\x00ab'.1狗🐕é\u00a0\u3000\u200d"), max_size=60),
    st.lists(st.sampled_from(TEXTS[:10]), max_size=4).map("".join),
)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(tiny_bpe())


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained(gpt2_vocabulary())


# Any folder that transformers reads.


RARELY = st.sampled_from([False, False, True])
FLAGS = st.builds(
    dict,
    special=st.booleans(),
    normalized=st.booleans(),
    lstrip=RARELY,
    rstrip=RARELY,
    single_word=RARELY,
)
TOKEN = st.sampled_from(["<|user|>", "<|bot|>", "dog", END_OF_TEXT])
NAMED = st.none() | TOKEN | st.builds(lambda text, how: {"__type": "AddedToken", "content": text} | how, TOKEN, FLAGS)
FIELDS = st.fixed_dictionaries({}, optional={
    "tokenizer_class": st.sampled_from(["GPT2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "Other"]),
    "add_prefix_space": st.booleans(),
    "add_bos_token": st.booleans(),
    "split_special_tokens": RARELY,
    **dict.fromkeys(("bos_token", "eos_token", "pad_token"), NAMED),
    "extra_special_tokens": st.sampled_from([[], ["<|far|>"], {"image_token": "<|far|>"}]),
    "model_max_length": st.just(1024),
    # A token of the vocabulary that is added again and strips to its left gets other ids once it is saved.
    "added_tokens_decoder": st.builds(
        lambda text, how: {
            "300": {"content": text} | how | ({"lstrip": False} if text == "x" else {}),
            "0": {"content": END_OF_TEXT, "special": True},
        },
        st.sampled_from(["<|user|>", "x"]), FLAGS,
    ),
})  # fmt: skip


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Any]:
    """Files of a tokenizer, most of them as GPT-2's own, with some of what people add."""
    content = json.loads(tiny_bpe().to_str())
    files: dict[str, Any] = {"config.json": {"model_type": "gpt2"}}
    if draw(RARELY):
        files["config.json"]["tokenizer_class"] = draw(st.sampled_from(["GPT2Tokenizer", "PreTrainedTokenizerFast"]))
    if draw(st.booleans()):
        files["tokenizer_config.json"] = draw(FIELDS)
    if draw(RARELY):
        files["added_tokens.json"] = {"<|user|>": 300, "<|bot|>": 301}
    if draw(RARELY):
        files["special_tokens_map.json"] = {"eos_token": draw(TOKEN), "pad_token": "<|pad|>"}
    if draw(st.booleans()):
        merges = "\n".join(["#version: 0.2", *(" ".join(merge) for merge in content["model"]["merges"])])
        return files | {"vocab.json": content["model"]["vocab"], "merges.txt": merges}
    if draw(RARELY):
        added = {"id": 300, "content": "<|bot|>", "single_word": False, "lstrip": False, "rstrip": False}
        content["added_tokens"].append(added | draw(FLAGS))
    if draw(RARELY):
        first, text = (
            {kind: {"id": id, "type_id": 0}} for kind, id in (("SpecialToken", END_OF_TEXT), ("Sequence", "A"))
        )
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, text],
            "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
        }  # fmt: skip
    content["pre_tokenizer"]["add_prefix_space"] = draw(RARELY)
    content["model"]["dropout"] = 0.5 if draw(RARELY) else None
    return files | {"tokenizer.json": content}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@settings(max_examples=60)
@given(folders(), st.lists(UNICODE, max_size=3))
def test_a_folder_has_transformers_ids_before_and_after_saving(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any], texts: list[str]
) -> None:
    logging.set_verbosity_error()
    folder, copied = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("saved")
    write(folder, files)
    try:
        reference = AutoTokenizer.from_pretrained(folder)
    except Exception:  # transformers raises any kind
        with pytest.raises(CheckpointError):
            Tokenizer.from_pretrained(folder)
        return
    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.save(write(copied, {"config.json": {"model_type": "gpt2"}}))
    again, reference_again = Tokenizer.from_pretrained(copied), AutoTokenizer.from_pretrained(copied)
    reference.backend_tokenizer.model.dropout = None
    for text in (*TEXTS, *texts):
        expected = reference(text)["input_ids"]
        assert tokenizer.encode(text) == again.encode(text) == expected == reference_again(text)["input_ids"]
    for name in ("bos_token_id", "eos_token_id"):
        assert len({getattr(one, name) for one in (tokenizer, again, reference, reference_again)}) == 1, name
    fields = json.loads((copied / "tokenizer_config.json").read_text())
    assert fields.keys() >= files.get("tokenizer_config.json", {}).keys(), "every field is kept"


PARTS: dict[str, Any] = {
    "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "normalizer": normalizers.NFC(),
    "post_processor": processors.TemplateProcessing(f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [None, "llama", "gpt2"])
@pytest.mark.parametrize("name", [None, "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
def test_a_tokenizer_json_is_taken_as_transformers_takes_it(
    part: str, kind: str | None, name: str | None, tmp_path: Path
) -> None:
    """Its class of GPT-2 makes the steps of its own, whatever they are in the file."""
    backend = tiny_bpe()
    setattr(backend, part, PARTS[part])
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": {"tokenizer_class": name} if name else {}}
    write(tmp_path, files | ({"config.json": {"model_type": kind}} if kind else {}))
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]


# States of a backend.


def sampling() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.2), ("ab", -1.5), ("aa", -1.1), ("ba", -1.4)]
    return tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))


def drop(backend: Any) -> None:
    backend.model.dropout = 0.9


def sample(backend: Any) -> None:
    backend.model.alpha = 0.1


LEFT_ON: dict[str, tuple[Callable[[], tokenizers.Tokenizer], Callable[[Any], None]]] = {
    "truncation": (tiny_bpe, lambda backend: backend.enable_truncation(4, strategy="only_first")),
    "padding": (tiny_bpe, lambda backend: backend.enable_padding(length=64)),
    "dropout": (tiny_bpe, drop),
    "special tokens as text": (tiny_bpe, lambda backend: setattr(backend, "encode_special_tokens", True)),
    "sampling": (sampling, sample),
}


@pytest.mark.parametrize("state", LEFT_ON)
def test_what_a_call_has_left_on_in_a_backend_is_off(state: str) -> None:
    """A call of transformers' tokenizer leaves its settings in the backend, also after ours is made of it."""
    make, turn_on = LEFT_ON[state]
    backend = make()
    text = f"ababaabab{END_OF_TEXT}aab the dog"
    expected = backend.encode(text).ids
    for before in (True, False):
        if before:
            turn_on(backend)
        tokenizer = Tokenizer(backend)
        turn_on(backend)
        assert [tokenizer.encode(text) for _ in range(5)] == [expected] * 5
        assert {*map(str, (backend.encode(text).ids for _ in range(9)))} != {str(expected)}, "it stays as it was"


def test_a_backend_with_a_part_in_python_is_refused() -> None:
    class Spaces:
        def pre_tokenize(self, text: Any) -> None: ...

    backend = tiny_bpe()
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Spaces())
    with pytest.raises(ConfigError, match=r"backend cannot be copied: .*Custom PreTokenizer"):
        Tokenizer(backend)


def test_bytes_that_no_text_of_the_training_had_are_left_out(tmp_path: Path) -> None:
    """As in transformers; so a text may have fewer tokens than its bytes let expect."""
    content = json.loads(tiny_bpe().to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    kept = [token for token in vocab if not set(token) & set("Zz犬Ãĵ")]
    content["model"] |= {
        "vocab": {token: number for number, token in enumerate(kept)},
        "merges": [merge for merge in merges if all(part in kept for part in (*merge, "".join(merge)))],
    }
    write(tmp_path, {"tokenizer.json": content, "config.json": {"model_type": "gpt2"}})
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "zZz", "the Zoo"):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode("the Zoo")) == "the oo"
    assert tokenizer.least_tokens("z" * 200_000) == 0 == len(tokenizer.encode("z" * 200_000))


def test_a_chat_template_of_its_own_file_is_handed_on(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": tiny_bpe().to_str(), "chat_template.jinja": "{{ messages[0]['content'] }}"})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save(write(tmp_path, {"config.json": {"model_type": "gpt2"}}))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "{{ messages[0]['content'] }}"


def test_no_file_of_an_earlier_tokenizer_stays(tmp_path: Path) -> None:
    stale = {"special_tokens_map.json": {"pad_token": "<stale>"}, "added_tokens.json": {"<stale>": 9}}
    write(tmp_path, stale | {"chat_template.jinja": "stale", "README.md": "mine"})
    model, tokenizer = minigpt.from_pretrained("demo"), Tokenizer.from_pretrained("demo")
    minigpt.save_pretrained(model, tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file(), "without a tokenizer what there is stays"
    minigpt.save_pretrained(model, tmp_path, tokenizer)
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.settings == tokenizer.settings
    assert again.encode("<stale>") == tokenizer.encode("<stale>")
    assert (tmp_path / "README.md").read_text() == "mine"


# GPT-2's own vocabulary.


def test_known_ids(gpt2: Tokenizer) -> None:
    known = {"The dog": [464, 3290], "Hello my name is": [15496, 616, 1438, 318], " can": [460], END_OF_TEXT: [50256]}
    assert {text: gpt2.encode(text) for text in known} == known
    assert (gpt2.vocab_size, gpt2.eos_token_id, gpt2.end_of_text_id) == (50257, 50256, 50256)


@cache
def transformers_gpt2() -> GPT2TokenizerFast:
    return GPT2TokenizerFast.from_pretrained(gpt2_vocabulary())


@settings(max_examples=200)
@given(UNICODE)
@example(" \u00a0 \u3000x")
def test_gpt2_s_ids_are_those_of_transformers(gpt2: Tokenizer, text: str) -> None:
    hf_tokenizer = transformers_gpt2()
    ids = gpt2.encode(text)
    assert ids == hf_tokenizer(text)["input_ids"]
    assert gpt2.decode(ids) == text == hf_tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_first_space_that_tokenizer_config_asks_for(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    fields = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    write(tmp_path, {"tokenizer_config.json": fields, "config.json": {"model_type": "gpt2"}})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert (gpt2.encode("can you"), tokenizer.encode("can you")) == ([5171, 345], [460, 345])
    tokenizer.save(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode("can you") == [460, 345]


def test_what_people_add_to_a_vocabulary_needs_no_merge(gpt2: Tokenizer, tmp_path: Path) -> None:
    vocab = json.loads((gpt2_vocabulary() / "vocab.json").read_text(encoding="utf-8"))
    write(tmp_path, {"vocab.json": vocab | {"<pad>": 50257, "madeupword0000": 50259, "<|im|>x": 50260}})
    shutil.copy(gpt2_vocabulary() / "merges.txt", tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode("the dog") == gpt2.encode("the dog")


# Bytes, characters and special tokens.


def test_parts_of_a_character_are_exact_bytes(ours: Tokenizer) -> None:
    ids = ours.encode("犬")
    assert ours.decode_bytes(ids[:1]) + ours.decode_bytes(ids[1:]) == "犬".encode()
    assert ours.decode(ids[:2]) == "\ufffd"
    assert ours.decode([*ids[:2], *ours.encode("a")]) == "\ufffda"


def test_special_tokens_of_any_spelling_come_back(ours: Tokenizer) -> None:
    tokenizer = Tokenizer(copy.deepcopy(ours.backend))
    tokenizer.backend.add_special_tokens(["<my token, ünïcode>"])
    ids = tokenizer.encode("the<my token, ünïcode> dog")
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids)) == "the<my token, ünïcode> dog"
    assert tokenizer.batch_decode([ids, ids[:1]], skip_special_tokens=True) == ["the dog", tokenizer.decode(ids[:1])]


def test_a_plain_text_in_a_byte_level_vocabulary_is_itself(tmp_path: Path) -> None:
    """As transformers writes it, and not an error: a token with a space, and one with characters of no byte."""
    fields = json.loads(tiny_bpe().to_str())
    fields["model"]["vocab"] |= {"a b": 300, "狗": 301}
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, {"tokenizer.json": fields}))
    ids = [*tokenizer.encode("the"), 300, 301]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "thea b狗"


@pytest.mark.parametrize("token_id", [-1, 300, 2**32, 2**100])
def test_an_id_outside_the_vocabulary_is_named(ours: Tokenizer, token_id: int) -> None:
    with pytest.raises(GenerationError, match=rf"token id {token_id} .* 300"):
        ours.decode([1, token_id])


@pytest.mark.parametrize("text", ["a\udfffb", 3, None, b"the", ["the"]], ids=ascii)
def test_what_is_no_text_is_not_encoded(ours: Tokenizer, text: Any) -> None:
    with pytest.raises(GenerationError, match=r"^text must be") as raised:
        ours.encode(text)
    assert str(raised.value).encode()  # the message itself can be printed


def test_a_long_text_is_not_cut_and_a_short_one_not_filled(tmp_path: Path) -> None:
    """A tokenizer.json remembers the truncation and padding of the last text that it was used on."""
    backend = tiny_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, {"tokenizer.json": backend.to_str()}))
    text = "the dog saw the other dog there"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


SENTENCE = "the dog saw the other dog there, and the dog. "
LONG = LONG_TEXT + 1  # characters of a text that is not simply encoded


@pytest.mark.parametrize(
    "piece", [SENTENCE, "é🙂 \t", END_OF_TEXT, " ", "x\udfff"], ids=["words", "emoji", "ends", "spaces", "surrogates"]
)
@pytest.mark.parametrize("split", ["Digits", "Isolated", None])
def test_a_text_has_at_least_so_many_tokens(piece: str, split: str | None) -> None:
    """And the text of the longest token alone has exactly so many."""
    text = piece * (LONG // len(piece) + 1)
    backend = tiny_bpe()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        first = pre_tokenizers.Digits() if split == "Digits" else pre_tokenizers.Split(" ", "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    tokenizer = Tokenizer(backend)
    least = tokenizer.least_tokens(text)
    assert least > 0
    if "\udfff" not in text:
        count = len(tokenizer.encode(text))
        print(f"{count} tokens, at least {least}")
        assert least <= count
    ends = LONG // len(END_OF_TEXT) + 1
    assert tokenizer.least_tokens(END_OF_TEXT * ends) == ends == len(tokenizer.encode(END_OF_TEXT * ends))
    assert tokenizer.least_tokens("short") == 0


def drops_spaces(backend: tokenizers.Tokenizer) -> None:
    spaces = pre_tokenizers.Split(" ", "removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def joins_characters(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def takes_spaces(backend: tokenizers.Tokenizer) -> None:
    backend.add_tokens([tokenizers.AddedToken("<far>", lstrip=True)])


@pytest.mark.parametrize("change", [drops_spaces, joins_characters, takes_spaces])
def test_a_tokenizer_that_drops_characters_has_no_least_count(change: Any) -> None:
    backend = tiny_bpe()
    change(backend)
    text = "e\u0301 " * 50 + " " * LONG + "<far>"
    assert Tokenizer(backend).least_tokens(text) == 0


def test_a_long_text_has_the_ids_of_its_sentences(ours: Tokenizer) -> None:
    many = LONG // len(SENTENCE) + 1
    assert ours.encode(f" {SENTENCE}".rstrip() * many) == ours.encode(f" {SENTENCE}".rstrip()) * many
    with pytest.raises(GenerationError, match="text must be"):
        ours.encode("a\udfffb" * LONG)


# Files that are damaged or of another kind.

WHOLE = tiny_bpe().to_str()
DAMAGED: dict[str, dict[str, Any]] = {
    **{content[:15] or "empty": {"tokenizer.json": content} for content in ("", "{}", "[]", "[" * 100_000)},
    "cut": {"tokenizer.json": WHOLE[: len(WHOLE) // 2]},
    **{content: {"tokenizer.json": content} for content in ('{"model": null}', '{"added_tokens": [3]}')},
    "a list": {"vocab.json": [1], "merges.txt": ""},
    "a negative id": {"vocab.json": {"a": -1}, "merges.txt": ""},
    "no merges": {"vocab.json": {"a": 1}},
    "nothing": {},
    "deep settings": {"tokenizer.json": WHOLE, "tokenizer_config.json": '{"a":' * 100_000},
    "deep added tokens": {"tokenizer.json": WHOLE, "added_tokens.json": '{"a":' * 100_000},
    "no class": {"vocab.txt": "[PAD]\n[UNK]\na", "config.json": {"model_type": "gpt2"}},  # taken for GPT-2's
}  # fmt: skip


@pytest.mark.parametrize("files", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_folder_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_pretrained(write(tmp_path, files))


# Vocabularies of other kinds.


def test_bert_s_vocabulary(tmp_path: Path) -> None:
    """As the Chinese GPT-2s have it. Its texts are transformers', whole and token by token behind another."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"今天气很好a", "##b", ".", "dog"]
    write(tmp_path, {
        "vocab.txt": "\n".join(vocabulary), "config.json": {"model_type": "gpt2", "tokenizer_class": "BertTokenizer"},
    })  # fmt: skip
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)
    text = "今天 ab dog. 好x"
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"] == [2, 5, 6, 10, 11, 13, 12, 9, 1, 3]
    assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    assert [tokenizer.decode_bytes([i]).decode() for i in ids[1:7]] == [" 今", " 天", " a", "b", " dog", "."]
    assert tokenizer.kind == "WordPiece"
    with pytest.raises(GenerationError, match=r"token id 14 .* 14"):
        tokenizer.decode([14])


def unigram(folder: Path) -> Path:
    """A tokenizer.json as transformers makes it of SentencePiece's file, with bytes for what is in no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁今日", "は", "▁the", "dog", "s"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(piece, -1.0 - i / 99) for i, piece in enumerate(pieces)], 0, byte_fallback=True)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    steps = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    return write(folder, {"tokenizer.json": backend.to_str()})


def test_pieces_of_sentencepiece(tmp_path: Path) -> None:
    """A piece's space is part of it, and parts of a character are their bytes."""
    tokenizer = Tokenizer.from_pretrained(unigram(tmp_path))
    text = "今日は the dogs 狗"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids).decode() == f" {text}"
    assert [tokenizer.decode_bytes([i]) for i in ids[-3:]] == [b"\xe7", b"\x8b", b"\x97"]


def test_a_file_of_sentencepiece_names_the_packages_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"spiece.model": "x", "config.json": {"model_type": "gpt2", "tokenizer_class": "T5Tokenizer"}})
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CheckpointError, match="pip install sentencepiece protobuf"):
        Tokenizer.from_pretrained(tmp_path)


def test_openai_s_own_names(gpt2: Tokenizer, tmp_path: Path) -> None:
    for name, openai_name in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        shutil.copy(gpt2_vocabulary() / name, tmp_path / openai_name)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == gpt2.encode(text)
    assert tokenizer.eos_token_id == 50256


def test_the_characters_of_a_nanogpt(tmp_path: Path) -> None:
    alphabet = "\n !abc狗"
    stoi = {character: i for i, character in enumerate(alphabet)}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(alphabet)), "stoi": stoi}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    text = "ab  c\n\n狗!"
    assert tokenizer.encode(text) == [stoi[character] for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text
    with pytest.raises(GenerationError, match=r"cannot read 'abx': it has no token for 'x'$"):
        tokenizer.encode("abx")
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(text)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize("meta", [[], {}, {"stoi": {"ab": 0}}, {"stoi": {"a": 0.5}}, {"stoi": Path("a")}], ids=str)
def test_a_meta_file_of_something_else_is_refused(meta: object, tmp_path: Path) -> None:
    """And nothing in it is called."""
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(CheckpointError, match=r"must have a dict 'stoi'|is not read from a pickle"):
        Tokenizer.from_pretrained(tmp_path)


# A vocabulary with a gap


def with_gap(folder: Path) -> Path:
    """A GPT-2 whose vocabulary has no token of the ids 10 to 19."""
    tokenizer = json.loads(tiny_bpe().to_str())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for token, number in vocabulary.items():
        vocabulary[token] = number + 10 * (number >= 10)
    for token in added:
        token["id"] = vocabulary.get(token["content"], token["id"] + 10)
    saved(reference(vocab_size=1 + max(vocabulary.values())), folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_an_id_of_a_gap_has_no_text(tmp_path: Path) -> None:
    place = with_gap(tmp_path)
    tokenizer = Tokenizer.from_pretrained(place)
    hf_tokenizer = GPT2TokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    ids = tokenizer.encode("gap")
    assert tokenizer.vocab_size == tokenizer.id_count - 10
    assert tokenizer.decode([12, *ids, 19]) == hf_tokenizer.decode([12, *ids, 19]) == "gap"
    for outside in (-1, tokenizer.id_count):
        with pytest.raises(GenerationError, match=f"outside the tokenizer's vocabulary of {tokenizer.id_count} ids"):
            tokenizer.decode([outside])


def test_a_vocabulary_with_a_gap_is_judged_served_and_written(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    place = with_gap(tmp_path)
    model, tokenizer = minigpt.Recipe(place, device="cpu").open()
    assert tokenizer is not None
    last = tokenizer.id_count - 1
    report = minigpt.parity(place, norm="textbook", device="cpu", prompts=[[12, 30, last]], max_new_tokens=2)
    assert report.passed
    assert report.tokens.pieces[0] == "#12 "
    assert report.tokens.pieces[2] == tokenizer.decode([last])
    minigpt.serve.app({"gap": model}, tokenizer=tokenizer)
    new = list(minigpt.stream(model, tokenizer, "gap", max_new_tokens=5, temperature=9.0, do_sample=True, seed=1))
    assert isinstance("".join(new), str)


def test_a_tokenizer_says_what_it_is() -> None:
    assert re.fullmatch(r"<Tokenizer: byte-level BPE of [\d,]+ tokens>", repr(Tokenizer.from_pretrained("demo")))
