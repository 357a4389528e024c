"""What each norm is given: against the formulas, on inputs that hooks have kept."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_within, random_ids, small_model

from minigpt import NormError, Recipe, norm_sites
from minigpt.judge.look import site_statistics
from minigpt.judge.reading import recorded
from minigpt.report.numerals import brief, percent


def test_the_figures_are_those_of_the_inputs() -> None:
    model, ids = small_model(dtype=torch.float64), random_ids(4, 24)
    with torch.no_grad():
        model.wpe.weight[0, :3] = torch.tensor([300.0, -200.0, 250.0])
        with recorded(model, model.site_names()) as (inputs, _):
            model(ids)
    actual = site_statistics(model, ids)
    assert [one.site for one in actual] == model.site_names()
    for one in actual:
        x = inputs[one.site]
        deviation = (x.var(-1, correction=0) + 1e-5).sqrt()
        rest, first = deviation[:, 1:], deviation[:, 0]
        share = (x.mean(-1).square() / x.square().mean(-1)).mean()
        for supplied, expected in ((one.deviation, rest.mean()), (one.deviation_spread, rest.std(correction=0)),
                              (one.deviation_first, first.mean()), (one.mean_share, share)):  # fmt: skip
            assert_within(abs(supplied - expected.item()), 1e-12 * expected.item(), expected.item(), one.site)
        energy = (x - x.mean(-1, keepdim=True)).square().sum((0, 1))
        assert {top.channel for top in one.channels} == {0, 1, 2}, "the massive channels"
        assert sum(top.share for top in one.channels) == pytest.approx((energy[:3].sum() / energy.sum()).item())
        norm = model.get_submodule(one.site)
        constant = torch.where(torch.arange(deviation.shape[1]) == 0, first.mean(), rest.mean())[:, None]
        frozen = (x - x.mean(-1, keepdim=True)) / constant * norm.weight + norm.bias
        expected = F.layer_norm(x, (48,), norm.weight, norm.bias)
        lost = (frozen - expected).square().sum() / (expected - expected.mean((0, 1))).square().sum()
        assert one.unexplained == pytest.approx(lost.item(), rel=1e-9)
    assert not any(norm._forward_pre_hooks for norm in model.norm_modules().values())


def test_a_row_of_one_token_has_no_usual_deviation() -> None:
    with pytest.raises(NormError, match="two tokens or more"):
        site_statistics(small_model(), random_ids(3, 1))


def test_the_command_shows_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from minigpt.cli.sites import sites

    (tmp_path / "text").write_text("Once upon a time there was a gardener named Tom. " * 20)
    files = {"json_file": str(tmp_path / "a.json"), "html": tmp_path / "page.html"}
    sites(Recipe("demo", device="cpu"), text=tmp_path / "text", **files)
    shown, fields = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    page = (tmp_path / "page.html").read_text()
    for site in fields["norm_sites"]:
        figures = [brief(site[key]) for key in ("deviation", "deviation_spread", "deviation_first")]
        row = [site["site"], *figures, *percent(site["mean_share"]).split(), *percent(site["unexplained"]).split()]
        assert row in [line.split()[: len(row)] for line in shown.splitlines()]
        assert f"{site['site']}<" in page.replace("<wbr>", "")
    assert len(fields["norm_sites"]) == 9
    assert page.count('class="heat"') == 3


def test_norms_of_heads_are_among_the_sites() -> None:
    """A text for each head: the figures are those of its rows."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = Qwen3Config(**shape, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = random_ids(2, 16, vocab=64)
    with recorded(model, norm_sites(model)) as (inputs, _), torch.no_grad():
        model(ids)
    found = {one.site: one for one in site_statistics(model, ids)}
    assert found.keys() == norm_sites(model).keys()
    assert len(found) == 9
    for site in ("model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.k_norm", "model.norm"):
        x = inputs[site].double()  # (B, T, H, D) or (B, T, C)
        deviation = (x.square().mean(-1) + 1e-6).sqrt()
        assert found[site].deviation == pytest.approx(deviation[:, 1:].mean().item(), rel=1e-9)
        assert found[site].deviation_first == pytest.approx(deviation[:, 0].mean().item(), rel=1e-9)
        assert 0 <= found[site].unexplained <= 1
