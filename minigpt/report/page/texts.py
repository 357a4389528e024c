"""Texts with what happened along them: the divergence at each token, and where two greedy continuations part."""

import re
from collections.abc import Sequence

from minigpt.report.numerals import brief, count, plain
from minigpt.report.page.figures import LogScale, figure
from minigpt.report.page.markup import Html, element, fragment
from minigpt.report.page.tables import folded, table, wide
from minigpt.report.reading import Reading


def kl_scale(readings: Sequence[Reading]) -> LogScale:
    """One scale, of whole powers of ten, for the tokens of all reports."""
    return LogScale(kl.number for reading in readings for kl in reading["tokens.kl"]).decades


def tokens_with_kl(reading: Reading, scale: LogScale) -> Html | None:
    """The text, above each token a bar as high as the divergence of the prediction made there; None without tokens."""
    tokens = reading["tokens"]
    pairs = list(zip((piece.text for piece in tokens["pieces"]), tokens["kl"], strict=False))
    if not pairs:
        return None
    start = tokens["new_from"].number
    spans = [
        _token(i, piece, kl.number, scale, new=start is not None and i >= start, first=i == start)
        for i, (piece, kl) in enumerate(pairs)
    ]
    rows = [[str(i), visible(piece), figure(kl)] for i, (piece, kl) in enumerate(pairs)]
    listed = wide("Divergence at every token", ["position", "token", "KL, nats"], rows)
    return fragment(
        element("p", spans, class_="tokens"),
        folded("Every token in figures", listed),
    )


def kl_key(scale: LogScale) -> Html:
    """What the heights mean."""
    return element(
        "p",
        element("span", f"bars: from {brief(scale.low, 1)} (no height) to {brief(scale.high, 1)} nats (full height)"),
        element("span", element("span", "text", class_="key-new"), " the greedy continuation"),
        class_="legend",
    )


def _token(position: int, piece: str, kl: float | None, scale: LogScale, *, new: bool, first: bool) -> Html:
    height = max(0.0, scale.place(kl))
    return element(
        "span",
        visible(piece),
        class_=" ".join(["token", *["new"] * new, *["first-new"] * first]),
        style=f"--part:{height:.3f}",
        title=f"token {position}, {visible(piece)!r}: KL {brief(kl)}{'' if kl is None else ' nats'}",
    )


def visible(piece: str) -> str:
    """A token's text with its line breaks and tabs shown."""
    return piece.replace("\r", "\u240d").replace("\n", "\u21b5").replace("\t", "\u21e5")


def parting_texts(reading: Reading) -> Html | None:
    """Both greedy continuations, the word where they part marked; None where they agree."""
    parting = reading["greedy.first_divergence"]
    if not parting:
        return None
    ours, theirs = parting["candidate_text"].value, parting["reference_text"].value
    figures = table(
        "Where greedy decoding parts",
        ["", ""],
        [
            ["tokens compared in all", figure(reading["greedy.tokens_compared"], count)],
            ["prompt", figure(parting["prompt"], count)],
            ["new token", figure(parting["token"], count)],
            ["token chosen with this norm", element("span", "id ", figure(parting["candidate_id"], plain))],
            ["token chosen by transformers", element("span", "id ", figure(parting["reference_id"], plain))],
            ["margin between the two best true logits there", figure(parting["margin"])],
            ["margin that noise can overturn", figure(parting["noise"])],
        ],
        "pairs",
    )
    if not (isinstance(ours, str) and isinstance(theirs, str)):
        return figures
    common = parting_point(ours, theirs)
    prompt = parting["prompt_text"].text
    texts = element(
        "div",
        _continued(f"with {reading['norm'].text}", prompt, ours, common, "ours"),
        _continued("transformers", prompt, theirs, common, "theirs"),
        class_="beside texts",
    )
    return fragment(texts, figures)


def parting_point(a: str, b: str) -> int:
    """The length of the text the two share, up to the beginning of the word in which they part."""
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    within_word = any(not text[shared].isspace() for text in (a, b) if shared < len(text))
    while within_word and shared > 0 and not a[shared - 1].isspace():
        shared -= 1
    return shared


def _continued(head: str, prompt: str, text: str, common: int, whose: str) -> Html:
    word = re.match(r"\s*\S*", text[common:])
    end = common + (len(word[0]) if word else 0)
    return element(
        "div",
        element("h3", head),
        element(
            "blockquote",
            element("span", prompt, class_="prompt"),
            text[:common],
            element("mark", text[common:end] or "(ends)", class_=whose),
            text[end:],
        ),
    )
