"""Causes of a verdict: the precision that the error is like, and the mistakes that give the candidate's logits."""

from typing import TYPE_CHECKING

from minigpt.judge.measures import precision_of
from minigpt.judge.original_data import OriginalData
from minigpt.judge.runners import Runner
from minigpt.progress import Steps
from minigpt.report.fields import Causes, ParityFigures, Verdict, is_near, outcome_of
from minigpt.report.noise import MOST_NOISE

if TYPE_CHECKING:
    from minigpt.judge.diagnosis import FileTruth

QUICK = 2e7  # weights of a model in memory that is diagnosed without being asked, in a few seconds


def is_off_at_once(figures: ParityFigures) -> bool:
    """Return whether the first block is off, or the second norm, as in a narrower format; True if neither is known."""
    errors = [(block.error, block.noise) for block in figures.blocks[:1]]
    if not errors:
        errors = [(site.propagated_error, site.noise) for site in figures.norm_sites[1:2]]
    return all(error > MOST_NOISE * noise for error, noise in errors)


def explain(
    truth: OriginalData,
    runner: Runner,
    figures: ParityFigures,
    verdict: Verdict,
    diagnose: bool | None,
    say: Steps,
    of_file: "FileTruth | None" = None,
) -> Causes:
    """Return whose precision an error is like, and the mistakes that give it, if a diagnosis is due.

    Args:
        diagnose: None for a FAIL of a small model alone.
        of_file: the truth of another program's file that is off.
    """
    # Windows, or tokens read one by one, may be off all the same.
    are_prompts_right = figures.logits.ratio <= MOST_NOISE
    is_long_text_off = figures.text is not None and not figures.text.logits.ratio <= MOST_NOISE
    is_off_later = are_prompts_right and is_long_text_off
    precision = None
    if verdict.passed or (is_off_at_once(figures) and not is_off_later):
        precision = precision_of(figures.logits.rms_error, truth.floor.precisions)
    if diagnose is None:
        is_explained = figures.account is not None and figures.account.explains
        is_off = not is_explained and (not are_prompts_right or is_long_text_off)
        is_quick = truth.facts.weights <= QUICK and not truth.facts.offload
        diagnose = outcome_of(figures, verdict) == "FAIL" and is_quick and is_off
    if not diagnose:
        return Causes(precision=precision)
    if are_prompts_right and not is_long_text_off and not verdict.passed:
        note = "The diagnosis compares the logits of texts that are read whole, and these are right."
        return Causes(precision=precision, notes=[note])
    # A diagnosis alone needs the mistakes, which are many.
    from minigpt.judge.diagnosis import DiagnosisError, find_clues, find_mistakes, one_answer, unseen_mistakes

    try:
        if verdict.passed:
            unseen = "; ".join(unseen_mistakes(truth, runner, say))
            note = "Each of the commonest mistakes would be seen."
            if unseen:
                note = f"With these weights and texts, these mistakes would not be seen: {unseen}."
            return Causes(precision=precision, notes=[note])
        if changes := one_answer(truth, runner):
            return Causes(diagnosis=[], notes=changes)
        diagnosis, may_be_rounded = find_mistakes(truth, runner, say, of_windows=are_prompts_right, file=of_file)
    except DiagnosisError as error:
        return Causes(precision=precision, notes=[f"{error}."])
    precision = precision if may_be_rounded else None
    clues = [] if diagnosis or is_near(precision) else find_clues(truth, runner, figures, of_windows=are_prompts_right)
    if truth.facts.offload:
        clues.append("The weights stay in their files: no mistake in attention, MLP or positions was tried.")
    return Causes(precision=precision, diagnosis=diagnosis, notes=clues)
