"""Token bytes to text, piece by piece: whole characters only, and never a part of a stop string."""

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Turns a growing sequence of bytes into pieces of text.

    A piece never ends in half a character. Text that could still become a stop string is held back until that is
    decided. The stop string and the text after it are never returned.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self.stop_texts = tuple(stop_texts)
        self.stopped = False
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, data: bytes, final: bool = False) -> str:
        """Return the text that is ready; with ``final``, also the text that was held back."""
        if self.stopped:
            return ""
        text = self._held + self._characters.decode(data, final)
        ends = [(cut + len(stop), cut) for stop in self.stop_texts if (cut := text.find(stop)) >= 0]
        if ends:  # the first complete one, so that the pieces in which the text arrives do not matter
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        undecided = 0 if final else max((_overlap(text, stop) for stop in self.stop_texts), default=0)
        shown = len(text) - undecided
        self._held = text[shown:]
        return text[:shown]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
