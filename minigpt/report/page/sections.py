"""The sections of the page, each of one report or of two. A section that no report has anything for is left out."""

from collections.abc import Callable, Sequence

from minigpt.report.numerals import brief, count, percent, precise, times
from minigpt.report.page.depth import blocks_in_figures, depth_charts
from minigpt.report.page.figures import figure
from minigpt.report.page.heat import heat_key, heat_maps, heat_scale
from minigpt.report.page.markup import Child, Html, element, fragment
from minigpt.report.page.rankings import difference_scale, differences, sensitivities, sensitivity_scale
from minigpt.report.page.tables import absent, beside, heads, wide
from minigpt.report.page.texts import kl_key, kl_scale, parting_texts, tokens_with_kl
from minigpt.report.reading import Reading

Readings = Sequence[Reading]


def sections(readings: Readings) -> list[Html]:
    """All that there is to show, in the order a reader asks for it."""
    drawn = (
        _figures, _budget, _ordinary, _sites, _depth, _tokens, _greedy, _sensitivity, _bisect, _perplexity, _speed,
        _measured_on,
    )  # fmt: skip
    return [section for draw in drawn if (section := draw(readings)) is not None]


def _section(name: str, title: str, about: Child, *bodies: Child) -> Html | None:
    if all(body is None for body in bodies):
        return None
    return element(
        "section",
        element("div", element("h2", title, id=f"{name}-title"), element("p", about), class_="about"),
        element("div", *bodies, class_="body"),
        id=name,
        aria_labelledby=f"{name}-title",
    )


def _figures(readings: Readings) -> Html | None:
    own, true = "distribution.perplexity_candidate", "distribution.perplexity_reference"
    quantities: list[tuple[str, str, Callable[[float], str], str | None]] = [
        ("logits, RMS error", "logits.rms_error", brief, "logits.noise_floor_rms"),
        ("logits, largest error", "logits.max_abs_error", brief, "logits.noise_floor_max"),
        ("logits, RMS of the truth", "logits.scale", brief, None),
        ("logits as decoded, RMS error", "decoding.rms_error", brief, "decoding.noise_floor_rms"),
        ("logits as decoded, largest error", "decoding.max_abs_error", brief, "decoding.noise_floor_max"),
        ("logits as decoded, RMS of the truth", "decoding.scale", brief, None),
        ("KL divergence, mean", "distribution.kl_mean", brief, None),
        ("KL divergence, median", "distribution.kl_median", brief, None),
        ("KL divergence, 99.9th percentile", "distribution.kl_p999", brief, None),
        ("KL divergence, largest", "distribution.kl_max", brief, None),
        ("same likeliest token", "distribution.top1_agreement", percent, None),
        ("five likeliest tokens in common", "distribution.top5_agreement", percent, None),
        ("perplexity of the prompts", own, precise, true),
        ("reference arithmetic, largest difference from transformers", "bitwise.max_abs_error", brief, None),
    ]
    rows: list[list[Child]] = [
        [name, *(_with_floor(reading, path, written, floor) for reading in readings), *_over_first(readings, path)]
        for name, path, written, floor in quantities
        if any(path in reading for reading in readings)
    ]
    head = ["", *heads(readings, "this model"), *(["B over A"] * (len(readings) > 1))]
    about = (
        "Errors are from transformers in float64 on the same weights; the noise floor is transformers\u2019 own. "
        "Divergence is in nats."
    )
    return _section("figures", "Figures", about, wide("Figures", head, rows, f"figures {_breadth(readings)}"))


def _over_first(readings: Readings, path: str) -> list[Child]:
    """Of two reports, the second's figure over the first's, where that can be told."""
    if len(readings) < 2:
        return []
    a, b = (reading[path].number for reading in readings)
    return [times(b / a) if a and b is not None else absent()]


def _breadth(readings: Readings) -> str:
    """Figures of one report stand near their names; those of two take the whole line."""
    return "narrow" if len(readings) == 1 else ""


