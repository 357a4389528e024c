"""What each norm does to the activations: at its site, along the text, and on the way through the blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved
from torch import Tensor, nn

import minigpt

TEXT = [5, 17, 42, 8, 23, 11, 60]


def judge(folder: Path, norm: Callable[..., nn.Module], sites: str, dtype: str = "float32") -> minigpt.ParityReport:
    return minigpt.parity(
        folder, norm=norm, sites=sites, dtype=dtype, device="cpu", prompts=[TEXT, [3, 9]], max_new_tokens=0
    )


def louder(at: Callable[[Tensor], Tensor]) -> type[minigpt.LayerNorm]:
    """A norm that is 1 % too large at the tokens for which ``at``, asked for their places, is 1."""

    class LouderAt(minigpt.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[-2])[:, None]  # (T, 1)
            return super().forward(x) * (1 + 0.01 * at(places).to(x.dtype))

    return LouderAt


AFTER_FIRST = louder(lambda places: places > 0)
EVERYWHERE = louder(torch.ones_like)


def test_no_token_hides_another(tmp_path: Path) -> None:
    """Each is measured by its own size: a first token of 300 times the others' size hides none of their errors."""
    model = reference(std=0.3)
    with torch.no_grad():
        model.transformer.wpe.weight[0] *= 300
    place = saved(model, tmp_path)
    report = minigpt.parity(place, norm=AFTER_FIRST, sites="h.0.ln_1", device="cpu", prompts=[TEXT], max_new_tokens=0)
    expected = 0.01 * ((len(TEXT) - 1) / len(TEXT)) ** 0.5
    assert report.norm_sites[0].local_error == pytest.approx(expected, rel=1e-3)
    assert report.blocks[0].error > 1e-4


@pytest.mark.parametrize(("site", "drifts"), [("h.0.ln_1", [1, 1]), ("h.1.ln_2", [0, 1]), ("ln_f", [0, 0])])
def test_a_block_drifts_from_the_site_on(folder: Path, site: str, drifts: list[int]) -> None:
    blocks = judge(folder, EVERYWHERE, site).blocks
    assert [block.block for block in blocks] == ["h.0", "h.1"]
    for block, drifted in zip(blocks, drifts, strict=True):
        assert (block.error > 1e-4) if drifted else (block.error < 1e-5)
