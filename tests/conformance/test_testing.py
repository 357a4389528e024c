"""assert_norm_parity, as the author of a kernel uses it."""

from fnmatch import fnmatchcase

import pytest
import sabotages

from minigpt.conformance.check import CASES
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
    assert lines[0].startswith("NoShift is not a LayerNorm at "), lines[0]
    assert lines[1] == "  diagnosis: no shift"
    assert any(line.startswith("  FAIL ordinary rows: error ") and ", bound " in line for line in lines)
    assert not any("same input" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_a_layer_norm_passes_on_cuda() -> None:
    for norm in (sabotages.GammaBeta, "fused"):
        assert_norm_parity(norm, device="cuda")
