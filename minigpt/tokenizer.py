"""Text <-> token ids: GPT-2's byte-level byte-pair encoding, by the ``tokenizers`` library."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.checkpoint import TOKENIZER_FILES, folder_of, has_tokenizer, locate
from minigpt.checkpoint.files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from minigpt.errors import CheckpointError, GenerationError
from minigpt.files import read_object

END_OF_TEXT = "<|endoftext|>"
KEPT = (  # fields of a tokenizer_config.json that are saved again, though nothing here depends on them
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "model_max_length",
    "additional_special_tokens", "extra_special_tokens", "chat_template", "padding_side", "truncation_side",
)  # fmt: skip


class Tokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2). Every text has ids, which decode to the same bytes.

    Args:
        backend: the ``tokenizers.Tokenizer`` that does the work.
        settings: what transformers finds in tokenizer_config.json, e.g. the padding token or the chat template. They
            are only saved again.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        self.backend, self.settings = backend, dict(settings or {})

    @classmethod
    def from_pretrained(
        cls, source: str | Path = "demo", *, revision: str | None = None, local_files_only: bool = False
    ) -> "Tokenizer":
        """Load the tokenizer of a checkpoint, from its tokenizer.json, or its vocab.json and merges.txt.

        Truncation, padding and BPE dropout (arXiv 1910.13267) that such a file remembers from training are off, so
        that a text always has the same ids.

        Raises:
            CheckpointError: if the source cannot be found or has neither, or the tokenizer is not byte-level.
        """
        folder = folder_of(locate(source, TOKENIZER_FILES, revision=revision, local_files_only=local_files_only))
        if not has_tokenizer(folder):
            raise CheckpointError(
                f"{folder.resolve()} has no tokenizer.json, and no vocab.json with a merges.txt; add the files that "
                "the model was trained with"
            )
        try:
            tokenizer = cls(_backend(folder), _settings(folder))
            is_exact = tokenizer.backend.normalizer is None and tokenizer.is_byte_exact()
        except Exception as error:  # the library raises bare Exceptions
            raise CheckpointError(f"the tokenizer files in {folder} are damaged: {error}") from error
        if not is_exact:
            raise CheckpointError(f"the tokenizer in {folder} must be byte-level, as GPT-2's is, but it changes texts")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. ``<|endoftext|>`` in it is one token, as in transformers.

        Raises:
            GenerationError: if the text is not a string, or has lone surrogates.
        """
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise GenerationError(f"text must be a string of valid Unicode, got {text!r:.200}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens included. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes of ids, even if they end inside a character.

        Raises:
            GenerationError: if an id is outside the vocabulary.
        """
        return b"".join(self._bytes_of(int(token_id)) for token_id in ids)

    def is_byte_exact(self) -> bool:
        """Return True if every byte has a token and a text decodes to itself: no unknown token, no added space."""
        text = "".join(map(chr, range(0x250))) + "狗🐕"
        complete = all(self.backend.token_to_id(character) is not None for character in _BYTE_OF)
        return complete and self.decode_bytes(self.encode(text)) == text.encode()

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_of_text_id(self) -> int | None:
        """The id of ``<|endoftext|>``, which separates texts; None if the vocabulary has none."""
        return self.backend.token_to_id(END_OF_TEXT)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers reads them, into an existing folder.

        Raises:
            OSError: if they cannot be written.
        """
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}
        if self.end_of_text_id is not None:
            settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        settings |= self.settings
        Path(directory, "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        Path(directory, TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise GenerationError(f"token id {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}")
        return bytes(_BYTE_OF[character] for character in token)

    @cached_property
    def _special(self) -> dict[int, str]:
        return {token_id: token.content for token_id, token in self.backend.get_added_tokens_decoder().items()}


def _backend(folder: Path) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None
        return backend
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _settings(folder: Path) -> dict[str, Any]:
    file, template = folder / TOKENIZER_CONFIG, folder / CHAT_TEMPLATE
    fields = read_object(file, CheckpointError) if file.is_file() else {}
    settings = {name: value for name, value in fields.items() if name in KEPT}
    return settings | ({"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {})


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes of a byte-level vocabulary by the printable characters that represent them.

    A printable byte represents itself. The others follow from U+0100 on, in order (GPT-2's encoder does the same).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
