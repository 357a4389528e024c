"""Text <-> token ids, with the ids that transformers gives."""

import copy
import io
import json
import math
import pickle
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from minigpt.checkpoint.contents import (
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    Files,
    fields_of,
    local_place,
)
from minigpt.checkpoint.pickles import check_pickle
from minigpt.choices import GPT2_TYPE
from minigpt.errors import CheckpointError, ConfigError, GenerationError, listing, raised
from minigpt.files import read_text, replaced, write_atomically, write_json

END_OF_TEXT = "<|endoftext|>"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token")  # which end-of-text is for GPT-2
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
PLAIN_CLASS = "PreTrainedTokenizerFast"  # takes a tokenizer.json as it is
PLAIN_CLASSES = (None, PLAIN_CLASS, "TokenizersBackend")
LONG_TEXT = 100_000  # characters, which take a tenth of a second to read
KEEPS_BYTES = ("ByteLevel", "Split", "Digits", "Sequence")  # pre-tokenizers that drop nothing, unless one removes


class Tokenizer:
    """A checkpoint's tokenizer: mostly byte-level BPE (Radford et al. 2019, section 2.2), which loses no text.

    A text always has the same ids. So truncation, padding, BPE dropout (arXiv 1910.13267) and Unigram's sampling are
    off, whatever a file remembers from training or an earlier call has left on. Special tokens are read as such, unless
    the settings say ``split_special_tokens``.

    Args:
        backend: the ``tokenizers.Tokenizer`` that does the work. It is copied: other calls may change theirs.
        settings: the fields of tokenizer_config.json, e.g. the end-of-text token or the chat template. By default
            ``<|endoftext|>``, if the vocabulary has it, ends a text.

    Raises:
        ConfigError: if the backend cannot be copied, as one with components written in Python.
    """

    backend: tokenizers.Tokenizer
    settings: dict[str, Any]

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        try:
            copied = copy.deepcopy(backend)
        except Exception as error:  # a bare one
            raise ConfigError(f"cannot be copied: {error}", argument="backend") from error
        self._take(copied, settings)

    def _take(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None) -> None:
        """Become the tokenizer of a backend that nobody else has."""
        self.backend = backend
        self.settings = {}
        if settings is not None:
            self.settings = settings
        elif backend.token_to_id(END_OF_TEXT) is not None:
            self.settings = dict.fromkeys(TOKEN_NAMES, END_OF_TEXT)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(self.settings.get("split_special_tokens"))
        model: Any = backend.model
        if isinstance(model, models.BPE):
            model.dropout = None
        if isinstance(model, models.Unigram) and hasattr(model, "alpha"):  # older tokenizers cannot sample
            model.alpha = None

    def __repr__(self) -> str:
        return f"<Tokenizer: {self.kind} of {self.vocab_size:,} tokens>"

    @classmethod
    def from_pretrained(
        cls, source: str | Path = "demo", *, revision: str | None = None, local_files_only: bool = False
    ) -> "Tokenizer":
        """Load the tokenizer of a checkpoint. A tokenizer.json is taken as it is, where transformers does so too.

        transformers' AutoTokenizer reads any other: a vocab.json with merges.txt, BERT's vocab.txt, SentencePiece
        (which needs two more packages), and a tokenizer.json with added_tokens.json, special_tokens_map.json or a class
        of its own in its folder. Its class of GPT-2 takes only vocabulary and merges of a tokenizer.json. OpenAI's
        encoder.json with vocab.bpe is read too, and so are the characters of nanoGPT's meta.pkl.

        Raises:
            CheckpointError: if the source cannot be found, or has no tokenizer or one that cannot be read.
        """
        place = local_place(source, TOKENIZER_FILES, revision=revision, local_files_only=local_files_only)
        files = Files.at(place)
        return cls.read(files.folder, files.config or {})

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> "Tokenizer":
        """Load the tokenizer whose files are in a folder. Raises as ``from_pretrained``.

        Args:
            config: the fields of the folder's config.json.
        """
        if not any((folder / name).is_file() for name in VOCABULARY_FILES):
            raise CheckpointError(f"{folder.resolve()} has no tokenizer: none of {', '.join(VOCABULARY_FILES)}")
        tokenizer = cls.__new__(cls)
        try:
            tokenizer._take(*_read(folder, config))
        except raised() as error:  # a library in Rust may panic
            reason = " ".join(str(error).split())
            if any(folder.glob("*.model")):
                reason = f"SentencePiece's file needs two packages, pip install sentencepiece protobuf; {reason}"
            raise CheckpointError(f"the tokenizer in {folder} cannot be read: {reason}") from error
        if tokenizer._is_byte_level and len(tokenizer._missing_bytes) == len(_BYTE_OF):
            raise CheckpointError(
                f"the tokenizer in {folder} is byte-level, and has no token for any byte; if it is of another kind, "
                "its tokenizer_config.json must name a tokenizer_class"
            )
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. A special token's spelling in it is that token, as in transformers.

        Args:
            add_special_tokens: with what the tokenizer puts around each text, as a first token. GPT-2's adds nothing.

        Raises:
            GenerationError: if the text is not a string, or has lone surrogates.
        """
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Return the ids of a text with their places in it. Raises as ``encode``."""
        try:
            if isinstance(text, str) and len(text) > LONG_TEXT:  # ``encode`` would keep other threads waiting
                return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise GenerationError(f"text must be a string of valid Unicode, got {text!r:.200}") from error
        except raised() as error:
            raise GenerationError(f"the tokenizer cannot read {text!r:.200}: {self._reason(error, text)}") from error

    def _reason(self, error: BaseException, text: str) -> str:
        """Return why a text cannot be read. The error of a tokenizer of characters does not name them."""
        if not isinstance(self.backend.model, models.WordLevel):
            return str(error)
        unknown = set(text).difference(self.backend.get_vocab())
        return f"it has no token for {listing(map(repr, unknown))}"

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without turning it into ids.

        It is exact where the tokens are pieces of the text's bytes, as GPT-2's: there are as many as its bytes divided
        by the longest token's, or more. Other tokenizers may drop or join characters: 0, as of a text that takes
        no time to read.
        """
        if len(text) <= LONG_TEXT or self._longest_token is None:
            return 0
        return math.ceil(len(text.encode("utf-8", "surrogatepass")) / self._longest_token)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        token_ids = [int(token_id) for token_id in ids]
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not self._is_special(token_id)]
        data = self.decode_bytes(token_ids)  # which also checks the ids
        if self._is_byte_level:
            return data.decode("utf-8", errors="replace")
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def decode_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes by which ids continue a text, even if they end inside a character.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        data = b""
        for token_id in map(int, ids):
            if not (skip_special_tokens and self._is_special(token_id)):
                data += self._bytes_of(token_id)
        return data

    def offsets(self, text: str) -> list[int]:
        """Return where each token of ``encode(text)`` begins in the text, in characters.

        A token that the tokenizer puts around texts begins where the token before it ends. A token that is the end of
        a character begins where the character does. Spaces between two tokens are the second one's.

        Raises:
            GenerationError: as ``encode``.
        """
        begins: list[int] = []
        position = 0
        for begin, end in self._encoding(text).offsets:
            if begin == end:  # of no character, or of spaces alone
                begin = position
            while begin > position and text[begin - 1].isspace():  # which some tokenizers leave out of the offsets
                begin -= 1
            begins.append(begin)
            position = max(end, position)
        return begins

    def batch_decode(self, rows: Iterable[Iterable[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each row of ids. Raises as ``decode``."""
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    @property
    def kind(self) -> str:
        """The kind of its vocabulary, e.g. "byte-level BPE" or "WordPiece"."""
        kind = type(self.backend.model).__name__
        return f"byte-level {kind}" if self._is_byte_level else kind

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def id_count(self) -> int:
        """One more than the highest id. A vocabulary with gaps has fewer tokens."""
        return 1 + max(self.backend.get_vocab().values(), default=-1)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text, or None."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or None."""
        return self._id_of("eos_token")

    @property
    def end_of_text_id(self) -> int | None:
        """The id that separates texts: ``eos_token_id``, or that of ``<|endoftext|>``; None without either."""
        if self.eos_token_id is not None:
            return self.eos_token_id
        return self.backend.token_to_id(END_OF_TEXT)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers reads them, into an existing folder.

        Raises:
            OSError: if they cannot be written.
        """
        write_atomically(Path(directory, "tokenizer.json"), self.backend.to_str(pretty=True))
        with replaced(Path(directory, "tokenizer_config.json")) as config:
            write_json(config, self.settings | {"tokenizer_class": PLAIN_CLASS})

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None and not 0 <= token_id < self.id_count:
            raise GenerationError(f"token id {token_id} is outside the tokenizer's vocabulary of {self.id_count} ids")
        if token is None:  # a gap in the vocabulary, which has no text in transformers either
            return b""
        if self._is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        # What follows is of another kind, or a plain text that somebody added.
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)  # SentencePiece's
        if byte is not None:
            return bytes.fromhex(byte[1])
        before = self.backend.decode([self._anchor])
        return self.backend.decode([self._anchor, token_id]).removeprefix(before).encode()

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def _id_of(self, name: str) -> int | None:
        token = _content(self.settings.get(name))
        if token is None:
            return None
        return self.backend.token_to_id(token)

    @cached_property
    def _is_byte_level(self) -> bool:
        return self.backend.decoder is not None and b'"ByteLevel"' in self.backend.decoder.__getstate__()

    @cached_property
    def _missing_bytes(self) -> list[int]:
        """The bytes that a byte-level vocabulary has no token for. Texts lose them, as in transformers."""
        return [byte for character, byte in _BYTE_OF.items() if self.backend.token_to_id(character) is None]

    @cached_property
    def _longest_token(self) -> int | None:
        """The bytes of the longest token, if the tokens of every text are all its bytes; else None."""
        settings = json.loads(self.backend.to_str())
        if not self._is_byte_level or settings["normalizer"] is not None or settings["pre_tokenizer"] is None:
            return None
        if self._missing_bytes:
            return None
        splits = [settings["pre_tokenizer"]]
        for split in splits:
            if split["type"] not in KEEPS_BYTES or split.get("behavior") == "Removed":
                return None
            splits += split.get("pretokenizers", ())
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=False)))  # a character stands for a byte
        for token in self._added.values():
            if token.lstrip or token.rstrip:  # it takes the spaces around it
                return None
            longest = max(longest, len(token.content.encode()))
        return longest

    @cached_property
    def _anchor(self) -> int:
        """A token with a text of its own. After it, the decoder writes a token as it does inside a text."""
        for token_id in range(self.id_count):
            if token_id not in self._added and self.backend.decode([token_id]).strip():
                return token_id
        return 0

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()


def _read(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the backend, and the fields of tokenizer_config.json."""
    fields = fields_of(folder / "tokenizer_config.json")
    if (folder / "chat_template.jinja").is_file():
        fields["chat_template"] = read_text(folder / "chat_template.jinja", CheckpointError)
    name = fields.get("tokenizer_class") or config.get("tokenizer_class")
    is_gpt2 = name in GPT2_CLASSES or (name is None and config.get("model_type") == GPT2_TYPE)
    backend = None
    if is_gpt2 or name in PLAIN_CLASSES:
        backend = _plain(folder, fields, is_gpt2)
    if backend is not None:
        if is_gpt2 or name is None:
            fields = dict.fromkeys(TOKEN_NAMES, END_OF_TEXT) | fields
    elif (folder / "meta.pkl").is_file():
        backend = _of_characters(folder / "meta.pkl")
    else:
        hf_tokenizer = _of_transformers(folder, config.get("tokenizer_class"))
        backend, fields = hf_tokenizer.backend_tokenizer, fields | hf_tokenizer.special_tokens_map
    return backend, fields


