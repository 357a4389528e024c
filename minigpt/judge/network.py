"""Causes of a FAIL: the precision that the error is like, and the mistake that gives the candidate's logits.

T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.errors import MiniGPTError
from minigpt.judge.checkpoint_facts import architecture_of
from minigpt.judge.diagnose import MistakeSearch, Noise
from minigpt.judge.evidence import Network, Sums, Text
from minigpt.judge.mistakes import Mistake, mistakes_of
from minigpt.judge.precision import precision_of
from minigpt.judge.reading import Sample
from minigpt.judge.reference import Reference
from minigpt.judge.runners import Runner
from minigpt.judge.truth import Truth
from minigpt.report.fields import MOST_NOISE, Causes, Diagnosed, ParityFigures, Verdict, outcome_of

MOST_WORK = 3e10  # weights times tokens of the texts on which the nearest mistakes are compared
QUICK = 2e7  # weights of a model that is diagnosed without being asked
SAME = 1e-3  # of the noise floor: the network must be this near to the truth

Say = Callable[[str], None]


def is_quick(truth: Truth) -> bool:
    """Return whether a diagnosis takes a few seconds: of a small GPT-2."""
    is_gpt2 = truth.bitwise_error.count > 0
    return is_gpt2 and truth.facts.shape.weights <= QUICK


def explain(
    truth: Truth, runner: Runner, figures: ParityFigures, verdict: Verdict, diagnose: bool | None, say: Say
) -> Causes:
    """Return whose precision an error is like, and the mistakes that give it, if a diagnosis is due.

    Args:
        diagnose: None for a FAIL of a small GPT-2 alone.
    """
    precision = precision_of(figures.logits.rms_error, truth.precisions)
    # Windows, or tokens read one by one, may be off all the same.
    are_prompts_right = figures.logits.ratio <= MOST_NOISE
    if diagnose is None:
        diagnose = outcome_of(figures, verdict) == "FAIL" and is_quick(truth) and not are_prompts_right
    if not diagnose:
        return Causes(precision=precision)
    if verdict.passed:
        return Causes(precision=precision, notes=["A diagnosis is for a FAIL: there is no mistake to look for."])
    if are_prompts_right:
        note = "The diagnosis compares the logits of prompts that are read whole, and these are right."
        return Causes(precision=precision, notes=[note])
    try:
        return Causes(precision=precision, diagnosis=find_mistakes(truth, runner, say))
    except DiagnosisError as error:
        return Causes(precision=precision, notes=[f"{error}."])


class DiagnosisError(MiniGPTError):
    """A diagnosis that is not possible; the verdict stays."""


def find_mistakes(truth: Truth, runner: Runner, say: Say) -> list[Diagnosed]:
    """Return the mistakes that give the candidate's logits; none if no known one does.

    Raises:
        DiagnosisError: if the original's files are gone, or hold another model now.
    """
    if not truth.facts.place.exists():
        raise DiagnosisError(f"The diagnosis needs the original at {truth.facts.place}, which is no longer there")
    say("opening the network in float64")
    network, own_noise = open_network(truth)
    weights = sum(parameter.numel() for parameter in network.model.parameters())
    texts = texts_of(truth, runner, weights)
    check_network(truth, network, texts[0])

    def longer() -> list[Text]:
        whole = [sample for sample in truth.windows if len(truth.logits(sample)) == len(sample.ids)]
        return [text_of(truth, runner, sample) for sample in whole[:1]]

    def own(mistakes: Sequence[Mistake]) -> float:
        return own_noise(network, mistakes, texts)

    noise = Noise(truth.floor.prompts.rms, truth.floor.prompts.scale, truth.precisions, own)
    return MistakeSearch(network, mistakes_of(network.model), texts, longer, noise, weights, say).find()


OwnNoise = Callable[[Network, Sequence[Mistake], Sequence[Text]], float]


def open_network(truth: Truth) -> tuple[Network, OwnNoise]:
    """Return the original in float64, and what computes the noise of the same model with mistakes at the dtype."""
    if architecture_of(truth.facts.place) is None and not truth.facts.offload:
        exact = our_network(truth, torch.float64)

        def own_noise(network: Network, mistakes: Sequence[Mistake], texts: Sequence[Text]) -> float:
            return noise_of(our_network(truth, truth.facts.dtype), network, mistakes, texts)

        return exact, own_noise
    reference = Reference(truth.facts, torch.float64)

    def run(ids: Tensor) -> Tensor:
        return reference(ids)[0]

    return Network(reference.model, run, truth.facts.shape.n_positions), no_noise


def our_network(truth: Truth, compute: torch.dtype) -> Network:
    """Return our GPT-2 with the weights as the original's dtype rounds them."""
    model: Any = truth.facts.in_our_arithmetic("eager").to(compute)

    def run(ids: Tensor) -> Tensor:
        return model.head(model.hidden_states(ids))[0]

    def hidden(ids: Tensor) -> Tensor:
        return model.hidden_states(ids)[0]

    return Network(model, run, truth.facts.shape.n_positions, hidden)


def noise_of(rounded: Network, exact: Network, mistakes: Sequence[Mistake], texts: Sequence[Text]) -> float:
    """Return the RMS error of a network at the dtype, with mistakes in both."""
    sums = Sums()
    for text in texts:
        sums.add(rounded.logits(mistakes, text).double() - exact.logits(mistakes, text))
    return sums.rms


def no_noise(network: Network, mistakes: Sequence[Mistake], texts: Sequence[Text]) -> float:
    """Return 0: another architecture's noise with a mistake in it is not known."""
    return 0.0


def texts_of(truth: Truth, runner: Runner, weights: int) -> list[Text]:
    """Return what the candidate computes of the prompts, the shortest first, as far as there is time for them."""
    prompts = sorted(truth.prompts, key=lambda sample: len(sample.ids))
    texts, tokens = list[Text](), 0
    for sample in prompts:
        tokens += len(sample.ids)
        if texts and tokens * weights > MOST_WORK:
            break
        texts.append(text_of(truth, runner, sample))
    return texts


def text_of(truth: Truth, runner: Runner, sample: Sample) -> Text:
    logits = runner.logits(sample).double()
    logits = logits.masked_fill(logits.isinf(), torch.nan)
    return Text(truth.tensor(sample.ids), logits, truth.logits(sample).double())


def check_network(truth: Truth, network: Network, text: Text) -> None:
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
