"""Short English tales, told from a seed: the text that the demo model is trained on.

A tale has a hero and a companion, a thing that returns by name, a trouble, and a consequence that follows from it. The
material is in tales.toml, whose first lines describe its notation.

    python scripts/demo/tales.py 6000 1 > train.txt

- ``tale(0)``: the tale of seed 0.
- ``tales(1000, 0)``: a thousand tales, the same ones every time.
- ``vocabulary()``: every word that a tale can use.

Hero and companion are always a she and a he, so a pronoun always says who is meant.
"""

import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

MATERIAL = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WOMEN, MEN, KIN = (MATERIAL[name].split() for name in ("women", "men", "kin"))
SHE, HE = ("she", "her", "her"), ("he", "him", "his")

CHOICE = re.compile(r"\[([^][]*)\]")
SLOT = re.compile(r"\{[^{}]*\}")
THING = re.compile(r"(\[.*?\]) (.*)")
WORD = re.compile(r"[A-Za-z]+")


def with_article(words: str) -> str:
    """Return the words with "a" or "an" before them, by their first letter."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@dataclass(frozen=True)
class Person:
    """Someone in a tale, with the forms in which a sentence may speak of them."""

    name: str
    he: str
    him: str
    his: str
    role: str = ""
    kin: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a_role(self) -> str:
        return with_article(self.role)


@dataclass(frozen=True)
class Thing:
    """A thing or an animal: "a rusty bell" when it is first seen, "the bell" ever after."""

    look: str
    noun: str

    def __str__(self) -> str:
        return self.noun

    @property
    def a(self) -> str:
        return with_article(f"{self.look} {self.noun}")

    @property
    def one(self) -> str:
        return with_article(self.noun)

    @property
    def the(self) -> str:
        return f"the {self.noun}"


Matter = Mapping[str, str | Thing]


class Plot:
    """The course of a kind of tale: the hero's nature, the beats of its two parts, and what it may be about."""

    def __init__(self, material: dict[str, Any]) -> None:
        self.nature: str = material["nature"]
        self.before: list[list[str]] = material["before"]
        self.after: list[list[str]] = material["after"]
        merged = (
            {slot: text for part in parts for slot, text in part.items()} for parts in product(*material["groups"])
        )
        self.matters: list[Matter] = [{slot: value_of(slot, text) for slot, text in each.items()} for each in merged]


def value_of(slot: str, text: str) -> str | Thing:
    """Return what fills a slot: a thing for the names in the material's ``things``, else the text."""
    match = THING.fullmatch(text) if slot in MATERIAL["things"] else None
    return Thing(*match.groups()) if match else text


PLOTS = [Plot(material) for material in MATERIAL["plots"]]


def chosen(text: str, rng: random.Random) -> str:
    """Return the text with one side taken of every choice in it."""
    while CHOICE.search(text):
        text = CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text)
    return text


def settled(value: str | Thing, rng: random.Random) -> str | Thing:
    """Return a matter's value with its choices made, so that it stays the same wherever the tale uses it."""
    return chosen(value, rng) if isinstance(value, str) else Thing(chosen(value.look, rng), value.noun)


def people(plot: Plot, matter: Matter, rng: random.Random) -> dict[str, str | Person]:
    """Return a hero and a friend, a she and a he in either order; no one else in the matter has the hero's trade.

    A plot is always told of the same couple: a model this small knows a tale by its people.
    """
    couple = PLOTS.index(plot) % len(WOMEN)
    she, he = (WOMEN[couple], *SHE), (MEN[couple], *HE)
    hero, friend = rng.choice([(she, he), (he, she)])
    other, sibling = ("boy", "brother") if hero is she else ("girl", "sister")
    homes: dict[str, str] = MATERIAL["homes"]
    taken = {*matter.values(), other}
    role = rng.choice([role for role in homes if role.split()[-1] not in taken])
    return {
        "hero": Person(*hero, role=chosen(role, rng)),
        "friend": Person(*friend, kin=rng.choice([*KIN, sibling])),
        "home": homes[role],
    }


def outline(plot: Plot, rng: random.Random) -> str:
    """Return the plot with one way of telling chosen for each beat, its slots still open."""
    opening = rng.choice(["{opening} {nature} ", "{opening} ", ""])
    before, after = (" ".join(map(rng.choice, beats)) for beats in (plot.before, plot.after))
    return opening + before + rng.choice([" ", "\n\n"]) + after


def tale(seed: int) -> str:
    """Return the tale of this seed, in one or two paragraphs."""
    rng = random.Random(seed)
    plot = rng.choice(PLOTS)
    matter = rng.choice(plot.matters)
    opening = rng.choice(MATERIAL["openings"])
    cast = {**MATERIAL["shared"], "opening": opening, "nature": plot.nature, **people(plot, matter, rng)}
    cast |= {slot: settled(value, rng) for slot, value in matter.items()}
    text = outline(plot, rng)
    while SLOT.search(text):  # what fills a slot may have slots and choices too
        text = chosen(text.format_map(cast), rng)
    return text


def tales(count: int, seed: int) -> Iterator[str]:
    """Return so many tales; those of two seeds are different but for chance."""
    rng = random.Random(seed)
    return (tale(rng.getrandbits(63)) for _ in range(count))


def vocabulary() -> set[str]:
    """Return every word that a tale can use, and the names of the material's slots."""
    pronouns = [form for word in SHE + HE for form in (word, word.capitalize())]
    texts = [*_texts(MATERIAL), *pronouns, "sister brother a an The"]
    return {word for text in texts for word in WORD.findall(SLOT.sub(" ", text))}


def _texts(material: object) -> Iterator[str]:
    if isinstance(material, str):
        yield material
    elif isinstance(material, Mapping):
        yield from _texts([*material.items()])
    elif isinstance(material, Iterable):
        for part in material:
            yield from _texts(part)


def main(count: Annotated[int, typer.Argument()] = 3, seed: Annotated[int, typer.Argument()] = 0) -> None:
    """Print COUNT tales of SEED, with GPT-2's end-of-text token between them."""
    print(*tales(count, seed), sep="<|endoftext|>", end="")


if __name__ == "__main__":
    typer.run(main)
