"""The original, read once, and candidates held against it: ``minigpt.Original`` and ``minigpt.parity``."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minigpt.checkpoint.contents import files_state, unchanged
from minigpt.device import resolve_device
from minigpt.engines.engine import Engine
from minigpt.errors import CheckpointError, ConfigError, MiniGPTError
from minigpt.judge.candidate import OutputsFile, candidate_of
from minigpt.judge.judgement import Judgement, Searches, explain
from minigpt.judge.original_data import OriginalData
from minigpt.judge.read_original import read_original
from minigpt.judge.reference import judging
from minigpt.judge.runners import Runner
from minigpt.judge.texts import Prompts
from minigpt.judge.verdict import decide, parse_budget
from minigpt.precision import dtype_name
from minigpt.progress import Progress, Steps
from minigpt.recipe import RECIPE_OPTIONS, Recipe, check_names
from minigpt.report.fields import Causes, ParityFigures
from minigpt.report.noise import MOST_NOISE
from minigpt.report.parity_report import ParityReport
from minigpt.watch import watched

if TYPE_CHECKING:
    from minigpt.judge.diagnosis import FileTruth

READING = ("attention", "device", "dtype", "memory", "revision", "local_files_only")  # options of reading an original
OF_MODULES = {"attention", "device", "dtype", "local_files_only", "memory"}  # options of the original of a module


class Original:
    """A checkpoint as transformers computes it, read once. ``judge`` holds any number of candidates against it.

    ``Original(source, ...)`` is ``Original.read(source, ...)``. ``Original.load`` reads a file that ``save`` wrote.

    transformers reads it at the dtype, and is freed; minigpt reads it in reference arithmetic; then transformers
    reads it in float64 on the weights as rounded to the dtype, and is freed. So there is one model in memory at a
    time, and none while a candidate is judged. What is kept: true logits in float64, of a text file the first 2**27
    in float32; the true input of each norm in float64, for the first prompts, 1 GiB at most.

    Args:
        source, attention, device, dtype, memory, revision, local_files_only: as ``minigpt.Recipe`` takes them. A model
            that takes more than ``memory`` in float64 is read block by block, also by a recipe that is judged, and a
            GPT-2 by transformers alone.
        prompts: texts, or lists of token ids; by default four texts, and one that fills the context; random ids if
            there is no tokenizer. That one has at most 1,024 tokens, and fewer for more than 195 million weights. Half
            of it walks over tokens that no other text has; the whole vocabulary of a small model is walked.
        text: a UTF-8 file that the models read in windows of the context.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none. By default
            32, and 4 where a model is read block by block.
        gradients: also keep the gradient of the loss for every Parameter.
        progress: called with a few words on each step as it begins, and the share of the steps that are done.

    Attributes:
        truth: what transformers says, as ``minigpt.judge.original_data.OriginalData`` describes it.

    Raises:
        CheckpointError, ConfigError, GenerationError: if it cannot be read; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """

    def __init__(
        self,
        source: str | Path | Recipe = "demo",
        *,
        against: str | Path | None = None,
        beside: Iterable[Recipe] = (),
        prompts: Prompts | None = None,
        text: str | Path | None = None,
        max_new_tokens: int | None = None,
        gradients: bool = False,
        progress: Progress | None = None,
        **opening: Any,
    ) -> None:
        check_names(opening, READING, "Original")
        recipe = source if isinstance(source, Recipe) else Recipe(source, **opening)
        if recipe is source and opening:
            raise ConfigError("is part of the Recipe; set it there", argument=next(iter(opening)))
        say = Steps(progress, total=5)
        self.truth = read_original(recipe, against, beside, prompts, text, max_new_tokens, gradients, say)

    def __repr__(self) -> str:
        facts, texts = self.truth.facts, self.truth.texts
        return f"<Original {facts.source} at {dtype_name(facts.dtype)}: {len(texts.prompts)} prompts, {facts.device}>"

    @classmethod
    def read(cls, source: str | Path | Recipe = "demo", **options: Any) -> "Original":
        """Return the original that transformers reads now; arguments and errors as for the class."""
        return cls(source, **options)

    @classmethod
    def load(cls, file: str | Path, *, device: str | torch.device | None = None) -> "Original":
        """Return the original that ``save`` wrote. transformers need not be installed.

        Raises:
            CheckpointError: if the file is not such a record, or another version of minigpt wrote it.
            MiniGPTError: if the noise floor in it is not finite, or too high to judge by.
        """
        from minigpt.judge.original_file import load_record

        original = cls.__new__(cls)
        original.truth = load_record(file, device)
        return original

    def save(self, file: str | Path) -> None:
        """Write the original to a safetensors file: the record that ``load`` reads, and other programs too.

        For each text N it has ``ids.N`` (T), ``logits.N`` (T, V) in float64, and the true output of every norm and
        block, ``h.3.ln_1.N`` and ``h.3.N`` (T, C). Keys that begin with ``kept.`` are for ``load``.

        Raises:
            MiniGPTError: if it cannot be written.
        """
        from minigpt.judge.original_file import save_record

        save_record(self.truth, file)

    def judge(
        self,
        candidate: Any = None,
        *,
        gradients: bool | None = None,
        sensitivity: bool = False,
        remove: bool = False,
        remove_file: str | Path | None = None,
        bisect: bool = False,
        budget: str | None = None,
        diagnose: bool | None = None,
        as_file: bool = False,
        progress: Progress | None = None,
        **opening: Any,
    ) -> ParityReport:
        """Judge a candidate; ``minigpt.parity`` describes the arguments.

        Args:
            candidate: by default the original's own source, with what ``opening`` does to it.
            gradients: by default whether the original has them.

        Raises:
            CheckpointError: if the checkpoint was saved again since the original was read.
        """
        check_names(opening, RECIPE_OPTIONS, "judge")
        if as_file and not isinstance(candidate, Engine):
            raise ConfigError("is for another program's file, which minigpt.engines opens", argument="as_file")
        limits = parse_budget(budget)
        has_gradients = self.truth.gradients is not None
        if gradients and not has_gradients:
            raise ConfigError("needs an original that has gradients; read it with gradients too", argument="gradients")
        if gradients is None:
            gradients = has_gradients
        if candidate is None or isinstance(candidate, str | Path):
            opening = {"attention": self.truth.facts.attention} | opening
            candidate = Recipe(self.truth.facts.place if candidate is None else candidate, **opening)
        elif opening:
            raise ConfigError("is for a candidate that is a source", argument=next(iter(opening)))
        if isinstance(candidate, Recipe):
            candidate = self._like_the_original(candidate)
        searches = Searches(sensitivity and not isinstance(candidate, Engine), remove, bisect, remove_file)
        files_checked: AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(candidate, Recipe) and self.truth.facts.offload:  # it is read block by block
            files_checked = unchanged(candidate.place())
        truth, of_file, say = self.truth, None, Steps(progress, total=3)
        with files_checked, judging():
            with watched() as changed:  # which has what was changed at the end of the block
                say("loading the candidate")
                opened = candidate_of(truth, candidate)
                with opened.eval_mode():
                    figures = Judgement(truth, opened, limits, gradients, say).figures(searches)
                    if isinstance(candidate, Engine):
                        how = truth, opened.runner, candidate, as_file, sensitivity, say
                        figures, of_file = with_account(figures, *how)
            changes = sorted({*changed, *opened.claim.changes})
            verdict = decide(figures, limits, changes)
            report = ParityReport.of(figures, verdict, Causes())
            with watched(), opened.eval_mode():
                causes = explain(truth, opened.runner, report, diagnose, say, of_file)
        return ParityReport.of(figures, verdict, causes)

    def judge_outputs(
        self,
        file: str | Path,
        *,
        gradients: bool | None = None,
        budget: str | None = None,
        diagnose: bool | None = None,
        progress: Progress | None = None,
    ) -> ParityReport:
        """Judge what another program wrote: a safetensors file with ``logits.N`` for each text of the record.

        Args:
            gradients, budget, diagnose, progress: as ``judge`` takes them.

        Raises:
            CheckpointError: if it cannot be read, lacks logits, or a tensor is unknown or has another shape.
        """
        outputs = OutputsFile(Path(file))
        return self.judge(outputs, gradients=gradients, budget=budget, diagnose=diagnose, progress=progress)

    def _like_the_original(self, recipe: Recipe) -> Recipe:
        """Return a recipe on the original's device and at its dtype.

        Raises:
            ConfigError: if the recipe has others.
            CheckpointError: if the original's files were written since it was read.
        """
        facts = self.truth.facts
        device, dtype = facts.device, dtype_name(facts.dtype)
        if recipe.device is not None and resolve_device(recipe.device) != device:
            raise ConfigError(f"must be the original's, {device}, got {recipe.device}", argument="device")
        if recipe.dtype is not None and recipe.dtype != dtype:
            raise ConfigError(f"must be the original's, {dtype}, got {recipe.dtype}", argument="dtype")
        is_own = recipe.place().resolve() == facts.place.resolve()
        if is_own and facts.state is not None and files_state(facts.place) != facts.state:
            raise CheckpointError(f"{facts.source} was saved to or removed since it was read; read the original again")
        return dataclasses.replace(recipe, device=device, dtype=dtype)


def with_account(
    figures: ParityFigures,
    truth: OriginalData,
    runner: Runner,
    engine: Engine,
    as_file: bool,
    by_tensor: bool,
    say: Steps,
) -> "tuple[ParityFigures, FileTruth | None]":
    """Return the figures of a program's file; if it is off, with where that comes from, or why that is not known."""
    if figures.nan is not None or figures.logits.ratio <= MOST_NOISE:
        return figures, None
    from minigpt.judge.account import account_of  # imported here: the files of other programs alone need it
    from minigpt.judge.file_weights import weights_of

    try:
        if truth.facts.offload:
            raise MiniGPTError("the model is read block by block, and a file's weights are held in float64")
        weights = weights_of(engine.file, truth.facts.place if truth.facts.place.exists() else None)
        account, of_file = account_of(truth, runner, engine, weights, as_file, by_tensor, say)
        return dataclasses.replace(figures, account=account), None if account.blames_file else of_file
    except MiniGPTError as error:
        if as_file:
            raise
        note = f"Where the difference comes from is not known: {error}."
        return dataclasses.replace(figures, notes=[*figures.notes, note]), None


