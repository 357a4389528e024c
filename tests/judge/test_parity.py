"""parity(): who passes, who fails and why, and that every figure is what an independent computation finds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from checkpoints import reference, saved, tokens
from judgements import PROMPTS, judge
from kit import norm_with
from norm_classes import Louder
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import MiniGPTError, NormError
from minigpt.checkpoint.read import Checkpoint, read_checkpoint
from minigpt.report.numerals import brief

SITES = ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
DTYPES = ["float32", "bfloat16", "float16", "float64"]


@pytest.fixture(scope="module")
def plain(folder: Path) -> minigpt.ParityReport:
    """What most tests change something of."""
    return judge(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, where more would show no more."""
    return saved(reference(std=0.3, n_layer=1), tmp_path_factory.mktemp("small"))


def is_last(length: int) -> Tensor:
    return torch.arange(length) == length - 1


LAST_ROW = norm_with(lambda norm, x: sabotages.exact(norm, x) * (1 + 0.01 * is_last(x.shape[1])[:, None]))
ONE_CHANNEL = norm_with(lambda norm, x: sabotages.exact(norm, x) + 0.01 * is_last(x.shape[-1]))
SABOTAGES = (
    Louder, LAST_ROW, ONE_CHANNEL, sabotages.DividesByNMinusOne, sabotages.NoShift, sabotages.NoMean,
    sabotages.HalfTheMean,
)  # fmt: skip


# Correct norms


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_norm_passes(folder: Path, dtype: str, attention: str) -> None:
    norm = "fused" if dtype == "float64" else "textbook"
    report = judge(folder, norm=norm, dtype=dtype, attention=attention)
    print(f"ratio {report.logits.ratio:.3g} of at most 2, scale {report.logits.scale:.3g}")
    assert report.passed
    assert report.reasons == []
    assert (report.norm, report.dtype, report.attention, report.device) == (norm, dtype, attention, "cpu")
    assert report.bitwise.equal is True
    assert report.bitwise.max_abs_error == 0.0
    assert 0 < report.logits.noise_floor_rms < 0.02 * report.logits.scale


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_massive_activations_are_no_fault(tmp_path: Path, dtype: str) -> None:
    """Real GPT-2 has residual entries near 3,000 in a few dimensions, from the first block on."""
    model = reference(std=0.3)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[[3, 20]] = torch.tensor([3000.0, -2500.0])
    report = judge(saved(model, tmp_path), norm="textbook", dtype=dtype)
    print(f"ratio {report.logits.ratio:.3g} of at most 2, scale {report.logits.scale:.3g}")
    assert report.passed, report.reasons


@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        ("sdpa", {"reorder_and_upcast_attn": True}),
        ("eager", {"reorder_and_upcast_attn": True}),
        ("sdpa", {"scale_attn_by_inverse_layer_idx": True}),
        ("sdpa", {"tie_word_embeddings": False}),
        ("eager", {"scale_attn_weights": False}),
        ("sdpa", {"n_inner": 50, "activation_function": "relu", "n_head": 2}),
        ("sdpa", {"layer_norm_epsilon": 0.1, "eos_token_id": None}),
    ],
    ids=str,
)
def test_every_config_that_we_read(tmp_path: Path, attention: str, fields: dict[str, Any]) -> None:
    report = judge(saved(reference(std=0.3, **fields), tmp_path), norm="textbook", attention=attention)
    print(f"ratio {report.logits.ratio:.3g} of at most 2")
    assert report.passed, report.reasons
    assert report.bitwise.equal


# Norms that are not LayerNorm


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_sabotaged_norm_fails_and_the_reason_names_numbers(folder: Path, sabotage: type[minigpt.LayerNorm]) -> None:
    report = judge(folder, norm=sabotage)
    print(report.reasons)
    assert not report.passed
    assert report.logits.ratio > 10, "barely seen"
    assert brief(report.logits.rms_error) in report.reasons[0]
    assert f"{brief(report.logits.ratio)} times" in report.reasons[0]
    assert report.bitwise.equal, "our own model, which holds no such norm, is blamed for it"
    assert min(site.local_error for site in report.norm_sites if site.site != "ln_f") > 1e-5


