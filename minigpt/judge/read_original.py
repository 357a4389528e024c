"""Reading an original: transformers at the dtype, minigpt in reference arithmetic, transformers in float64.

T tokens, V vocabulary, C embedding.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.checkpoint import Files, local_place
from minigpt.checkpoint.contents import unchanged
from minigpt.checkpoint.offloading import free_memory, may_take
from minigpt.checkpoint.transformers_model import note_on_left_out
from minigpt.choices import human_size
from minigpt.device import require_values, resolve_device
from minigpt.errors import CheckpointError, ConfigError, MiniGPTError, NormError, listing
from minigpt.garbage import uncollected
from minigpt.judge.checkpoint_facts import CheckpointFacts, read_facts, within_memory
from minigpt.judge.gradients import largest_errors
from minigpt.judge.measures import Distance, Floor, Measures
from minigpt.judge.original_data import OriginalData
from minigpt.judge.own_code import replaced_code
from minigpt.judge.reading import Reading, StoredReadings, Text
from minigpt.judge.reference import Reference, WideProducts, judging
from minigpt.judge.runners import OurRunner, Runner
from minigpt.judge.texts import Prompts, Texts, first_of, notes_on_length, read_texts, tokenizer_at
from minigpt.machine import versions
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.formulas import TrueNorm
from minigpt.norms.registry import lookup
from minigpt.precision import dtype_name
from minigpt.progress import Steps
from minigpt.recipe import Recipe
from minigpt.scoring import Scored
from minigpt.swap.fit import tokens_to_fit_on
from minigpt.swap.sites import matching

NEW_TOKENS = 32  # after each prompt
FEW_TOKENS = 4  # where each brings all weights from their files
OTHER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORK = 1e10  # weights times tokens that are read, but for the first prompt
MOST_WORK = 1e11  # of the first prompt, if that is read without being asked
MOST_STREAM = 2**27  # numbers of the residual stream that are kept, in float64: 1 GiB


class Rounded(NamedTuple):
    """What transformers at the dtype reads and writes.

    Attributes:
        facts: those that are known now.
        texts: with what was written after the prompts.
        readings: of the prompts, then of the windows.
        decoded: logits of each continuation, read token by token.
        losses: on the whole text file; None where minigpt computes them, of a GPT-2 in memory.
        gradients: by Parameter, with each implementation of attention; none if they were not asked for.
    """

    facts: CheckpointFacts
    texts: Texts
    readings: list[Reading]
    decoded: list[Tensor]
    losses: list[Scored] | None
    gradients: list[dict[str, Tensor]]


def read_original(
    recipe: Recipe,
    against: str | Path | None,
    beside: Iterable[Recipe],
    prompts: Prompts | None,
    text: str | Path | None,
    max_new_tokens: int | None,
    gradients: bool,
    say: Steps,
) -> OriginalData:
    """Return what transformers says of the original of a recipe's model: of its own source, or of ``against``.

    It is read at the dtype that the recipe's model has, before any code of a norm runs. One model is in memory at a
    time.

    Args:
        beside: more recipes that will be judged; of all, what can be known of norms and sites is checked first.
        prompts, text, max_new_tokens, gradients: as ``Original`` takes them.
        say: called with a few words as a step begins.

    Raises:
        CheckpointError, ConfigError, GenerationError, NormError: if it cannot be read; the message says why.
        MiniGPTError: if transformers is not finite at the dtype, or the noise floor is so high that transformers
            cannot be trusted.
    """
    say(f"reading {recipe.source if against is None else against}")
    with uncollected():  # transformers needs it; its import keeps its callers' variables, which later would be models
        import torch._dynamo
    device = resolve_device(recipe.wanted_device)
    require_values(device)
    for other in (recipe, *beside):
        other.check_fit()
    place = recipe.place()
    recipe.check_architecture(Files.at(place).architecture)
    facts, tensors = read_facts(place, recipe.dtype)
    for other in (recipe, *beside):
        _check_named(other, facts.sites)
        if other.fit is not None:
            tokens_to_fit_on(tokenizer_at(place), other.fit)  # it is long enough
    if against is not None:
        place = local_place(against, local_files_only=recipe.local_files_only)
        facts, tensors = read_facts(place, facts.dtype)
    source = str(recipe.source if against is None else against)
    if facts.unread:
        raise CheckpointError(
            f"{source} {facts.unread}, so transformers cannot be the judge's truth of it; `minigpt convert {source} "
            "FOLDER` writes what it reads"
        )
    most = FEW_TOKENS if max_new_tokens is None else max_new_tokens
    facts = within_memory(facts, may_take(recipe.memory, device), free_memory(device), most)
    if facts.offload and gradients:
        size = human_size(facts.weights * torch.float64.itemsize)
        raise ConfigError(f"needs the whole model in memory, {size} in float64; allow that", argument="gradients")
    if facts.offload:
        tensors.clear()
    elif max_new_tokens is None:
        most = NEW_TOKENS
    facts = dataclasses.replace(facts, source=source, attention=recipe.attention, device=device)
    texts = read_texts(facts, prompts, text)
    with judging(), unchanged(facts.place, facts.state):
        original = _read(facts, tensors, texts, most, gradients, say)
        original.require_low_floors()
        return original


def _read(
    facts: CheckpointFacts, tensors: dict[str, Tensor], texts: Texts, most: int, gradients: bool, say: Steps
) -> OriginalData:
    say(f"transformers at {dtype_name(facts.dtype)}")
    rounded = _read_rounded(facts, tensors, texts, most, gradients, say)
    facts = rounded.facts
    texts = rounded.texts
    losses = rounded.losses
    prompts = texts.prompts
    bitwise = Distance()
    say("transformers in other dtypes")
    other_dtypes = read_in_other_dtypes(facts, prompts, tensors)
    if facts.is_gpt2 and not facts.offload:
        say("minigpt in reference arithmetic")
        ours = OurRunner(facts.in_our_arithmetic(facts.attention), facts)
        for reading, before in zip(ours.read(prompts, places=False), rounded.readings, strict=False):
            bitwise.add(reading.logits, before.logits)
        losses = _losses(ours, facts, texts.file_ids)
        del ours
    say("transformers in float64")
    reference = Reference(facts, torch.float64, tensors)
    norms: dict[str, TrueNorm] = {}
    for site, norm in reference.host.norms().items():
        norms[site] = TrueNorm.of(norm, reference.host.site_of(norm))
    kept: dict[Text, Reading] = StoredReadings(facts.device) if facts.offload else {}
    measures = Measures(facts.dtype, is_floor=True)
    count = sum(bool(before.outputs) for before in rounded.readings)  # later prompts have no room for these
    readings = itertools.chain(
        reference.read(prompts[:count]),
        reference.read(prompts[count:], places=False),
        reference.read(texts.windows, places=False),
    )
    for text, before, exact in zip(texts.all, rounded.readings, say.each(readings, len(texts.all)), strict=True):
        is_prompt = text in prompts
        blocks = {place: y for place, y in exact.outputs.items() if place in facts.blocks}
        inputs = {site: x for site, x in exact.inputs.items() if site in facts.sites}
        logits = exact.logits if is_prompt else exact.logits.to(_narrow(facts), copy=True)
        kept[text] = Reading(logits, blocks, inputs)
        measures.add(text, before, exact, {}, is_prompt=is_prompt)
    decoded = measures.add_decoded(prompts, rounded.decoded, [kept[prompt].logits for prompt in prompts])
    true_gradients = None
    if rounded.gradients:
        true_gradients = reference.gradients(texts.of_gradients)
        measures.gradients = largest_errors(rounded.gradients, true_gradients)
        true_gradients = {name: gradient.to(_narrow(facts)) for name, gradient in true_gradients.items()}
    distance = measures.prompts.distance
    longer = measures.windows
    floor = Floor(
        prompts=distance,
        decoded=decoded.distance,
        windows=longer.distances,
        position=max(measures.prompts.largest_error, longer.largest_error),
        places={place: distance.relative for place, distance in measures.places.items()},
        gradients=measures.gradients or {},
        bitwise=bitwise,
        losses=[(row.tokens, row.loss) for row in losses or ()],
        precisions={dtype_name(facts.dtype): distance.rms} | errors_of(other_dtypes, prompts, kept),
    )
    return OriginalData(facts, texts, floor, kept, norms, true_gradients)


def _read_rounded(
    facts: CheckpointFacts, tensors: dict[str, Tensor], texts: Texts, most: int, with_gradients: bool, say: Steps
) -> Rounded:
    """Let transformers at the dtype write and read."""
    reference = Reference(facts, tensors=tensors)
    if replaced := replaced_code(reference.model):
        raise MiniGPTError(
            f"this process has replaced {listing(replaced)}, so what transformers computes here is no truth; judge in "
            "a process that has not, or against a record that such a process has written"
        )
    host = reference.host
    config = reference.model.config
    kept = reference.kept(facts.dtype)
    ids = [prompt.ids for prompt in texts.prompts]
    written = reference.write(ids, most, facts.shape.eos_token_ids)
    prompts = [prompt for prompt, _ in written]
    decoded = [logits for _, logits in written]
    texts = dataclasses.replace(texts, prompts=prompts)
    count = len(texts.all)
    readings, places = _read_prompts(reference, facts, prompts, decoded, say, count)
    windows = say.each(reference.read(texts.windows, places=False), count, first=len(prompts) + 1)
    for number, reading in enumerate(windows):
        require_finite(facts.dtype, f"window {number}", {"the logits": reading.logits})
        readings.append(reading)
    losses = None if reference.is_gpt2 else _losses(reference, facts, texts.file_ids)
    gradients = list[dict[str, Tensor]]()
    if with_gradients:
        gradients.append(reference.gradients(texts.of_gradients))
        require_finite(facts.dtype, "the gradients", gradients[0])
        with reference.other_attention():
            others = reference.gradients(texts.of_gradients)
        if all(bool(gradient.isfinite().all()) for gradient in others.values()):  # eager may overflow in float16
            gradients.append(others)
    notes = [*facts.notes, *note_on_left_out(reference.model)]
    if not reference.is_gpt2:
        notes += notes_on_length(config, texts, facts.shape)
    if unread := [site for site in host.sites if site not in places]:
        notes.append(f"No prompt reaches {listing(unread)}: no norm is judged there. A longer prompt may reach it.")
    facts = dataclasses.replace(
        facts,
        attention=config._attn_implementation,
        notes=notes,
        places=places,
        sites=[place for place in places if place in host.sites],
        blocks=[place for place in places if place in host.blocks],
        embedding=host.embedding,
        layer_types=list(getattr(config.get_text_config(), "layer_types", None) or ()),
        kept=kept,
        versions=versions(facts.device) | {"float32_products": "full float32 (TF32 off)"},
    )
    return Rounded(facts, texts, readings, decoded, losses, gradients)


def _read_prompts(
    reference: Reference, facts: CheckpointFacts, prompts: list[Text], decoded: list[Tensor], say: Steps, count: int
) -> tuple[list[Reading], list[str]]:
    """Return what transformers computes of each prompt, and the places in the order of the data.

    Of prompts for which there is no room, the logits alone are returned.
    """
    room = MOST_STREAM // max(1, len(reference.host.sites) * facts.shape.n_embd)
    readings, places = list[Reading](), list[str]()
    for number, reading in enumerate(say.each(reference.read(prompts), count)):
        require_finite(facts.dtype, f"prompt {number}", {**reading.outputs, "the logits": reading.logits})
        require_finite(facts.dtype, f"prompt {number}, token by token", {"the logits": decoded[number]})
        end = 0
        for place in reading.outputs:  # each behind the place before it: a short text may not reach every norm
            if place not in places:
                places.insert(end, place)
            end = places.index(place) + 1
        room -= len(prompts[number].ids)
        outputs: dict[str, Tensor] = {}
        if room >= 0:  # a copy, so that the texts that were read with this one are freed
            outputs = {place: y.clone() for place, y in reading.outputs.items()}
        readings.append(Reading(reading.logits, outputs))
    return readings, places


def _losses(runner: Runner, facts: CheckpointFacts, ids: list[int]) -> list[Scored]:
    """Return tokens and loss of each window of the whole text file, if there is one.

    Raises:
        MiniGPTError: if a window's logits hold NaN.
    """
    losses = []
    if ids:
        losses = runner.window_losses(ids) or []
    for number, row in enumerate(losses):
        require_finite(facts.dtype, f"window {number}", {"the logits": torch.tensor(row.loss)})
    return losses


def _narrow(facts: CheckpointFacts) -> torch.dtype:
    """Return the dtype in which long texts' logits, and gradients, are kept."""
    return torch.float64 if facts.dtype == torch.float64 else torch.float32


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


