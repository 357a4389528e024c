"""Norms as public model code writes them: what becomes of each in a GPT-2, and what was trained comes back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_close, assert_same_bits, random_ids, small_model
from sabotages import NanoGPT
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from typer.testing import CliRunner

import minigpt
from minigpt import NormError, norms, swap_norms
from minigpt.cli.commands import app_of


class ScaleNorm(nn.Module):
    """Nguyen and Salazar 2019: an L2 norm with one learned gain."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(dim**0.5))
        self.eps = eps

    def forward(self, x):
        return x * self.scale / torch.norm(x, dim=-1, keepdim=True).clamp(min=self.eps)


class DynamicTanh(nn.Module):
    """DyT as its authors publish it, with a flag that has no default."""

    def __init__(self, normalized_shape, channels_last, alpha_init_value=0.5):
        super().__init__()
        self.channels_last = channels_last
        self.alpha = nn.Parameter(torch.ones(1) * alpha_init_value)
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        x = torch.tanh(self.alpha * x)
        return x * self.weight + self.bias if self.channels_last else x * self.weight[:, None, None]


class GroupOfAll(nn.Module):
    """GroupNorm with one group, channels last."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.group = nn.GroupNorm(1, dim, eps)

    def forward(self, x):
        return self.group(x.flatten(0, -2)).view_as(x)


class LearnedEps(nn.Module):
    """RMSNorm with an eps that is trained."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.tensor(eps))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps.abs())


class Gated(nn.Module):
    """A linear gate beside the norm: its bias is as long as a row, and no shift."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * torch.sigmoid(self.gate(x))


class Outcome(NamedTuple):
    """What becomes of a class: its own names for the model's scale and shift (None: applied to its output), and what
    else is trained."""

    scale: str | None
    shift: str | None
    more: tuple[str, ...] = ()


TABLE: dict[Any, Outcome] = {
    nn.LayerNorm: Outcome("weight", "bias"),
    nn.RMSNorm: Outcome("weight", None),
    LlamaRMSNorm: Outcome("weight", None),
    CohereLayerNorm: Outcome("weight", None),
    GemmaRMSNorm: Outcome(None, None, ("weight",)),  # multiplies by 1 + weight
    NemotronLayerNorm1P: Outcome(None, None, ("weight", "bias")),  # the same
    OlmoLayerNorm: Outcome(None, None),
    NanoGPT: Outcome("weight", "bias"),
    ScaleNorm: Outcome(None, None, ("scale",)),
    DynamicTanh: Outcome("weight", "bias", ("alpha",)),
    GroupOfAll: Outcome("group.weight", "group.bias"),
    LearnedEps: Outcome("weight", None, ("eps",)),
    Gated: Outcome(None, None, ("gate.weight", "gate.bias")),
}

every_norm = pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.__name__)


@every_norm
@torch.no_grad()
def test_what_becomes_of_it(cls: type[nn.Module]) -> None:
    """It computes its own formula with the model's scale and shift, in the formula or beside it."""
    outcome, model = TABLE[cls], small_model()
    before = dict(model.named_parameters())
    swap_norms(model, cls)
    assert all(after is before[name] for name, after in model.named_parameters() if name in before)
    lacking = [what for what, name in (("scale", outcome.scale), ("shift", outcome.shift)) if name is None]
    message = [note for note in norms.notes(model.ln_f) if " has no " in note]
    assert len(message) == bool(lacking)
    has_both = cls in (GemmaRMSNorm, NemotronLayerNorm1P)  # which multiply by 1 + weight
    assert not has_both or f"{cls.__name__} has no plain scale (it multiplies by more than weight" in message[0]
    assert all(f"the model's {what} is applied to its output" in message[0] for what in lacking)
    more = {name.removeprefix("ln_f.norm.").removeprefix("ln_f.") for name in model.state_dict().keys() - before.keys()
           if name.startswith("ln_f.") and name in dict(model.named_parameters())}  # fmt: skip
    assert more == set(outcome.more)

    norm, x = model.ln_f, torch.randn(2, 5, model.config.n_embd)
    alone: Any = norm.norm if hasattr(norm, "multiplies") else norm
    actual, y = norm(x), alone(x)  # the model's scale and shift are lent to it
    y = y if outcome.scale else y * norm.weight
    assert_same_bits(actual, y if outcome.shift else y + norm.bias, "the norm")
    for name, role in ((outcome.scale, norm.weight), (outcome.shift, norm.bias)):
        if name:
            holder, _, last = name.rpartition(".")
            assert getattr(alone.get_submodule(holder), last) is role
    assert model(random_ids(2, 9)).isfinite().all()