def test_autocast_around_a_judgement_does_not_reach_it(folder: Path, plain: minigpt.ParityReport) -> None:
    """Else the noise would be that of halves, and hide what a norm does wrong in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        report = judge(folder, norm=sabotages.DividesByNMinusOne)
        assert judge(folder).logits == plain.logits
        assert torch.is_autocast_enabled("cpu")
    assert not report.passed


class WrongAtOneToken(minigpt.LayerNorm):
    """Right wherever a text is read at once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.001 if x.shape[-2] == 1 else 1)


def test_a_norm_that_is_wrong_only_as_tokens_are_decoded(folder: Path) -> None:
    report = judge(folder, norm=WrongAtOneToken)
    assert report.logits.ratio < 2 < 100 < report.decoding.ratio
    assert report.reasons[0] == (
        f"Decoded a token at a time, the logits' RMS error is {brief(report.decoding.rms_error)}, "
        f"{brief(report.decoding.ratio)} times the noise floor; at most 4 times is parity."
    )


@pytest.mark.parametrize("site", ["h.0.ln_2", "h.1.ln_1"])
def test_a_sabotage_at_one_site_shows_there_and_from_there_on(folder: Path, site: str) -> None:
    report = judge(folder, norm=Louder, sites=site)
    actual = {one.site: one for one in report.norm_sites}
    for one in report.norm_sites:
        print(f"{one.site}: own {one.local_error:.2e}, propagated {one.propagated_error:.2e}")
    assert list(actual) == SITES
    assert [name for name in SITES if actual[name].swapped] == [site]
    assert [name for name in SITES if actual[name].local_error > 1e-6] == [site]
    assert [name for name in SITES if actual[name].propagated_error > 1e-5] == SITES[SITES.index(site) :]
    assert actual[site].local_error == pytest.approx(0.03, rel=1e-3)
    assert not report.passed


@pytest.mark.parametrize("longest", [0, 7])
def test_nan_never_passes(small: Path, longest: int) -> None:
    """At once, or in longer texts alone."""
    with pytest.raises(NormError, match="NaN"):
        judge(small, norm=norm_with(lambda norm, x: x * (float("nan") if x.shape[1] > longest else 1)))


# That the judge is independent


def test_a_fault_in_our_loading_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*args: Any) -> Checkpoint:
        actual = read_checkpoint(*args)
        one, other = "h.1.ln_1.weight", "h.1.ln_2.weight"
        return dataclasses.replace(
            actual, tensors=actual.tensors | {one: actual.tensors[other], other: actual.tensors[one]}
        )

    monkeypatch.setattr("minigpt.checkpoint.read.read_checkpoint", mistaken)
    report = judge(folder)
    assert not report.passed
    assert report.bitwise.equal is False
    assert report.bitwise.max_abs_error > 0.01
    assert report.logits.ratio > 100


# The figures, recomputed from transformers alone


