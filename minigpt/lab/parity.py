"""Is it still the same model? A GPT-2 with its norms swapped, against transformers on the same weights."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.checkpoint import from_pretrained, locate
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, GenerationError
from minigpt.generation import generate, prompt_ids
from minigpt.lab.drift import SiteErrors
from minigpt.lab.measures import LogitsMeter
from minigpt.lab.reference import Reference, judging, versions
from minigpt.lab.report import Divergence, Greedy, ParityReport, Speed
from minigpt.model import GPT2, swap_norms
from minigpt.norms import NormSpec
from minigpt.placement import dtype_name, resolve_device, resolve_dtype
from minigpt.tokenizer import Tokenizer

PROMPTS = (
    "Once upon a time there was a",
    "The old sailor looked at the sea and said that",
    "In the morning the village was quiet, because everyone who could walk had gone to the river. When they came back,",
    'She opened the door. "Who is there?" she asked. Nobody answered, but',
)
NEW_TOKENS = 32

Prompts = Sequence[str] | Sequence[Sequence[int]]

# T tokens, V vocabulary


def parity(
    source: str | Path = "demo",
    *,
    norm: NormSpec = "fused",
    sites: str | Iterable[str] = "*",
    attention: str = "sdpa",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    prompts: Prompts | None = None,
    max_new_tokens: int = NEW_TOKENS,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> ParityReport:
    """Judge a model with ``norm`` at ``sites`` against transformers with the same weights.

    The truth is transformers in float64 on the weights as rounded to ``dtype``, on every prompt and its greedy
    continuation. The noise floor is how far transformers itself is from that truth when it computes in ``dtype``. The
    candidate passes when its RMS error is at most twice the noise floor, and its greedy tokens agree with transformers'
    or part only where the two best logits are closer than the noise. TF32 is off meanwhile.

    Args:
        source, attention, device, dtype, revision, local_files_only: as ``from_pretrained`` takes them.
        norm, sites: as ``swap_norms`` takes them.
        prompts: texts, or lists of token ids; by default four texts, or random ids where no tokenizer can be read.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none.
        progress: called with a few words on each step as it begins.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: it cannot be judged; the message says why.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    chosen: dict[str, Any] = dict(revision=revision, local_files_only=local_files_only)
    progress("loading the models")
    models = _load(locate(source, **chosen), norm, patterns, attention, resolve_device(device), resolve_dtype(dtype))
    judged = _judged_prompts(source, prompts, models.candidate.config, chosen)
    with judging():
        progress("decoding greedily")
        pairs = [_continuations(models, ids, max_new_tokens) for ids in judged.ids]
        progress("comparing logits and norms")
        meter, site_errors, margins = _compare(models, judged.ids, pairs)
        progress("timing")
        speed = _speed(models, max(judged.ids, key=len))
    logits = meter.logits()
    return ParityReport(
        model=str(source),
        norm=norm if isinstance(norm, str) else getattr(norm, "__qualname__", repr(norm)),
        sites=patterns,
        device=str(models.device),
        dtype=dtype_name(models.dtype),
        attention=attention,
        prompts=judged.described,
        versions=versions(models.device),
        bitwise=meter.bitwise(),
        logits=logits,
        distribution=meter.distribution(),
        greedy=_compare_greedy(pairs, margins, noise=2 * logits.noise_floor_max),
        norm_sites=site_errors.report(models.swapped),
        speed=speed,
    )


class _Models(NamedTuple):
    """One checkpoint four times: with the norm in question, in reference arithmetic, and twice in transformers."""

    candidate: GPT2
    plain: GPT2
    reference: Reference
    truth: Reference
    swapped: list[str]

    @property
    def device(self) -> torch.device:
        return self.candidate.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.candidate.wte.weight.dtype

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        return torch.tensor([ids], dtype=torch.long, device=self.device)


def _load(
    place: Path, norm: NormSpec, sites: list[str], attention: str, device: torch.device, dtype: torch.dtype | None
) -> _Models:
    candidate = from_pretrained(place, attention=attention, device=device, dtype=dtype)
    swapped = swap_norms(candidate, norm, sites)
    plain = from_pretrained(place, attention=attention, device=device, dtype=dtype, arithmetic="reference")
    dtype = candidate.wte.weight.dtype
    reference = Reference(place, attention=attention, dtype=dtype, device=device)
    other = "eager" if attention == "sdpa" else "sdpa"  # so that float64 too has a noise floor to be judged by
    truth = Reference(place, attention=other, dtype=dtype, device=device, compute=torch.float64)
    return _Models(candidate, plain, reference, truth, swapped)


