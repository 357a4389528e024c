"""Reading an original: transformers at the dtype, minigpt in reference arithmetic, transformers in float64.

T tokens, V vocabulary, C embedding.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.checkpoint.contents import unchanged
from minigpt.checkpoint.transformers_model import note_on_left_out
from minigpt.errors import MiniGPTError
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.gradients import relative_errors
from minigpt.judge.kept import KeptReadings
from minigpt.judge.measured import Floor, measure
from minigpt.judge.measures import Distance
from minigpt.judge.own_code import require_own_code
from minigpt.judge.precision import errors_of, read_in_other_dtypes
from minigpt.judge.prompts import TextsToRead
from minigpt.judge.reading import Reading, Sample, Scored, gradient_texts
from minigpt.judge.reference import Reference, judging
from minigpt.judge.runners import OurRunner, Runner
from minigpt.judge.truth import Truth
from minigpt.machine import versions
from minigpt.norms.formulas import TrueNorm
from minigpt.precision import dtype_name
from minigpt.progress import Steps
from minigpt.report.numerals import brief

MOST_STREAM = 2**27  # numbers of the residual stream that are kept, in float64: 1 GiB

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


class Rounded(NamedTuple):
    """The outputs of transformers at the dtype.

    Attributes:
        readings: of the prompts, then of the windows.
        decoded: logits of each continuation, read token by token.
        losses: on the whole text file; None where minigpt computes them, of a GPT-2 in memory.
        gradients: by Parameter; None if they were not asked for.
        other_dtypes: logits of the first prompts in other dtypes, by their names.
    """

    readings: list[Reading]
    decoded: list[Tensor]
    losses: list[Scored] | None
    gradients: dict[str, Tensor] | None
    other_dtypes: dict[str, list[Tensor]]


def read_truth(
    facts: CheckpointFacts, tensors: dict[str, Tensor], texts: TextsToRead, most: int, gradients: bool, say: Steps
) -> Truth:
    """Return what transformers says of a checkpoint. One model is in memory at a time.

    Args:
        tensors: of a GPT-2, by their names in the files. They are taken out of this dict.
        most: greedy tokens to write after each prompt.
        gradients: whether to read the gradient of the loss for every Parameter.
        say: called with a few words as a step begins.

    Raises:
        MiniGPTError: if transformers is not finite at the dtype, or the noise floor is so high that transformers
            cannot be trusted.
    """
    with judging(), unchanged(facts.place, facts.state):
        truth = _read(facts, tensors, texts, most, gradients, say)
        require_low_floors(truth)
        return truth


def _read(
    facts: CheckpointFacts, tensors: dict[str, Tensor], texts: TextsToRead, most: int, gradients: bool, say: Steps
) -> Truth:
    say(f"transformers at {dtype_name(facts.dtype)}")
    facts, prompts, rounded = _read_rounded(facts, tensors, texts, most, gradients, say)
    bitwise, losses, other_dtypes = Distance(), rounded.losses, rounded.other_dtypes
    if facts.is_gpt2 and not facts.offload:
        say("minigpt in reference arithmetic")
        bitwise, losses = _read_ours(facts, texts, prompts, rounded.readings)
    else:
        say("transformers in other dtypes")
        other_dtypes = read_in_other_dtypes(lambda dtype: nullcontext(Reference(facts, dtype)), facts, prompts)
    say("transformers in float64")
    reference = Reference(facts, torch.float64)
    norms: dict[str, TrueNorm] = {}
    for site, norm in reference.host.norms().items():
        norms[site] = TrueNorm.of(norm, reference.host.site_of(norm))
    kept = KeptReadings(facts.offload, facts.device)
    exact = _kept(reference, facts, prompts, texts.windows, rounded.readings, kept)
    exact = say.each(exact, len(rounded.readings))
    measures = measure(facts.dtype, prompts, texts.windows, rounded.readings, exact, is_floor=True)
    measures.add_decoded(prompts, rounded.decoded, [kept[prompt].logits for prompt in prompts])
    true_gradients = None
    if rounded.gradients is not None:
        true_gradients = reference.gradients(gradient_texts(prompts, texts.windows))
        measures.gradients = relative_errors(rounded.gradients, true_gradients)
        true_gradients = {name: gradient.to(_narrow(facts)) for name, gradient in true_gradients.items()}
    floor = Floor.of(measures)
    precisions = {dtype_name(facts.dtype): floor.prompts.rms} | errors_of(other_dtypes, prompts, kept)
    return Truth(
        facts=facts,
        described=texts.described,
        why_random=texts.why_random,
        tokenizer=texts.tokenizer,
        prompts=prompts,
        windows=texts.windows,
        text_file=texts.file,
        text_ids=texts.file_ids,
        versions=versions(facts.device) | {"float32_products": "full float32 (TF32 off)"},
        exact=kept,
        norms=norms,
        floor=floor,
        bitwise_error=bitwise,
        losses=[(row.tokens, row.loss) for row in losses or ()],
        precisions=precisions,
        gradients=true_gradients,
    )


def _read_rounded(
    facts: CheckpointFacts, tensors: dict[str, Tensor], texts: TextsToRead, most: int, with_gradients: bool, say: Steps
) -> tuple[CheckpointFacts, list[Sample], Rounded]:
    """Let transformers at the dtype write and read.

    Returns:
        The facts that are known now; the prompts with what was written after them; the outputs.
    """
    reference = Reference(facts, tensors=tensors)
    require_own_code(reference.model)
    host = reference.host
    kept = reference.kept(facts.dtype)
    written = reference.write(texts.ids, most, facts.shape.eos_token_ids)
    prompts = [prompt for prompt, _ in written]
    decoded = [logits for _, logits in written]
    count = len(prompts) + len(texts.windows)
    readings, places = _read_prompts(reference, facts, prompts, decoded, say, count)
    windows = say.each(reference.read(texts.windows, places=False), count, first=len(prompts) + 1)
    for number, reading in enumerate(windows):
        require_finite(facts.dtype, f"window {number}", {"the logits": reading.logits})
        readings.append(reading)
    losses = None if reference.is_gpt2 else _losses(reference, facts, texts.file_ids)
    gradients = None
    if with_gradients:
        of_gradients = gradient_texts(prompts, texts.windows)
        gradients = reference.gradients(of_gradients)
        require_finite(facts.dtype, "the gradients", gradients)
    other_dtypes: dict[str, list[Tensor]] = {}
    if reference.is_gpt2:
        say("transformers in other dtypes")
        other_dtypes = read_in_other_dtypes(reference.computing_in, facts, prompts)
    facts = dataclasses.replace(
        facts,
        attention=reference.model.config._attn_implementation,
        notes=[*facts.notes, *note_on_left_out(reference.model)],
        places=places,
        sites=[place for place in places if place in host.sites],
        blocks=[place for place in places if place in host.blocks],
        embedding=host.embedding,
        kept=kept,
    )
    return facts, prompts, Rounded(readings, decoded, losses, gradients, other_dtypes)


def _read_prompts(
    reference: Reference, facts: CheckpointFacts, prompts: list[Sample], decoded: list[Tensor], say: Steps, count: int
) -> tuple[list[Reading], list[str]]:
    """Return what transformers computes of each prompt, and the places in the order of the data.

    Of prompts for which there is no room, the logits alone are returned.
    """
    room = MOST_STREAM // max(1, len(reference.host.sites) * facts.shape.n_embd)
    readings, places = list[Reading](), list[str]()
    for number, reading in enumerate(say.each(reference.read(prompts), count)):
        require_finite(facts.dtype, f"prompt {number}", {**reading.outputs, "the logits": reading.logits})
        require_finite(facts.dtype, f"prompt {number}, token by token", {"the logits": decoded[number]})
        places = [*reading.outputs]
        room -= len(prompts[number].ids)
        outputs: dict[str, Tensor] = {}
        if room >= 0:  # a copy, so that the texts that were read with this one are freed
            outputs = {place: y.clone() for place, y in reading.outputs.items()}
        readings.append(Reading(reading.logits, outputs))
    return readings, places


def _losses(runner: Runner, facts: CheckpointFacts, ids: list[int]) -> list[Scored]:
    """Return tokens and loss of each window of the whole text file.

    Raises:
        MiniGPTError: if a window's logits hold NaN.
    """
    losses = runner.window_losses(ids) or []
    for number, row in enumerate(losses):
        require_finite(facts.dtype, f"window {number}", {"the logits": torch.tensor(row.loss)})
    return losses


def _read_ours(
    facts: CheckpointFacts, texts: TextsToRead, prompts: list[Sample], readings: list[Reading]
) -> tuple[Distance, list[Scored]]:
    """Let minigpt in reference arithmetic read: it has transformers' bits.

    Returns:
        How far its logits of the prompts are from transformers', and its losses.
    """
    ours = OurRunner(facts.in_our_arithmetic(facts.attention), facts)
    read = ours.read(prompts, places=False)
    measures = measure(facts.dtype, prompts, [], read, readings[: len(prompts)], is_floor=True)
    return measures.prompts.distance, _losses(ours, facts, texts.file_ids)


def _narrow(facts: CheckpointFacts) -> torch.dtype:
    """Return the dtype in which long texts' logits, and gradients, are kept."""
    return torch.float64 if facts.dtype == torch.float64 else torch.float32


