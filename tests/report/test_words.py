"""The words of a report that is made up: its verdict, what it is of, what it lacks, what to do next.

The terminal and the page take them from one place; test_terminal.py and test_page.py say that they are shown.
"""

import pytest
from reports import MADE, divergence, failing, made, report_with, shown, with_budget

from minigpt.report.numerals import brief
from minigpt.report.overview import notes_on
from minigpt.report.sentences import ABOUT_BUILT_IN, heading, sentences

KEPT = {"quantity": "kl", "limit": 0.01, "measured": 0.0012, "kept": True, "text": "the prompts"}


@pytest.mark.parametrize(("within_noise", "told"), [(True, "within the noise"), (False, "beyond the noise")])
def test_where_greedy_decoding_parts(within_noise: bool, told: str) -> None:
    parting = divergence() | {"within_noise": within_noise}
    text = shown(report_with(greedy={"tokens_compared": 82, "first_divergence": parting}))
    for part in ("82", "17", told, brief(parting["margin"]), brief(parting["noise"])):
        assert part in text


def test_a_failure_names_the_next_command() -> None:
    assert "Next:" not in shown(report_with())
    assert "minigpt norms --check textbook names a mistake" in shown(failing())
    assert "--bisect names the sites" in shown(failing())


def test_each_figure_names_the_tokens_that_it_is_of() -> None:
    text = shown(report_with())
    assert "318 tokens of the 4 texts" in text
    assert "Of the whole of data/held-out.txt" in text
    assert f"text of {MADE['text']['tokens']:,} tokens" in text


def test_an_original_that_does_not_predict_the_texts_is_named() -> None:
    vocabulary = MADE["coverage"]["vocabulary"]
    for perplexity, is_poor in ((0.4 * vocabulary, True), (30.0, False)):
        text = shown(report_with(perplexity=MADE["perplexity"] | {"reference": perplexity}))
        assert ("the original itself does not predict these texts" in text) == is_poor


def test_what_a_candidate_does_not_give_is_named() -> None:
    assert "Not judged" not in shown(report_with())
    text = shown(report_with(missing=["tokens one by one", "gradients"]))
    assert "tokens one by one, since the candidate takes no cache of transformers" in text
    assert "; gradients, since the candidate has none" in text


def test_a_budget_that_is_kept_is_not_called_parity() -> None:
    """Nor is a budget that is not kept a model without parity."""
    kept = report_with(budget=[KEPT], logits=MADE["logits"] | {"ratio": 98_727.0})
    assert shown(kept).startswith("PASS  Within the budget")
    assert "Parity holds" not in shown(kept)
    assert "98,727\u00d7 the noise floor" in shown(kept)
    headings = [heading(made(report)) for report in (kept, with_budget(MADE), MADE, failing())]
    assert headings == ["Within the budget", "Over the budget", "Parity holds", "Parity does not hold"]


def test_a_norm_that_is_meant_to_differ_is_not_called_half_precision() -> None:
    logits = {**MADE["logits"], "ratio": 21573.0}
    like_bfloat16 = report_with(logits=logits, precision={"like": "bfloat16", "ratio": 1.2})
    assert "The candidate computes in bfloat16" in shown(like_bfloat16)
    assert "The candidate computes in" not in shown(like_bfloat16 | {"exact": False})


def test_a_lower_perplexity_is_said_not_to_be_better() -> None:
    lower = MADE["perplexity"] | {"candidate": 9.0}
    different = {"exact": False, "verdict": "fail", "reasons": ["It differs."]}
    assert "not better here" in shown(report_with(perplexity=lower, **different))
    assert "not better here" not in shown(report_with(**different))


@pytest.mark.parametrize("file", [None, "held.txt"])
def test_the_built_in_texts_are_explained_where_they_are_all_that_was_read(file: str | None) -> None:
    different = {"exact": False, "verdict": "fail", "reasons": ["It differs."]}
    report = made(report_with(built_in=True, text=MADE["text"] | {"file": file}, **different))
    assert (ABOUT_BUILT_IN in sentences(report)) is (ABOUT_BUILT_IN in notes_on([report])) is (file is None)
    assert any("--text FILE" in sentence for sentence in sentences(report)) is (file is None)


@pytest.mark.parametrize(
    ("place", "own_error", "part"),
    [
        ("h.0.ln_1", None, "the embeddings, the positions and the norm h.0.ln_1"),
        ("h.3.ln_2", 1e-7, "the attention of block 3, and the norm h.3.ln_2"),
        ("h.3.ln_2", 0.1, "the norm h.3.ln_2 itself"),
        ("h.3", None, "the MLP of block 3"),
        ("h.4", None, "the attention and the MLP of h.4"),
        ("ln_f", 1e-7, "the norm ln_f itself"),
    ],
)
def test_a_fail_says_which_part_to_look_at(place: str, own_error: float | None, part: str) -> None:
    """The part that lies between the first output that is off and the output before it."""
    sites = [
        {"site": name, "local_error": own_error, "propagated_error": 0.1, "noise": 1e-7, "swapped": False}
        for name in ("h.0.ln_1", "h.3.ln_2", "ln_f")
    ]
    off = {"place": place, "error": 0.1, "noise": 1e-7, "ratio": 1e6, "ratio_before": None}
    text = shown(failing() | {"norm_sites": sites, "first_off": off})
    assert f"Next: look at {part};" in text or f"Next: look at {part}." in text
