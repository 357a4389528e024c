"""Is it still the same model? A GPT-2 with its norms swapped, against transformers on the same weights."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.checkpoint import locate
from minigpt.device import dtype_name, require_values, resolve_device, resolve_dtype, versions
from minigpt.errors import GenerationError, MiniGPTError
from minigpt.judge import search
from minigpt.judge.contest import Contest, Judged, Prompts, judged_prompts
from minigpt.judge.drift import Drift
from minigpt.judge.greedy import Continued, compare_greedy, continuations, decoding_distance, reader_of
from minigpt.judge.measures import Distance, LogitsMeter, over_floor
from minigpt.judge.perplexity import file_ids, perplexity_of_ids, text_perplexity
from minigpt.judge.reference import judging
from minigpt.judge.removal import Remover
from minigpt.judge.report import Fields, ParityReport, judged, parse_budget
from minigpt.judge.yardsticks import cost, ordinary_differences, speed
from minigpt.norms import NormSpec
from minigpt.norms.foreign.adapt import KEEP
from minigpt.norms.foreign.construct import title
from minigpt.norms.registry import require_on
from minigpt.report.numerals import brief
from minigpt.report.steps import Progress, Steps
from minigpt.swap.sites import patterns_of

NEW_TOKENS = 32

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

# T tokens, V vocabulary


def parity(
    source: str | Path = "demo",
    *,
    norm: NormSpec = "fused",
    sites: str | Iterable[str] = "*",
    keep: Collection[str] = KEEP,
    center: bool = False,
    against: str | Path | None = None,
    attention: str = "sdpa",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    prompts: Prompts | None = None,
    max_new_tokens: int = NEW_TOKENS,
    revision: str | None = None,
    local_files_only: bool = False,
    noise: bool = False,
    sensitivity: bool = False,
    remove: bool = False,
    remove_file: str | Path | None = None,
    bisect: bool = False,
    text: str | Path | None = None,
    fit: str | Path | None = None,
    budget: str | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Judge a model with ``norm`` at ``sites`` against transformers with the original's weights.

    The truth is transformers in float64 on the weights as rounded to ``dtype``, on every prompt and its greedy
    continuation. The noise floor is how far transformers itself is from that truth when it computes in ``dtype``. The
    candidate passes if its RMS error is at most twice the noise floor, and at most four times when it decodes the
    continuations token by token. Its greedy tokens must also agree with those of transformers, or differ only where the
    two best logits are closer than the noise. TF32 is off meanwhile.

    Args:
        source, attention, device, dtype, quantize, revision, local_files_only: as ``from_pretrained`` takes them.
        norm, sites, keep: as ``swap_norms`` takes them.
        center: apply ``center_writers`` to the candidate first.
        against: the original that ``source`` was finetuned or quantized from; by default ``source`` itself.
        prompts: texts, or lists of token ids; by default four texts, or random ids if there is no tokenizer.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none.
        noise: also measure ordinary differences, e.g. bfloat16 against float32, for comparison.
        sensitivity: swap one site at a time, and rank the sites.
        remove: swap one site after another, the least harmful first, until all are swapped or the budget's kl is spent.
        remove_file: keeps what ``remove`` has measured; a search that is started again with it goes on.
        bisect: name the swapped sites that break parity, or the budget if there is one.
        text: a UTF-8 file to measure the perplexity of, with the original and with the candidate.
        fit: a UTF-8 file to fit the swapped norms on first, as ``fit_norms`` does.
        budget: limits that decide in place of parity, e.g. "kl=1e-6,perplexity=0.01%".
        progress: called with a few words on each step as it begins, and the share of the steps that are done.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: if it cannot be judged; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """
    limits = parse_budget(budget) if budget is not None else {}
    patterns = patterns_of(sites)
    on = resolve_device("cpu" if quantize and device is None else device)
    require_values(on)
    steps = Steps(progress, total=sum((5, noise, sensitivity or remove, bisect, 2 * (text is not None))))
    steps("loading the models")
    place = locate(source, revision=revision, local_files_only=local_files_only)
    original = None if against is None else locate(against, local_files_only=local_files_only)
    contest = Contest(place, norm, patterns, attention, on, resolve_dtype(dtype), quantize, original, keep, center)
    read = judged_prompts(contest.original, prompts, contest.config)
    if "perplexity" in limits and text is None and max(map(len, read.prompts)) < 2:
        raise GenerationError("the budget limits perplexity, but no prompt has two tokens; give longer ones, or a text")
    text_ids = file_ids(text, read.tokenizer, contest.config.n_positions) if text is not None else []
    fitted = None if fit is None else contest.fit(fit, read.tokenizer)
    steps.total += len(read.prompts) - 1 + (len(contest.swapped) if remove else 0)
    with judging():
        run = _Run(contest, read, steps, max_new_tokens)
        require_on(norm, contest.device)
        report: dict[str, Any] = dict(
            model=str(source),
            against=None if against is None else str(against),
            norm=norm if isinstance(norm, str) else title(norm),
            sites=patterns,
            device=str(contest.device),
            dtype=dtype_name(contest.dtype),
            attention=attention,
            versions=versions(contest.device) | {"float32_products": "full float32 (TF32 off)"},
            prompts=read.described,
            quantize=quantize,
            center=center,
            exact=contest.is_exact,
            fit=fitted,
            **run.findings(),
            noise=run.noise() if noise else None,
            **dict.fromkeys(("sensitivity", "removal", "perplexity", "bisect")),
        )
        if sensitivity or remove:
            remover = Remover(contest, text_ids[: contest.config.n_positions] or run.longest.text, remove_file)
            steps("swapping one site at a time")
            report["sensitivity"] = remover.sensitivity(report["logits"])
            if remove:
                report["removal"] = remover.curve(limits.get("kl", torch.inf), steps)
        if text is not None:
            report["perplexity"] = text_perplexity(contest, text, text_ids, steps)
        if bisect:
            steps("searching for the sites that break it")
            fails = run.failing(report, limits, text_ids)
            report["bisect"] = search.bisect(contest.swapped, fails)
    return judged(report, limits)


