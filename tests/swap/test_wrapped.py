"""Norms that PEFT, accelerate or PyTorch wraps, offloads or shards are swapped; looking changes nothing."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from architectures import random_model
from helpers import assert_within, rms
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

import minigpt
from minigpt.host import host_of, prefix_of
from minigpt.judge.gradients import gradients_of
from minigpt.judge.look import site_statistics

IDS = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1))
PARTS = {  # what LoRA adapts, what is saved whole, and the norms that are tuned
    "llama": ("q_proj", ["norm"], ["input_layernorm", "norm"]),
    "gpt2": ("c_attn", ["ln_f", "ln_1"], ["ln_1", "ln_f"]),
    "gemma": ("q_proj", ["norm", "input_layernorm"], ["input_layernorm"]),
    "pythia": ("query_key_value", ["final_layer_norm"], ["input_layernorm"]),
}


def lora(name: str, **fields: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=[PARTS[name][0]], **fields)


def two_adapters(model: Any, name: str) -> Any:
    wrapped = peft.get_peft_model(model, lora(name, modules_to_save=PARTS[name][1]))
    wrapped.add_adapter("other", lora(name, modules_to_save=PARTS[name][1]))
    return wrapped


WRAPPERS: dict[str, Callable[[Any, str], Any]] = {
    "saved": lambda model, name: peft.get_peft_model(model, lora(name, modules_to_save=PARTS[name][1])),
    "tuned": lambda model, name: peft.get_peft_model(model, peft.LNTuningConfig(target_modules=PARTS[name][2])),
    "tokens": lambda model, name: peft.get_peft_model(model, lora(name, trainable_token_indices=[1, 2])),
    "two": two_adapters,
}
QUICK = [("llama", "saved"), ("gpt2", "tuned"), ("gemma", "saved")]
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.thorough)
    for name in PARTS
    for kind in WRAPPERS
]


@torch.no_grad()
def outputs(model: Any) -> list[Tensor]:
    """Return the logits with the adapter, and without it."""
    with_adapter = model(IDS).logits
    with model.disable_adapter():
        return [with_adapter, model(IDS).logits]


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {path: set(vars(part)) for path, part in model.named_modules()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_norm_that_peft_wraps_keeps_its_weights(name: str, kind: str) -> None:
    model = WRAPPERS[kind](random_model(name), name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim == 1:
                parameter.add_(0.2)  # so that the adapter's norms are not the original ones
    before, seen, state = outputs(model), attributes(model), model.state_dict()
    sites = minigpt.norm_sites(model)
    assert attributes(model) == seen
    kinds = {site.kind for site in sites.values()}
    assert len(kinds) == 1
    assert minigpt.swap_norms(model, "rms" if kinds == {"rms_norm"} else "textbook") == [*sites]
    for logits, expected in zip(outputs(model), before, strict=True):
        assert_within(rms(logits - expected), 1e-5 * rms(expected), rms(expected), f"{name}, {kind}")
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    minigpt.swap_norms(model, "dyt")
    assert len(minigpt.fit_norms(model, IDS)) == len(site_statistics(model, IDS)) == 5


@pytest.mark.filterwarnings("ignore")
def test_a_pattern_of_the_wrapper_matches_the_norms_in_it() -> None:
    model = WRAPPERS["saved"](random_model("llama"), "llama")
    expected = [f"base_model.model.model.norm.{part}" for part in ("original_module", "modules_to_save.default")]
    assert minigpt.swap_norms(model, "rms", "*model.norm") == expected


def checkpointed(model: Any) -> Any:
    layer = type(model.model.layers[0])
    checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda part: type(part) is layer)
    return model


AROUND: dict[str, Callable[[Any], Any]] = {
    "checkpointed": checkpointed,
    "in parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "all": lambda model: nn.DataParallel(torch.compile(checkpointed(model), backend="eager")),
}


@pytest.mark.parametrize("kind", AROUND)
def test_what_pytorch_wraps_has_the_same_places(kind: str) -> None:
    plain, model = random_model("llama"), AROUND[kind](random_model("llama"))
    known, host = host_of(plain), host_of(model)
    assert (len(host.sites), len(host.blocks)) == (len(known.sites), len(known.blocks))
    assert [*minigpt.norm_sites(model).values()] == [*minigpt.norm_sites(plain).values()]
    prefix = prefix_of(model, [*known.sites, *known.blocks])
    assert prefix is not None
    before = plain(IDS).logits.detach()
    minigpt.swap_norms(model, "rms")
    expected = gradients_of(plain, [IDS[:1]], known.embedding)
    with torch.compiler.set_stance("force_eager"):
        assert_within(rms(model(IDS).logits - before), 1e-5 * rms(before), rms(before), kind)
        gradients = gradients_of(model, [IDS[:1]], known.embedding, prefix)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_within(rms(gradient - expected[name]), 1e-4 * rms(expected[name]), rms(expected[name]), name)


OFFLOADED: dict[str, dict[str, str]] = {  # the paths that stay in memory; all others are on disk
    "blocks": dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"),
    "all but the table of angles": {"model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "disk"},
}


def offloaded(name: str, kind: str, folder: Path) -> tuple[Any, Any]:
    """Return a model in memory, and the same with a part of its weights on disk."""
    random_model(name, tie_word_embeddings=False).save_pretrained(folder / "model")
    places = {"model.embed_tokens": "disk", "model.layers": "disk"} | OFFLOADED[kind]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "disk"
    )
    return type(model).from_pretrained(folder / "model").eval(), model.eval()


def same(kind: str) -> str:
    """Return our norm of a kind."""
    return {"rms_norm": "rms", "layer_norm": "textbook"}[kind]


def explained(model: Any) -> dict[str, float]:
    """Fit the norms; return how well each explains the one that it replaces."""
    return {site: fit.after for site, fit in minigpt.fit_norms(model, IDS).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "blocks"), ("gemma", "all but the table of angles"), ("nemotron", "blocks")],
)
@torch.no_grad()
def test_a_norm_whose_weights_are_on_disk_is_swapped_and_fitted(name: str, kind: str, tmp_path: Path) -> None:
    plain, model = offloaded(name, kind, tmp_path)
    before = plain(IDS).logits
    sites = minigpt.norm_sites(model)
    assert sites == minigpt.norm_sites(plain)
    assert [site.site for site in site_statistics(model, IDS)] == [*sites]
    own = type(plain.model.norm)
    for norm in (same(sites["model.norm"].kind), own, "dyt", own):
        assert minigpt.swap_norms(model, norm) == [*sites]
        logits = model(IDS).logits
        if norm == "dyt":
            minigpt.swap_norms(plain, norm)
            assert_within(rms(logits - plain(IDS).logits), 1e-5 * rms(before), rms(before), norm)
            assert explained(model) == pytest.approx(explained(plain), rel=1e-3)
            assert_within(rms(model(IDS).logits - plain(IDS).logits), 1e-2 * rms(before), rms(before), "fitted")
        else:
            assert_within(rms(logits - before), 1e-5 * rms(before), rms(before), str(norm))
    model.save_pretrained(tmp_path / "saved")
    again = type(plain).from_pretrained(tmp_path / "saved").eval()
    assert_within(rms(again(IDS).logits - before), 1e-5 * rms(before), rms(before), "saved")
    with pytest.raises(minigpt.ConfigError, match="offloaded"):
        gradients_of(model, [IDS[:1]], "model.embed_tokens")


@pytest.mark.filterwarnings("ignore")
def test_looking_at_norms_on_disk_changes_nothing(tmp_path: Path) -> None:
    _, model = offloaded("llama", "blocks", tmp_path)
    seen, before = attributes(model), model(IDS).logits
    minigpt.norm_sites(model)
    assert attributes(model) == seen
    site_statistics(model, IDS)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.filterwarnings("ignore")
def test_a_block_that_is_offloaded_as_one_is_refused(tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model: Any = random_model("llama")
    before = model(IDS).logits.detach()
    cpu_offload(model, "cpu", preload_module_classes=["LlamaDecoderLayer"])
    with pytest.raises(minigpt.NormError, match=r"input_layernorm is a placeholder, and its block is offloaded as one"):
        minigpt.swap_norms(model, "rms")
    minigpt.swap_norms(model, "rms", "model.norm")
    assert_within(rms(model(IDS).logits.detach() - before), 1e-5 * rms(before), rms(before), "the last norm")


@contextlib.contextmanager
def one_process(tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_norms_are_swapped_before_they_are_sharded(name: str, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    with one_process(tmp_path) as mesh:
        for norm in ("rms", "dyt", "derf", "hardtanh", nn.RMSNorm):
            model = random_model(name)
            minigpt.swap_norms(model, norm)
            before, sites = model(IDS).logits.detach(), minigpt.norm_sites(model)
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
            assert minigpt.norm_sites(model) == sites
            logits = model(IDS).logits
            assert torch.equal(logits, before)
            logits.sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert len(site_statistics(model, IDS)) == len(sites)
            with pytest.raises(minigpt.ConfigError, match="is sharded"):
                gradients_of(model, [IDS[:1]], "model.embed_tokens")


@pytest.mark.parametrize("has_run", [False, True])
def test_norms_that_are_sharded_are_neither_swapped_nor_fitted(has_run: bool, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    with one_process(tmp_path) as mesh:
        model = random_model("llama")
        before = model(IDS).logits.detach()
        fully_shard(model, mesh=mesh)
        if has_run:  # which leaves whole Parameters in the model for its backward
            model(IDS)
        for change in (lambda: minigpt.swap_norms(model, "rms"), lambda: minigpt.fit_norms(model, IDS)):
            with pytest.raises(minigpt.NormError, match="sharded; swap and fit norms before that"):
                change()
        assert torch.equal(model(IDS).logits, before)
