"""The tales that the demo model learns from: the same from a seed, grammatical whatever the seed, and of many kinds."""

import re
from functools import cache

from demo import tales
from hypothesis import example, given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**63 - 1)
WOMEN, MEN = set(tales.WOMEN), set(tales.MEN)


@cache
def several() -> list[str]:
    return [tales.tale(seed) for seed in range(1500)]


def words_of(text: str) -> list[str]:
    return tales.WORD.findall(text)


@given(SEEDS)
def test_a_tale_is_a_paragraph_or_two(seed: int) -> None:
    paragraphs = tales.tale(seed).split("\n\n")
    assert 1 <= len(paragraphs) <= 2
    assert 60 <= sum(len(paragraph.split()) for paragraph in paragraphs) <= 200
    assert all(paragraph[-1] in '."' and paragraph.count('"') % 2 == 0 for paragraph in paragraphs)


@given(SEEDS)
def test_nothing_of_the_template_is_left(seed: int) -> None:
    assert not re.search(r"[][{}|_]|  |[,.!?]{2}| [,.!?]", tales.tale(seed))


@given(SEEDS)
@example(512)  # "a use"
def test_articles_agree_with_the_next_word(seed: int) -> None:
    for article, word in re.findall(r"\b([Aa]n?) (\w+)", tales.tale(seed)):
        assert (article.lower() == "an") == (word[0] in "aeiou" and word != "use")


@given(SEEDS)
def test_a_tale_has_one_woman_and_one_man(seed: int) -> None:
    words = set(words_of(tales.tale(seed)))
    assert len(words & WOMEN) == len(words & MEN) == 1


def test_the_vocabulary_holds_every_word() -> None:
    told = {word for tale in several() for word in words_of(tale)}
    assert told - {"s"} <= tales.vocabulary()  # the s is a possessive's
    assert len(told) > 800


def test_tales_differ() -> None:
    """In more than their names; and neither their first nor their last words are always the same few."""
    nameless = {re.sub("|".join(WOMEN | MEN), "N", tale) for tale in several()}
    assert len(nameless) == len(several())
    assert len({tale[:12] for tale in nameless}) > 100
    assert len({tuple(words_of(tale)[-5:]) for tale in nameless}) > 100