class _Run:
    """One judgement under way: the texts that were written, and what was measured on them.

    Raises:
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """

    def __init__(self, contest: Contest, judged: Judged, steps: Steps, max_new_tokens: int) -> None:
        self.contest, self.judged, self.begin = contest, judged, steps
        self.drift = Drift(contest)
        self.floor, self.bits = Distance(), Distance()  # of transformers from the truth, and of ours from transformers
        self.truths: list[Float[Tensor, "seq vocab"]] = []
        self.begin("decoding greedily")
        self.texts = continuations(contest, judged.prompts, max_new_tokens)
        self.longest = max(self.texts, key=lambda text: len(text.text))
        with self.drift:
            self.meter = self._metered(self._read())
        if self.floor.rms > MOST_FLOOR[contest.dtype] * self.floor.scale:
            raise MiniGPTError(
                f"transformers at {dtype_name(contest.dtype)} is {brief(self.floor.rms)} from itself in float64, on "
                f"logits of scale {brief(self.floor.scale)}, so it cannot be the reference; update transformers, or "
                "try another --attention or --dtype"
            )
        self.decoding = None
        if any(text.reference for text in self.texts):
            self.begin("comparing logits as they are decoded")
            floor = decoding_distance(contest.reference.reading, self.texts, self.truths, contest.device)
            # Of few tokens the reference's error may be small by chance.
            self.decoding_floor = max(floor, self.floor, key=lambda distance: distance.rms)
            self.decoding = self._decoding()

    def _read(self) -> Iterator[Float[Tensor, "seq vocab"]]:
        """Let all models read each text; yield the candidate's logits (T, V), and count the others'."""
        contest = self.contest
        models = (contest.truth, contest.candidate, contest.reference, contest.plain)
        for i, text in enumerate(self.texts, start=1):
            self.begin(f"comparing logits and norms on prompt {i} of {len(self.texts)}")
            ids = contest.tensor(text.text)  # (1, T)
            truth, candidate, reference, plain = (model(ids)[0] for model in models)  # each (T, V)
            self.drift.add()
            self.floor.add(reference, truth)
            self.bits.add(plain, reference)
            self.truths.append(truth)
            yield candidate

    def _metered(self, logits: Iterable[Float[Tensor, "seq vocab"]]) -> LogitsMeter:
        """Compare a candidate's logits of every text with the truth."""
        meter = LogitsMeter()
        for candidate, text, truth in zip(logits, self.texts, self.truths, strict=True):
            meter.add(truth, candidate, self.contest.tensor(text.prompt)[0, 1:])
        return meter

    def findings(self) -> dict[str, Any]:
        """The parts of the report that are always there."""
        self.begin("timing")
        longest = self.texts.index(self.longest)
        return dict(
            **self._deciding(self.meter, self.texts),
            decoding=self.decoding,
            bitwise=Fields(equal=self.bits.largest == 0, max_abs_error=self.bits.largest),
            norm_sites=self.drift.norm_sites(self.contest.swapped),
            blocks=self.drift.block_drift(),
            tokens=Fields(
                prompt=longest,
                pieces=[self.judged.text([token]) or f"#{token} " for token in self.longest.text],
                kl=self.meter.kl[longest].tolist(),
                new_from=len(self.longest.prompt),
            ),
            speed=speed(self.contest, self.longest.text),
            cost=cost(self.contest, self.longest.prompt),
            notes=self.contest.notes,
        )

    def noise(self) -> list[Fields]:
        """Ordinary differences, on the shortest prompt: float16 is slow on a CPU."""
        self.begin("measuring ordinary differences")
        text, truth = min(zip(self.texts, self.truths, strict=True), key=lambda pair: len(pair[0].prompt))
        return ordinary_differences(self.contest, text.prompt, truth[: len(text.prompt)])

    def failing(
        self, report: dict[str, Any], limits: dict[str, float], text_ids: list[int]
    ) -> Callable[[list[str]], bool]:
        """Return the function that says whether the report would fail with the norm at some of its sites only.

        It decides as the report does: by the budget if there is one, else by parity. Greedy decoding is not run again.
        Up to the first difference both read the same tokens, so one forward over what transformers wrote shows it.
        """

        def fails(sites: list[str]) -> bool:
            self.contest.swap_only(sites)
            try:
                found = report | self._measured_again() | {"decoding": None}
                if report["perplexity"] is not None and "perplexity" in limits:
                    candidate = perplexity_of_ids(self.contest.candidate, text_ids)
                    found["perplexity"] = Fields(report["perplexity"], candidate=candidate)
                if judged(found, limits).passed and self.decoding is not None:
                    found["decoding"] = self._decoding()
                return not judged(found, limits).passed
            finally:
                self.contest.swap_only(self.contest.swapped)

        return fails

    def _measured_again(self) -> dict[str, Any]:
        """What decides the verdict, except the decoded logits, of the candidate as it stands."""
        logits = [self.contest.candidate(self.contest.tensor(text.text))[0] for text in self.texts]  # each (T, V)
        texts = [
            text._replace(candidate=rows[text.before_new].argmax(-1).tolist())
            for text, rows in zip(self.texts, logits, strict=True)
        ]
        return self._deciding(self._metered(logits), texts)

    def _deciding(self, meter: LogitsMeter, texts: list[Continued]) -> dict[str, Any]:
        noise = 2 * self.floor.largest  # can swap two logits this close: each may be off by the floor's maximum
        return dict(
            logits=over_floor(meter.distance, self.floor),
            distribution=meter.distribution(),
            greedy=compare_greedy(texts, self.truths, noise, self.judged),
        )

    def _decoding(self) -> Fields:
        """The candidate's logits as they are while the continuations are written."""
        reader = reader_of(self.contest.candidate)
        candidate = decoding_distance(reader, self.texts, self.truths, self.contest.device)
        return over_floor(candidate, self.decoding_floor)
