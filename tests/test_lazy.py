"""What ``import minigpt`` costs: nothing but itself, and later only what is used."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import reference, saved

import minigpt

HEAVY = {
    "torch", "transformers", "triton", "tokenizers", "safetensors", "huggingface_hub", "numpy", "jaxtyping", "typer",
    "rich",
}  # fmt: skip


def imported_by(script: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after a script."""
    report = "; import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", script + report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("script", ["dir(minigpt)", "minigpt.GPT2Config.preset('gpt2'); minigpt.CheckpointError"])
def test_the_import_alone_is_light(script: str) -> None:
    assert not imported_by(f"import minigpt; {script}") & HEAVY


def test_a_wrong_word_of_an_option_is_an_error_before_pytorch_is_imported() -> None:
    for words in (
        ["generate", "x", "--top-p", "0"],
        ["generate", "x", "--dtype", "int3"],
        ["perplexity", "demo", "x", "--quantize", "int9"],
        ["parity", "--norm", "rms", "--keep", "all"],
    ):
        used = imported_by(
            f"import sys, minigpt.cli; sys.argv[1:] = {words}\n"
            "try: minigpt.cli.main()\nexcept SystemExit as ended: assert ended.code == 2\npass"
        )
        assert not used & {"torch", "transformers"}, words


def test_loading_and_generating_need_no_transformers_and_no_network_client(tmp_path: Path) -> None:
    """Nor any kernel compiler, beyond what PyTorch itself brings."""
    folder = saved(reference(), tmp_path)
    used = imported_by(
        f"import torch, minigpt; model = minigpt.from_pretrained({str(folder)!r}, norm='textbook', device='cpu');"
        "minigpt.generate(model, torch.zeros(1, 2, dtype=torch.long), max_new_tokens=2);"
        "minigpt.Tokenizer; minigpt.swap_norms(model, 'fused'); minigpt.norms.available()"
    )
    assert not used & {"transformers", "huggingface_hub"}
    assert "triton" not in used or "triton" in imported_by("import torch")


def test_type_checkers_see_the_same_names() -> None:
    (typed,) = [node for node in ast.parse(Path(minigpt.__file__).read_text()).body if isinstance(node, ast.If)][:1]
    homes = [(node.module, alias.name) for node in typed.body for alias in node.names]  # type: ignore[attr-defined]
    assert {name: f"minigpt.{home}" for name, home in minigpt._NAMES.items()} == {
        name: module for module, name in homes if module != "minigpt"
    }
    assert sorted(name for _, name in homes) == dir(minigpt)
    assert all(getattr(minigpt, name) is not None for name in dir(minigpt))
