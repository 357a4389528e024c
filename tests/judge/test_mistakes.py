"""The mistake of a GPT-2 is named by its logits alone; where nothing explains them, nothing is named."""

import dataclasses
from pathlib import Path
from typing import Any

import architectures
import planted
import pytest
import torch
from helpers import random_ids, small_model
from judgements import PROMPTS
from torch import Tensor

import minigpt
from minigpt.judge.diagnosis import open_network
from minigpt.judge.evidence import Evidence, Network, Prediction, turn
from minigpt.judge.measures import precision_of
from minigpt.judge.mistake_search import MistakeSearch
from minigpt.judge.mistakes import Mistake, Swaps, mistakes_of
from minigpt.judge.mistakes.norms import FormulaNorm, wrong_norms
from minigpt.judge.mistakes.rounding import q4_0, q8_0
from minigpt.judge.screen import Noise
from minigpt.norms.formulas import CURES, tables
from minigpt.norms.registry import KINDS
from minigpt.progress import Steps
from minigpt.report.parity_report import ParityReport
from minigpt.shape import Shape

SLOW = pytest.param("attn.c_proj not transposed in h.1 alone", marks=pytest.mark.thorough)
QUICK = ("exact GELU", "no causal mask", "log-probabilities", "positions from 0 again", "count the padding", SLOW)


def judged(original: minigpt.Original, dtype: torch.dtype = torch.float32, **settings: Any) -> ParityReport:
    program = planted.Program(original.truth.facts.place, dtype, **settings)
    return original.judge(lambda ids: program(ids))


@pytest.mark.parametrize("words", QUICK)
def test_a_planted_mistake_is_named_and_no_other(original: minigpt.Original, words: str) -> None:
    settings = dict(planted.single_plants(original.truth))[words]
    report = judged(original, **settings)
    assert report.diagnosis is not None
    (found,) = report.diagnosis
    print(f"{found.mistake}: {found.ratio:.3g} times the noise, at most 2")
    assert words in found.mistake
    assert found.explains
    assert found.ratio <= 2


def test_two_mistakes_are_named_one_after_another(original: minigpt.Original) -> None:
    report = judged(original, act="erf", positions=1)
    assert report.diagnosis is not None
    named = [found.mistake for found in report.diagnosis]
    assert sorted(named) == ["positions from 1", "the exact GELU in place of tanh"]
    assert [found.explains for found in report.diagnosis] == [False, True]
    assert "Write arange(T) in place of arange(1, T + 1)." in [found.cure for found in report.diagnosis]


@pytest.mark.thorough
@pytest.mark.parametrize("pair", planted.PAIRS[-4:], ids=lambda pair: " and ".join(pair[2:]))
def test_mistakes_that_people_make_together_are_named(pair: tuple[Any, ...]) -> None:
    """Their effects do not add up."""
    original = minigpt.Original("demo", device="cpu")
    first, second, *words = pair
    report = judged(original, **first, **second)
    assert report.diagnosis is not None
    named = " and ".join(found.mistake for found in report.diagnosis)
    assert len(report.diagnosis) == len(words)
    assert all(word in named for word in words)
    assert report.diagnosis[-1].explains


def test_a_tied_pair_repeats_no_mistake() -> None:
    first, second, third = (Mistake(words) for words in ("first", "second", "third"))
    text = Evidence(torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, 3), torch.zeros(2, 3))
    nearest, tied = (Prediction((first, other), [text], [text.truth]) for other in (second, third))
    told = [MistakeSearch._or_others(one, nearest, [nearest, tied]) for one in (first, second)]
    assert told == [[first], [second, third]]


def test_a_cure_names_a_mistake_of_the_table() -> None:
    known = {words for kind in ("layer_norm", "rms_norm") for table in tables(kind).values() for words in table}
    assert CURES.keys() <= known