def parity(
    candidate: "str | Path | Recipe | nn.Module | Callable[[Tensor], Any]" = "demo",
    *,
    against: str | Path | None = None,
    prompts: Prompts | None = None,
    text: str | Path | None = None,
    max_new_tokens: int | None = None,
    gradients: bool = False,
    sensitivity: bool = False,
    remove: bool = False,
    remove_file: str | Path | None = None,
    bisect: bool = False,
    budget: str | None = None,
    diagnose: bool | None = None,
    as_file: bool = False,
    progress: Progress | None = None,
    **opening: Any,
) -> ParityReport:
    """Judge a model against transformers with the original's weights.

    The truth is transformers in float64 on the weights as rounded to ``dtype``, on every prompt and its greedy
    continuation. The noise floor is how far transformers itself is from that truth when it computes in ``dtype``. The
    candidate passes if its RMS error is at most twice the noise floor, on the prompts and on every window of a longer
    text, and at most four times when it decodes the continuations token by token. Its greedy tokens must also agree
    with transformers', or differ only where the two best logits are closer than the noise. TF32 is off
    meanwhile. What the candidate's code changes in the process is undone, and fails it.

    ``minigpt.Original`` reads the original once for many candidates.

    Args:
        candidate: a source or a ``Recipe``; a ``GPT2`` or any ``nn.Module`` in eval mode; a function of ids (B, T) to
            logits (B, T, V), or to an object with ``logits``; or what a function of ``minigpt.engines`` returns.
        against: the source of the original; by default the candidate's own. A module or a function needs one.
        prompts, text, max_new_tokens: as ``Original`` takes them.
        gradients: also compare the gradient of the loss for every Parameter.
        sensitivity: swap one site at a time, and rank the sites; of another program's file, rank its tensors by what
            the rounding of each costs.
        remove: swap one site after another, the least harmful first, until all are swapped or the budget's kl is
            spent. With a budget the report is of the sites that it allows.
        remove_file: keeps what ``remove`` has measured; a search that is started again with it goes on. It needs a
            source and a norm that is given by its name.
        bisect: name the swapped sites that break parity, or the budget if there is one.
        budget: limits that decide in place of parity, e.g. "kl=1e-6,perplexity=0.01%".
        diagnose: whether to look for the mistake that gives the candidate's logits. By default after a FAIL, if the
            model is so small that it takes a few seconds.
        as_file: of what a function of ``minigpt.engines`` returns, judge whether the program is right for its file: it
            passes if its error with the file's weights is explained by the arithmetic that it documents.
        progress: called with a few words on each step as it begins, and the share of the steps that are done.
        opening: norm, sites, keep, center, fit, attention, arithmetic, device, dtype, quantize, memory, revision
            and local_files_only, as ``Recipe`` takes them, for a candidate that is a source. For a module or a
            function, attention, device, dtype, memory and local_files_only are the original's.

    Raises:
        CheckpointError, ConfigError, NormError, GenerationError: if it cannot be judged; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """
    check_names(opening, RECIPE_OPTIONS, "parity")
    parse_budget(budget)
    texts: dict[str, Any] = dict(
        prompts=prompts, text=text, max_new_tokens=max_new_tokens, gradients=gradients,
        progress=_part_of(progress, 0.0, 0.6),
    )  # fmt: skip
    if isinstance(candidate, str | Path):
        candidate, opening = Recipe(candidate, **opening), {}
    is_recipe = isinstance(candidate, Recipe)
    for name in {*opening} - (set() if is_recipe else OF_MODULES):
        why = "is part of the Recipe; set it there" if is_recipe else "is for a candidate that is a source"
        raise ConfigError(why, argument=name)
    source: Any = candidate
    options: dict[str, Any] = {"against": against}
    if not is_recipe:
        source, options = against, _options_of(candidate) | opening
    if source is None:
        raise ConfigError(
            "must be given: the model that this module or function must equal, as a name or a folder",
            argument="against",
        )
    return Original(source, **options, **texts).judge(
        candidate, gradients=gradients, sensitivity=sensitivity, remove=remove, remove_file=remove_file, bisect=bisect,
        budget=budget, diagnose=diagnose, as_file=as_file, progress=_part_of(progress, 0.6, 0.4),
    )  # fmt: skip


def _part_of(progress: Progress | None, begin: float, share: float) -> Progress | None:
    """Return a progress from 0 to 1 that is a share of another."""
    return None if progress is None else lambda step, done: progress(step, begin + share * done)


def _options_of(candidate: Any) -> dict[str, Any]:
    """Return the device, the dtype and the attention of a model that the caller holds."""
    options = {"attention": getattr(candidate, "attention", None)}
    parameters = candidate.parameters() if isinstance(candidate, nn.Module) else ()
    for parameter in parameters:
        if parameter.is_floating_point() and not parameter.is_meta:  # neither quantized nor offloaded
            options |= {"device": parameter.device, "dtype": parameter.dtype}
            break
    return {name: value for name, value in options.items() if isinstance(value, str | torch.device | torch.dtype)}