def _kept(
    reference: Reference,
    facts: CheckpointFacts,
    prompts: Sequence[Sample],
    windows: Sequence[Sample],
    rounded: Sequence[Reading],
    kept: KeptReadings,
) -> Iterator[Reading]:
    """Yield what transformers in float64 computes of each text, and keep what later judgements need."""
    with_places = [before for before in rounded if before.outputs]
    whole = prompts[: len(with_places)]  # a later prompt has no room for what norms and blocks compute
    for sample, reading in zip(whole, reference.read(whole), strict=True):
        blocks = {place: reading.outputs[place] for place in facts.blocks}
        inputs = {site: reading.inputs[site] for site in facts.sites}
        kept.keep(sample, Reading(reading.logits, blocks, inputs))
        yield reading
    others = prompts[len(whole) :]
    for sample, reading in zip(others, reference.read(others, places=False), strict=True):
        kept.keep(sample, reading)
        yield reading
    for sample, reading in zip(windows, reference.read(windows, places=False), strict=True):
        kept.keep(sample, Reading(reading.logits.to(_narrow(facts), copy=True)))
        yield reading


def require_finite(dtype: torch.dtype, text: str, outputs: Mapping[str, Tensor]) -> None:
    """Check what transformers computes of a text, by the names of norms and blocks in the order of the data.

    Raises:
        MiniGPTError: if a tensor holds NaN or infinity.
    """
    wider = "bfloat16" if dtype == torch.float16 else "float64"
    for place, output in outputs.items():
        if output.numel() and not torch.stack(output.aminmax()).isfinite().all():  # a NaN is both
            raise MiniGPTError(
                f"transformers itself is not finite at {dtype_name(dtype)}: NaN or infinity in {text}, first in "
                f"{place}; try {wider}, unless the checkpoint's weights hold NaN"
            )


def require_low_floors(truth: Truth) -> None:
    """Check that transformers at the dtype is near enough to its float64 self.

    Raises:
        MiniGPTError: if it is not, or the distance is not finite.
    """
    name = dtype_name(truth.facts.dtype)
    for floor, way in ((truth.floor.prompts, ""), (truth.floor.decoded, ", token by token,")):
        most = MOST_FLOOR[truth.facts.dtype] * floor.scale
        if not floor.rms <= most:  # written so that NaN is refused
            raise MiniGPTError(
                f"transformers at {name}{way} is {brief(floor.rms)} from itself in float64, on "
                f"logits of scale {brief(floor.scale)}, so it cannot be the reference; update transformers, or try "
                "another --attention or --dtype"
            )