@pytest.mark.thorough
def test_a_program_that_is_off_in_the_long_text_alone_is_told_from_where(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old sailor told Mara a tale of the sea. " * 12)
    original = minigpt.Original("demo", prompts=["Tom"], text=text, max_new_tokens=4, device="cpu")
    program = planted.Program(original.truth.facts.place, torch.float32)

    def late(ids: Tensor) -> Tensor:
        logits = program(ids)
        logits[:, 20:] += torch.arange(logits.shape[-1]) / 10
        return logits

    report = original.judge(late)
    assert report.outcome == "FAIL"
    assert report.logits.ratio <= 2
    assert report.precision is None
    assert report.diagnosis == []
    assert any("right before position 20" in note for note in report.notes)


def test_a_norm_that_is_off_where_tokens_are_read_one_by_one_leaves_no_diagnosis(folder: Path) -> None:
    class Late(minigpt.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.5 if x.shape[-2] == 1 else 1.0)

    report = minigpt.parity(folder, norm=Late, prompts=PROMPTS, max_new_tokens=4, device="cpu", diagnose=True)
    assert report.outcome == "FAIL"
    assert report.logits.ratio <= 2
    assert report.diagnosis is None
    assert any("these are right" in note for note in report.notes)


@torch.no_grad()
def test_two_mistakes_that_move_blocks_are_not_put_in_together() -> None:
    """The second would count blocks that the first has moved."""
    model: Any = small_model(dtype=torch.float64).eval()
    ids = random_ids(1, 12)
    truth = model(ids)[0]
    noise = Noise(1e-6, 1.0, {})
    network = Network(model, lambda ids, step: model(ids)[0][:, ::step], model.config.n_positions)
    text = Evidence(ids, truth + torch.randn_like(truth), truth)
    search = MistakeSearch(network, mistakes_of(model), [text], lambda: [], noise, 1, Steps(None))
    moving = [mistake for mistake in search.table if mistake.moves_blocks]
    assert len(moving) > 3
    for mistake in (*moving, search.table[0]):
        search.screen.add(mistake)
    search.singles = [*moving, search.table[0]]
    assert search.pairs
    assert all(sum(mistake.moves_blocks for mistake in mistakes) < 2 for mistakes in search.pairs)


def test_a_mistake_that_leaves_much_is_not_named_in_part(original: minigpt.Original) -> None:
    """The program is another one by far, though log-probabilities are nearest to it."""
    noise = torch.Generator().manual_seed(1)
    program = planted.Program(original.truth.facts.place, logits="log")

    def noisy(ids: Tensor) -> Tensor:
        logits = program(ids)
        return logits + 0.1 * original.truth.floor.prompts.scale * torch.randn(logits.shape, generator=noise)

    assert original.judge(noisy).diagnosis == []


@pytest.mark.thorough
def test_a_right_program_at_half_precision_is_told_its_precision_and_no_mistake(original: minigpt.Original) -> None:
    report = judged(original, torch.bfloat16)
    assert report.outcome == "FAIL"
    assert report.diagnosis == []
    assert report.precision is not None
    assert report.precision.like == "bfloat16"
    print(f"{report.precision.ratio:.3g} times transformers' own at bfloat16")


ANNOTATED = {"ddof": 1, "eps_outside": True, "eps": 1e-6}  # the norm of the Annotated Transformer


@pytest.mark.thorough
@pytest.mark.parametrize("act", ["tanh", "erf"])
def test_an_error_that_is_mostly_of_a_mistake_is_none_of_a_precision(act: str) -> None:
    """Its size is near that of bfloat16 on the demo."""
    original = minigpt.Original("demo", device="cpu")
    report = judged(original, act=act, **ANNOTATED)
    size = precision_of(report.logits.rms_error, original.truth.floor.precisions)
    assert size is not None
    assert size.like == "bfloat16"
    assert report.precision is None
    assert report.diagnosis is None or all("rounded" not in found.mistake for found in report.diagnosis)


def test_an_error_that_begins_behind_the_first_block_is_none_of_a_precision(original: minigpt.Original) -> None:
    model = minigpt.from_pretrained(original.truth.facts.place, device="cpu")
    size = original.truth.floor.precisions["bfloat16"]
    head = original.judge(model).logits.rms_error
    with torch.no_grad():
        model.get_parameter("ln_f.bias").add_(0.05)
    report = original.judge(model, diagnose=False)
    print(f"{report.logits.rms_error:.3g}, of bfloat16 {size:.3g}, before {head:.3g}")
    assert not report.passed
    assert report.precision is None


def test_a_pass_says_its_precision_and_is_not_diagnosed(original: minigpt.Original) -> None:
    program = planted.Program(original.truth.facts.place)
    report = original.judge(lambda ids: program(ids), diagnose=True)
    assert report.passed
    assert report.diagnosis is None
    assert "Each of the commonest mistakes would be seen." in report.notes
    assert report.precision is not None
    assert report.precision.like == "float32"


def test_a_pass_names_the_mistakes_that_it_cannot_see() -> None:
    prompts = ["The old sailor told Mara a tale of the sea.", "Once upon a time"]
    original = minigpt.Original("demo", device="cpu", dtype="bfloat16", prompts=prompts, max_new_tokens=4)
    report = judged(original, torch.bfloat16, eps_outside=True)
    assert report.passed
    asked = original.judge(planted.Program(original.truth.facts.place, torch.bfloat16), diagnose=True)
    (note,) = [note for note in asked.notes if "would not be seen" in note]
    assert "std + eps in place of sqrt(variance + eps)" in note
    assert "ReLU" not in note


def test_no_norm_that_differs_on_purpose_is_diagnosed_unless_asked(original: minigpt.Original) -> None:
    assert original.judge(norm="rms").diagnosis is None
    asked = original.judge(norm="rms", diagnose=True).diagnosis
    assert asked is not None
    assert "RMSNorm" in asked[0].mistake


def test_a_record_names_mistakes_and_says_where_the_original_must_be(
    original: minigpt.Original, tmp_path: Path
) -> None:
    original.save(tmp_path / "r.safetensors")
    record = minigpt.Original.load(tmp_path / "r.safetensors", device="cpu")
    assert record.truth.floor.precisions == original.truth.floor.precisions
    assert [*record.truth.floor.precisions] == ["float32", "float16", "bfloat16"]
    record.truth.facts = dataclasses.replace(record.truth.facts, place=tmp_path / "gone")
    program = planted.Program(original.truth.facts.place, act="relu")
    report = record.judge(lambda ids: program(ids))
    assert report.diagnosis is None
    assert f"The diagnosis needs the original at {tmp_path / 'gone'}, which is no longer there." in report.notes


def test_every_mistake_is_taken_out_again(folder: Path) -> None:
    model = minigpt.from_pretrained(folder, device="cpu", dtype="float64", arithmetic="reference")
    ids = torch.tensor(PROMPTS[:1])
    before = model(ids)
    parts = {name: (type(part), id(part)) for name, part in model.named_modules()}
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    effects = {}
    for mistake in mistakes_of(model):
        with Swaps(new_from=4, padding=2) as swaps:
            mistake.put(model, swaps)
            effects[mistake] = (model(mistake.ids(ids)), mistake)
    assert torch.equal(model(ids), before)
    assert {name: (type(part), id(part)) for name, part in model.named_modules()} == parts
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == weights
    unchanged = [mistake.words for logits, mistake in effects.values() if is_inside(mistake) and same(logits, before)]
    assert unchanged == []


@pytest.mark.parametrize("words", ["no attn.c_proj", "no last norm"])
def test_any_mistake_can_be_put_in_beside_one_that_leaves_a_part_out(words: str, folder: Path) -> None:
    model = minigpt.from_pretrained(folder, device="cpu", dtype="float64", arithmetic="reference")
    ids = torch.tensor(PROMPTS[:1])
    before = model(ids)
    mistakes = list(mistakes_of(model))
    [leaves_out] = [mistake for mistake in mistakes if mistake.words == words]
    for mistake in mistakes:
        for both in ((leaves_out, mistake), (mistake, leaves_out)):
            with Swaps(new_from=4, padding=2) as swaps:
                for each in sorted(both, key=turn):
                    each.put(model, swaps)
        assert torch.equal(model(ids), before), mistake.words


def is_inside(mistake: Mistake) -> bool:
    return not mistake.is_outside and not mistake.error


def same(logits: Tensor, before: Tensor) -> bool:
    return logits.shape == before.shape and torch.equal(logits, before)


def test_the_words_of_mistakes_are_their_own(folder: Path) -> None:
    model = minigpt.from_pretrained(folder, device="cpu", dtype="float64", arithmetic="reference")
    families: dict[str, str] = {}
    for mistake in mistakes_of(model):
        assert mistake.words not in families or families[mistake.words] == mistake.family != ""
        families[mistake.words] = mistake.family


def test_the_judge_names_a_norms_mistakes_as_the_kit_does() -> None:
    for model in (small_model(), architectures.random_model("llama")):
        names = set[str]()
        for kind in KINDS:
            for eps in (1e-5, 1e-6):
                for table in tables(kind, eps).values():
                    names |= table.keys()
        families = {mistake.family for mistake in wrong_norms(model)}
        assert len(families) > 10
        assert families <= names


@torch.no_grad()
def test_a_mistake_of_a_norm_leaves_alone_what_another_mistake_has_put_in_its_place() -> None:
    model: Any = small_model()
    by_words = {mistake.words: mistake for mistake in mistakes_of(model)}
    with Swaps() as swaps:
        by_words["no last norm"].put(model, swaps)
        by_words["the variance divided by n - 1 in every norm"].put(model, swaps)
        assert type(model.ln_f) is torch.nn.Identity
        assert type(model.h[0].ln_1) is FormulaNorm


@torch.no_grad()
def test_a_late_scale_is_the_one_that_the_config_asks_for() -> None:
    model: Any = small_model(scale_attn_weights=False)
    ids = random_ids(1, 9)
    right = model(ids)
    (late,) = (mistake for mistake in mistakes_of(model) if mistake.words == "softmax before the scores are scaled")
    with Swaps() as swaps:
        late.put(model, swaps)
        assert torch.allclose(model(ids), right, atol=1e-5)


def test_of_mistakes_that_look_alike_the_simplest_is_named() -> None:
    mistakes = [Mistake("no eps in every ln_1", rank=1), Mistake("eps 1e-12 in every norm"), Mistake("no eps")]
    assert [mistake.words for mistake in sorted(mistakes, key=lambda mistake: mistake.simplicity)] == [
        "no eps", "eps 1e-12 in every norm", "no eps in every ln_1",
    ]  # fmt: skip


def test_blocks_round_as_ggml_rounds_them() -> None:
    x = torch.randn(3, 64)
    for bits, rounds in ((8, q8_0), (4, q4_0)):
        expected = planted.ggml(bits)(x, False)
        error = (rounds(x.double()) - expected).abs().max()
        print(f"{bits} bits: {float(error):.3g}, at most 1e-6")
        assert error <= 1e-6


def test_the_nearest_precision_is_by_the_quotient() -> None:
    errors = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
    found = precision_of(2e-3, errors)
    assert found is not None
    assert (found.like, found.ratio) == ("float16", pytest.approx(2.0))
    assert precision_of(float("nan"), errors) is None
    assert precision_of(1e-3, {}) is None


# Its error is little more than that of bfloat16, so its logits are near those of other roundings too.
IN_THE_NOISE = "int8, a scale for each input"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_planted_mistake_of_the_demo_is_named(dtype: str) -> None:
    original = minigpt.Original("demo", device="cpu", dtype=dtype)
    for words, settings in planted.single_plants(original.truth):
        report = judged(original, getattr(torch, dtype), **settings)
        if report.logits.ratio <= 2:
            continue
        if dtype == "bfloat16" and words == IN_THE_NOISE:
            assert report.logits.ratio < 2.1
            continue
        assert report.diagnosis, words
        assert [words in found.mistake for found in report.diagnosis] == [True], report.diagnosis


@pytest.mark.thorough
def test_no_mistake_of_a_right_program_is_named() -> None:
    original = minigpt.Original("demo", device="cpu")
    for name, make in planted.right_programs(original.truth.facts.place):
        report = original.judge(make(), diagnose=True)
        assert not report.diagnosis, (name, report.diagnosis)


def test_the_progress_of_a_diagnosis_moves_with_each_mistake(
    original: minigpt.Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigpt.progress.FIRST_SECONDS", 0.0)
    program = planted.Program(original.truth.facts.place, act="relu")
    said: list[tuple[str, float]] = []
    original.judge(lambda ids: program(ids), progress=lambda step, done: said.append((step, done)))
    shares = [done for step, done in said if step.startswith("putting mistakes into the network: mistake ")]
    assert len(shares) > 100
    assert shares == sorted({*shares})


def test_nothing_is_quicker_than_float64_where_that_is_the_noise(folder: Path) -> None:
    original = minigpt.Original(folder, prompts=PROMPTS[-1:], max_new_tokens=1, device="cpu", dtype="float64")
    assert open_network(original.truth).quick is None


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("float64", marks=pytest.mark.thorough),
        pytest.param("bfloat16", marks=pytest.mark.thorough),  # the same network, and a higher bound
    ],
)
@torch.no_grad()
def test_the_screen_computes_what_it_compares_as_exactly_as_the_noise_needs(folder: Path, dtype: str) -> None:
    original = minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=4, device="cpu", dtype=dtype)
    network = open_network(original.truth)
    assert (network.quick is None) == (dtype == "float64")
    truth = original.truth.logits(original.truth.texts.prompts[0])
    text = Evidence(torch.tensor([original.truth.texts.prompts[0].ids]), truth, truth)
    scale, floor = original.truth.floor.prompts.scale, original.truth.floor.prompts.rms
    for mistake in mistakes_of(network.model):
        if mistake.rank == 0 and not mistake.is_outside and not mistake.error:
            whole = network.logits((mistake,), text)[:, ::7]
            part = network.logits((mistake,), text, step=7)
            assert torch.allclose(part, whole, rtol=1e-9, atol=1e-9, equal_nan=True), mistake.words
            if network.quick is not None:
                quick = network.quick.logits((mistake,), text, step=7)
                error = (quick - whole)[~whole.isnan()].square().mean().sqrt()
                size = max(1.0, float(whole.nan_to_num().square().mean().sqrt()) / scale)
                assert error <= 30 * floor * size, (mistake.words, error, floor)


