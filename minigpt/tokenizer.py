"""Text <-> token ids: GPT-2's byte-level byte-pair encoding, with the ids that transformers gives."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.checkpoint import TOKENIZER_FILES, folder_of, has_tokenizer, local_place
from minigpt.checkpoint.contents import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    fields_of,
    write_json,
)
from minigpt.errors import CheckpointError, GenerationError
from minigpt.files import read_text

END_OF_TEXT = "<|endoftext|>"
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
OF_GPT2 = (None, "GPT2Tokenizer", "GPT2TokenizerFast")  # the classes that take vocabulary and merges only
ANY_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the classes that take a tokenizer.json as it is
# Fields of a tokenizer_config.json that change no id where there is a tokenizer.json.
WITHOUT_EFFECT = {
    *NAMES, "tokenizer_class", "added_tokens_decoder", "add_prefix_space", "add_bos_token", "add_eos_token", "errors",
    "model_max_length", "clean_up_tokenization_spaces", "chat_template", "padding_side", "truncation_side", "backend",
    "is_local", "local_files_only", "name_or_path", "model_input_names",
}  # fmt: skip


class Tokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2). Every text has ids, which decode to the same bytes.

    Args:
        backend: the ``tokenizers.Tokenizer`` that does the work.
        settings: the fields of tokenizer_config.json, e.g. the end-of-text token or the chat template. By default
            ``<|endoftext|>``, if the vocabulary has it, ends a text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        self.backend = backend
        has_end = backend.token_to_id(END_OF_TEXT) is not None
        self.settings = dict.fromkeys(NAMES[:3] if has_end else (), END_OF_TEXT) if settings is None else settings

    @classmethod
    def from_pretrained(
        cls, source: str | Path = "demo", *, revision: str | None = None, local_files_only: bool = False
    ) -> "Tokenizer":
        """Load the tokenizer of a checkpoint, with the ids that ``transformers.AutoTokenizer`` gives.

        Truncation, padding and BPE dropout (arXiv 1910.13267) that a tokenizer.json remembers from training are off, so
        that a text always has the same ids. If the folder has more than one plain tokenizer.json, or one vocab.json and
        merges.txt, transformers is imported and reads it.

        Raises:
            CheckpointError: if the source cannot be found or has neither, or the tokenizer is not byte-level.
        """
        folder = folder_of(local_place(source, TOKENIZER_FILES, revision=revision, local_files_only=local_files_only))
        if not has_tokenizer(folder):
            raise CheckpointError(
                f"{folder.resolve()} has no tokenizer.json, and no vocab.json with a merges.txt; add the files that "
                "the model was trained with"
            )
        try:
            tokenizer = cls(*_read(folder))
            is_exact = tokenizer.backend.normalizer is None and tokenizer.is_byte_exact()
        except BaseException as error:  # the library raises bare Exceptions, and panics
            _require_reason(error)
            raise CheckpointError(f"the tokenizer files in {folder} are damaged: {error}") from error
        if not is_exact:
            raise CheckpointError(f"the tokenizer in {folder} must be byte-level, as GPT-2's is, but it changes texts")
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. A special token's spelling in it is that token, as in transformers.

        Args:
            add_special_tokens: with what the tokenizer puts around each text, as a first token. GPT-2's adds nothing.

        Raises:
            GenerationError: if the text is not a string, or has lone surrogates.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise GenerationError(f"text must be a string of valid Unicode, got {text!r:.200}") from error
        except BaseException as error:
            _require_reason(error)
            raise GenerationError(f"the tokenizer cannot read {text!r:.200}: {error}") from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        kept = (int(token_id) for token_id in ids)
        if skip_special_tokens:
            kept = (token_id for token_id in kept if not (token_id in self._added and self._added[token_id].special))
        return self.decode_bytes(kept).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes of ids, even if they end inside a character.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        return b"".join(self._bytes_of(int(token_id)) for token_id in ids)

    def batch_decode(self, rows: Iterable[Iterable[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each row of ids. Raises as ``decode``."""
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def __call__(self, text: str | list[str], **options: object) -> dict[str, Any]:
        """Return ``{"input_ids": ids}`` of a text, or of each of several texts.

        Raises:
            GenerationError: as ``encode``, or if there are options, which transformers' tokenizer has.
        """
        if options:
            raise GenerationError(
                f"has no {', '.join(options)} here; use torch.tensor([tokenizer.encode(text)]), or the tokenizer of "
                "transformers.AutoTokenizer",
                argument="tokenizer",
            )
        return {"input_ids": self.encode(text) if isinstance(text, str) else [self.encode(one) for one in text]}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a minigpt.Tokenizer has no {name}; its .backend is a tokenizers.Tokenizer, and "
            "transformers.AutoTokenizer.from_pretrained reads the same folder"
        )

    def is_byte_exact(self) -> bool:
        """Return True if all bytes have a token and texts come back, but for added tokens and a first space."""
        text = "".join(map(chr, range(0x250))) + "狗🐕"
        for token in self._added.values():
            text = text.replace(token.content, "")
        complete = all(self.backend.token_to_id(character) is not None for character in _BYTE_OF)
        return complete and self.decode(self.encode(text, add_special_tokens=False)) in (text, f" {text}")

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text, or None."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or None."""
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of the token that fills a row, or None."""
        return self._id_of("pad_token")

    @property
    def end_of_text_id(self) -> int | None:
        """The id that separates texts: ``eos_token_id``, or that of ``<|endoftext|>``; None without either."""
        return self.backend.token_to_id(END_OF_TEXT) if self.eos_token_id is None else self.eos_token_id

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers reads them, into an existing folder.

        Raises:
            OSError: if they cannot be written.
        """
        self.backend.save(str(Path(directory, "tokenizer.json")))
        write_json(Path(directory, TOKENIZER_CONFIG), self.settings | {"tokenizer_class": ANY_FILE[0]})

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise GenerationError(f"token id {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return bytes(_BYTE_OF[character] for character in token)

    def _id_of(self, name: str) -> int | None:
        token = _content(self.settings.get(name))
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()


def _read(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the backend, and the fields of tokenizer_config.json."""
    fields = fields_of(folder / TOKENIZER_CONFIG)
    template = folder / CHAT_TEMPLATE
    fields |= {"chat_template": read_text(template, CheckpointError)} if template.is_file() else {}
    backend = _plain(folder, fields)
    if backend is None:
        backend, named = _of_transformers(folder)
        fields |= named
    elif fields.get("tokenizer_class") in OF_GPT2:
        fields = dict.fromkeys(NAMES[:3], END_OF_TEXT) | fields
    backend.no_truncation()
    backend.no_padding()
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None
    return backend, fields


def _plain(folder: Path, fields: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """Return the backend that a folder's one file describes; None if transformers would make another of the folder."""
    has_file, kind = (folder / "tokenizer.json").is_file(), fields.get("tokenizer_class")
    is_gpt2 = kind in OF_GPT2
    if has_file:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if backend.token_to_id(END_OF_TEXT) is not None:
            backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    named = {name: fields[name] for name in NAMES if fields.get(name)}
    listed = fields.get("added_tokens_decoder") or {}
    known = {(str(number), token.content, token.special) for number, token in added.items()}
    conditions = (
        is_gpt2 or (has_file and kind in ANY_FILE),
        fields_of(folder / CONFIG).get("tokenizer_class") is None,
        not (folder / ADDED_TOKENS).exists(),
        not (folder / SPECIAL_TOKENS).exists() or "added_tokens_decoder" in fields,
        all(name in WITHOUT_EFFECT or not value for name, value in fields.items()),
        has_file or not any(fields.get(name) for name in ("add_bos_token", "add_eos_token")),
        not is_gpt2 or (not fields.get("add_prefix_space") and _is_gpt2(backend)),
        {_content(token) for token in named.values()} <= special,
        not is_gpt2 or END_OF_TEXT in special,
        {(number, token["content"], token.get("special", False)) for number, token in listed.items()} <= known,
        not any(map(_trims, (*added.values(), *named.values(), *listed.values()))),
    )
    return backend if all(conditions) else None


def _is_gpt2(backend: tokenizers.Tokenizer) -> bool:
    """Return True if transformers' GPT2Tokenizer, which takes only the vocabulary and the merges, is the same."""
    split = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    base = backend.get_vocab_size(with_added_tokens=False)
    return (
        isinstance(backend.model, models.BPE)
        and not (backend.normalizer or backend.model.unk_token or backend.model.byte_fallback)
        and not (backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix)
        and not backend.model.ignore_merges
        and {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}.items() <= split.items()
        and backend.get_vocab_size() == base
    )


def _of_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the backend of transformers' tokenizer, and its special tokens by name."""
    from transformers import AutoTokenizer, GPT2Config

    config: Any = GPT2Config()
    config.tokenizer_class = fields_of(folder / CONFIG).get("tokenizer_class")
    theirs = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    return theirs.backend_tokenizer, theirs.special_tokens_map


def _content(token: Any) -> str | None:
    """Return the text of a token as JSON has it: the text itself, or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _trims(token: AddedToken | dict[str, Any] | str) -> bool:
    """Return True if a token is found beside spaces, which it takes, or between words only."""
    flags = token.__getstate__() if isinstance(token, AddedToken) else token
    return isinstance(flags, dict) and any(flags.get(name) for name in ("lstrip", "rstrip", "single_word"))


def _require_reason(error: BaseException) -> None:
    """Raise an error again that is neither an ``Exception`` nor a panic of the library."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes of a byte-level vocabulary by the printable characters that represent them.

    A printable byte represents itself. The others follow from U+0100 on, in order (GPT-2's encoder does the same).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