def _plain(folder: Path, fields: dict[str, Any], is_gpt2: bool) -> tokenizers.Tokenizer | None:
    """Return the backend of tokenizer.json; None without one, or if transformers makes another one of its folder.

    Args:
        is_gpt2: whether transformers' class of GPT-2 reads it.
    """
    more = ["added_tokens.json", "special_tokens_map.json"]
    if fields.get("added_tokens_decoder"):  # which replaces the latter
        more.remove("special_tokens_map.json")
    has_more = any((folder / name).exists() for name in more)
    if has_more or not (folder / "tokenizer.json").is_file():
        return None
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if is_gpt2 and not _is_gpt2s(backend, bool(fields.get("add_prefix_space"))):
        return None
    tokens = [value for name, value in fields.items() if name.endswith("_token")]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        tokens += fields.get(name) or ()
    tokens += (fields.get("added_tokens_decoder") or {}).values()
    for token in tokens:
        text = _content(token)
        if isinstance(text, str) and backend.token_to_id(text) is None:
            return None
    return backend


def _is_gpt2s(backend: tokenizers.Tokenizer, add_prefix_space: bool) -> bool:
    """Return whether transformers' class of GPT-2 would make this backend of its vocabulary and merges."""
    model: Any = backend.model
    if backend.normalizer is not None or backend.pre_tokenizer is None or backend.decoder is None:
        return False
    if not isinstance(model, models.BPE) or model.unk_token is not None or model.byte_fallback or model.ignore_merges:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    made = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    states = [json.loads(part.__getstate__()) for part in (backend.pre_tokenizer, made)]
    return states[0] == states[1] and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"


