"""The table of settings: whatever is wrong is refused before any work, by the name of the setting."""

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_bpe, tokens
from test_generation import Untouched

from minigpt import GenerationError, Tokenizer, from_pretrained
from minigpt.generation import generate, parse_settings, stream
from minigpt.generation.processors import PROCESSORS
from minigpt.generation.settings import HTTP, SETTINGS, Options, check_settings

TOKENIZER = Tokenizer(tiny_bpe(300))

# fmt: off
WRONG: list[tuple[str, dict[str, Any], str]] = [  # the name of the setting that is wrong, the settings, and the value
    ("max_new_tokens", {}, ""), ("max_new_tokens", {"max_new_tokens": 0}, "0"),
    ("max_new_tokens", {"max_new_tokens": True}, "True"), ("temperature", {"temperature": -0.5}, "-0.5"),
    ("temperature", {"temperature": 1e-40}, "1e-40"), ("temperature", {"temperature": float("nan")}, "nan"),
    ("temperature", {"temperature": False}, "False"), ("top_k", {"top_k": -1}, "-1"), ("top_p", {"top_p": 0.0}, "0.0"),
    ("seed", {"seed": -(2**63) - 1}, str(-(2**63) - 1)), ("stop", {"stop": ["a", ""]}, "''"),
    ("repetition_penalty", {"repetition_penalty": 1e-300}, "1e-300"),
    ("repetition_penalty", {"repetition_penalty": 10**400}, "1000"),
    ("frequency_penalty", {"frequency_penalty": math.inf}, "inf"), ("logit_bias", {"logit_bias": {3: 1e300}}, "300"),
    ("logit_bias", {"logit_bias": {-3: 1.0}}, "-3"), ("bad_words_ids", {"bad_words_ids": [[5], []]}, "[]"),
    ("suppress_tokens", {"suppress_tokens": "12"}, "12"), ("suppress_tokens", {"suppress_tokens": [2**70]}, ""),
    ("pad_token_id", {"pad_token_id": 2**70}, ""), ("eos_token_id", {"eos_token_id": [2, 2**40]}, ""),
    ("do_sample", {"do_sample": "no"}, "no"), ("do_sample", {"do_sample": None}, "None"),
    ("overflow", {"overflow": "wrap"}, "wrap"), ("draft", {"draft": "int4"}, "int4"),
    ("temprature", {"temprature": 0.7}, "temperature"), ("num_beams", {"num_beams": 4}, "top_k"),
    # each value is valid, and they contradict each other
    ("min_new_tokens", {"min_new_tokens": 5}, "4"), ("min_p", {"min_p": 0.1}, ""), ("seed", {"seed": 1}, ""),
    ("top_k", {"do_sample": True, "temperature": 0, "top_k": 3}, "0"),
    ("num_return_sequences", {"num_return_sequences": 2}, "1"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "wrong", "value"), WRONG, ids=lambda part: str(part)[:40])
def test_wrong_settings_are_refused_before_any_work(name: str, wrong: dict[str, Any], value: str) -> None:
    settings = wrong if name == "max_new_tokens" else {"max_new_tokens": 4, **wrong}
    for call in (
        lambda: generate(Untouched(), tokens(1, 3), tokenizer=TOKENIZER, **settings),
        lambda: stream(Untouched(), TOKENIZER, "the", **settings),
    ):
        with pytest.raises(GenerationError) as refused:
            call()
        assert refused.value.argument == name
        assert value in refused.value.message


def test_a_setting_that_names_ids_beyond_the_vocabulary() -> None:
    for name, value in (("suppress_tokens", [3, 300]), ("bad_words_ids", [[3, 300]]), ("logit_bias", {300: 1.0})):
        with pytest.raises(GenerationError) as refused:
            generate(Untouched(), tokens(1, 3), max_new_tokens=2, **{name: value})
        assert (refused.value.argument, "300" in refused.value.message) == (name, True)


OVER_HTTP: dict[str, tuple[Any, Any]] = {  # the largest value, and one that is too large
    "max_new_tokens": (65536, 65537), "temperature": (2, 2.1), "presence_penalty": (-2, -2.1),
    "frequency_penalty": (2, 2.1), "logit_bias": ({5: -100}, {5: -101}), "stop": (["x" * 256] * 16, ["x"] * 17),
    "bad_words_ids": ([[1] * 16] * 1024, [[1] * 17]), "eos_token_id": ([1] * 64, [1] * 65),
    "no_repeat_ngram_size": (16, 17), "suppress_tokens": ([1] * 1024, [1] * 1025),
}  # fmt: skip


def test_one_client_has_limits_that_python_has_not() -> None:
    assert {name for name, setting in SETTINGS.items() if setting.http} == OVER_HTTP.keys()
    for name, (most, more) in OVER_HTTP.items():
        settings = {"max_new_tokens": 4, "do_sample": True}
        check_settings(settings | {name: more})
        del settings["do_sample"]
        check_settings(settings | ({name: most} if name != "temperature" else {}), HTTP)
        with pytest.raises(GenerationError) as refused:
            check_settings(settings | {name: more}, HTTP)
        assert refused.value.argument == name


def test_every_processor_has_a_setting() -> None:
    assert PROCESSORS.keys() <= SETTINGS.keys()
    for name in PROCESSORS:
        for value in SETTINGS[name].neutral:
            assert parse_settings(max_new_tokens=4, do_sample=True, **{name: value}).active == {}


def test_the_docs_name_every_limit_of_the_server() -> None:
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    for name, setting in SETTINGS.items():
        assert setting.about in str(Options.__doc__) or name not in Options.__annotations__
        if setting.http is not None:
            assert f"| `{name}` | {setting.rule.requirement} | {setting.http.requirement} |" in page.splitlines()


@pytest.mark.parametrize("pad", [-1, None])
def test_a_padding_of_minus_1_is_none(pad: int | None) -> None:
    model = from_pretrained("demo")
    model.generation_fields = {"eos_token_id": 7, "pad_token_id": pad}
    assert parse_settings(max_new_tokens=1).fill_id(model) == 7
