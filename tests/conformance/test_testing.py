"""assert_norm_parity, as the author of a kernel uses it."""

import html
import re
from fnmatch import fnmatchcase

import pytest
import sabotages

import minigpt
from minigpt.conformance.check import CASES
from minigpt.conformance.summary import conformance_page
from minigpt.testing import assert_norm_parity, norm_cases


@pytest.mark.parametrize("case", [name for name in norm_cases() if "ordinary rows" in name])
def test_one_test_a_case(case: str) -> None:
    assert_norm_parity(sabotages.GammaBeta, cases=case)


def test_every_case_can_be_asked_for_by_its_name() -> None:
    assert len(set(norm_cases())) == len(norm_cases()) > 80
    for name in norm_cases():
        assert [case.name for case in CASES if fnmatchcase(case.name, name)] == [name]


def test_the_message_names_the_mistake_and_lists_the_failures() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_norm_parity(sabotages.NoShift, cases=["values", "same input*"], device="cpu")
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"NoShift is not a LayerNorm at [\w, ]+ on cpu: no shift", lines[0]), lines[0]
    assert len([line for line in lines if line.startswith("  FAIL ")]) == 5
    assert re.fullmatch(r"  and \d+ more, in the report's ``failures``", lines[-1]), lines[-1]
    assert any(line.startswith("  FAIL ordinary rows: error ") and ", bound " in line for line in lines)
    assert not any("same input" in line for line in lines)


def test_a_notebook_shows_the_page_of_a_report() -> None:
    report = minigpt.check_norm(sabotages.NoShift, cases="ordinary rows*", device="cpu", seed=0)
    framed = report._repr_html_()
    assert framed.startswith('<iframe title="NoShift: conformance"')
    assert html.unescape(framed.partition('srcdoc="')[2].partition('"')[0]) == conformance_page(report)


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_a_layer_norm_passes_on_cuda() -> None:
    for norm in (sabotages.GammaBeta, "fused"):
        assert_norm_parity(norm, device="cuda")