def _of_characters(file: Path) -> tokenizers.Tokenizer:
    """Return the backend of nanoGPT's meta.pkl. Only numbers, texts and containers are unpickled.

    Raises:
        ValueError, pickle.UnpicklingError: if it holds anything else.
    """
    stream = io.BytesIO(file.read_bytes())
    check_pickle(stream)
    stream.seek(0)
    meta = _PlainUnpickler(stream).load()
    vocabulary = None
    if isinstance(meta, dict):
        vocabulary = meta.get("stoi")
    if not vocabulary or not all(map(_is_character, vocabulary.items())):
        raise ValueError(f"{file.name} must have a dict 'stoi' from characters to ids")
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _is_character(entry: tuple[Any, Any]) -> bool:
    """Return True for a character and its id."""
    character, token_id = entry
    return isinstance(character, str) and len(character) == 1 and type(token_id) is int


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, texts and containers, and imports nothing. So nothing can be called either."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not read from a pickle: that could run code")


def _of_transformers(folder: Path, name: str | None) -> Any:
    """Return the tokenizer that transformers makes of a folder, whose config.json may name a class."""
    from transformers import AutoTokenizer, GPT2Config, GPT2Tokenizer

    if (folder / "encoder.json").is_file():  # OpenAI's names of vocab.json and merges.txt
        return GPT2Tokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    config: Any = GPT2Config()
    config.tokenizer_class = name
    return AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)


def _content(token: Any) -> Any:
    """Return the text of a token as JSON has it: the text itself, or an object."""
    if isinstance(token, dict):
        return token.get("content")
    return token


# The bytes of a byte-level vocabulary by the printable characters that represent them: a printable byte represents
# itself, and the others follow from U+0100 on, in order (GPT-2's encoder does the same).
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
for _number, _byte in enumerate(sorted({*range(256)}.difference(_PRINTABLE))):
    _BYTE_OF[chr(256 + _number)] = _byte
