"""Reading an original: transformers at the dtype, minigpt in reference arithmetic, transformers in float64.

T tokens, V vocabulary, C embedding.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.checkpoint.contents import unchanged
from minigpt.choices import human_size
from minigpt.errors import MiniGPTError
from minigpt.judge.finite import NotFiniteError, explain, require_finite, require_finite_gradients
from minigpt.judge.gpt2 import OurRunner
from minigpt.judge.gradients import relative_errors
from minigpt.judge.kept import KeptReadings
from minigpt.judge.measured import Floor, Measures, measure
from minigpt.judge.measures import Distance
from minigpt.judge.perplexity import windows_of
from minigpt.judge.precision import errors_of, read_in_other_dtypes
from minigpt.judge.prompts import TextsToRead
from minigpt.judge.reading import Reading, Runner, Sample, Scored, gradient_texts, read
from minigpt.judge.reference import Reference, judging
from minigpt.judge.runners import Layout
from minigpt.judge.source import Source, norm_in_ours
from minigpt.judge.true_norm import TrueNorm
from minigpt.judge.truth import Truth
from minigpt.machine import versions
from minigpt.precision import dtype_name
from minigpt.progress import Steps
from minigpt.recipe import Recipe
from minigpt.report.numerals import brief

MOST_STREAM = 2**27  # numbers of the residual stream that are kept, in float64: 1 GiB

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


@dataclass
class Rounded:
    """The outputs of transformers at the dtype.

    Attributes:
        readings: of the prompts, then of the windows.
        decoded: logits of each continuation, read token by token.
        prompts: the prompts with what was written after them.
        attention: the implementation that it has.
        places, sites, blocks, embedding: the paths of its norms and blocks, in the order of the data.
        kept: the dtypes of what it keeps in another dtype.
        losses: on the whole text file; None where minigpt computes them, of a GPT-2 in memory.
        gradients: by Parameter; None if they were not asked for.
        other_dtypes: logits of the first prompts in other dtypes, by their names.
    """

    readings: list[Reading]
    decoded: list[Tensor]
    prompts: list[Sample]
    attention: str
    places: list[str]
    sites: list[str]
    blocks: list[str]
    embedding: str
    kept: dict[str, str]
    losses: list[Scored] | None
    gradients: dict[str, Tensor] | None
    other_dtypes: dict[str, list[Tensor]]


@dataclass
class Exact:
    """The outputs of transformers in float64.

    Attributes:
        readings: by text.
        norms: by site.
        floor: how far transformers at the dtype is from it.
        gradients: by Parameter; None if they were not asked for.
    """

    readings: Mapping[Sample, Reading]
    norms: dict[str, TrueNorm]
    floor: Floor
    gradients: dict[str, Tensor] | None


class TruthReader:
    """Reads an original, with one model in memory at a time.

    Args:
        name: what the user calls the source.
        most: greedy tokens to write after each prompt.
        gradients: whether to read the gradient of the loss for every Parameter.
        say: called with a few words as a step begins.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        texts: TextsToRead,
        attention: str,
        device: torch.device,
        most: int,
        gradients: bool,
        say: Steps,
    ) -> None:
        self.name, self.source, self.texts = name, source, texts
        self.attention, self.device = attention, device
        self.most, self.has_gradients, self.say = most, gradients, say

    def read(self) -> Truth:
        """Return what transformers says.

        Raises:
            MiniGPTError: if transformers is not finite at the dtype, or the noise floor is so high that transformers
                cannot be trusted.
        """
        with judging(), unchanged(self.source.place, self.source.state):
            try:
                truth = self._read()
                require_low_floors(truth)
                return truth
            except NotFiniteError as error:
                overflow = error.overflow
            # The model that overflowed is freed here.
            source = self.source
            raise explain(overflow, source.place, self.attention, source.dtype, self.device, source.offload)

    def _read(self) -> Truth:
        source, texts = self.source, self.texts
        self.say(f"transformers at {dtype_name(source.dtype)}")
        rounded = self._read_rounded()
        self.attention = rounded.attention
        bitwise, losses = Distance(), rounded.losses
        if source.is_gpt2 and not source.offload:
            self.say("minigpt in reference arithmetic")
            bitwise, losses = self._read_ours(rounded)
        else:
            rounded.other_dtypes = self._read_in_other_dtypes(self._opened_in, rounded.prompts)
        self.say("transformers in float64")
        exact = self._read_exact(rounded)
        precisions = {dtype_name(source.dtype): exact.floor.prompts.rms}
        precisions |= errors_of(rounded.other_dtypes, rounded.prompts, exact.readings)
        return Truth(
            source=self.name,
            place=source.place,
            attention=rounded.attention,
            device=self.device,
            dtype=source.dtype,
            config=source.shape,
            described=texts.described,
            why_random=texts.why_random,
            tokenizer=texts.tokenizer,
            prompts=rounded.prompts,
            windows=texts.windows,
            text_file=texts.file,
            text_ids=texts.file_ids,
            versions=versions(self.device) | {"float32_products": "full float32 (TF32 off)"},
            exact=exact.readings,
            places=rounded.places,
            sites=rounded.sites,
            blocks=rounded.blocks,
            embedding=rounded.embedding,
            norm=source.norm,
            norms=exact.norms,
            floor=exact.floor,
            bitwise_error=bitwise,
            losses=[(row.tokens, row.loss) for row in losses or ()],
            precisions=precisions,
            kept=rounded.kept,
            gradients=exact.gradients,
            offload=source.offload,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        """Return a sentence if the weights take more than they may: whether they stayed in their files."""
        source = self.source
        if not source.is_too_large:
            return []
        size, most = human_size(source.size), human_size(source.memory or 0)
        note = f"The model takes {size} in float64, and may take {most} here."
        if source.why_whole is not None:
            return [f"{note} It is in memory all the same, since {source.why_whole}."]
        return [
            f"{note} So its weights are read block by block, and at most {self.most} new tokens are compared after "
            "each prompt."
        ]

    def _reference(self, attention: str, compute: torch.dtype) -> Reference:
        source = self.source
        return Reference(
            source.place, attention, source.dtype, self.device, compute, source.take_tensors(), source.offload
        )

    @contextlib.contextmanager
    def _opened_in(self, compute: torch.dtype) -> Iterator[Reference]:
        """Open another architecture than GPT-2 in a dtype for the block."""
        yield self._reference(self.attention, compute)

    def _read_in_other_dtypes(self, open_in: Callable, prompts: Sequence[Sample]) -> dict[str, list[Tensor]]:
        self.say("transformers in other dtypes")
        return read_in_other_dtypes(open_in, self.source.dtype, prompts, self.source.weights)

    def _read_rounded(self) -> Rounded:
        """Let transformers at the dtype write and read."""
        reference = self._reference(self.attention, self.source.dtype)
        host = reference.host
        kept = reference.kept(self.source.dtype)
        prompts, decoded = reference.write(self.texts.ids, self.most, self.source.shape.eos_token_ids)
        readings, places = self._read_prompts(reference, prompts, decoded)
        texts = len(prompts) + len(self.texts.windows)
        windows = self.say.each(reference.logits_of_all(self.texts.windows), texts, first=len(prompts) + 1)
        for number, reading in enumerate(windows):
            ids = self.texts.windows[number].ids
            require_finite(f"the logits of window {number}", ids, [reading.logits])
            readings.append(reading)
        losses = None if reference.is_gpt2 else self._losses(reference)
        gradients = None
        if self.has_gradients:
            texts = gradient_texts(prompts, self.texts.windows)
            gradients = reference.gradients(texts)
            require_finite_gradients(gradients, texts)
        other_dtypes: dict[str, list[Tensor]] = {}
        if reference.is_gpt2:
            other_dtypes = self._read_in_other_dtypes(reference.computing_in, prompts)
        sites = [place for place in places if place in host.sites]
        blocks = [place for place in places if place in host.blocks]
        attention = reference.model.config._attn_implementation
        return Rounded(
            readings, decoded, prompts, attention, places, sites, blocks, host.embedding, kept, losses, gradients,
            other_dtypes,
        )  # fmt: skip

    def _read_prompts(
        self, reference: Reference, prompts: Sequence[Sample], decoded: Sequence[Tensor]
    ) -> tuple[list[Reading], list[str]]:
        """Return what transformers computes of each prompt, and the places in the order of the data.

        Of prompts for which there is no room, the logits alone are returned.
        """
        room = MOST_STREAM // max(1, len(reference.host.sites) * self.source.shape.n_embd)
        readings, places = list[Reading](), list[str]()
        texts = len(prompts) + len(self.texts.windows)
        for number, reading in enumerate(self.say.each(read(reference, prompts), texts)):
            ids = prompts[number].ids
            tensors = [reading.logits, *reading.outputs.values()]
            require_finite(f"the outputs of prompt {number}", ids, tensors)
            require_finite(f"the logits of prompt {number}, token by token,", ids, [decoded[number]])
            places = [*reading.outputs]
            room -= len(ids)
            outputs: dict[str, Tensor] = {}
            if room >= 0:  # a copy, so that the texts that were read with this one are freed
                outputs = {place: y.clone() for place, y in reading.outputs.items()}
            readings.append(Reading(reading.logits, outputs))
        return readings, places

    def _losses(self, runner: Runner) -> list[Scored]:
        """Return tokens and loss of each window of the whole text file.

        Raises:
            NotFiniteError: if a window's logits hold NaN.
        """
        ids = self.texts.file_ids
        losses = runner.window_losses(ids) or []
        windows = windows_of(len(ids), self.source.shape.window)
        for number, (row, window) in enumerate(zip(losses, windows, strict=True)):
            start, _, end = window
            require_finite(f"the logits of window {number}", ids[start:end], [torch.tensor(row.loss)])
        return losses

    def _read_ours(self, rounded: Rounded) -> tuple[Distance, list[Scored]]:
        """Let minigpt in reference arithmetic read: it has transformers' bits.

        Returns:
            How far its logits of the prompts are from transformers', and its losses.
        """
        recipe = Recipe(
            self.source.place,
            norm=norm_in_ours(self.source.norm),
            attention=rounded.attention,
            arithmetic="reference",
            device=self.device,
            dtype=self.source.dtype,
        )
        shape = self.source.shape
        layout = Layout(
            self.device, shape.vocab_size, shape.n_positions, rounded.sites, rounded.blocks, rounded.embedding
        )
        ours = OurRunner(recipe.open()[0], layout)
        prompts = rounded.prompts
        measures = Measures(self.source.dtype, is_floor=True)
        measure(measures, prompts, [], ours.logits_of_all(prompts), rounded.readings[: len(prompts)])
        return measures.prompts.distance, self._losses(ours)

    def _read_exact(self, rounded: Rounded) -> Exact:
        """Let transformers in float64 read, and measure how far it is from itself at the dtype."""
        other = "eager" if rounded.attention == "sdpa" else "sdpa"  # so that float64 has a noise floor too
        reference = self._reference(other, torch.float64)
        host = reference.host
        norms: dict[str, TrueNorm] = {}
        for site, norm in host.norms().items():
            norms[site] = TrueNorm.of(norm, host.site_of(norm))
        kept = KeptReadings(self.source.offload, self.device)
        measures = Measures(self.source.dtype, is_floor=True)
        exact = self.say.each(self._kept(reference, rounded, kept), len(rounded.readings))
        measure(measures, rounded.prompts, self.texts.windows, rounded.readings, exact)
        measures.add_decoded(rounded.prompts, rounded.decoded, [kept[prompt].logits for prompt in rounded.prompts])
        gradients = None
        if rounded.gradients is not None:
            gradients = reference.gradients(gradient_texts(rounded.prompts, self.texts.windows))
            measures.gradients = relative_errors(rounded.gradients, gradients)
            gradients = {name: gradient.to(self._narrow) for name, gradient in gradients.items()}
        return Exact(kept, norms, Floor.of(measures), gradients)

    @property
    def _narrow(self) -> torch.dtype:
        """The dtype in which long texts' logits, and gradients, are kept."""
        return torch.float64 if self.source.dtype == torch.float64 else torch.float32

    def _kept(self, reference: Reference, rounded: Rounded, kept: KeptReadings) -> Iterator[Reading]:
        """Yield what transformers in float64 computes of each text, and keep what later judgements need."""
        with_places = [before for before in rounded.readings if before.outputs]
        whole = rounded.prompts[: len(with_places)]  # a later prompt has no room for what norms and blocks compute
        for sample, reading in zip(whole, reference.read_all(whole), strict=True):
            blocks = {place: reading.outputs[place] for place in rounded.blocks}
            inputs = {site: reading.inputs[site] for site in rounded.sites}
            kept.keep(sample, Reading(reading.logits, blocks, inputs))
            yield reading
        others = rounded.prompts[len(whole) :]
        for sample, reading in zip(others, reference.logits_of_all(others), strict=True):
            kept.keep(sample, reading)
            yield reading
        for sample, reading in zip(self.texts.windows, reference.logits_of_all(self.texts.windows), strict=True):
            kept.keep(sample, Reading(reading.logits.to(self._narrow, copy=True)))
            yield reading


def require_low_floors(truth: Truth) -> None:
    """Check that transformers at the dtype is near enough to its float64 self.

    Raises:
        MiniGPTError: if it is not, or the distance is not finite.
    """
    name = dtype_name(truth.dtype)
    for floor, way in ((truth.floor.prompts, ""), (truth.floor.decoded, ", token by token,")):
        most = MOST_FLOOR[truth.dtype] * floor.scale
        if not floor.rms <= most:  # written so that NaN is refused
            raise MiniGPTError(
                f"transformers at {name}{way} is {brief(floor.rms)} from itself in float64, on "
                f"logits of scale {brief(floor.scale)}, so it cannot be the reference; update transformers, or try "
                "another --attention or --dtype"
            )
