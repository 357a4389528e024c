"""What each norm does to the activations: at its site, along the text, and on the way through the blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import minigpt

TEXT = [5, 17, 42, 8, 23, 11, 60]


def judge(folder: Path, norm: Callable[..., nn.Module], sites: str, dtype: str = "float32") -> minigpt.ParityReport:
    return minigpt.parity(
        folder, norm=norm, sites=sites, dtype=dtype, device="cpu", prompts=[TEXT, [3, 9]], max_new_tokens=0
    )


def louder(at: Callable[[Tensor], Tensor]) -> type[minigpt.LayerNorm]:
    """A norm that is 1 % too large at the tokens for which ``at``, asked for their places, is 1."""

    class Louder(minigpt.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[-2])[:, None]  # (T, 1)
            return super().forward(x) * (1 + 0.01 * at(places).to(x.dtype))

    return Louder


AFTER_FIRST = louder(lambda places: places > 0)
EVERYWHERE = louder(torch.ones_like)


def test_the_first_token_apart_from_the_rest(folder: Path) -> None:
    """It carries the massive activations of a real model, which would hide all else."""
    report = judge(folder, AFTER_FIRST, "h.0.ln_1")
    swapped = report.norm_sites[0]
    assert swapped.local_rest == pytest.approx(0.01, rel=1e-3)
    assert swapped.local_first < 1e-6 < swapped.local_error < swapped.local_rest
    assert all(site.propagated_first < 1e-5 < site.propagated_rest for site in report.norm_sites)
    assert all(block.error_first < 1e-5 < block.error_rest for block in report.blocks)


@pytest.mark.parametrize(("site", "drifts"), [("h.0.ln_1", [1, 1]), ("h.1.ln_2", [0, 1]), ("ln_f", [0, 0])])
def test_a_block_drifts_from_the_site_on(folder: Path, site: str, drifts: list[int]) -> None:
    blocks = judge(folder, EVERYWHERE, site).blocks
    assert [block.block for block in blocks] == ["h.0", "h.1"]
    for block, drifted in zip(blocks, drifts, strict=True):
        assert (block.error > 1e-4) if drifted else (block.error < 1e-5)


@torch.no_grad()
def test_the_stream_and_its_noise_as_transformers_gives_them(folder: Path) -> None:
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    truth = GPT2LMHeadModel.from_pretrained(folder, **how | {"attn_implementation": "eager"}).double()
    theirs = GPT2LMHeadModel.from_pretrained(folder, **how)
    ours = minigpt.from_pretrained(folder, dtype="bfloat16", device="cpu")
    minigpt.swap_norms(ours, EVERYWHERE)
    for block in judge(folder, EVERYWHERE, "*", "bfloat16").blocks:
        true, their = (stream(model, f"transformer.{block.block}") for model in (truth, theirs))
        our = stream(ours, block.block)
        print(f"{block.block}: error {block.error:.4g}, noise {block.noise:.4g}")
        assert block.error == pytest.approx(((our - true).norm() / true.norm()).item(), rel=1e-6)
        assert block.noise == pytest.approx(((their - true).norm() / true.norm()).item(), rel=1e-6)


def stream(model: nn.Module, block: str) -> Tensor:
    """Everything that a block gives while a model reads both texts."""
    kept: list[Tensor] = []
    hook = model.get_submodule(block).register_forward_hook(
        lambda _, args, output: kept.append(output if isinstance(output, Tensor) else output[0])
    )
    for ids in (TEXT, [3, 9]):
        model(torch.tensor([ids]))
    hook.remove()
    return torch.cat([output.double().flatten() for output in kept])


def test_one_token_has_no_rest(folder: Path) -> None:
    report = minigpt.parity(folder, device="cpu", prompts=[[7]], max_new_tokens=0)
    assert report.passed
    assert all((site.local_error, 0) == (site.local_first, site.local_rest) for site in report.norm_sites)


class SumsItself(minigpt.LayerNorm):
    """Right by itself; 1 % too large where it adds the residual too, as a block has it do at ln_2."""

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, self.forward(total) * 1.01


def test_a_norm_is_judged_as_the_model_calls_it(folder: Path) -> None:
    report = judge(folder, SumsItself, "*")
    assert not report.passed
    for site in report.norm_sites:
        wanted = 0.01 if site.site.endswith("ln_2") else 0.0
        print(f"{site.site}: {site.local_error:.3g}, wanted {wanted}")
        assert site.local_error == pytest.approx(wanted, abs=2e-6, rel=1e-3)
    alone = judge(folder, SumsItself, "*.ln_1")
    assert alone.passed, alone.reasons


class SumsInPlace(minigpt.LayerNorm):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        residual += delta
        return residual, self.forward(residual)


def test_a_sum_in_place_is_no_drift_of_the_block_before(folder: Path) -> None:
    report = judge(folder, SumsInPlace, "*")
    assert report.passed, report.reasons
    assert max(block.error for block in report.blocks) < 1e-5


def test_a_norm_with_hooks_of_its_own_is_heard_behind_them(folder: Path) -> None:
    def hooked(size: int, eps: float) -> nn.Module:
        norm = nn.LayerNorm(size, eps)
        norm.register_forward_hook(lambda module, given, y: y * 1.05)
        return norm

    first = judge(folder, hooked, "*").norm_sites[0]
    assert first.propagated_error == pytest.approx(0.05, rel=1e-3)
