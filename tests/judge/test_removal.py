"""Swapping one site after another: the order by brute force, the figures, and going on after a kill."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import judgements
import pytest
import torch

import minigpt

SITES = ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
PROMPTS = [list(range(5, 25))]


def judge(folder: Path, norm: str = "rms", **how: object) -> minigpt.ParityReport:
    return judgements.judge(folder, norm, prompts=PROMPTS, max_new_tokens=0, remove=True, **how)


@torch.inference_mode()
def test_each_step_takes_the_least_harmful_site(folder: Path) -> None:
    """Recomputed with the public interface alone."""
    ids, actual = torch.tensor(PROMPTS), judge(folder).removal
    original = minigpt.from_pretrained(folder, device="cpu")(ids)[0].double().log_softmax(-1)
    assert actual.loss == pytest.approx(-original[:-1].gather(1, ids[0, 1:, None]).mean().item(), rel=1e-6)
    kept: list[str] = []
    for step in actual.steps:
        harm = {}
        for site in set(SITES) - set(kept):
            model = minigpt.from_pretrained(folder, device="cpu")
            minigpt.swap_norms(model, "rms", [*kept, site])
            swapped = model(ids)[0].double().log_softmax(-1)
            harm[site] = (original.exp() * (original - swapped)).sum(-1).mean().item()
            if site == step.site:
                assert step.loss == pytest.approx(-swapped[:-1].gather(1, ids[0, 1:, None]).mean().item(), rel=1e-5)
        assert step.site == min(harm, key=lambda site: harm[site])
        assert step.kl_mean == pytest.approx(harm[step.site], rel=1e-4)
        kept.append(step.site)
    assert sorted(kept) == SITES


def test_the_first_step_is_the_sensitivity_and_the_rest_of_the_report_is_as_without(folder: Path) -> None:
    report = judge(folder, bisect=True)
    alone = minigpt.parity(folder, norm="rms", prompts=PROMPTS, max_new_tokens=0, device="cpu", sensitivity=True)
    assert report.sensitivity == alone.sensitivity
    assert report.logits == alone.logits


def test_a_budget_is_answered_by_how_many_sites_it_allows(folder: Path) -> None:
    """The report is of those, and it passes if there is one; nobody asked about all sites at once."""
    steps = judge(folder).removal.steps
    report = judge(folder, budget=f"kl={steps[2].kl_mean * 0.999}")
    assert report.removal.steps == steps[:3], "up to the site that is over the budget"
    assert (report.removal.allowed, report.passed, report.reasons) == (2, True, [])
    assert {site.site for site in report.norm_sites if site.swapped} == {step.site for step in steps[:2]}
    assert report.distribution.kl_mean == pytest.approx(steps[1].kl_mean)
    none = judge(folder, budget=f"kl={steps[0].kl_mean * 0.999}")
    assert (none.removal.allowed, none.passed) == (0, False)
    other = judge(folder, budget="top1=0").removal
    assert len(other.steps) == len(SITES) > other.allowed, "checked on all texts after the search"


@pytest.mark.parametrize("quantity", ["kl", pytest.param("ratio", marks=pytest.mark.thorough)])
def test_the_same_budget_decides_of_as_many_sites_without_a_search(quantity: str, folder: Path) -> None:
    """The built-in texts are longer than the prompts, and count in neither."""
    how: dict[str, Any] = dict(max_new_tokens=0, device="cpu")
    order = [step.site for step in minigpt.parity(folder, norm="rms", remove=True, **how).removal.steps]
    original = minigpt.Original(folder, **how)
    figures = []
    for count in range(1, len(order) + 1):
        report = original.judge(folder, norm="rms", sites=order[:count])
        figures.append(report.logits.ratio if quantity == "ratio" else report.distribution.kl_mean)
    budget = f"{quantity}={figures[-2]}"
    allowed = original.judge(folder, norm="rms", remove=True, budget=budget).removal.allowed
    kept = [original.judge(folder, norm="rms", sites=order[: n + 1], budget=budget).passed for n in range(len(order))]
    assert kept == [n < allowed for n in range(len(order))]
    assert allowed == len(order) - 1


def test_a_killed_search_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    whole = judge(folder, remove_file=file).removal
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 16, "15 trials, and the model with its own norms"
    first = json.loads(lines[0]) | {"kl_mean": 0.0}  # what is known is not measured again
    file.write_text("".join([json.dumps(first) + "\n", *lines[1:7]]) + lines[7][:20])
    again = judge(folder, remove_file=file).removal
    assert (again.steps[0].site, again.steps[0].kl_mean) == (first["sites"][0], 0.0)
    file.write_text("".join(lines[:7]) + lines[7][:20])
    assert judge(folder, remove_file=file).removal == whole
    assert sorted(file.read_text().splitlines()) == sorted("".join(lines).splitlines())
    judge(folder, norm="std_eps", remove_file=file)
    assert len({json.loads(line)["search"] for line in file.read_text().splitlines()}) == 2, "another norm's trials"


@pytest.mark.parametrize(
    ("open_candidate", "argument"),
    [(lambda folder: minigpt.Recipe(folder, norm=minigpt.LayerNorm), "norm"), (minigpt.from_pretrained, "remove_file")],
)
def test_a_search_that_is_kept_needs_a_source_and_a_name(
    folder: Path, tmp_path: Path, open_candidate: Callable[[Path], Any], argument: str
) -> None:
    original = minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=0, device="cpu")
    with pytest.raises(minigpt.ConfigError) as refused:
        original.judge(open_candidate(folder), remove=True, remove_file=tmp_path / "trials.jsonl")
    assert refused.value.argument == argument


@pytest.mark.thorough
def test_each_site_is_fitted_as_it_goes(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a young gardener named Tom, who found a silver coin. " * 20)
    how = {"norm": "dyt", "sites": ["h.3.*", "ln_f"], "remove": True, "text": text, "device": "cpu"}
    plain, fitted = minigpt.parity(**how), minigpt.parity(**how, fit=text)
    assert all(site.after > site.before for site in fitted.fit)
    alone = minigpt.parity(**how | {"remove": False}, fit=text)
    assert fitted.perplexity == alone.perplexity, "measured with the norms as they were fitted together"
    for one, other in zip(fitted.removal.steps, plain.removal.steps, strict=True):
        assert one.kl_mean < other.kl_mean
