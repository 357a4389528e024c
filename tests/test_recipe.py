"""A recipe says how a model is opened; what it says is what is opened, and what is reported is what ran."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids
from safetensors.torch import load_file, save_file

import minigpt
from minigpt import ConfigError, NormError, Recipe
from minigpt.checkpoint.norms import described_norms
from minigpt.recipe import RECIPE_OPTIONS, differences
from minigpt.study.export import can_save_frozen
from minigpt.study.study import AXES

TALE = "Once upon a time there was a young gardener named Tom. He had a garden. " * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose norms are rms, with scales that no other folder has."""
    model = minigpt.from_pretrained("demo", norm="rms", device="cpu")
    with torch.no_grad():
        for norm in model.norm_modules().values():
            norm.get_parameter("weight").mul_(1.25)
    folder = tmp_path_factory.mktemp("rms")
    minigpt.save_pretrained(model, folder, minigpt.Tokenizer.from_pretrained("demo"))
    return folder


def names(model: minigpt.GPT2) -> set[str]:
    return {minigpt.norms.name_of(norm) for norm in model.norm_modules().values()}


@pytest.mark.parametrize(("norm", "stands"), [(None, "rms"), ("rms", "rms"), ("fused", "fused"), ("dyt", "dyt")])
def test_the_norm_that_is_asked_for_stands(norm: str | None, stands: str, trained: Path) -> None:
    model, tokenizer = Recipe(trained, norm=norm, device="cpu").open()
    assert names(model) == {stands}
    assert described_norms(model) == stands
    assert tokenizer is not None
    # The scale is the checkpoint's under every norm.
    assert torch.equal(model.ln_f.weight, minigpt.from_pretrained(trained, device="cpu").ln_f.weight)


def test_fused_is_pytorchs_layer_norm(trained: Path) -> None:
    model = minigpt.from_pretrained(trained, norm="fused", device="cpu")
    x = torch.randn(3, model.config.n_embd)
    expected = torch.nn.functional.layer_norm(x, x.shape[-1:], model.ln_f.weight, model.ln_f.bias, 1e-5)
    torch.testing.assert_close(model.ln_f(x), expected)


def test_a_part_of_the_sites_leaves_the_others(trained: Path) -> None:
    model = minigpt.from_pretrained(trained, norm="fused", sites=["ln_f", "h.0.*"], device="cpu")
    assert [site for site, norm in model.norm_modules().items() if minigpt.norms.name_of(norm) == "fused"] == [
        "h.0.ln_1", "h.0.ln_2", "ln_f",
    ]  # fmt: skip
    assert described_norms(model).startswith("rms, fused at ")


def test_a_trained_norm_that_is_asked_for_again_keeps_what_it_has_learned(tmp_path: Path) -> None:
    model = minigpt.from_pretrained("demo", norm="dyt", device="cpu")
    with torch.no_grad():
        model.ln_f.alpha.fill_(0.75)
    minigpt.save_pretrained(model, tmp_path)
    again = minigpt.from_pretrained(tmp_path, norm="dyt", device="cpu")
    assert again.ln_f.alpha.item() == 0.75
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(again(ids), model.eval()(ids))


def test_centring_comes_before_the_swap_and_the_fit_after_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TALE)
    ids = random_ids(2, 30)
    with torch.no_grad():
        plain = minigpt.from_pretrained("demo", device="cpu")(ids)
        centred = minigpt.from_pretrained("demo", norm="rms", center=True, device="cpu")(ids)
        torch.testing.assert_close(centred, plain, rtol=1e-4, atol=1e-4)
        errors = [
            (minigpt.from_pretrained("demo", norm="dyt", fit=fit, device="cpu")(ids) - plain).square().mean()
            for fit in (None, tmp_path / "text")
        ]
    assert errors[1] < errors[0] / 2


def test_a_tapered_norm_is_never_saved_as_a_constant(tmp_path: Path) -> None:
    """At a gate of 1 it needs no text; below that it is more than the frozen norm that it holds."""
    assert names(minigpt.from_pretrained("demo", norm="taper:1", device="cpu")) == {"taper:1.0"}
    (tmp_path / "text").write_text(TALE)
    model = minigpt.from_pretrained("demo", norm="taper:0.5", fit=tmp_path / "text", device="cpu")
    for norm in model.norm_modules().values():
        norm.freeze(norm.calibration[0], norm.calibration[0])
    assert not can_save_frozen(model)


