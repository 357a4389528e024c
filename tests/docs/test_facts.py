"""A fact stands once: where the documentation repeats a limit or a list of the code, both are equal."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from minigpt import norms
from minigpt.choices import ATTENTIONS, DTYPE_NAMES
from minigpt.cli.options import RECIPE
from minigpt.engine import kernel
from minigpt.generation.settings import SETTINGS
from minigpt.norms.foreign.adapt import SCALE_NAMES, SHIFT_NAMES

ROOT = Path(__file__).parents[2]


def read(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_limits_over_http_are_those_that_the_server_keeps() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from minigpt.serve import guard, routes, run, scheduler

    page = read("docs/serving.md")
    for limit in (
        f"its body; up to {run.MAX_RECEIVED // 2**20} MB more is read and dropped, for status 413 | "
        f"{guard.MAX_BODY // 2**20} MB |",
        'tokens of a prompt with `overflow` "slide", of which the model sees the last | '
        f"{routes.MAX_PROMPT_TOKENS:,} |",
        f"`logprobs` + 1 for each token that is reported | {routes.MAX_NUMBERS:,} |",
        f"The server keeps {run.MAX_CONNECTIONS:,} connections.",
        f"A client has {run.SEND_SECONDS} s for the head of a request, and {run.SEND_SECONDS} s for its body",
        f"A client that takes nothing for {run.READ_SECONDS} s",
        f"at most {scheduler.PROMPT_TOKENS_BESIDE} tokens of prompts, otherwise {scheduler.PROMPT_TOKENS}",
    ):
        assert limit in page, limit


@pytest.mark.parametrize(
    ("names", "row"),
    [
        (["max_new_tokens"], "`max_tokens`"),
        (
            ["logit_bias", "bad_words_ids", "suppress_tokens"],
            "entries of `logit_bias`, `bad_words_ids` and `suppress_tokens`",
        ),
        (["bad_words_ids", "no_repeat_ngram_size"], "ids in one entry of `bad_words_ids`, and `no_repeat_ngram_size`"),
        (["eos_token_id"], "ids of `eos_token_id`"),
        (["stop"], "`stop`"),
    ],
)
def test_limits_of_settings_over_http_are_those_of_their_table(names: list[str], row: str) -> None:
    (cell,) = re.findall(rf"\| {re.escape(row)} \| ([^|]*) \|", read("docs/serving.md"))
    for name in names:
        rule = SETTINGS[name].http
        assert rule is not None
        assert {*re.findall(r"\d+", cell.replace(",", ""))} <= {*re.findall(r"\d+", rule.requirement)}, (name, cell)


def test_the_kernel_is_built_at_the_levels_that_it_is_loaded_at() -> None:
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    built = module_from_spec(spec)
    pytest.importorskip("hatchling")
    spec.loader.exec_module(built)
    assert {*built.X86, *built.ARM} == {*kernel.LEVELS}


def test_options_of_opening_name_every_dtype_and_attention() -> None:
    assert all(name in RECIPE["dtype"].metadata["about"] for name in DTYPE_NAMES)
    assert all(name in RECIPE["attention"].metadata["about"] for name in ATTENTIONS)


def test_every_registered_norm_has_a_row_and_a_test() -> None:
    page = read("docs/norms.md")
    tables = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    for name in norms.available():
        assert f"| `{name}`" in page or f"`{name}`" in page, f"docs/norms.md has no {name}"
        assert re.search(rf"\"{name}[\":]", tables), f"no test names {name}"


def test_the_page_has_the_names_of_scales_and_shifts_in_their_order() -> None:
    (sentence,) = re.findall(r"The scale is ([^:]*): the first of these", read("docs/norms.md"))
    assert re.findall(r"`(\w+)`", sentence) == [*SCALE_NAMES, *SHIFT_NAMES]


@pytest.mark.parametrize("word", ["std_eps", "RMSNorm", "LayerNorm", "frozen", "folded"])
def test_the_norms_of_the_kernel_are_those_of_the_page(word: str) -> None:
    (sentence,) = re.findall(r"The kernel is for our own blocks with ([^.]*)\.", read("docs/speed.md"))
    assert word in sentence
