"""Where transformers itself overflows, the error says so: of which text, where, and which dtype to try."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import random_model
from checkpoints import edit_tensors, reference, saved
from torch import Tensor

import minigpt
from minigpt.scoring import Scored, require_numbers

SHORT: dict[str, Any] = {"device": "cpu", "prompts": [[5, 17, 3, 80, 41, 9], [60, 2]], "max_new_tokens": 1}


def qwen(folder: Path, change: Callable[[Any], None]) -> Path:
    model = random_model("qwen3")
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def overflowing(model: Any) -> None:
    """The products of the second block's MLP are beyond 65,504, and its weights are not."""
    model.model.layers[1].mlp.up_proj.weight.mul_(1e4)
    model.model.layers[1].mlp.down_proj.weight.mul_(1e4)


def spoiled(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight[3, 5] = torch.nan


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_float16_overflows_in_transformers(tmp_path: Path, gradients: bool) -> None:
    """As in transformers#36822 and #39972."""
    place = qwen(tmp_path, overflowing)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float16)
    assert not model(torch.tensor(SHORT["prompts"][:1])).logits.isfinite().all()
    with pytest.raises(minigpt.MiniGPTError) as caught:
        minigpt.parity(place, norm="rms", dtype="float16", gradients=gradients, **SHORT)
    assert str(caught.value) == (
        "transformers itself is not finite at float16: NaN or infinity in prompt 0, first in model.layers.1; "
        "try bfloat16, unless the checkpoint's weights hold NaN"
    )
    assert minigpt.parity(place, norm="rms", dtype="bfloat16", **SHORT).passed


def test_weights_that_are_not_finite_may_be_the_cause(tmp_path: Path) -> None:
    place = qwen(tmp_path, spoiled)
    words = r"not finite at float32: .* model\.layers\.0; try float64, unless the checkpoint's weights hold NaN"
    with pytest.raises(minigpt.MiniGPTError, match=words):
        minigpt.parity(place, norm="rms", **SHORT)


def times(factor: float, tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return tensors | {name: tensors[name] * factor}


@pytest.mark.thorough
def test_logits_alone_overflow(tmp_path: Path) -> None:
    def large(model: Any) -> None:
        model.lm_head.weight[7] *= 1e6

    with pytest.raises(minigpt.MiniGPTError, match=r"in prompt 0, first in the logits; try bfloat16"):
        minigpt.parity(qwen(tmp_path, large), dtype="float16", **SHORT)


def test_a_gpt2_overflows(tmp_path: Path) -> None:
    place = saved(reference(std=0.3), tmp_path)
    edit_tensors(place, functools.partial(times, 1e6, name="transformer.h.1.mlp.c_proj.weight"))
    with pytest.raises(minigpt.MiniGPTError, match=r"not finite at float16: .* first in h\.1; try bfloat16"):
        minigpt.parity(place, dtype="float16", device="cpu", prompts=[[5, 17, 3]], max_new_tokens=0)


def test_a_window_of_a_longer_text_overflows(tmp_path: Path) -> None:
    """The embedding of one position is too large, which no prompt reaches."""
    model = reference(std=0.3)
    model.transformer.wpe.weight.data[40] *= 1e6
    place = saved(model, tmp_path)
    with pytest.raises(minigpt.MiniGPTError, match=r"in window 0, first in the logits; try bfloat16"):
        minigpt.Original(place, dtype="float16", device="cpu", max_new_tokens=0)


def test_gradients_alone_overflow(tmp_path: Path) -> None:
    def steep(model: Any) -> None:
        """A small input of a norm makes a large gradient."""
        model.model.embed_tokens.weight.mul_(1e-6)
        model.lm_head.weight.mul_(1e3)

    place = qwen(tmp_path, steep)
    assert minigpt.Original(place, dtype="float16", **SHORT).truth.floor.prompts.rms > 0
    with pytest.raises(minigpt.MiniGPTError, match=r"at float16: .* in the gradients, first in .*; try bfloat16"):
        minigpt.Original(place, dtype="float16", gradients=True, **SHORT)


def test_a_record_without_a_noise_floor_is_refused(tmp_path: Path) -> None:
    original = minigpt.Original("demo", device="cpu", prompts=[[1, 2, 3]], max_new_tokens=1)
    original.save(tmp_path / "record")
    original.truth.floor.prompts.squares = float("nan")
    original.save(tmp_path / "broken")
    assert minigpt.Original.load(tmp_path / "record").judge(norm="textbook").passed
    with pytest.raises(minigpt.MiniGPTError, match="its noise floor holds NaN"):
        minigpt.Original.load(tmp_path / "broken")


def test_a_perplexity_of_nan_is_an_error() -> None:
    model, tokenizer = minigpt.from_pretrained("demo", device="cpu"), minigpt.Tokenizer.from_pretrained("demo")
    with torch.no_grad():
        model.ln_f.weight[3] = torch.nan
    with pytest.raises(
        minigpt.GenerationError, match=r"logits in window 0 of the text are NaN at float32; its weights"
    ):
        minigpt.perplexity(model, tokenizer, "Once upon a time")
    with pytest.raises(minigpt.GenerationError, match=r"window 1 of a text .* 65,504, so take bfloat16 or float32"):
        require_numbers("a text", [Scored(1, 2.0, 0.0), Scored(1, float("nan"), 0.0)], torch.float16)


@pytest.mark.thorough
def test_a_cell_of_a_study_says_it(tmp_path: Path) -> None:
    from minigpt.study.file import read_study
    from minigpt.study.run import run_study

    place = qwen(tmp_path / "model", overflowing)
    (tmp_path / "s.toml").write_text(f'models = ["{place}"]\nnorms = ["rms"]\ndtype = "float16"\ndevice = "cpu"\n')
    (row,) = run_study(read_study(tmp_path / "s.toml"), tmp_path / "out")
    assert row["outcome"] == "FAILED"
    assert "transformers itself is not finite at float16" in row["reason"]