def _with_floor(reading: Reading, path: str, written: Callable[[float], str], floor: str | None) -> Child:
    if path not in reading:
        return absent()
    name = "truth" if path.startswith("distribution") else "noise floor"
    aside = element("small", name, " ", figure(reading[floor], written)) if floor and floor in reading else None
    return [figure(reading[path], written), aside]


def _titled(readings: Readings, draw: Callable[[Reading], Html | None]) -> list[Html]:
    """What ``draw`` makes of each report that has it, one below the other, by name where there are two."""
    return [
        fragment(element("h3", heads([reading], "")) if reading.label else None, drawn)
        for reading in readings
        if (drawn := draw(reading)) is not None
    ]


def _budget(readings: Readings) -> Html | None:
    def drawn(reading: Reading) -> Html | None:
        rows = [
            [line["quantity"].text, figure(line["limit"]), figure(line["measured"]),
             "\u2713 kept" if line["kept"].value else element("strong", "\u2717 not kept", class_="broken")]
            for line in reading["budget"]
        ]  # fmt: skip
        return wide("Budget", ["quantity", "limit", "measured", ""], rows) if rows else None

    return _section("budget", "Budget", "What the norm was allowed to cost, and what it did.", beside(readings, drawn))


def _ordinary(readings: Readings) -> Html | None:
    scale = difference_scale(readings)
    about = (
        "What changes in the logits of one prompt when nobody would say that the model has changed, and this "
        "norm\u2019s error as a share of it. Bars are logarithmic."
    )
    drawn = beside(readings, lambda reading: differences(reading, scale))
    return _section("noise", "Beside ordinary differences", about, drawn)


def _sites(readings: Readings) -> Html | None:
    scale = heat_scale(readings)
    about = (
        "Relative RMS error at every norm, ln_1 and ln_2 of each block and ln_f apart. The stronger the colour the "
        "larger, on a logarithmic scale."
    )
    drawn = _titled(readings, lambda reading: heat_maps(reading, scale))
    return _section("sites", "Where it happens", about, *([heat_key(readings, scale), *drawn] if drawn else []))


def _depth(readings: Readings) -> Html | None:
    charts = depth_charts(readings)
    about = (
        "Relative RMS error. The band is transformers\u2019 own at this dtype, over all tokens: inside it there is "
        "only noise. The first token may carry so much that it hides what happens to the others."
    )
    return _section("depth", "Through depth", about, charts, *(map(blocks_in_figures, readings) if charts else []))


def _tokens(readings: Readings) -> Html | None:
    scale = kl_scale(readings)
    about = (
        "How far the next-token distribution is from the truth, above the token at which it was predicted. "
        "The scale is logarithmic."
    )
    drawn = _titled(readings, lambda reading: tokens_with_kl(reading, scale))
    return _section("tokens", "Along a text", about, *([kl_key(scale), *drawn] if drawn else []))


def _greedy(readings: Readings) -> Html | None:
    about = "The likeliest token each time, with this norm and by transformers, from the first where the two part."
    return _section("greedy", "Where the texts part", about, *_titled(readings, parting_texts))


def _sensitivity(readings: Readings) -> Html | None:
    scale = sensitivity_scale(readings)
    about = "How far each site, swapped alone, moves the logits, and how many times the noise floor that is."
    drawn = beside(readings, lambda reading: sensitivities(reading, scale))
    return _section("sensitivity", "Which sites matter", about, drawn)


def _bisect(readings: Readings) -> Html | None:
    def drawn(reading: Reading) -> Html | None:
        found = reading["bisect"]
        if not found:
            return None
        tried = [" Sets of sites tried: ", figure(found["verdicts"], count), "."] if "verdicts" in found else None
        sites = [element("li", element("code", site.text)) for site in found["sites"]]
        if not sites:
            return element("p", "No set of the swapped sites does, on the texts that transformers wrote.", tried)
        return fragment(element("ul", sites, class_="sites"), element("p", tried, class_="aside"))

    about = "The swapped sites that must have their own norm back for parity to hold."
    return _section("bisect", "Which sites break it", about, beside(readings, drawn))


