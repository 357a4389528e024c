"""A finetuned checkpoint against its original: KL, top-1, perplexity of both, and drift by site."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import reference, saved, talking
from judgements import PROMPTS
from transformers import GPT2LMHeadModel

import minigpt

SHAPE = dict(std=0.3, vocab_size=300, n_positions=64)
TEXT = "the dog ran to the house and the cat saw the dog; the dog saw nothing. " * 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = talking(tmp_path_factory.mktemp("original"), n_layer=2, n_positions=64)
    (place / "text").write_text(TEXT, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same but for the second block's MLP."""
    model = reference(**SHAPE)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.mul_(1.1)
    return saved(model, tmp_path_factory.mktemp("tuned"))


@pytest.fixture(scope="module")
def report(base: Path, tuned: Path) -> minigpt.ParityReport:
    return minigpt.parity(tuned, against=base, prompts=PROMPTS, max_new_tokens=0, text=base / "text", device="cpu")


def test_it_is_different_and_the_original_is_named(report: minigpt.ParityReport, base: Path, tuned: Path) -> None:
    assert (report.outcome, report.model, report.against) == ("DIFFERENT", str(tuned), str(base))
    assert report.bitwise.equal, "the original in reference arithmetic is transformers', whatever was tuned"
    assert f"{tuned} is another checkpoint than {base}" in report.reasons[-1]


@torch.no_grad()
def test_kl_and_top1_are_of_the_two_models(base: Path, tuned: Path) -> None:
    report = minigpt.parity(tuned, against=base, prompts=PROMPTS, max_new_tokens=0, device="cpu")
    logits = {}
    for place in (base, tuned):
        model = GPT2LMHeadModel.from_pretrained(place).double()
        logits[place] = torch.cat([model(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    p, q = (logits[place].log_softmax(-1) for place in (base, tuned))
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert report.distribution.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert report.distribution.top1_agreement == pytest.approx(same)


def test_the_drift_begins_after_what_was_tuned(report: minigpt.ParityReport) -> None:
    drift = {site.site: site.propagated_error for site in report.norm_sites}
    assert all(drift[site] < 1e-5 for site in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2"))
    assert drift["ln_f"] > 1e-3


def test_another_shape_cannot_be_compared(base: Path, tmp_path: Path) -> None:
    other = saved(reference(**SHAPE, n_layer=1), tmp_path)
    with pytest.raises(minigpt.ConfigError, match="must have the same shape to be compared, but n_layer is 1 and 2"):
        minigpt.parity(other, against=base, prompts=PROMPTS, device="cpu")


def test_the_norms_that_a_checkpoint_names_are_left_there(base: Path, tmp_path: Path) -> None:
    model = minigpt.from_pretrained(base, norm="rms", device="cpu")
    minigpt.save_pretrained(model, tmp_path / "rms")
    how = dict(prompts=PROMPTS, max_new_tokens=0, device="cpu")
    saved_norms = minigpt.parity(tmp_path / "rms", against=base, **how)
    swapped = minigpt.parity(base, norm="rms", **how)
    assert saved_norms.distribution.kl_mean == pytest.approx(swapped.distribution.kl_mean)
    assert saved_norms.bitwise.equal
