"""Bytes to text as it is written: whole characters, never part of a stop string, and nothing withheld without need."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.generation.row import TextAssembler

STOPS = st.lists(st.text("ab\n狗é", min_size=1, max_size=4), max_size=3)
TEXTS = st.text("ab\n狗é🐕 ", max_size=30)


def cut_in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def assembled(pieces: list[bytes], stops: list[str]) -> list[str]:
    """What is shown after each piece, and then at the end."""
    assembler = TextAssembler(stops)
    return [*(assembler.add(piece) for piece in pieces), assembler.add(b"", final=True)]


def until_the_first_stop(text: str, stops: list[str]) -> str:
    """The text before whichever stop string is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=150)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12), stops=STOPS)
def test_pieces_join_to_the_text_before_the_first_stop(text: str, cuts: list[int], stops: list[str]) -> None:
    shown = assembled(cut_in_pieces(text.encode(), cuts), stops)
    assert "".join(shown) == until_the_first_stop(text, stops)
    assert "\ufffd" not in "".join(shown)


@settings(max_examples=150)
@given(text=TEXTS, stops=STOPS)
def test_a_byte_at_a_time_nothing_is_withheld_without_need(text: str, stops: list[str]) -> None:
    """After each whole character, all is shown but what could still become a stop string."""
    assembler, shown = TextAssembler(stops), ""
    for end, character in enumerate(text, start=1):
        for byte in character.encode():
            shown += assembler.add(bytes([byte]))
        before_a_stop = until_the_first_stop(text[:end], stops)
        if before_a_stop != text[:end]:
            assert (shown, assembler.stopped) == (before_a_stop, True)
            return
        undecided = {
            n for n in range(end + 1) for stop in stops if n < len(stop) and stop.startswith(text[end - n : end])
        }
        assert shown == text[: end - max(undecided, default=0)]
    assert not assembler.stopped


@settings(max_examples=100)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_bytes_that_are_no_text_become_what_they_become_at_once(data: bytes, cuts: list[int]) -> None:
    assert "".join(assembled(cut_in_pieces(data, cuts), [])) == data.decode("utf-8", errors="replace")