@pytest.mark.parametrize(("options", "argument"), [
    ({"sites": "ln_f"}, "sites"),
    ({"keep": ()}, "keep"),
    ({"fit": "text"}, "fit"),
    ({"norm": "rms", "keep": ("gain",)}, "keep"),
    ({"norm": {"h.*": "rms"}, "sites": "ln_f"}, "sites"),
    ({"norm": "frozen"}, "fit"),
    ({"revision": "main"}, "revision"),
    ({"quantize": "int4"}, "quantize"),
    ({"attention": "flash"}, "attention"),
    ({"torch_dtype": "float16"}, "torch_dtype"),
    ({"device_map": "auto"}, "device_map"),
    ({"bogus": 1}, "bogus"),
])  # fmt: skip
def test_what_does_nothing_or_is_unknown_is_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises((ConfigError, NormError)) as refused:
        minigpt.from_pretrained("demo", **options)
    assert refused.value.argument == argument
    assert str(refused.value).startswith(argument)


def test_the_fingerprint_changes_with_what_decides_the_model(tmp_path: Path) -> None:
    text, code, copy = tmp_path / "text", tmp_path / "mine.py", tmp_path / "copy"
    text.write_text(TALE)
    code.write_text("import minigpt\nclass Mine(minigpt.LayerNorm):\n    pass\n")
    other, deep = tmp_path / "other.py", tmp_path / "pack" / "deep.py"
    deep.parent.mkdir()
    for file, source in (
        (other, "from helper import f"),
        (tmp_path / "helper.py", "from pack import deep"),
        (deep, ""),
    ):
        file.write_text(source + "\nimport torch\nclass Other(torch.nn.LayerNorm):\n    pass\nf = 1\n")
    minigpt.save_pretrained(minigpt.from_pretrained("demo"), copy)
    recipes = [
        {}, {"source": copy}, {"norm": "rms"}, {"norm": "rms", "sites": "ln_f"}, {"norm": "rms", "keep": ()},
        {"norm": "rms", "center": True}, {"norm": "rms", "fit": text}, {"norm": f"{code}:Mine"}, {"dtype": "bfloat16"},
        {"norm": f"{other}:Other"},
    ]  # fmt: skip
    prints = [Recipe(**options).fingerprint() for options in recipes]
    assert prints == [Recipe(**options).fingerprint() for options in recipes]
    assert len({*prints}) == len(prints)
    text.write_text(TALE + "More.")
    code.write_text("import minigpt\nclass Mine(minigpt.LayerNorm):\n    more = 1\n")
    deep.write_text("more = 1\n")
    minigpt.save_pretrained(minigpt.from_pretrained("demo", norm="std_eps"), copy)
    changed = [i for i, options in enumerate(recipes) if Recipe(**options).fingerprint() != prints[i]]
    assert changed == [1, 6, 7, 9]


def test_the_words_of_the_shell_open_the_same_model(trained: Path) -> None:
    from minigpt.cli.options import recipes_of

    recipe = Recipe(
        trained, norm="std_eps", sites=("ln_f", "h.0.*"), keep=("scale",), center=True, dtype=torch.bfloat16
    )
    words = recipe.command()
    values: dict[str, Any] = dict.fromkeys(("fit", "device", "quantize", "revision")) | {"attention": "sdpa"}
    values |= {name.removeprefix("--"): value for name, value in pairwise(words) if name[:2] == "--"}
    (again,) = recipes_of(values | {"center": "--center" in words})
    assert (again.fingerprint(), again.command()) == (recipe.fingerprint(), words)


def test_importing_the_package_reads_no_recipe() -> None:
    code = "import minigpt, sys; print('torch' in sys.modules, 'minigpt.recipe' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_option_of_opening_is_declared_once_and_every_list_of_them_is_whole() -> None:
    names = [field.name for field in dataclasses.fields(Recipe)]
    assert names[1:] == RECIPE_OPTIONS
    assert [*inspect.signature(minigpt.from_pretrained).parameters] == names
    for function in (minigpt.from_pretrained, minigpt.parity):
        assert {*re.findall(r"\w+", inspect.getdoc(function) or "")} >= {*RECIPE_OPTIONS}
    page = (Path(__file__).parents[1] / "docs" / "study.md").read_text(encoding="utf-8")
    assert f"each a value or a list: {', '.join(name for name in AXES if name != 'fit')}\n" in page
    assert differences(Recipe(quantize="int8")) == ["int8 weights are other weights"]
    assert differences(Recipe(norm="rms", center=True, dtype="bfloat16", attention="eager")) == []


