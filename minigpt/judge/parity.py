"""Is it still the same model? A GPT-2 with its norms swapped, against transformers on the same weights."""

import dataclasses
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.checkpoint import locate
from minigpt.errors import GenerationError
from minigpt.judge import search
from minigpt.judge.budget import parse_budget, spend
from minigpt.judge.contest import Contest, Judged, Prompts, judged_prompts
from minigpt.judge.cost import cost, speed
from minigpt.judge.decoding import decoding_distance, ours
from minigpt.judge.drift import Drift
from minigpt.judge.greedy import Continued, compare_greedy, continuations
from minigpt.judge.measures import LogitsMeter, over_floor
from minigpt.judge.noise import ordinary_differences
from minigpt.judge.parity_report import Bisection, Logits, OrdinaryDifference, ParityReport, SiteSensitivity, TokenDrift
from minigpt.judge.perplexity import file_ids, text_perplexity
from minigpt.judge.reference import judging
from minigpt.measure.environment import versions
from minigpt.measure.steps import Progress, Steps
from minigpt.norms import NormSpec
from minigpt.norms.foreign.adapt import KEEP
from minigpt.norms.foreign.construct import title
from minigpt.placement import dtype_name, require_values, resolve_device, resolve_dtype
from minigpt.swap.sites import patterns_of

NEW_TOKENS = 32

# T tokens, V vocabulary


