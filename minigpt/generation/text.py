"""Token bytes -> text as it is written: whole characters only, and never a part of a stop string."""

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Turns a growing sequence of bytes into pieces of text that can be shown at once.

    A piece never ends in half a character, and what could still become a stop string is held back until it is decided.
    The stop string itself, and all that follows it, is never shown.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self.stop_texts = tuple(stop_texts)
        self.stopped = False
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, data: bytes, final: bool = False) -> str:
        """The text that can be shown now; with ``final``, everything that was held back too."""
        if self.stopped:
            return ""
        text = self._held + self._characters.decode(data, final)
        ends = [(cut + len(stop), cut) for stop in self.stop_texts if (cut := text.find(stop)) >= 0]
        if ends:  # the first to be complete, so that it does not matter in which pieces the text arrives
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        undecided = 0 if final else max((_overlap(text, stop) for stop in self.stop_texts), default=0)
        shown = len(text) - undecided
        self._held = text[shown:]
        return text[:shown]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