class Scaled(minigpt.LayerNorm):
    """A norm with a number that no Parameter holds."""

    def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha = alpha


@pytest.mark.parametrize("norm", [Scaled, functools.partial(Scaled, alpha=0.1), {"ln_f": Scaled}])
def test_a_norm_without_a_name_has_no_fingerprint(norm: Any) -> None:
    with pytest.raises(ConfigError, match="norm must be a name, so that a later run finds the same norm"):
        Recipe("demo", norm=norm).fingerprint()


@pytest.mark.parametrize("norm", [functools.partial(Scaled, alpha=0.1), lambda size: Scaled(size)])
def test_the_shell_has_no_words_for_a_norm_without_a_name(norm: Any) -> None:
    with pytest.raises(ConfigError, match="which the command line has no words for"):
        Recipe("demo", norm=norm).command()


def test_what_a_partial_says_stands(caplog: pytest.LogCaptureFixture) -> None:
    partial = functools.partial
    for norm in (partial(minigpt.LayerNorm, eps=1e-3), partial(partial(minigpt.LayerNorm), eps=1e-3)):
        model = minigpt.from_pretrained("demo", norm=norm, sites="ln_f", device="cpu")
        assert (model.ln_f.eps, model.h[0].ln_1.eps) == (1e-3, 1e-5)
        assert caplog.messages[-1] == "eps is 0.001 in LayerNorm, where the model's is 1e-05"
    mix = minigpt.norms.build(partial(minigpt.norms.lookup("mix"), share=0.25), 8)
    assert minigpt.norms.name_of(mix) == "mix:0.25"


def test_another_norm_stands_beside_the_code_that_config_json_names(tmp_path: Path) -> None:
    for name in ("Mine", "Other"):
        source = f"import minigpt\nclass {name}(minigpt.LayerNorm):\n    pass\n"
        (tmp_path / f"{name.lower()}.py").write_text(source)
    mine, other = f"{tmp_path / 'mine.py'}:Mine", f"{tmp_path / 'other.py'}:Other"
    folder = tmp_path / "model"
    minigpt.save_pretrained(minigpt.from_pretrained("demo", norm=mine, sites="h.0.ln_1", device="cpu"), folder)

    def at(norm: Any) -> dict[str, str]:
        model = minigpt.from_pretrained(folder, norm=norm, device="cpu")
        kinds = {site: type(module).__name__ for site, module in model.norm_modules().items()}
        return {site: kind for site, kind in kinds.items() if kind in ("Mine", "Other")}

    assert at({"h.0.ln_1": mine, "ln_f": other}) == {"h.0.ln_1": "Mine", "ln_f": "Other"}
    assert at({"ln_f": other, "h.0.ln_1": mine}) == {"h.0.ln_1": "Mine", "ln_f": "Other"}
    assert at({"*": mine, "ln_f": other}) == {"h.0.ln_1": "Mine", "ln_f": "Other"}
    assert at(mine) == {"h.0.ln_1": "Mine"}
    assert at(other) == {"h.0.ln_1": "Other"}  # the class may have another name now


@pytest.mark.parametrize("norm", ["taper", "taper:0.5", "taper:0.25", "frozen"])
def test_the_constants_of_the_checkpoint_stay_with_its_kind_of_norm(norm: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TALE)
    tokenizer = minigpt.Tokenizer.from_pretrained("demo")
    model = minigpt.from_pretrained("demo", norm="taper", fit=tmp_path / "text", device="cpu")
    minigpt.save_pretrained(model, tmp_path / "model", tokenizer)
    again = minigpt.from_pretrained(tmp_path / "model", norm=norm, device="cpu")
    for site, module in model.norm_modules().items():
        assert torch.equal(again.get_buffer(f"{site}.calibration"), module.get_buffer("calibration"))


def test_numbers_that_were_saved_without_dimensions_are_read(tmp_path: Path) -> None:
    model = minigpt.from_pretrained("demo", norm="derf", device="cpu")
    minigpt.save_pretrained(model, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {name: x.view(()) if x.numel() == 1 else x for name, x in load_file(file).items()}
    assert sum(x.ndim == 0 for x in old.values()) == 2 * len(model.site_names())
    save_file(old, file, {"format": "pt"})
    again = minigpt.from_pretrained(tmp_path, device="cpu")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    fresh = minigpt.norms.build("derf", 128)
    fresh.load_state_dict({name: x.view(()) if x.numel() == 1 else x for name, x in fresh.state_dict().items()})
    assert all(parameter.shape in ((1,), (128,)) for parameter in fresh.parameters())
