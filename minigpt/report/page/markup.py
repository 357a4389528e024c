"""HTML as nested calls. Text is escaped unless it is already ``Html``, so that no prompt or name can become markup."""

import html
from collections.abc import Iterable

Child = object  # text, a number, Html, None for nothing, or an iterable of these

_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, *children: Child, **attributes: object) -> Html:
    """``<tag attributes>children</tag>``.

    An attribute is left out where it is None; ``class_`` is class, and an underscore within a name is a hyphen.
    """
    return Html(f"<{tag}{_written(attributes)}>{fragment(*children)}</{tag}>")


def fragment(*children: Child) -> Html:
    """The children after one another, escaped."""
    return Html("".join(_flat(children)))


def printable(text: object) -> str:
    """``text`` with control characters and lone surrogates, which no page can carry, made visible."""
    return str(text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str) or (child is not None and not isinstance(child, Iterable)):
            yield html.escape(printable(child))
        elif child is not None:
            yield from _flat(child)


def _written(attributes: dict[str, object]) -> str:
    return "".join(
        f' {name}="{html.escape(printable(value))}"'
        for name, value in ((name.strip("_").replace("_", "-"), value) for name, value in attributes.items())
        if value is not None
    )
