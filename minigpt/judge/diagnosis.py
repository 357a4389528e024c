"""A diagnosis: the original is opened in float64, and the mistakes are sought that give the candidate's logits.

T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.checkpoint import Files
from minigpt.errors import MiniGPTError
from minigpt.judge.clues import clues_of
from minigpt.judge.evidence import Evidence, Network, Sums, predict
from minigpt.judge.file_weights import FileWeights
from minigpt.judge.measures import Distance
from minigpt.judge.mistake_search import MistakeSearch
from minigpt.judge.mistakes import Mistake, mistakes_of
from minigpt.judge.original_data import OriginalData
from minigpt.judge.reading import Text, as_batch
from minigpt.judge.reference import Reference
from minigpt.judge.runners import Runner
from minigpt.judge.screen import Noise
from minigpt.judge.texts import first_of
from minigpt.progress import Steps
from minigpt.report.fields import Diagnosed, ParityFigures
from minigpt.report.noise import MOST_NOISE, noise_ratio
from minigpt.report.numerals import brief

MOST_WORK = 3e10  # weights times tokens of the texts on which the nearest mistakes are compared
SAME = 1e-3  # of the noise floor: the network must be this near to the truth


class DiagnosisError(MiniGPTError):
    """A diagnosis that is not possible; the verdict stays."""


class FileTruth(NamedTuple):
    """The truth of another program's file: transformers in float64 with its weights and the program's arithmetic.

    Attributes:
        data: its facts, and the logits of prompts, the best first.
        arithmetic: what the program rounds; empty if that is not known.
        noise: of transformers at the dtype with the same arithmetic.
        weights: in whose folder the checkpoint is.
    """

    data: OriginalData
    arithmetic: list[Mistake]
    noise: Noise
    weights: FileWeights


def find_mistakes(
    truth: OriginalData, runner: Runner, say: Steps, *, of_windows: bool = False, file: FileTruth | None = None
) -> tuple[list[Diagnosed], bool]:
    """Return the mistakes that give the candidate's logits, and whether a narrower format may explain its error.

    There are none if no known mistake gives the logits. No format explains an error that is mostly one of mistakes.

    Args:
        of_windows: whether to compare the logits of the long text, where those of the prompts are right.
        file: the truth of a program's file, in place of the original's, so that mistakes alone are left.

    Raises:
        DiagnosisError: if the original's files are gone, or hold another model now.
    """
    say("opening the network")
    floor = sum(truth.floor.windows, Distance()) if of_windows else truth.floor.prompts
    noise, arithmetic = Noise(floor.rms, floor.scale, truth.floor.precisions), list[Mistake]()
    if file is not None:
        truth, arithmetic, noise, _ = file
    network = open_network(truth, arithmetic=arithmetic)
    weights = sum(parameter.numel() for parameter in network.model.parameters())
    shortest = sorted(truth.texts.prompts, key=lambda text: len(text.ids))
    whole = whole_windows(truth)
    chosen = truth.texts.prompts if file is not None else whole if of_windows else shortest
    texts: list[Evidence] = []
    for text in first_of(chosen, weights, MOST_WORK):
        texts.append(replace(evidence_of(truth, runner, text), least=noise.row))
    check_network(truth, network, evidence_of(truth, runner, shortest[0]))

    def longer() -> list[Evidence]:
        return [evidence_of(truth, runner, text) for text in whole[:1]]

    search = MistakeSearch(network, mistakes_of(network.model), texts, longer, noise, weights, say)
    return search.find(), not (search.is_like_a_half and search.is_mostly_of_mistakes)


def one_answer(truth: OriginalData, runner: Runner) -> list[str]:
    """Return that the candidate has several answers for the shortest prompt, in a sentence; nothing if it has one."""
    shortest = min(truth.texts.prompts, key=lambda text: len(text.ids))
    sums, floor = Sums(), truth.floor.prompts
    sums.add(runner.logits(shortest).double() - runner.logits(shortest).double())
    ratio = noise_ratio(sums.rms, floor.rms, floor.scale)
    if not MOST_NOISE < ratio < math.inf:
        return []
    return [f"Asked again for the same text, it gives logits {brief(ratio)} times the noise apart: dropout may be on."]


def whole_windows(truth: OriginalData) -> list[Text]:
    """Return the windows of the long text of which all logits are kept."""
    return [text for text in truth.texts.windows if len(truth.logits(text)) == len(text.ids)]


def find_clues(truth: OriginalData, runner: Runner, figures: ParityFigures, *, of_windows: bool = False) -> list[str]:
    """Return clues to a mistake that has no name, from all prompts.

    Args:
        of_windows: whether to look at the first window of the long text too, where the prompts are right.
    """
    windows = whole_windows(truth)[:1] if of_windows else []
    texts = [evidence_of(truth, runner, text) for text in [*truth.texts.prompts, *windows]]
    return clues_of(truth, texts, figures)


def unseen_mistakes(truth: OriginalData, runner: Runner, say: Steps) -> list[str]:
    """Return the commonest mistakes that pass on the shortest prompt: those with a plain cure, in every place.

    Raises:
        DiagnosisError: as ``find_mistakes`` does.
    """
    say("putting common mistakes into the network")
    network, floor = open_network(truth), truth.floor.prompts.rms
    text = evidence_of(truth, runner, min(truth.texts.prompts, key=lambda text: len(text.ids)))
    check_network(truth, network, text)
    unseen = []
    for mistake in mistakes_of(network.model):
        if mistake.cure and mistake.rank == 0:
            effect = predict(network, (mistake,), [text]).effect
            if math.hypot(effect, floor) <= MOST_NOISE * floor:
                unseen.append(mistake.words)
    return unseen


def open_network(
    truth: OriginalData, compute: torch.dtype | None = None, arithmetic: Sequence[Mistake] = ()
) -> Network:
    """Return the original in a dtype: by default in float64, or in float32 where bfloat16 has far more noise.

    Args:
        arithmetic: what a program rounds, which is put in too.

    Raises:
        DiagnosisError: if its files are gone.
    """
    facts = truth.facts
    if not facts.place.exists():
        raise DiagnosisError(f"The diagnosis needs the original at {facts.place}, which is no longer there")
    is_ours = Files.at(facts.place).architecture is None and not facts.offload
    if is_ours:
        network = our_network(truth, torch.float64, arithmetic)
        if facts.dtype != torch.float64 and not arithmetic:
            network.quick = our_network(truth, torch.float32)
        return network
    if compute is None:
        compute = torch.float32 if facts.dtype == torch.bfloat16 and not arithmetic else torch.float64
    if arithmetic:  # which is put into ``sdpa``
        facts = replace(facts, attention="eager" if compute == torch.float64 else "sdpa")
    reference = Reference(facts, compute)

    def run(ids: Tensor, step: int) -> Tensor:
        return reference(ids)[0][:, ::step]

    def rounded() -> Network:
        return open_network(truth, facts.dtype, arithmetic)

    return Network(
        reference.model, run, facts.shape.n_positions, None if facts.offload else rounded, is_foreign=True,
        arithmetic=arithmetic,
    )  # fmt: skip


def our_network(truth: OriginalData, compute: torch.dtype, arithmetic: Sequence[Mistake] = ()) -> Network:
    """Return our GPT-2 with the weights as the original's dtype rounds them."""
    model: Any = truth.facts.in_our_arithmetic("sdpa" if arithmetic else "eager").to(compute)

    def hidden(ids: Tensor) -> Tensor:
        return model.hidden_states(ids)[0]

    def run(ids: Tensor, step: int) -> Tensor:
        if "head" in vars(model):  # a mistake has put another one there
            return model.head(model.hidden_states(ids))[0, :, ::step]
        owner = model.wte if model.config.tie_word_embeddings else model.lm_head
        return F.linear(hidden(ids), owner.weight[::step])

    def rounded() -> Network:
        return our_network(truth, truth.facts.dtype, arithmetic)

    return Network(
        model, run, truth.facts.shape.n_positions, rounded, None if arithmetic else hidden, arithmetic=arithmetic
    )


def evidence_of(truth: OriginalData, runner: Runner, text: Text) -> Evidence:
    logits = runner.logits(text).double()
    logits = logits.masked_fill(logits.isinf(), torch.nan)
    longest = max(prompt.new_from for prompt in truth.texts.prompts)
    padding = max(0, longest - text.new_from)
    return Evidence(as_batch(text.ids, truth.facts.device), logits, truth.logits(text).double(), text.new_from, padding)


def check_network(truth: OriginalData, network: Network, text: Evidence) -> None:
    """Check that a network is the original.

    Raises:
        DiagnosisError: if it computes something else.
    """
    sums = Sums()
    sums.add(network.logits((), text) - text.truth)
    if sums.rms > SAME * max(truth.floor.prompts.rms, 1e-9 * truth.floor.prompts.scale):
        raise DiagnosisError(
            f"The diagnosis needs the original as it was read, and {truth.facts.place}, as this process computes it, "
            "is another model"
        )