def test_a_token_outside_of_the_vocabulary_begins_no_text() -> None:
    for size, expected in ((96, None), (50257, 50256)):
        assert Shape.of(minigpt.GPT2Config(vocab_size=size)).bos_token_id == expected


@pytest.mark.thorough
@pytest.mark.parametrize("context", [96, 24, 4, 2, 1])
@pytest.mark.parametrize("norm", ["rms", "hardtanh"])
def test_a_short_context_and_a_small_vocabulary_are_diagnosed(context: int, norm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = minigpt.GPT2Config(vocab_size=97, n_positions=context, n_embd=16, n_layer=1, n_head=2)
    model = minigpt.GPT2(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    minigpt.save_pretrained(model, tmp_path)
    for prompts in (None, [[*range(1, context + 1)]], [[1]]):
        report = minigpt.parity(tmp_path, norm=norm, prompts=prompts, diagnose=True, device="cpu")
        assert not report.passed
        assert report.diagnosis is not None


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "phi", "gemma"])
def test_mistakes_of_another_architecture_are_named(name: str, tmp_path: Path) -> None:
    model = architectures.random_model(name)
    model.save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, prompts=PROMPTS, max_new_tokens=4, device="cpu")

    def plain(ids: Tensor) -> Tensor:
        return model(ids).logits

    def log_probabilities(ids: Tensor) -> Tensor:
        return model(ids).logits.log_softmax(-1)

    assert original.judge(plain, diagnose=True).passed
    named = original.judge(log_probabilities, diagnose=True).diagnosis
    assert named is not None
    assert [found.mistake for found in named] == ["log-probabilities in place of logits"]
    for module in model.modules():
        for role in ("variance_epsilon", "eps"):
            if hasattr(module, role):
                setattr(module, role, 1e-3)
    named = original.judge(plain, diagnose=True).diagnosis
    assert named is not None
    assert named[0].explains
    assert named[0].mistake.startswith("eps 0.001 in place of ")


@pytest.mark.thorough
@pytest.mark.parametrize(("own", "other"), [(1e-6, 1e-5), (1e-5, 1e-6), (1e-12, 1e-5)])
def test_a_common_eps_in_place_of_the_checkpoints_is_named(own: float, other: float, tmp_path: Path) -> None:
    """CTranslate2's converter writes no eps, and 1e-5 is its default."""
    model = architectures.random_model("llama", rms_norm_eps=own, pad_token_id=None)
    model.save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, prompts=PROMPTS, max_new_tokens=4, device="cpu")
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = other
    named = original.judge(lambda ids: model(ids).logits, diagnose=True).diagnosis
    assert named is not None
    assert named[0].mistake == f"eps {other:g} in place of {own:g} in every norm"
