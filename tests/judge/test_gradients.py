"""Gradients in the model: a norm whose backward is wrong fails, and its site is named; right norms pass."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_classes import NoGradient
from torch import Tensor
from transformers import GPT2LMHeadModel

import minigpt
from minigpt.report.parts import parts_of

PROMPTS = [[5, 17, 42, 8, 23, 11, 9, 9, 30], [3, 60, 1]]  # one has a token twice


@pytest.fixture(scope="module")
def own_original(folder: Path) -> minigpt.Original:
    return minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=4, gradients=True, device="cpu")


class Detached(minigpt.LayerNorm):
    """Right forward; its statistics get no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True).detach(), x.var(-1, correction=0, keepdim=True).detach()
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class FaultyBackward(torch.autograd.Function):
    """LayerNorm with a backward by hand; ``fault`` says what is wrong in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, fault: str) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward((x - mean) * rstd, rstd, weight)
        ctx.fault = fault
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_hat, rstd, weight = ctx.saved_tensors
        g = dy * weight
        twice = 2 if ctx.fault == "mean twice" else 1
        dx = rstd * (g - twice * g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
        rounded = x_hat.bfloat16().float() if ctx.fault == "rounded" else x_hat
        rows = slice(1, None) if ctx.fault == "lost row" else slice(None)
        dweight, dbias = (dy * rounded).flatten(0, -2)[rows].sum(0), dy.flatten(0, -2)[rows].sum(0)
        return dx, dweight, dbias, None, None


def with_fault(name: str) -> type[minigpt.LayerNorm]:
    class ByHand(minigpt.LayerNorm):
        fault = name

        def forward(self, x: Tensor) -> Tensor:
            return FaultyBackward.apply(x, self.weight, self.bias, self.eps, self.fault)

    return ByHand


@pytest.mark.parametrize("norm", [Detached, *map(with_fault, ("mean twice", "rounded", "lost row"))])
@pytest.mark.parametrize("site", ["h.0.ln_2", "h.1.ln_1"])
def test_a_wrong_backward_fails(own_original: minigpt.Original, norm: Any, site: str) -> None:
    report = own_original.judge(norm=norm, sites=site)
    assert report.logits.ratio < 2, "its forward is right"
    assert not report.passed
    assert "gradients" in report.reasons[0]


@pytest.mark.parametrize("norm", ["fused", "textbook", with_fault("")])
def test_a_right_backward_passes(own_original: minigpt.Original, norm: Any) -> None:
    report = own_original.judge(norm=norm)
    assert report.passed, report.reasons
    print(f"largest ratio {report.gradients[0]}")
    assert [row.ratio for row in report.gradients] == sorted((row.ratio for row in report.gradients), reverse=True)


def test_gradients_are_those_of_transformers(own_original: minigpt.Original, folder: Path) -> None:
    """Of the mean loss of all tokens, in float64; the noise is transformers' own at the dtype, by either attention."""
    gradients = []
    for dtype, attention in ((torch.float64, "sdpa"), (torch.float32, "sdpa"), (torch.float32, "eager")):
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        tokens = sum(len(text.ids) - 1 for text in own_original.truth.texts.prompts)
        for text in own_original.truth.texts.prompts:
            ids = torch.tensor([text.ids])
            (F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum") / tokens).backward()
        gradients.append({name.removeprefix("transformer."): single.grad for name, single in model.named_parameters()})
    exact, *noisy = gradients
    for name, gradient in exact.items():
        torch.testing.assert_close(own_original.truth.gradients[name].double(), gradient, rtol=1e-6, atol=1e-8)
        noise = max(((draw[name].double() - gradient).norm() / gradient.norm()).item() for draw in noisy)
        assert own_original.truth.floor.gradients[name] == pytest.approx(noise, rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_floor_of_half_precision_says_what_pytorch_loses(dtype: str, folder: Path) -> None:
    asked = {"prompts": PROMPTS, "max_new_tokens": 4, "gradients": True, "device": "cpu"}
    report = minigpt.Original(folder, dtype=dtype, **asked).judge(norm="textbook")
    assert report.passed, report.reasons
    (part,) = [part for part in parts_of(report) if part.name == "gradients"]
    shifts = [row.noise for row in report.gradients if re.search(r"ln_\w+\.bias$", row.parameter)]
    largest = max(shifts)
    says = "LayerNorm adds the gradients of scale and shift in bfloat16, so transformers' own error has what that loses"
    assert (f"{says}: shifts are off by up to {largest:.2g} of" in part.about) == (dtype == "bfloat16")


def test_an_original_without_them_says_so(folder: Path) -> None:
    plain = minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=0, device="cpu")
    assert plain.judge(norm="textbook").gradients is None
    with pytest.raises(minigpt.ConfigError) as caught:
        plain.judge(norm="textbook", gradients=True)
    assert caught.value.argument == "gradients"


# What passes no gradient


class OfInference(torch.nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(x)


class OfDetachedInput(torch.nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@pytest.mark.parametrize("norm", [NoGradient, OfInference, OfDetachedInput])
def test_norms_that_pass_no_gradient_are_an_error(own_original: minigpt.Original, norm: Any) -> None:
    with pytest.raises(minigpt.NormError) as caught:
        own_original.judge(norm=norm)
    assert re.match(r"the gradients cannot be compared: .*; a torch\.no_grad, .* in a norm, is the", str(caught.value))


def test_one_site_without_gradients_fails(own_original: minigpt.Original) -> None:
    report = own_original.judge(norm=NoGradient, sites="h.0.ln_1")
    assert report.outcome == "FAIL"
    assert "gradients" in report.reasons[0]


class UnderContext(torch.nn.Module):
    """A model that computes its logits under a context of its own."""

    def __init__(self, model: Any, context: Any) -> None:
        super().__init__()
        self.transformer, self.lm_head, self.context = model.transformer, model.lm_head, context

    def forward(self, ids: Tensor) -> Tensor:
        with self.context():
            return self.lm_head(self.transformer(ids).last_hidden_state)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_module_without_gradients_says_so(own_original: minigpt.Original, folder: Path, context: Any) -> None:
    model = UnderContext(GPT2LMHeadModel.from_pretrained(folder).eval(), context)
    if context is torch.enable_grad:
        assert own_original.judge(model).passed
        return
    with pytest.raises(minigpt.NormError, match="the model computes its logits without gradients, as under"):
        own_original.judge(model)
    assert own_original.judge(model, gradients=False).passed


def test_a_weight_that_is_stored_transposed_is_named(own_original: minigpt.Original, folder: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    before = model.transformer.h[0].mlp.c_fc
    linear = torch.nn.Linear(*before.weight.shape)
    linear.load_state_dict({"weight": before.weight.mT, "bias": before.bias})
    model.transformer.h[0].mlp.c_fc = linear
    assert own_original.judge(model, gradients=False).passed
    there, here = tuple(before.weight.shape), tuple(linear.weight.shape)
    sentence = (
        f"gradients need Parameters of the original's shapes, and h.0.mlp.c_fc.weight has {here} in place of {there}"
    )
    with pytest.raises(minigpt.ConfigError, match=f"^{re.escape(sentence)}$") as caught:
        own_original.judge(model)
    assert caught.value.argument == "gradients"


def test_the_caller_may_be_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        options: dict[str, Any] = dict(prompts=PROMPTS, max_new_tokens=0, gradients=True, device="cpu")
        assert minigpt.parity(folder, norm="textbook", **options).passed


def test_gradients_of_an_offloaded_model_are_refused(own_original: minigpt.Original, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert own_original.judge(model, gradients=False).passed
    with pytest.raises(minigpt.ConfigError, match=r"^gradients need all Parameters on cpu, .* are offloaded") as caught:
        own_original.judge(model)
    assert caught.value.argument == "gradients"