def _perplexity(readings: Readings) -> Html | None:
    measured = [reading for reading in readings if reading["perplexity"]]
    if not measured:
        return None
    quantities: list[tuple[str, Callable[[Reading], Child]]] = [
        ("file", lambda text: element("bdi", text["file"].text)),
        ("tokens", lambda text: figure(text["tokens"], count)),
        ("window, stride", lambda text: [figure(text["window"], count), ", ", figure(text["stride"], count)]),
        ("with the model\u2019s own norms and weights", lambda text: figure(text["reference"], precise)),
        ("with this norm", lambda text: figure(text["candidate"], precise)),
        ("change", _change),
    ]
    rows = [[name, *(drawn(reading["perplexity"]) for reading in measured)] for name, drawn in quantities]
    about = "On a whole text file, by windows that overlap."
    drawn = wide("Perplexity", ["", *heads(measured, "")], rows, f"figures {_breadth(readings)}")
    return _section("perplexity", "Perplexity", about, drawn)


def _change(text: Reading) -> str:
    before, after = text["reference"].number, text["candidate"].number
    if before is None or after is None:
        return "not finite"
    if after == before:
        return "none"
    if before == 0:
        return "not finite"
    return ("+" if after > before else "\u2212") + percent(abs(after / before - 1))


def _speed(readings: Readings) -> Html | None:
    rows: list[list[Child]] = []
    if any(reading["speed"] for reading in readings):
        rows.append(["one forward", *(_milliseconds(reading["speed"]) for reading in readings)])
    for phase, name in (("prefill", "prefill"), ("decode", "one more token")):
        if any(f"cost.{phase}_ms" in reading for reading in readings):
            rows.append([name, *(_share(reading["cost"], phase) for reading in readings)])
    about = "Medians, taken in turns, and what a norm twice as fast would bring to the whole by its share (Amdahl)."
    drawn = wide("Speed", ["", *heads(readings, "")], rows, "figures speed") if rows else None
    return _section("speed", "Speed", about, drawn)


def _milliseconds(speed: Reading) -> Child:
    if not speed:
        return absent()
    beside = element("small", "transformers ", figure(speed["reference_ms"]), " ms")
    return [figure(speed["candidate_ms"]), " ms", beside]


def _share(cost: Reading, phase: str) -> Child:
    if f"{phase}_ms" not in cost:
        return absent()
    share = cost[f"{phase}_norm_share"]
    tokens = [" for ", figure(cost["prefill_tokens"], count), " tokens"] if phase == "prefill" else None
    return [
        figure(cost[f"{phase}_ms"]), " ms", tokens,
        element("span", class_="part", style=f"--part:{share.number or 0:.4f}", aria_hidden="true"),
        element("small", "norms ", figure(cost[f"{phase}_norm_ms"]), " ms, ", figure(share, percent),
                "; twice as fast: whole ", figure(cost[f"{phase}_gain"], times)),
    ]  # fmt: skip


def _measured_on(readings: Readings) -> Html | None:
    names = ["model", "norm", "sites", "dtype", "attention", "device", "prompts"]
    facts = {name: [reading[name].text for reading in readings] for name in names}
    versions = dict.fromkeys(name for reading in readings for name in reading["versions"].names)
    facts |= {name.replace("_", " "): [reading["versions"][name].text for reading in readings] for name in versions}
    rows: list[list[Child]] = [
        [[name, _differs(values)], *(element("bdi", value) for value in values)]
        for name, values in facts.items()
        if any(values)
    ]
    about = "What is marked \u2260 differs between the two." if len(readings) > 1 else ""
    drawn = wide("Measured on", ["", *heads(readings, "")], rows, "facts")
    return _section("conditions", "Measured on", about, drawn)


def _differs(values: Sequence[str]) -> Child:
    return None if len(set(values)) == 1 else [" ", element("span", "\u2260", role="img", aria_label="differs")]