def _check_named(recipe: Recipe, sites: list[str]) -> None:
    """Check the names of norms and the patterns of sites. No code runs for that."""
    for pattern, norm in recipe.pairs():
        matching(pattern, sites)
        if not isinstance(norm, str):
            continue
        if (file := file_of(norm)) is None:
            if ":" not in norm:
                lookup(norm)
        elif not file.is_file():
            raise NormError(f"cannot read {file}: there is no such file")


def read_in_other_dtypes(
    facts: CheckpointFacts, prompts: Sequence[Text], tensors: dict[str, Tensor] | None = None
) -> dict[str, list[Float[Tensor, "seq vocab"]]]:
    """Return transformers' logits of the first prompts in other dtypes than the original's, by their names.

    transformers computes in the other dtype on the weights as the original's dtype rounds them, which it rounds further
    if that dtype is narrower. Of a large model there are none.

    Args:
        facts: of the original.
        tensors: as ``Reference`` takes them.
    """
    logits: dict[str, list[Tensor]] = {}
    if facts.weights * len(prompts[0].ids) > MOST_WORK:
        return logits
    for other in OTHER_DTYPES:
        if other == facts.dtype:
            continue
        with contextlib.suppress(MiniGPTError, RuntimeError):  # a device or a model may not know the dtype
            is_slow = other == torch.float16 and facts.device.type == "cpu"
            reference = Reference(facts, other, tensors)
            with WideProducts() if is_slow else contextlib.nullcontext():
                readings = [*reference.read(first_of(prompts, facts.weights, WORK), places=False)]
            del reference  # before the next one is opened
            logits[dtype_name(other)] = [reading.logits for reading in readings]
    return logits


def errors_of(
    logits: Mapping[str, Sequence[Tensor]], prompts: Sequence[Text], exact: Mapping[Text, Reading]
) -> dict[str, float]:
    """Return the RMS error of logits of the first prompts in each dtype, by its name."""
    errors: dict[str, float] = {}
    for name, of_prompts in logits.items():
        distance = Distance()
        for prompt, value in zip(prompts, of_prompts, strict=False):
            distance.add(value, exact[prompt].logits)
        errors[name] = distance.rms
    return errors