class _Judged(NamedTuple):
    ids: list[list[int]]
    described: str


class _Pair(NamedTuple):
    """One prompt's greedy continuations."""

    candidate: list[int]
    reference: list[int]


def _judged_prompts(
    source: str | Path,
    prompts: Sequence[str] | Sequence[Sequence[int]] | None,
    config: GPT2Config,
    chosen: dict[str, Any],
) -> _Judged:
    if prompts is not None and len(prompts) == 0:
        raise GenerationError("there is no prompt to judge on; give at least one")
    if prompts is None or isinstance(prompts[0], str):
        try:
            tokenizer = Tokenizer.from_pretrained(source, **chosen)
        except CheckpointError as error:
            if prompts is not None:
                raise
            ids, described = _random_ids(config), f"4 sequences of random ids, since {error}"
        else:
            ids = [prompt_ids(tokenizer, str(text)) for text in prompts or PROMPTS]
            described = f"{len(ids)} texts"
    else:
        ids, described = [list(map(int, prompt)) for prompt in prompts], f"{len(prompts)} lists of ids"
    for prompt in ids:
        _require_readable(prompt, config)
    return _Judged(ids, described)


def _random_ids(config: GPT2Config) -> list[list[int]]:
    seq = min(24, max(1, config.n_positions // 2))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (4, seq), generator=generator).tolist()


def _require_readable(ids: list[int], config: GPT2Config) -> None:
    if not ids:
        raise GenerationError("a prompt is empty; give at least one token")
    if len(ids) > config.n_positions:
        raise GenerationError(f"a prompt is {len(ids)} tokens, more than the model's context of {config.n_positions}")
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise GenerationError(f"a prompt holds a token id outside the model's vocabulary of {config.vocab_size}")


def _continuations(models: _Models, ids: list[int], most: int) -> _Pair:
    config = models.candidate.config
    new, prompt = min(most, config.n_positions - len(ids)), models.tensor(ids)
    if new < 1:
        return _Pair([], [])
    ours = generate(models.candidate, prompt, max_new_tokens=new)[0, len(ids) :].tolist()
    return _Pair(ours, models.reference.greedy(prompt, new, config.eos_token_ids))


def _compare(
    models: _Models, prompts: list[list[int]], pairs: list[_Pair]
) -> tuple[LogitsMeter, SiteErrors, list[list[float]]]:
    """Distances over all prompts and continuations, and what parts the two best true logits before each new token."""
    candidate, plain, reference, truth, _ = models
    meter, margins = LogitsMeter(), []
    with SiteErrors(candidate, truth.norms(candidate.norm_sites())) as site_errors:
        for ids, pair in zip(prompts, pairs, strict=True):
            text = models.tensor(ids + pair.reference)  # (1, T)
            true, ours, theirs, exact = (model(text)[0] for model in (truth, candidate, reference, plain))  # (T, V)
            meter.add(true, ours, theirs, exact, targets=text[0, 1 : len(ids)])
            site_errors.add()
            best = true[len(ids) - 1 :].topk(2).values  # (new + 1, 2)
            margins.append((best[:, 0] - best[:, 1]).tolist())
    return meter, site_errors, margins


def _compare_greedy(pairs: list[_Pair], margins: list[list[float]], noise: float) -> Greedy:
    compared, partings = 0, []
    for i, (pair, margin) in enumerate(zip(pairs, margins, strict=True)):
        differing = [j for j, (a, b) in enumerate(zip(*pair, strict=False)) if a != b]
        compared += differing[0] + 1 if differing else min(map(len, pair))
        if differing:
            j = differing[0]
            partings.append(Divergence(i, j, pair.candidate[j], pair.reference[j], margin[j], noise))
    return Greedy(compared, min(partings, key=lambda parting: parting.within_noise, default=None))


def _speed(models: _Models, ids: list[int]) -> Speed:
    text = models.tensor(ids)
    return Speed(*interleaved_ms(lambda: models.candidate(text), lambda: models.reference(text)))


def interleaved_ms(*contestants: Callable[[], object], repeats: int = 7) -> list[float]:
    """Median milliseconds of each, taken in turns so that a busy machine is busy for all; a first round warms up."""
    times: list[list[float]] = [[] for _ in contestants]
    for round_ in range(repeats + 1):
        for contestant, measured in zip(contestants, times, strict=True):
            _finish_pending_work()
            start = time.perf_counter()
            contestant()
            _finish_pending_work()
            if round_ > 0:
                measured.append(1000 * (time.perf_counter() - start))
    return [median(measured) for measured in times]


def _finish_pending_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
