"""The ids of tokens in generation_config.json, which go before those of config.json, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, reference, saved, tokens
from transformers import AutoModelForCausalLM

import minigpt
from minigpt import GenerationError, generate

FIELDS: dict[str, dict[str, Any] | None] = {
    "no file": None,
    "no ids": {},
    "null": {"eos_token_id": None, "pad_token_id": None},
    "one id": {"eos_token_id": 17},
    "several": {"eos_token_id": [17, 3], "pad_token_id": 5},
    "none": {"eos_token_id": -1},
}


def checkpoint(folder: Path, fields: dict[str, Any] | None) -> Path:
    """A model whose config.json ends a text at what it writes third, and its generation_config.json."""
    saved(reference(std=0.3), folder)
    free = generate(minigpt.from_pretrained(folder, device="cpu"), tokens(2, 5), max_new_tokens=9, eos_token_id=None)
    edit_config(folder, eos_token_id=free[0, 7].item(), pad_token_id=1)
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if fields is not None:
        file.write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("case", FIELDS)
def test_texts_end_where_transformers_ends_them(case: str, tmp_path: Path) -> None:
    fields = FIELDS[case]
    if fields and "eos_token_id" in fields and fields["eos_token_id"] == [17, 3]:
        first = checkpoint(tmp_path / "first", {})
        free = generate(minigpt.from_pretrained(first, device="cpu"), tokens(2, 5), max_new_tokens=9)
        fields = fields | {"eos_token_id": [free[0, 8].item(), free[1, 6].item()]}
    folder = checkpoint(tmp_path / "model", fields)
    model, hf_model = minigpt.from_pretrained(folder, device="cpu"), AutoModelForCausalLM.from_pretrained(folder)
    how = {} if fields and fields.get("pad_token_id") else {"pad_token_id": 1}
    expected = hf_model.generate(tokens(2, 5), max_new_tokens=9, do_sample=False, **how)
    assert torch.equal(generate(model, tokens(2, 5), max_new_tokens=9, **how), expected)


@pytest.mark.parametrize("case", FIELDS)
def test_a_model_that_is_saved_keeps_its_file(case: str, tmp_path: Path) -> None:
    fields = None if FIELDS[case] is None else {**FIELDS[case], "temperature": 0.5, "beams": [1]}
    model = minigpt.from_pretrained(checkpoint(tmp_path / "model", fields), device="cpu")
    minigpt.save_pretrained(model, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert written == (ids if fields is None else fields)
    minigpt.save_pretrained(model, tmp_path / "other", generation_config={"eos_token_id": 9})
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text()) == written | {"eos_token_id": 9}


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, None], 2**40])
def test_something_else_than_ids_is_refused(value: Any, tmp_path: Path) -> None:
    model = minigpt.from_pretrained(checkpoint(tmp_path, {"eos_token_id": value}), device="cpu")
    with pytest.raises(GenerationError, match=r"eos_token_id must be .* generation_config\.json"):
        generate(model, tokens(1, 3), max_new_tokens=3)
    assert generate(model, tokens(1, 3), max_new_tokens=3, eos_token_id=None).shape == (1, 6)
