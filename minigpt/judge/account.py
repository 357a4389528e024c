"""An account of a file's error: what its weights make, what the program's arithmetic adds, and what is left.

T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engines.engine import Engine
from minigpt.judge.candidate import require_shape
from minigpt.judge.checkpoint_facts import read_facts
from minigpt.judge.diagnosis import FileTruth
from minigpt.judge.evidence import typical
from minigpt.judge.file_weights import FileWeights
from minigpt.judge.measures import LogitsMeter
from minigpt.judge.mistakes import Swaps
from minigpt.judge.mistakes.programs import documented
from minigpt.judge.original_data import OriginalData
from minigpt.judge.read_original import read_in_other_dtypes
from minigpt.judge.reading import Reading, Text
from minigpt.judge.reference import Reference
from minigpt.judge.runners import Runner
from minigpt.judge.screen import Noise
from minigpt.judge.texts import first_of
from minigpt.precision import dtype_name
from minigpt.progress import Steps
from minigpt.report.account_fields import Account, ErrorShare, TensorShare
from minigpt.report.noise import FAR_OFF, MOST_NOISE, noise_ratio
from minigpt.scoring import perplexity_of

FLOAT32 = ("f32", "float32")  # these round nothing
MOST_WORK = 3e10  # weights times tokens of the texts
BEGINNINGS = 32  # texts of two tokens: in longer ones a number is soon rounded the other way, and changes what follows
CALM = 16  # positions that no such number has reached: as many say what is left there
PART = 4  # of the calm positions of one computation, which another one may have too
CALM_SHARE = 10  # of all positions, where fewer are calm

LogitsOfTexts = Sequence[Tensor]  # of each text (T, V)


def account_of(
    truth: OriginalData,
    runner: Runner,
    engine: Engine,
    weights: FileWeights,
    decides: bool,
    by_tensor: bool,
    say: Steps,
) -> tuple[Account, FileTruth]:
    """Return where the difference of a program's logits from the original's comes from, and the truth of its file.

    The program's own error is taken against transformers in float64 with the file's weights. Then the arithmetic that
    the program documents is put into that model. A number near the middle of two steps may be rounded the other way by
    the program, and changes all later ones. So what is left is compared with what transformers at the dtype leaves with
    the same arithmetic, on all positions and on those that agree best.

    Args:
        decides: whether the verdict is on the program and its file.
        by_tensor: whether to measure the cost of each tensor.

    Raises:
        CheckpointError, MiniGPTError: if transformers cannot read the file's model.
        ConfigError: if that has another shape than the original.
    """
    say("the file's weights in float64")
    weights.tensors.clear()  # they are in ``weights.place`` too
    facts = replace(read_facts(weights.place, truth.facts.dtype)[0], source=engine.name, device=truth.facts.device)
    require_shape(truth, engine.name, facts.shape)
    texts = first_of(truth.texts.windows if truth.texts.file else truth.texts.prompts, facts.weights, MOST_WORK)
    short, arithmetic = beginnings(texts), documented(engine, weights.types)
    original, program, of_short = [truth.logits(text) for text in texts], read(runner, texts), read(runner, short)
    rounded = Reference(replace(facts, attention="sdpa"))
    at_dtype = read(rounded, texts)
    with Swaps() as swaps:
        for mistake in arithmetic:
            mistake.put(rounded.model, swaps)
        noise, noise_short = read(rounded, texts), read(rounded, short)
    del rounded  # before the next one is opened
    exact = Reference(replace(facts, attention="eager"), torch.float64)  # which is sdpa there
    right, steps = read(exact, texts), list[ErrorShare]()
    explained, floor = right, compared(at_dtype, right, texts).distance

    def share(part: str, value: LogitsOfTexts, true: LogitsOfTexts, *, is_model: bool = False) -> ErrorShare:
        meter = compared(value, true, texts)
        ratio = noise_ratio(meter.distance.rms, floor.rms, floor.scale)
        losses = meter.column("loss")
        perplexity = perplexity_of(float(losses.sum()), len(losses)) if is_model else None
        return ErrorShare(part, ratio, meter.mean("kl")["kl"], perplexity)

    with Swaps() as swaps:
        for mistake in arithmetic:
            say(mistake.words)
            mistake.put(exact.model, swaps)
            before, explained = explained, read(exact, texts)
            if not all(map(torch.equal, before, explained)):  # a Llama has no GELU
                steps.append(share(mistake.words, program, explained))
        true_short = read(exact, short)
    tensors = None
    if by_tensor:
        say("one tensor at a time")
        tensors = costs_of(truth, exact, weights)
    del exact
    say("transformers in other dtypes")
    others = read_in_other_dtypes(facts, texts)
    errors = errors_by_position([*program, *of_short], [*explained, *true_short])
    own_errors = errors_by_position([*noise, *noise_short], [*explained, *true_short])
    calm = int((own_errors <= FAR_OFF * floor.rms).sum())
    calm = calm // PART if calm >= CALM else len(errors) // CALM_SHARE
    precisions = [share(name, logits, right, is_model=True) for name, logits in others.items()]
    sizes: dict[str, float] = {}
    for one in precisions:
        sizes[one.part] = one.ratio * floor.rms
    around = Noise(floor.rms, floor.scale, sizes)
    effect = share("", explained, right).ratio
    if steps:
        half_agrees = floor.rms * math.sqrt(effect) / MOST_NOISE
        around = Noise(max(typical(own_errors, floor.rms), half_agrees), floor.scale, {}, row=floor.rms)
    exact_of: dict[Text, Reading] = {}
    for text, logits in zip([*texts, *short], [*explained, *true_short], strict=True):
        exact_of[text] = Reading(logits)
    whole = [text for text in texts if not text.first]
    whole.sort(key=lambda text: len(text.ids))
    of_file = replace(truth.texts, prompts=[*whole, *short], windows=[])
    data = replace(truth, facts=facts, texts=of_file, exact=exact_of)
    account = Account(
        program=engine.program,
        types=sorted({kind for kind in weights.types.values() if kind.lower() not in FLOAT32}),
        tokens=sum(map(len, original)),
        positions=len(errors),
        perplexity=share("", original, original, is_model=True).perplexity,
        total=share("the program, against the original", program, original, is_model=True),
        weights=share("the file's weights", right, original, is_model=True),
        own=share("the program's arithmetic", program, right),
        dtype=dtype_name(facts.dtype),
        precisions=precisions,
        steps=steps,
        effect=effect,
        noise=share("", noise, explained).ratio,
        calm=calm,
        calm_left=least(errors, calm) / floor.rms,
        calm_noise=least(own_errors, calm) / floor.rms,
        decides=decides,
        strange=weights.strange,
        tensors=tensors,
    )
    if not steps:
        arithmetic = []
    return account, FileTruth(data, arithmetic, around, weights)


def costs_of(truth: OriginalData, exact: Reference, weights: FileWeights) -> list[TensorShare]:
    """Return what each tensor that the file rounds costs, the most first.

    Args:
        exact: transformers in float64 with the file's weights. At the end they are so again.
    """
    original = Reference(truth.facts)  # at the dtype: half the memory
    before = dict(original.model.named_parameters())
    rounded: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, parameter in exact.model.named_parameters():
        if name in before and not torch.equal(parameter, before[name].to(parameter.dtype)):
            rounded[name] = (before[name], parameter)
    shortest = sorted(truth.texts.prompts, key=lambda sample: len(sample.ids))
    texts = first_of(shortest, truth.facts.weights * len(rounded), MOST_WORK)
    right = [truth.logits(sample) for sample in texts]
    without, alone = dict[str, float](), dict[str, float]()
    for measured in (without, alone):
        for name, tensors in rounded.items():
            exchange(*tensors)
            meter = compared(read(exact, texts), right, texts)
            measured[name] = meter.mean("kl")["kl"]
            exchange(*tensors)
        for tensors in rounded.values():
            exchange(*tensors)
    costs: list[TensorShare] = []
    for path, cost in alone.items():
        name = path.removeprefix(exact.prefix or "")
        kind = weights.types.get(name, "")
        costs.append(TensorShare(name, kind, cost, without[path]))
    return sorted(costs, key=lambda cost: -cost.alone)


def exchange(one: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange the values of two tensors, each in its own dtype, which the values of both fit."""
    one.data, other.data = other.data.to(one.dtype), one.data.to(other.dtype)