@pytest.mark.parametrize("cls", [GemmaRMSNorm, NemotronLayerNorm1P, LlamaRMSNorm], ids=lambda cls: cls.__name__)
@torch.no_grad()
def test_the_model_s_scale_counts_once(cls: type[nn.Module]) -> None:
    """Also in a class that multiplies by 1 + weight."""
    norm: Any = norms.build(cls, 8)
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(3, 8)
    standard = F.layer_norm(x, (8,)) if cls is NemotronLayerNorm1P else F.rms_norm(x, (8,), eps=1e-5)
    assert_close(norm(x), standard * norm.weight + norm.bias, 1e-5, "scaled once")


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.BatchNorm1d, r"^BatchNorm1d raised .* on an input of \(1, 2, 48\) in float32; to write it for this model,"),
        (nn.GroupNorm, r"GroupNorm\(48, eps=.*\) raised TypeError: .* missing 1 required positional argument"),
        (nn.Flatten, "Flatten"),
    ],
    ids=["batch norm", "groups", "another shape"],
)
def test_only_what_cannot_run_is_refused(norm: Any, message: str) -> None:
    model = small_model()
    before = model.norm_modules()
    with pytest.raises(NormError, match=message):
        swap_norms(model, norm)
    assert model.norm_modules() == before


@torch.no_grad()
def test_what_is_not_kept_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    swap_norms(model, nn.RMSNorm, "ln_f", keep=())
    assert caplog.messages == ["RMSNorm has no shift: the model's shift is dropped"]
    x = torch.randn(2, 48)
    assert_same_bits(model.ln_f(x), F.rms_norm(x, (48,), model.ln_f.weight, 1e-5), "RMSNorm alone")
    swap_norms(model, OlmoLayerNorm, "h.*", keep=["scale"])
    assert "h.0.ln_1.weight" in model.state_dict()
    assert "h.0.ln_1.bias" not in model.state_dict()
    with pytest.raises(NormError, match="got gain"):
        swap_norms(model, nn.RMSNorm, keep=["gain"])  # type: ignore[list-item]


LIBRARY = [nn.RMSNorm, LlamaRMSNorm, LearnedEps, ScaleNorm, OlmoLayerNorm, "dyt"]


@pytest.mark.parametrize("keep", [("scale", "shift"), ()], ids=["kept", "dropped"])
@pytest.mark.parametrize("norm", LIBRARY, ids=lambda norm: getattr(norm, "__name__", norm))
def test_what_was_trained_comes_back(norm: Any, keep: tuple[str, ...], tmp_path: Path) -> None:
    """On the demo: swap, three steps, save, read, the same logits."""
    model = minigpt.from_pretrained("demo", norm=norm, keep=keep, device="cpu")
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    trained(model, ids)
    minigpt.save_pretrained(model, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["model_type"], fields["norm"]) == ("minigpt-gpt2", norms.name_of(norm))
    with pytest.raises(ValueError, match="minigpt-gpt2"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    if norm != "dyt":
        with pytest.raises(NormError, match="code is not run because a file names it"):
            minigpt.from_pretrained(tmp_path)
    again = minigpt.from_pretrained(tmp_path, norm=None if norm == "dyt" else norm, device="cpu")
    assert again.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert_same_bits(again(ids), model.eval()(ids), "the logits of what was read")


def trained(model: minigpt.GPT2, ids: Tensor) -> None:
    """Three steps; every parameter of a norm has moved."""
    before = {name: one.detach().clone() for name, one in model.named_parameters() if "ln_" in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    assert not [name for name, one in model.named_parameters() if name in before and torch.equal(one, before[name])]


def test_sites_have_each_their_own(tmp_path: Path) -> None:
    """Registered norms come back at once, others where the checkpoint has them and nowhere else."""
    model = minigpt.from_pretrained("demo", norm={"h.*.ln_1": "dyt", "h.0.ln_1": LearnedEps}, device="cpu")
    ids = torch.randint(model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    trained(model, ids)
    minigpt.save_pretrained(model, tmp_path)
    pairs = dict(json.loads((tmp_path / "config.json").read_text())["norm"])
    assert pairs["h.0.ln_1"].endswith("test_public_norms:LearnedEps")
    assert set(pairs.values()) == {pairs["h.0.ln_1"], "dyt"}
    assert "ln_f" not in pairs
    again = minigpt.from_pretrained(tmp_path, norm=LearnedEps, device="cpu")
    with torch.no_grad():
        assert_same_bits(again(ids), model.eval()(ids), "the logits of what was read")
    assert [type(norm) for norm in again.norm_modules().values()] == [
        type(norm) for norm in model.norm_modules().values()
    ]


def test_hf_reads_what_we_save_and_we_what_it_saves(tmp_path: Path) -> None:
    hf: Callable[..., Any] = minigpt.hf.GPT2LMHeadModel.from_pretrained
    model = minigpt.from_pretrained("demo", norm={"h.*": "dyt", "ln_f": "rms"}, device="cpu")
    ids = torch.randint(model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    trained(model, ids)
    minigpt.save_pretrained(model.eval(), tmp_path / "ours")
    hf_result = hf(tmp_path / "ours").eval()
    hf_result.save_pretrained(tmp_path / "theirs")
    again = minigpt.from_pretrained(tmp_path / "theirs", device="cpu")
    with torch.no_grad():
        assert_close(hf_result(ids).logits, model(ids), 1e-6, "in transformers")
        assert_same_bits(again(ids), model(ids), "and back")


def test_the_command_line_says_what_is_kept() -> None:
    words = "parity --norm torch.nn:RMSNorm --prompt Once --keep none --device cpu --json -"
    judged = CliRunner().invoke(app_of(words.split()), words.split())
    assert judged.exit_code == 1
    assert "RMSNorm has no shift: the model's shift is dropped" in json.loads(judged.stdout)["notes"]
