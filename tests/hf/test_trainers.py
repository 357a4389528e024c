"""The trainers that people use, five steps each: the losses of transformers' class, with the textbook norm in ours."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import minigpt
from minigpt.checkpoint import local_place

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("registered")]

DEMO = str(local_place("demo"))
STORIES = ["Once upon a time there was a little dog.", "The old sailor saw a light.", "In a small house lived a cat."]
STEPS = 5
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1, "seed": 0,
    "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
}  # fmt: skip


def sft(model: Any, out: str, packing: bool = False, **more: Any) -> Any:
    """Supervised finetuning; LoRA if ``more`` has a ``peft_config``."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    settings = SFTConfig(out, max_length=32, packing=packing, packing_strategy="wrapped", **COMMON)
    return SFTTrainer(model, args=settings, train_dataset=rows(text=STORIES * 8), processing_class=words(), **more)


def packed(model: Any, out: str) -> Any:
    """The same with several texts in a row, for which TRL takes the body's hidden states."""
    return sft(model, out, packing=True)


def dpo(model: Any, out: str) -> Any:
    """Preferences."""
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    pairs = rows(prompt=STORIES * 4, chosen=[" It was good."] * 12, rejected=[" No, no, no."] * 12)
    return DPOTrainer(
        model, args=DPOConfig(out, max_length=48, **COMMON), train_dataset=pairs, processing_class=words()
    )


def grpo(model: Any, out: str) -> Any:
    """Rewards."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = GRPOConfig(out, num_generations=2, max_completion_length=8, beta=0.1, **COMMON)
    return GRPOTrainer(
        model, reward_funcs=vowels, args=settings, train_dataset=rows(prompt=STORIES * 4), processing_class=words()
    )


def vowels(completions: list[str], **_: Any) -> list[float | None]:
    """A reward."""
    return [1.0 * sum(text.count(letter) for letter in "aeiou") for text in completions]


def rows(**columns: list[str]) -> Any:
    """A data set of these columns."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


def words() -> Any:
    """The demo's tokenizer, with a token for padding."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def losses(make: Callable[..., Any], model: Any, out: Path, **more: Any) -> list[float]:
    """Train, and return the loss of each step."""
    trainer = make(model, str(out), **more)
    trainer.remove_callback(transformers.PrinterCallback)
    torch.manual_seed(0)
    trainer.train()
    return [float(step["loss"]) for step in trainer.state.log_history if "loss" in step]


def loaded(norm: str | None, **how: Any) -> Any:
    """The demo by transformers' class if ``norm`` is None, else by ours."""
    minigpt.hf.unregister()
    if norm is not None:
        minigpt.hf.register(norm=norm)
    return AutoModelForCausalLM.from_pretrained(DEMO, **how)


def assert_same_losses(actual: list[float], expected: list[float]) -> None:
    """Compare relatively, to 1e-5; TRL's losses near 0 absolutely.

    transformers' class repeats its own losses bit for bit, and ours has them too with ``norm="fused"`` and
    ``arithmetic="reference"``. Another norm and fast arithmetic round in another order. Over five steps with two
    processes that was up to 8e-7 of the loss, or 1.5e-5 of a loss of 13.
    """
    print(f"losses {actual}, transformers' {expected}")
    assert len(actual) == STEPS
    assert all(map(math.isfinite, actual))
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [sft, packed, dpo, grpo])
def test_trl_learns_what_it_learns_with_transformers_class(make: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl")
    expected = losses(make, loaded(None), tmp_path)
    assert_same_losses(losses(make, loaded("textbook"), tmp_path), expected)
    assert any(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_qlora_on_quantized_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl")
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    peft = pytest.importorskip("peft", reason="PEFT is of the extra hf")
    actual = []
    for norm in (None, "textbook"):
        bits = transformers.BitsAndBytesConfig(load_in_4bit=kind == "4bit", load_in_8bit=kind == "8bit")
        model = loaded(norm, quantization_config=bits)
        assert type(model.transformer.h[0].attn.c_attn).__module__.startswith("bitsandbytes")
        torch.manual_seed(0)
        adapter = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM")
        actual.append(losses(sft, model, tmp_path, peft_config=adapter))
    assert_same_losses(actual[1], actual[0])


PROGRAM = """
import json, sys, torch, transformers, minigpt.hf
from accelerate import Accelerator
from accelerate.utils import set_seed
folder, norm, out = sys.argv[1:]
if norm:
    minigpt.hf.register(norm=norm)
accelerator = Accelerator(cpu=True)
set_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
data = torch.utils.data.DataLoader(torch.arange(5, 5 + 20 * 16).view(20, 16), batch_size=2)
model, optimizer, data = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), 1e-3), data)
losses = []
for batch in data:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    json.dump({"processes": accelerator.num_processes, "losses": losses}, open(out, "w"))
accelerator.end_training()  # else a thread of gloo may end after the interpreter, and abort the process
"""


def test_accelerate_launches_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is of the extra hf")
    (tmp_path / "train.py").write_text(PROGRAM)
    actual = []
    for norm in ("", "textbook"):
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launch += ["--main_process_port", "0"]
        subprocess.run(
            [*launch, str(tmp_path / "train.py"), DEMO, norm, str(tmp_path / "losses.json")],
            check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        actual.append(json.loads((tmp_path / "losses.json").read_text()))
    assert actual[0]["processes"] == 2
    assert_same_losses(actual[1]["losses"], actual[0]["losses"])