def parity(
    source: str | Path = "demo",
    *,
    norm: NormSpec = "fused",
    sites: str | Iterable[str] = "*",
    keep: Collection[str] = KEEP,
    attention: str = "sdpa",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    prompts: Prompts | None = None,
    max_new_tokens: int = NEW_TOKENS,
    revision: str | None = None,
    local_files_only: bool = False,
    check_finite: bool = False,
    noise: bool = False,
    sensitivity: bool = False,
    bisect: bool = False,
    text: str | Path | None = None,
    calibration: str | Path | None = None,
    budget: str | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Judge a model with ``norm`` at ``sites`` against transformers with the same weights.

    The truth is transformers in float64 on the weights as rounded to ``dtype``, on every prompt and its greedy
    continuation. The noise floor is how far transformers itself is from that truth when it computes in ``dtype``. The
    candidate passes when its RMS error is at most twice the noise floor, and at most four times where the continuations
    are read as they are written; and its greedy tokens agree with transformers' or part only where the two best logits
    are closer than the noise. TF32 is off meanwhile.

    Args:
        source, attention, device, dtype, quantize, revision, local_files_only, check_finite: as ``from_pretrained``
            takes them.
        norm, sites, keep: as ``swap_norms`` takes them.
        prompts: texts, or lists of token ids; by default four texts, or random ids where no tokenizer can be read.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none.
        noise: measure ordinary differences too, such as bfloat16 against float32, to hold the error against.
        sensitivity: swap one site at a time, and rank the sites.
        bisect: name the swapped sites that break parity, found as sets that pass once any one site is left out.
        text: a UTF-8 file to take the perplexity of, before and after the swap and the quantization.
        calibration: a UTF-8 file that frozen norms collect their deviations from.
        budget: limits that decide in place of parity, such as "kl=1e-6,perplexity=0.01%".
        progress: called with a few words on each step as it begins, and the share of the steps that are done.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: it cannot be judged; the message says why.
    """
    limits = parse_budget(budget) if budget is not None else None
    patterns = patterns_of(sites)
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise GenerationError(f"max_new_tokens must be a whole number, 0 or more, not {max_new_tokens!r}")
    on = resolve_device("cpu" if quantize and device is None else device)
    require_values(on)
    steps = Steps(progress, total=sum((5, noise, sensitivity, bisect, 2 * (text is not None))))
    steps("loading the models")
    place = locate(source, revision=revision, local_files_only=local_files_only)
    contest = Contest(place, norm, patterns, attention, on, resolve_dtype(dtype), quantize, check_finite, keep)
    judged = judged_prompts(place, prompts, contest.config)
    if limits and "perplexity" in limits and text is None and max(map(len, judged.prompts)) < 2:
        raise GenerationError("the budget limits perplexity, and no prompt has two tokens; give longer ones, or a text")
    text_ids = file_ids(text, judged.tokenizer, contest.config.n_positions) if text is not None else []
    if calibration is not None:
        contest.calibrate(file_ids(calibration, judged.tokenizer, contest.config.n_positions))
    steps.total += len(judged.prompts) - 1
    run = _Run(contest, judged, steps)
    with judging():
        run.compare(max_new_tokens)
        found = run.findings()
        if noise:
            found["noise"] = run.noise()
        if sensitivity:
            found["sensitivity"] = run.sensitivity()
        if bisect:
            found["bisect"] = run.bisection()
        if text is not None:
            found["perplexity"] = text_perplexity(contest, text, text_ids, steps)
    report = ParityReport(
        model=str(source),
        norm=norm if isinstance(norm, str) else title(norm),
        sites=patterns,
        device=str(contest.device),
        dtype=dtype_name(contest.dtype),
        attention=attention,
        versions=versions(contest.device) | {"float32_products": "full float32 (TF32 off)"},
        prompts=judged.described,
        **found,
    )
    return report if limits is None else dataclasses.replace(report, budget=spend(report, limits))


class _Run:
    """One judgement under way: the texts that were written, and what was measured on them."""

    def __init__(self, contest: Contest, judged: Judged, steps: Steps) -> None:
        self.contest, self.judged, self.begin = contest, judged, steps
        self.texts: list[Continued] = []
        self.truths: list[Float[Tensor, "seq vocab"]] = []
        self.meter, self.drift = LogitsMeter(), Drift(contest)
        self.decoding: Logits | None = None

    def compare(self, max_new_tokens: int) -> None:
        """Continue every prompt greedily, and let all four models read the result."""
        self.begin("decoding greedily")
        self.texts = continuations(self.contest, self.judged.prompts, max_new_tokens)
        models = (self.contest.truth, self.contest.candidate, self.contest.reference, self.contest.plain)
        with self.drift:
            for i, text in enumerate(self.texts):
                self.begin(f"comparing logits and norms on prompt {i + 1} of {len(self.texts)}")
                ids = self.contest.tensor(text.text)  # (1, T)
                logits = [model(ids)[0] for model in models]  # each (T, V)
                self.drift.add()
                self.meter.add(*logits, targets=ids[0, 1 : len(text.prompt)])
                self.truths.append(logits[0])
        if any(text.reference for text in self.texts):
            self.decoding = self._decoding()

    def findings(self) -> dict[str, Any]:
        """The blocks of the report that are always there."""
        self.begin("timing")
        longest, logits = self._longest, self.meter.logits()
        return dict(
            bitwise=self.meter.bitwise(),
            logits=logits,
            distribution=self.meter.distribution(),
            greedy=compare_greedy(self.texts, self._margins(), logits.greedy_noise, self.judged),
            norm_sites=self.drift.norm_sites(self.contest.swapped),
            blocks=self.drift.block_drift(),
            decoding=self.decoding,
            tokens=self._token_drift(self.texts.index(longest)),
            speed=speed(self.contest, longest.text),
            cost=cost(self.contest, longest.prompt),
            notes=[*self.contest.notes, *self._unsteadiness(longest)],
        )

    def _unsteadiness(self, text: Continued) -> list[str]:
        ids = self.contest.tensor(text.text)  # (1, T)
        is_steady = torch.equal(self.contest.candidate(ids), self.contest.candidate(ids))
        said = "The candidate answers differently from call to call; these are the figures of one of its answers."
        return [] if is_steady else [said]

    def _decoding(self) -> Logits:
        """As ``LogitsMeter.logits``, of logits as they are while the continuations are written."""
        self.begin("comparing logits as they are decoded")
        readers = ours(self.contest.candidate), self.contest.reference.reading
        candidate, floor = (decoding_distance(by, self.texts, self.truths, self.contest.device) for by in readers)
        # Of few tokens the reference's error may be small by chance.
        return over_floor(candidate, max(floor, self.meter.reference, key=lambda distance: distance.rms))

    def noise(self) -> list[OrdinaryDifference]:
        """Ordinary differences, on the shortest prompt: float16 is slow on a CPU."""
        self.begin("measuring ordinary differences")
        shortest = min(range(len(self.texts)), key=lambda i: len(self.texts[i].prompt))
        prompt = self.texts[shortest].prompt
        return ordinary_differences(self.contest, prompt, self.truths[shortest][: len(prompt)])

    def sensitivity(self) -> list[SiteSensitivity]:
        """Every swapped site alone, on the longest text."""
        self.begin("swapping one site at a time")
        return search.sensitivity(self.contest, self._longest.text, self.meter.logits())

    def bisection(self) -> Bisection:
        """The swapped sites that break parity."""
        self.begin("looking for the sites that break parity")
        verdicts = search.Verdicts(self.contest, self.texts, self.truths, self.meter.logits(), self.decoding)
        return search.bisect(verdicts, self.contest.swapped)

    @property
    def _longest(self) -> Continued:
        return max(self.texts, key=lambda text: len(text.text))

    def _margins(self) -> list[list[float]]:
        margins = []
        for text, truth in zip(self.texts, self.truths, strict=True):
            best = truth[text.before_new].topk(min(2, truth.shape[-1])).values  # (new, 2)
            margins.append((best[:, 0] - best[:, -1]).tolist())
        return margins

    def _token_drift(self, i: int) -> TokenDrift:
        text = self.texts[i]
        return TokenDrift(
            prompt=i,
            pieces=[self.judged.piece(token) for token in text.text],
            kl=self.meter.kl[i].tolist(),
            new_from=len(text.prompt),
        )