def continuation(folder: Path, ids: list[int], most: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """What transformers' own greedy decoding adds."""
    prompt, model = torch.tensor([ids]), GPT2LMHeadModel.from_pretrained(folder, dtype=dtype)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


@torch.no_grad()
def seen(model: nn.Module, site: str, text: Tensor) -> tuple[Tensor, Tensor]:
    """A module's input and output while a model reads a text."""
    kept: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(site).register_forward_hook(
        lambda _, args, output: kept.append((args[0], output if isinstance(output, Tensor) else output[0]))
    )
    model(text)
    hook.remove()
    return kept[0]


def rms(parts: list[Tensor]) -> float:
    return torch.cat([part.flatten() for part in parts]).square().mean().sqrt().item()


def relative(ours: list[Tensor], truths: list[Tensor]) -> float:
    """Each token by its own size."""
    errors = [(a.double() - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(ours, truths, strict=True)]
    return rms(errors)


def apart(ours: list[Tensor], truths: list[Tensor]) -> list[Tensor]:
    return [a.double() - b for a, b in zip(ours, truths, strict=True)]


def near(expected: float) -> Any:
    """Equal but for the last digits of float64, in which two orders of adding may differ."""
    return pytest.approx(expected, rel=1e-6)


@torch.no_grad()
def test_the_figures_of_a_norm_that_is_3_percent_too_large_at_bfloat16(folder: Path) -> None:
    """Made again with transformers and our public classes."""
    report = judge(folder, norm=Louder, dtype="bfloat16")
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    reference = GPT2LMHeadModel.from_pretrained(folder, **how)
    truth = GPT2LMHeadModel.from_pretrained(folder, **how | {"attn_implementation": "eager"}).double()
    candidate = minigpt.from_pretrained(folder, dtype="bfloat16", device="cpu")
    minigpt.swap_norms(candidate, Louder)
    texts = [torch.tensor([ids + continuation(folder, ids, 4, torch.bfloat16)]) for ids in PROMPTS]
    ours, hf = [candidate(text)[0] for text in texts], [reference(text).logits[0] for text in texts]
    true = [truth(text).logits[0] for text in texts]

    error, noise, logits = apart(ours, true), apart(hf, true), report.logits
    assert (logits.rms_error, logits.noise_floor_rms) == (near(rms(error)), near(rms(noise)))
    assert logits.max_abs_error == near(max(one.abs().max().item() for one in error))
    assert logits.noise_floor_max == near(max(one.abs().max().item() for one in noise))
    assert (logits.scale, logits.ratio) == (near(rms(true)), near(rms(error) / rms(noise)))

    targets = torch.tensor([token for ids in PROMPTS for token in ids[1:]])  # the prompts without their continuations
    for whose, actual in (("reference", true), ("candidate", ours)):
        predicting = torch.cat([rows[: len(ids) - 1] for rows, ids in zip(actual, PROMPTS, strict=True)])
        perplexity = F.cross_entropy(predicting.double(), targets).exp().item()
        assert getattr(report.distribution, f"perplexity_{whose}") == near(perplexity)

    for site in report.norm_sites:
        seen_there = [seen(truth, f"transformer.{site.site}", text) for text in texts]
        inputs, outputs = ([pair[i] for pair in seen_there] for i in (0, 1))
        ours = [seen(candidate, site.site, text)[1] for text in texts]
        assert site.propagated_error == near(relative([y[0] for y in ours], [y[0] for y in outputs]))
        supplied, norm = [x.bfloat16() for x in inputs], truth.get_submodule(f"transformer.{site.site}")
        exact = [sabotages.exact(norm, x.double()) for x in supplied]
        ours = [candidate.get_submodule(site.site)(x) for x in supplied]
        assert site.local_error == near(relative([y[0] for y in ours], [y[0] for y in exact]))

    for block in report.blocks:
        places = {truth: "transformer.", reference: "transformer.", candidate: ""}
        true, theirs, ours = (
            [seen(model, prefix + block.block, text)[1][0] for text in texts] for model, prefix in places.items()
        )
        assert (block.error, block.noise) == (near(relative(ours, true)), near(relative(theirs, true)))


def test_logits_as_they_are_decoded(folder: Path) -> None:
    """Those that ``generate`` chooses from, against transformers' on the whole text in float64."""
    actual = judge(folder, norm="textbook").decoding
    model = minigpt.from_pretrained(folder, norm="textbook", device="cpu")
    truth = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    ours, true = [], []
    for ids in PROMPTS:
        out: Any = minigpt.generate(model, torch.tensor([ids]), max_new_tokens=4, output_scores=True)
        ours += [scores[0] for scores in out.scores]
        with torch.no_grad():
            true += list(truth(out.sequences).logits[0, len(ids) - 1 : -1])
    assert actual.rms_error == pytest.approx(rms(apart(ours, true)), rel=0.5)  # others stand beside a row here, or not
    assert actual.scale == near(rms(true))
    assert actual.noise_floor_rms < 2 * actual.rms_error


def test_where_greedy_decoding_parts(folder: Path) -> None:
    """The first token that differs, and the margin of the float64 truth there; all that precede it agree."""
    report = judge(folder, norm=sabotages.NoShift, max_new_tokens=20)
    parting = report.greedy.first_divergence
    ids, model = PROMPTS[parting.prompt], minigpt.from_pretrained(folder, device="cpu")
    minigpt.swap_norms(model, sabotages.NoShift)
    ours = minigpt.generate(model, torch.tensor([ids]), max_new_tokens=20)[0, len(ids) :].tolist()
    hf = continuation(folder, ids, 20)
    assert ours[: parting.token] == hf[: parting.token]
    assert (parting.candidate_id, parting.reference_id) == (ours[parting.token], hf[parting.token])
    assert parting.candidate_id != parting.reference_id
    truth = GPT2LMHeadModel.from_pretrained(folder).double()
    with torch.no_grad():
        best = truth(torch.tensor([ids + hf[: parting.token]])).logits[0, -1].topk(2).values
    assert parting.margin == near((best[0] - best[1]).item())
    assert report.logits.noise_floor_max <= parting.noise <= 4 * report.logits.noise_floor_max
    assert report.greedy.tokens_compared >= parting.token + 1


# Prompts


def test_texts_are_judged_as_their_ids(talking: Path) -> None:
    """An empty text starts from end-of-text."""
    tokenizer = minigpt.Tokenizer.from_pretrained(talking)
    texts = ["the dog saw", "naïve 狗", ""]
    ids = [tokenizer.encode(text) or [tokenizer.end_of_text_id] for text in texts]
    as_text, as_ids = judge(talking, prompts=texts), judge(talking, prompts=ids)
    assert (as_text.logits, as_text.distribution) == (as_ids.logits, as_ids.distribution)
    assert as_text.passed
    assert as_text.prompts == "3 texts"


@pytest.mark.parametrize(("has_tokenizer", "why"), [(False, "no tokenizer"), (True, "the default texts do not fit it")])
def test_a_model_that_cannot_read_our_texts_reads_random_ids(
    talking: Path, tmp_path: Path, has_tokenizer: bool, why: str
) -> None:
    place = saved(reference(vocab_size=300, n_positions=12), tmp_path)
    if has_tokenizer:
        (place / "tokenizer.json").write_bytes((talking / "tokenizer.json").read_bytes())
    report = judge(place, prompts=None)
    assert report.passed
    assert report.prompts == "4 sequences of random ids"
    (note,) = report.notes
    assert note.startswith("The texts are random ids, since ")
    assert why in note


def test_a_model_with_a_wider_vocabulary_than_its_tokenizer(talking: Path, tmp_path: Path) -> None:
    """As when a vocabulary is padded to a round number: no token that is written need have a text."""
    place = saved(reference(std=0.3, n_layer=1, vocab_size=384, n_positions=128), tmp_path)
    (place / "tokenizer.json").write_bytes((talking / "tokenizer.json").read_bytes())
    assert judge(place, prompts=["the dog"], max_new_tokens=30).passed
    assert judge(place, prompts=[[383, 382, 5]]).passed


def test_one_token_predicts_nothing_in_its_prompt(small: Path) -> None:
    fields = judge(small, prompts=[[5], [7]]).to_dict()
    assert fields["verdict"] == "pass"
    assert fields["distribution"]["perplexity_reference"] is fields["distribution"]["perplexity_candidate"] is None
    assert not judge(small, prompts=[[5], [6]], budget="perplexity=1%").passed, "nothing shows that it is kept"
    assert judge(small, prompts=[[5], [6, 7]], budget="perplexity=1%").passed


@pytest.mark.parametrize(("length", "compared"), [(48, 0), (47, 1)])
def test_a_prompt_that_fills_the_context(small: Path, length: int, compared: int) -> None:
    report = judge(small, prompts=tokens(1, length).tolist())
    assert report.passed, report.reasons
    assert (report.greedy.tokens_compared, report.decoding is None) == (compared, compared == 0)


BAD_PROMPTS = {
    "none": ([], "prompts must be a list"),
    "one text": ("the dog", "prompts must be a list of texts, .*, got 'the dog'"),
    "an empty one": ([[1, 2], []], "prompt 1: input_ids is empty"),
    "an id below 0": ([[1, -1]], "vocabulary of 61"),
    "an id beyond the vocabulary": ([[61]], "vocabulary of 61"),
    "longer than the context": ([[1] * 49], "prompt 0: 49 tokens .* 48"),
    "a text without a tokenizer": (["the dog"], "tokenizer"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("fault", BAD_PROMPTS)
def test_prompts_that_cannot_be_read(small: Path, fault: str) -> None:
    prompts, message = BAD_PROMPTS[fault]
    with pytest.raises(MiniGPTError, match=message):
        judge(small, prompts=prompts)


# What cannot be judged, and what is left as it was


@pytest.mark.gpu
def test_tf32_is_off_while_judging(folder: Path) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        report, exact = judge(folder, device="cuda"), judge(folder)
    finally:
        torch.set_float32_matmul_precision(before)
    assert report.logits.noise_floor_rms < 3 * exact.logits.noise_floor_rms
