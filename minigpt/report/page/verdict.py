"""The top of the page: the verdict, the reason in a sentence, and the few figures that carry it."""

from minigpt.report.numerals import brief, count, percent, times
from minigpt.report.page.figures import figure
from minigpt.report.page.markup import Child, Html, element
from minigpt.report.reading import Reading

MOST_NAMED = 4  # sites that a sentence can name


def verdict_card(reading: Reading) -> Html:
    """What was asked, what came out, why, and by which figures."""
    passed = reading["verdict"].value == "pass"
    label = element("span", reading.label, class_="which") if reading.label else None
    sign = element("span", "\u2713" if passed else "\u2717", class_="sign", aria_hidden="true")
    heading = "h2" if reading.label else "h1"
    return element(
        "header",
        element("p", label, _asked(reading), class_="asked"),
        element(heading, sign, judged(reading)),
        [element("p", reason, class_="reason") for reason in _reasons(reading)],
        _culprits(reading),
        element("dl", [_tile(*tile) for tile in _tiles(reading)], class_="tiles"),
        class_=f"verdict {'pass' if passed else 'fail'}",
    )


def judged(reading: Reading) -> str:
    """The verdict in words."""
    subject = "The budget is" if reading["budget"] else "Parity"
    words = ("kept", "not kept") if reading["budget"] else ("holds", "does not hold")
    return f"{subject} {words[reading['verdict'].value != 'pass']}"


def _asked(reading: Reading) -> Html:
    name = lambda key: element("bdi", element("strong", reading[key].text))  # noqa: E731
    sites = reading["sites"].text
    where = ["at ", element("bdi", sites)] if sites and sites != "*" else ["at every site"]
    return element("span", name("norm"), " in ", name("model"), ", ", where, ", ", reading["dtype"].text)


def _reasons(reading: Reading) -> list[str]:
    given = [reason.text for reason in reading["reasons"]]
    return given or [_held(reading)]


def _held(reading: Reading) -> str:
    if reading["budget"]:
        return "Every limit of the budget is kept."
    ratio, compared = reading["logits.ratio"].number, reading["greedy.tokens_compared"].number
    dtype = reading["dtype"].text
    error = f"Its logits\u2019 error is {_times(ratio)} that of transformers itself at {dtype}"
    if not compared:
        return f"{error}."
    if reading["greedy.first_divergence"]:
        return f"{error}, and greedy decoding parts only where noise alone could part it."
    return f"{error}, and all {count(compared)} greedy tokens are the same."


def _times(ratio: float | None) -> str:
    return "not known as a multiple of" if ratio is None else f"{brief(ratio)} times"


def _culprits(reading: Reading) -> Html | None:
    sites = [site.text for site in reading["bisect.sites"]]
    if not sites:
        return None
    named = ", ".join(sites) if len(sites) <= MOST_NAMED else f"{len(sites)} sites, which are named below"
    return element("p", "What breaks parity: ", element("strong", named), ".", class_="reason")


Tile = tuple[str, Child, Child]


def _tiles(reading: Reading) -> list[Tile]:
    """Name, figure, and what stands beside it."""
    distribution = reading["distribution"]
    found = [_noise_tile(reading["logits"], reading["decoding"])]
    if "kl_mean" in distribution:
        largest = [", largest ", figure(distribution["kl_max"])] if "kl_max" in distribution else None
        found.append(("KL divergence, nats", figure(distribution["kl_mean"]), ["mean", largest]))
    if "top1_agreement" in distribution:
        five = "top5_agreement"
        beside = ["the five likeliest: ", figure(distribution[five], percent)] if five in distribution else None
        found.append(("same likeliest token", figure(distribution["top1_agreement"], percent), beside))
    if reading["greedy"]:
        found.append(_greedy_tile(reading["greedy"]))
    return found


def _noise_tile(logits: Reading, decoding: Reading) -> Tile:
    errors = ["RMS error ", figure(logits["rms_error"]), ", noise floor ", figure(logits["noise_floor_rms"])]
    decoded = [", as decoded ", figure(decoding["ratio"], times)] if decoding else None
    return "of the noise floor", figure(logits["ratio"], times), [errors, decoded]


def _greedy_tile(greedy: Reading) -> Tile:
    compared, parting = figure(greedy["tokens_compared"], count), greedy["first_divergence"]
    if not parting:
        return "greedy tokens compared", compared, "all the same"
    margin, noise = parting["margin"].number, parting["noise"].number
    close = margin is not None and noise is not None and margin <= noise
    where = ["of prompt ", figure(parting["prompt"], count), ", ", "within the noise" if close else "beyond the noise"]
    return "new token where greedy decoding parts", figure(parting["token"], count), where


def _tile(name: str, number: Child, beside: Child) -> Html:
    return element(
        "div", element("dt", name), element("dd", number, class_="number"), element("dd", beside, class_="aside")
    )
