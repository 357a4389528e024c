"""The words of a report that is made up: its verdict, what it is of, what it lacks, what to do next.

The terminal shows them, and the page has the same sentences.
"""

import html
from typing import Any

import pytest
from reports import MADE, Report, divergence, failing, made, report_with, sample_report, shown, with_budget

from minigpt.report.numerals import brief, precise
from minigpt.report.overview import notes_on
from minigpt.report.page import report_page
from minigpt.report.sentences import ABOUT_BUILT_IN, sentences

KEPT = {"quantity": "kl", "limit": 0.01, "measured": 0.0012, "kept": True, "text": "the prompts"}
DIFFERENT: dict[str, Any] = {"exact": False, "verdict": "fail", "reasons": ["It differs."]}
BFLOAT16 = {"precision": {"like": "bfloat16", "ratio": 1.2}, "logits": MADE["logits"] | {"ratio": 21573.0}}
VOCABULARY = MADE["coverage"]["vocabulary"]
ACCOUNT = sample_report(2, passing=False)["account"]
Words = tuple[Report, list[str], list[str]]


def greedy(within_noise: bool) -> Report:
    parting = divergence() | {"within_noise": within_noise}
    return report_with(greedy={"tokens_compared": 82, "first_divergence": parting})


def predicting(perplexity: float) -> Report:
    return report_with(perplexity=MADE["perplexity"] | {"reference": perplexity})


def mistaken(*mistakes: str, ratio: float = 1.08, **parts: Any) -> Report:
    """A report whose last mistake explains the error, if ``ratio`` is small."""
    rows = [{"mistake": words, "ratio": 9e4, "explains": False, "rest": None, "cure": f"Cure {words}."}
            for words in mistakes]  # fmt: skip
    if rows:
        rows[-1] |= {"ratio": ratio, "explains": ratio < 2, "rest": {"like": "bfloat16", "ratio": 1.1}}
    return failing() | {"precision": None, "diagnosis": rows} | parts


def of_file(left: float, **parts: Any) -> Report:
    """A report on a program's file, of whose error its arithmetic leaves ``left`` times transformers' own."""
    steps = [step | {"ratio": left} for step in ACCOUNT["steps"]]
    account = ACCOUNT | {"steps": steps, "calm_left": left / 1000, "calm_noise": 0.9} | parts
    return failing() | {"diagnosis": None, "account": account}