def beginnings(texts: Sequence[Text]) -> list[Text]:
    """Return texts of two tokens, of the tokens of others."""
    ids = list(dict.fromkeys(token for text in texts for token in text.ids))
    spread = [ids[number * len(ids) // (2 * BEGINNINGS)] for number in range(2 * BEGINNINGS)]
    return [Text.whole(spread[number::BEGINNINGS]) for number in range(BEGINNINGS)]


def read(runner: Runner, texts: Sequence[Text]) -> LogitsOfTexts:
    """Return a runner's logits of texts, in float64."""
    return [runner.logits(text).double() for text in texts]


def compared(value: LogitsOfTexts, true: LogitsOfTexts, texts: Sequence[Text]) -> LogitsMeter:
    """Return the figures of logits against the true ones, of the texts alone that are given."""
    meter = LogitsMeter()
    for text, one, other in zip(texts, value, true, strict=False):
        meter.add(other, one, text.targets(other.device), text.counted)
    return meter


def errors_by_position(value: LogitsOfTexts, true: LogitsOfTexts) -> Float[Tensor, " all"]:
    """Return the RMS error at each position of all texts."""
    errors = [(one - other).square().mean(-1).sqrt() for one, other in zip(value, true, strict=True)]
    return torch.cat(errors)


def least(errors: Float[Tensor, " all"], count: int) -> float:
    """Return the RMS of the least of some errors."""
    return math.sqrt(float(errors.square().sort().values[:count].mean()))
