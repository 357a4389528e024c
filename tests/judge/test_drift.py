"""What each norm does to the activations: at its site, along the text, and on the way through the blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved
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


@torch.no_grad()
def test_the_stream_and_its_noise_as_transformers_gives_them(folder: Path) -> None:
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    truth = GPT2LMHeadModel.from_pretrained(folder, **how | {"attn_implementation": "eager"}).double()
    hf = GPT2LMHeadModel.from_pretrained(folder, **how)
    ours = minigpt.from_pretrained(folder, dtype="bfloat16", device="cpu")
    minigpt.swap_norms(ours, EVERYWHERE)
    for block in judge(folder, EVERYWHERE, "*", "bfloat16").blocks:
        true, their = (stream(model, f"transformer.{block.block}") for model in (truth, hf))
        our = stream(ours, block.block)
        print(f"{block.block}: error {block.error:.4g}, noise {block.noise:.4g}")
        assert block.error == pytest.approx(relative(our, true), rel=1e-6)
        assert block.noise == pytest.approx(relative(their, true), rel=1e-6)


def relative(rows: Tensor, truth: Tensor) -> float:
    return ((rows - truth).norm(dim=-1) / truth.norm(dim=-1)).square().mean().sqrt().item()


def stream(model: nn.Module, block: str) -> Tensor:
    """Everything that a block gives while a model reads both texts, a row a token."""
    kept: list[Tensor] = []
    hook = model.get_submodule(block).register_forward_hook(
        lambda _, args, output: kept.append(output if isinstance(output, Tensor) else output[0])
    )
    for ids in (TEXT, [3, 9]):
        model(torch.tensor([ids]))
    hook.remove()
    return torch.cat([output.double()[0] for output in kept])