PARTING = ["82", "17", brief(divergence()["margin"]), brief(divergence()["noise"])]
FIGURES = [
    "0.0456", "3.00\u00d7", "0.0152", "1.50", "0.875", "0.25", brief(MADE["distribution"]["kl_max"]),
    precise(MADE["distribution"]["perplexity_candidate"]), str(MADE["greedy"]["tokens_compared"]), "bit for bit",
]  # fmt: skip
WORDS: dict[str, Words] = {  # a report, what it says, and what it does not say
    "a pass": (
        report_with(),
        ["PASS  Parity holds: demo with textbook at *, against itself with LayerNorm in transformers: float32, sdpa, "
         "cpu, 4 texts\n", "318 tokens of the 4 texts", "Of the whole of data/held-out.txt", "text of 1,024 tokens"],
        ["FAIL", "Next:", "Not judged"],
    ),
    "a fail": (
        failing(),
        ["FAIL  Parity does not hold", "minigpt norms --check textbook names a mistake", "--bisect names the sites",
         *FIGURES],
        ["Not judged"],
    ),
    "greedy decoding parts in the noise": (greedy(True), [*PARTING, "within the noise"], ["beyond the noise"]),
    "greedy decoding parts beyond it": (greedy(False), [*PARTING, "beyond the noise"], []),
    "sites that break parity": (
        failing() | {"bisect": MADE["bisect"] | {"sites": ["h.0.ln_1", "ln_f"]}},
        ["What breaks parity: h.0.ln_1, ln_f."],
        ["--bisect"],
    ),
    "no sites that break parity": (
        failing() | {"bisect": MADE["bisect"], "notes": ["A note."]},
        ["What breaks parity: no set of the swapped sites, on the texts as transformers wrote them.", "A note."],
        [],
    ),
    "a budget that is not kept": (with_budget(MADE), ["FAIL  Over the budget"], ["Parity"]),
    "an original that does not predict": (
        predicting(0.4 * VOCABULARY), ["the original itself does not predict these texts"], []
    ),
    "an original that predicts": (predicting(30.0), [], ["the original itself does not predict these texts"]),
    "what a candidate does not give": (
        report_with(missing=["tokens one by one", "gradients", "norms by themselves"]),
        ["tokens one by one, since the candidate takes no cache of transformers", "; gradients, since the candidate",
         "norms by themselves, since a file cannot be given the original"],
        [],
    ),
    "a budget that is kept is not called parity": (
        report_with(budget=[KEPT], logits=MADE["logits"] | {"ratio": 98_727.0}),
        ["PASS  Within the budget", "98,727\u00d7 the noise floor"],
        ["Parity holds"],
    ),
    "a precision": (
        report_with(**BFLOAT16), ["The candidate computes in bfloat16: its error is 1.20 times transformers' own"], []
    ),
    "a precision that nobody asked of": (
        failing() | BFLOAT16 | {"diagnosis": None}, ["The candidate may compute in bfloat16: its error is"], []
    ),
    "a norm that is meant to differ is not in half precision": (
        report_with(**BFLOAT16, exact=False), [], ["The candidate computes in"]
    ),
    "a lower perplexity": (
        report_with(perplexity=MADE["perplexity"] | {"candidate": 9.0}, **DIFFERENT), ["not better here"], []
    ),
    "a higher perplexity": (report_with(**DIFFERENT), [], ["not better here"]),
    "two mistakes": (
        mistaken("A", "B"),
        ["It is this GPT-2 with A and with B. With both put into the original, the logits agree to 1.08 times "
         "transformers' own error. Cure A. Cure B."],
        ["--diagnose"],
    ),
    "a mistake of another architecture": (mistaken("A", bitwise=None), ["It is this model with A. With that put"], []),
    "a mistake of which much is left": (
        mistaken("A", ratio=70.0), ["With A the error falls from 3.00 to 70.0 times transformers' own; the rest is"],
        ["It is this GPT-2"],
    ),
    "no mistake that is known": (
        mistaken(missing=["norms and blocks"]),
        ["No mistake that is known gives these logits. Write the outputs of norms and blocks under the record's names: "
         "the report then names the place."],
        ["--diagnose"],
    ),
    "a program that is right for its file": (
        of_file(1e3),
        ["nats the file's weights (Q4_K; Q6_K) make", "llama.cpp is right for this file",
         "Where the difference comes from", "Which tensors cost most"],
        ["--diagnose"],
    ),
    "a mistake in a file of float32": (
        of_file(1e3, types=[]) | {"diagnosis": mistaken("A")["diagnosis"]}, ["It is this GPT-2 with A."], []
    ),
    "a file of float32 that is off, undiagnosed": (of_file(1e3, types=[]), ["--diagnose names the mistake"], []),
    "a program that is wrong for its file": (of_file(1e6), ["llama.cpp is not right for this file"], []),
    "a program that is judged by its file": (of_file(1e6, decides=True), ["The program is wrong for the file"], []),
    "logits that were stored in half precision": (
        report_with(stored={"dtype": "float16", "rms_error": 1e-3, "max_abs_error": 1e-2, "ratio": 9.0,
                            "explains": True}),
        ["the truth in float16"],
        [],
    ),
    "norms of a file": (
        report_with(norm_sites=[site | {"local_error": None} for site in MADE["norm_sites"]]), [], ["not finite"]
    ),
}  # fmt: skip
LOOK_AT = {  # a place, the own error of norms, and the part that lies between it and the output before it
    "the embeddings, the positions and the norm h.0.ln_1": ("h.0.ln_1", None),
    "the attention of block 3, and the norm h.3.ln_2": ("h.3.ln_2", 1e-7),
    "the norm h.3.ln_2 itself": ("h.3.ln_2", 0.1),
    "the MLP of block 3": ("h.3", None),
    "the attention and the MLP of h.4": ("h.4", None),
    "the norm ln_f itself": ("ln_f", 1e-7),
}
for part, (place, own_error) in LOOK_AT.items():
    sites = [
        {"site": name, "local_error": own_error, "propagated_error": 0.1, "noise": 1e-7, "swapped": False}
        for name in ("h.0.ln_1", "h.3.ln_2", "ln_f")
    ]
    off = {"place": place, "error": 0.1, "noise": 1e-7, "ratio": 1e6, "ratio_before": None}
    WORDS[part] = failing() | {"norm_sites": sites, "first_off": off}, [f"Next: look at {part}"], [f"{part} "]


@pytest.mark.parametrize(("report", "said", "unsaid"), WORDS.values(), ids=WORDS)
def test_what_a_report_says(report: Report, said: list[str], unsaid: list[str]) -> None:
    text, page = shown(report), html.unescape(report_page(made(report)))
    assert [words for words in said if words not in text] == []
    assert [words for words in unsaid if words in text] == []
    assert [sentence for sentence in sentences(made(report)) if sentence not in page] == []


def test_a_mistake_is_told_behind_the_first_reason() -> None:
    report = made(mistaken("A", reasons=["First.", "Second."]))
    assert [line.partition(" ")[0] for line in sentences(report)[:3]] == ["First.", "It", "Second."]


@pytest.mark.parametrize("file", [None, "held.txt"])
def test_the_built_in_texts_are_explained_where_they_are_all_that_was_read(file: str | None) -> None:
    report = made(report_with(built_in=True, text=MADE["text"] | {"file": file}, **DIFFERENT))
    assert (ABOUT_BUILT_IN in sentences(report)) is (ABOUT_BUILT_IN in notes_on([report])) is (file is None)
    assert any("--text FILE" in sentence for sentence in sentences(report)) is (file is None)
