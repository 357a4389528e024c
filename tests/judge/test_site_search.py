"""Which sites matter: sensitivity ranks them, and bisection names those that break parity, one or several."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved
from hypothesis import given
from hypothesis import strategies as st
from judgements import PROMPTS, judge
from torch import Tensor

import minigpt
from minigpt.judge.site_search import minimal_failing
from minigpt.report.numerals import brief

pytestmark = pytest.mark.thorough

SITES = [f"h.{i}.ln_{j}" for i in range(4) for j in (1, 2)] + ["ln_f"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(std=0.3, n_layer=4), tmp_path_factory.mktemp("deep"))


def wrong_at(deep: Path, sites: Sequence[str], factor: float = 1.01) -> type[minigpt.LayerNorm]:
    """A LayerNorm that scales by ``factor`` too much at these sites: it knows each by its weights, all different."""
    model = minigpt.from_pretrained(deep, device="cpu")
    weights = [model.get_parameter(f"{site}.weight").detach() for site in sites]

    class WrongAtSome(minigpt.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            wrong = any(torch.equal(self.weight, weight) for weight in weights)
            return super().forward(x) * (factor if wrong else 1.0)

    return WrongAtSome


@pytest.mark.parametrize("sites", [["h.2.ln_2"], ["h.0.ln_1", "h.2.ln_2", "ln_f"]])
def test_sabotaged_sites_are_those_that_are_named(deep: Path, sites: list[str]) -> None:
    report = judge(deep, wrong_at(deep, sites), bisect=True)
    assert not report.passed
    assert report.bisect.sites == sites
    assert sorted(site for culprits in report.bisect.sets for site in culprits) == sites
    assert report.bisect.verdicts < 3 * len(SITES) * len(sites)


def test_a_site_that_is_wrong_only_as_tokens_are_decoded(deep: Path) -> None:
    class WrongThereAtOneToken(wrong_at(deep, ["h.2.ln_2"])):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[-2] == 1 else minigpt.LayerNorm.forward(self, x)

    report = judge(deep, WrongThereAtOneToken, bisect=True)
    assert report.bisect.sites == ["h.2.ln_2"]
    assert report.logits.ratio < 2
    (reason,) = [reason for reason in report.reasons if reason.startswith("Decoded a token at a time")]
    assert f"{brief(report.decoding.ratio)} times the noise floor" in reason


def test_the_budget_decides_where_there_is_one() -> None:
    """Of rms at every site of the demo, one costs almost all; the others cost parity, but not the budget."""
    report = minigpt.parity("demo", norm="rms", bisect=True, budget="kl=0.05", device="cpu")
    assert (report.bisect.sites, report.bisect.sets) == (["h.0.ln_1"], [["h.0.ln_1"]])


def test_a_limit_of_perplexity_can_be_searched_by(deep: Path) -> None:
    actual = judge(deep, wrong_at(deep, ["h.1.ln_1"], factor=2.0), bisect=True, budget="perplexity=1e-3").bisect
    assert actual.sites == ["h.1.ln_1"]


def test_where_parity_holds_no_site_is_named(deep: Path) -> None:
    actual = judge(deep, "textbook", bisect=True).bisect
    assert (actual.sites, actual.sets, actual.verdicts) == ([], [], 1)


def test_where_something_else_breaks_parity_no_norm_is_blamed(deep: Path) -> None:
    report = judge(deep, "textbook", quantize="int8", bisect=True)
    assert not report.passed
    assert report.bisect.sites == []


def test_only_swapped_sites_are_asked_about(deep: Path) -> None:
    report = judge(deep, wrong_at(deep, SITES), sites=["h.[12].*"], bisect=True, sensitivity=True)
    assert set(report.bisect.sites) == {site.site for site in report.sensitivity} == set(SITES[2:6])


def test_sensitivity_is_the_change_that_one_site_makes(deep: Path) -> None:
    """Recomputed with the public interface; a correct site moves nothing but rounding."""
    norm = wrong_at(deep, ["h.1.ln_2", "h.3.ln_2"])
    report = judge(deep, norm, sensitivity=True)
    ranked = report.sensitivity
    assert [site.rms_error for site in ranked] == sorted((site.rms_error for site in ranked), reverse=True)
    assert {site.site for site in ranked[:2]} == {"h.1.ln_2", "h.3.ln_2"}
    assert ranked[1].rms_error > 100 * ranked[2].rms_error
    model = minigpt.from_pretrained(deep, device="cpu")
    with torch.inference_mode():
        texts = [minigpt.generate(model, torch.tensor([ids]), max_new_tokens=4) for ids in PROMPTS]
        before = [model(text).double().flatten() for text in texts]
        minigpt.swap_norms(model, norm, ranked[0].site)
        after = [model(text).double().flatten() for text in texts]
        change = (torch.cat(after) - torch.cat(before)).square().mean().sqrt().item()
    print(f"{ranked[0]}, recomputed {change:.6g}")
    assert ranked[0].rms_error == pytest.approx(change, rel=1e-3)
    assert ranked[0].ratio == pytest.approx(ranked[0].rms_error / report.logits.noise_floor_rms)


@given(st.integers(1, 40), st.data())
def test_a_minimal_failing_set_fails_and_loses_that_with_any_one_site(count: int, data: st.DataObject) -> None:
    """For any monotone verdict: one of some sets of culprits must be there whole."""
    sites = [f"site {i}" for i in range(count)]
    culprits = data.draw(st.lists(st.sets(st.sampled_from(sites), min_size=1, max_size=4), min_size=1, max_size=3))

    def fails(tried: list[str]) -> bool:
        return any(whole <= set(tried) for whole in culprits)

    actual = minimal_failing(sites, fails)
    assert set(actual) in culprits
    assert not any(fails([site for site in actual if site != left_out]) for left_out in actual)
