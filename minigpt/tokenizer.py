"""Text <-> token ids: GPT-2's byte-level byte-pair encoding, by the ``tokenizers`` library."""

import json
import operator
import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.checkpoint import TOKENIZER_FILES, folder_of, locate
from minigpt.checkpoint.files import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from minigpt.checkpoint.vocabulary import MOST_BYTES
from minigpt.errors import CheckpointError, GenerationError, is_several, listing
from minigpt.json_file import read_object

END_OF_TEXT = "<|endoftext|>"
SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # tokens that people add: no merge makes those
KEPT = (  # of a tokenizer_config.json: what is not in the vocabulary, and ours to hand on
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "model_max_length",
    "additional_special_tokens", "extra_special_tokens", "chat_template", "padding_side", "truncation_side",
)  # fmt: skip


class Tokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2). Every text has ids, and comes back from them byte for byte.

    Args:
        backend: the ``tokenizers.Tokenizer`` that does the work.
        settings: what transformers is to find in tokenizer_config.json beside it, such as the token that fills texts
            up, or how a chat is written. Nothing here depends on it; it is saved again.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        self.backend, self.settings = backend, dict(settings or {})

    @classmethod
    def from_pretrained(
        cls, source: str | Path = "demo", *, revision: str | None = None, local_files_only: bool = False
    ) -> "Tokenizer":
        """The tokenizer of a checkpoint, from its tokenizer.json, or its vocab.json and merges.txt.

        What such a file says of training is off, as in a model that only computes: no text is cut or filled, and no
        merge is left out by chance (BPE dropout, arXiv 1910.13267), so that a text always has the same ids. It is off
        in transformers' ``GPT2Tokenizer`` too; a plain ``PreTrainedTokenizerFast`` drops merges whenever it encodes.

        Raises:
            CheckpointError: the source cannot be found or has neither, or the files are damaged or of another kind.
        """
        place = locate(source, TOKENIZER_FILES, revision=revision, local_files_only=local_files_only)
        folder = folder_of(place)
        try:
            tokenizer = cls(_backend(folder), _settings(folder))
            normalizes = tokenizer.backend.normalizer is not None  # asked first: one that swells a text is to see none
            exact = not normalizes and tokenizer.is_byte_exact()
        except CheckpointError:
            raise
        except BaseException as error:  # the library raises bare Exceptions, and panics, which are not even these
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise CheckpointError(f"the tokenizer files in {folder} are damaged: {error}") from error
        if not exact:
            why = "it has a normalizer" if normalizes else "it loses part of a text"
            raise CheckpointError(f"the tokenizer in {folder} is not byte-level, as GPT-2's is: {why}")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of a text; ``<|endoftext|>`` written in it is that one token, as in transformers.

        Raises:
            GenerationError: it is no text, or not Unicode (it has lone surrogates), or the file's patterns give up on
                it.
        """
        if not isinstance(text, str):
            raise GenerationError(f"only a text can be encoded, not a {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise GenerationError(f"the text is not valid Unicode: {text!r:.200}") from error
        except BaseException as error:
            if _is_panic(error):
                raise GenerationError("the tokenizer cannot split this text; a pattern of its own gave up") from error
            raise

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD.

        Raises:
            GenerationError: an id is outside the vocabulary, or these are not the ids of one text.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_byte_exact(self) -> bool:
        """Whether every byte has a token and a text comes back as it was: no normalizer, no unknown token, no space."""
        text = "".join(map(chr, range(0x250))) + "狗🐕"
        complete = all(self.backend.token_to_id(character) is not None for character in _BYTE_OF)
        return complete and self.decode_bytes(self.encode(text)) == text.encode()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ids, also where they end in the middle of a character.

        Raises:
            GenerationError: an id is outside the vocabulary, or these are not the ids of one text.
        """
        if not is_several(ids):
            raise GenerationError(f"the ids of a text are a list of whole numbers, not {ids!r:.100}")
        return b"".join(self._bytes_of(_whole(token_id)) for token_id in ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_of_text_id(self) -> int | None:
        """The id of ``<|endoftext|>``, which separates texts; None where the vocabulary has none."""
        return self.backend.token_to_id(END_OF_TEXT)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers reads them, into a folder that exists.

        Raises:
            OSError: they cannot be written.
        """
        folder = Path(directory)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}
        if self.end_of_text_id is not None:
            settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        settings |= self.settings
        for name, text in (
            ("tokenizer.json", self.backend.to_str(pretty=True)),
            ("tokenizer_config.json", json.dumps(settings, indent=2) + "\n"),
        ):
            (folder / f"{name}.unfinished").write_text(text, encoding="utf-8")
            os.replace(folder / f"{name}.unfinished", folder / name)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise GenerationError(f"token id {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}")
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError as error:
            raise GenerationError(f"token {token!r} is not of a byte-level vocabulary, such as GPT-2's is") from error

    @cached_property
    def _special(self) -> dict[int, str]:
        return {token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()}


def _whole(token_id: Any) -> int:
    try:
        return operator.index(token_id)
    except TypeError as error:
        said = f"an id of a text is a whole number, not {token_id!r:.100}"
        raise GenerationError(f"{said}; of a batch, decode a row at a time") from error


def _is_panic(error: BaseException) -> bool:
    """Whether the library gave up in its own language: that is no Exception, and has no name to import."""
    return type(error).__name__ == "PanicException"


def _backend(folder: Path) -> tokenizers.Tokenizer:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file() and (size := (folder / name).stat().st_size) > MOST_BYTES:
            raise CheckpointError(f"{folder / name} has {size:,} bytes; more than {MOST_BYTES:,} are not read")
    if (folder / "tokenizer.json").is_file():
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()  # a file remembers how its last text was cut and filled; ours is to come back whole
        backend.no_padding()
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None
        return backend
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return byte_level_bpe(folder / "vocab.json", folder / "merges.txt")
    raise CheckpointError(
        f"{folder.resolve()} has neither a tokenizer.json nor a vocab.json with a merges.txt; put there those that the "
        "model was trained with"
    )


def _settings(folder: Path) -> dict[str, Any]:
    config, special = (_fields(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS))
    later = (special, config) if "added_tokens_decoder" in config else (config, special)  # as transformers has it
    settings = {name: _typed(value) for fields in later for name, value in fields.items() if name in KEPT}
    if (template := folder / CHAT_TEMPLATE).is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return settings


def _fields(file: Path) -> dict[str, Any]:
    return read_object(file, CheckpointError) if file.is_file() else {}


def _typed(value: Any) -> Any:
    """A token as tokenizer_config.json has it, where special_tokens_map.json leaves out what it is."""
    if isinstance(value, list):
        return [_typed(member) for member in value]
    return value | {"__type": "AddedToken"} if isinstance(value, dict) and "content" in value else value


def byte_level_bpe(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer from its two original files.

    Raises:
        CheckpointError: a file is damaged, or there are tokens that no merge makes.
    """
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    _require_whole(backend.get_vocab(), merges)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _require_whole(ids: dict[str, int], merges: Path) -> None:
    """Refuse merges of which some are gone: every text would still have ids, and others than the model has learned.

    What was to be merged comes after the bytes and is two tokens side by side; what people add is seldom either.
    """
    pairs = (line.split(" ") for line in merges.read_text(encoding="utf-8").split("\n"))
    made = {"".join(pair).rstrip("\r") for pair in pairs if len(pair) == 2}
    first = max((ids[byte] for byte in _BYTE_OF if byte in ids), default=0)
    lost = [
        token
        for token, number in ids.items()
        if number > first and token not in made and not SPECIAL.fullmatch(token) and _is_pair(token, ids)
    ]
    if lost:
        raise CheckpointError(f"{merges} makes no token {listing(lost)}, which the vocabulary has; it is cut off")


def _is_pair(token: str, ids: dict[str, int]) -> bool:
    return any(token[:i] in ids and token[i:] in ids for i in range(1, len(token)))


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, and back to the byte.

    Bytes that print are themselves; the others follow from U+0100 on, in order (GPT-2's encoder does the same).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
