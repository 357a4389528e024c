"""The file that keeps an original: what transformers says of a checkpoint, for later judgements and other programs.

T tokens, V vocabulary, C embedding.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt.device import resolve_device
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.files import replaced, require_file
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.measured import Floor
from minigpt.judge.measures import Distance
from minigpt.judge.reading import Reading, Sample
from minigpt.judge.truth import Truth
from minigpt.norms.formulas import TrueNorm
from minigpt.precision import dtype_name, resolve_dtype
from minigpt.shape import Shape
from minigpt.tokenizer import Tokenizer

VERSION = 7  # of the file
# Fields of a truth, and of its facts, that JSON holds as they are.
PLAIN_FIELDS = ("versions", "described", "why_random", "text_file", "text_ids", "losses", "precisions")
PLAIN_FACTS = (
    "source", "is_gpt2", "weights", "attention", "norm", "sites", "places", "blocks", "embedding", "kept", "offload",
    "notes",
)  # fmt: skip
FOR_OTHERS = ("model", "dtype", "attention", "versions", "noise_floor_rms", "noise_floor_max")
"""Fields that other programs find by themselves."""
GRADIENT = "kept.gradient."  # begins the keys of gradients


def save_truth(truth: Truth, file: str | Path) -> None:
    """Write a truth to a safetensors file: the record that ``load_truth`` reads, and other programs too.

    For each text N it has ``ids.N`` (T), ``logits.N`` (T, V) in float64, and the true output of every norm and
    block, ``h.3.ln_1.N`` and ``h.3.N`` (T, C). Keys that begin with ``kept.`` are for ``load_truth``.

    Raises:
        MiniGPTError: if it cannot be written.
    """
    state = metadata_of(truth)
    metadata = {"format": "pt", "minigpt": json.dumps(state)}
    for name in FOR_OTHERS:
        value = state[name]
        metadata[name] = value if isinstance(value, str) else json.dumps(value)
    tensors: dict[str, Tensor] = {}
    for name, tensor in tensors_of(truth):
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    try:
        with replaced(file) as new:
            save_file(tensors, new, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise MiniGPTError(f"cannot write {file}: {error}") from error


def tensors_of(truth: Truth) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a truth by their keys in the file. Those of a text are read as they are asked for."""
    for n, sample in enumerate(truth.samples):
        yield f"ids.{n}", torch.tensor(sample.ids)
        yield f"logits.{n}", truth.logits(sample).double()
        for place, x in truth.true_outputs(sample).items():
            yield f"{place}.{n}", x
        for site, x in truth.exact[sample].inputs.items():
            yield f"kept.{site}.{n}", x
    for site, norm in truth.norms.items():
        if norm.weight is not None:
            yield f"kept.{site}.weight", norm.weight
        if norm.bias is not None:
            yield f"kept.{site}.bias", norm.bias
    for name, x in (truth.gradients or {}).items():
        yield GRADIENT + name, x


def metadata_of(truth: Truth) -> dict[str, Any]:
    """Return what a truth holds, but for its tensors, in JSON's own types."""
    state: dict[str, Any] = {name: getattr(truth, name) for name in PLAIN_FIELDS}
    state |= {name: getattr(truth.facts, name) for name in PLAIN_FACTS}
    norms = {}
    for site, norm in truth.norms.items():
        if norm.module is None:
            norms[site] = (norm.kind, norm.eps, norm.rounds)
    texts = []
    for sample in truth.samples:
        first, end = sample.compared.start, sample.compared.stop
        texts.append([sample.new_from, first, end, sample.counted, sample.start])
    state["version"] = VERSION
    state["model"] = truth.facts.source
    state["place"] = str(truth.facts.place)
    state["dtype"] = dtype_name(truth.facts.dtype)
    state["config"] = dataclasses.asdict(truth.facts.shape)
    state["prompt_texts"] = len(truth.prompts)
    state["texts"] = texts
    state["norms"] = norms
    return state | state_of_floor(truth)


def state_of_floor(truth: Truth) -> dict[str, Any]:
    """Return the noise floor, and the error of our reference arithmetic, in JSON's own types."""
    floor = truth.floor
    distances = {
        "noise_floor": dataclasses.astuple(floor.prompts),
        "decoding_floor": dataclasses.astuple(floor.decoded),
        "bitwise_error": dataclasses.astuple(truth.bitwise_error),
    }
    noise: dict[str, float] = {}
    for place in truth.facts.places:
        noise[place] = floor.places.get(place, 0.0)
    return {
        "noise_floor_rms": floor.prompts.rms,
        "noise_floor_max": floor.prompts.largest,
        "distances": distances,
        "window_floors": [dataclasses.astuple(distance) for distance in floor.windows],
        "position_noise": floor.position,
        "noise": noise,
        "gradient_noise": floor.gradients,
    }


def load_truth(file: str | Path, device: str | torch.device | None = None) -> Truth:
    """Return what ``save_truth`` wrote. transformers need not be installed.

    Raises:
        CheckpointError: if the file is not such a record, or another version of minigpt wrote it.
    """
    place = resolve_device(device)
    require_file(file, CheckpointError)
    truth = None
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt", device=str(place)) as record:
            metadata = record.metadata() or {}
            state = json.loads(metadata["minigpt"])
            for name in record.keys():  # noqa: SIM118
                tensors[name] = record.get_tensor(name)
        if state.get("version") == VERSION:
            truth = truth_of(state, tensors, place)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{file} is not a record of minigpt parity --record: {why}") from error
    if truth is None:
        raise CheckpointError(f"{file} is a record of another version of minigpt; write it again with --record")
    return truth


def truth_of(state: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Truth:
    """Return the truth of a record's state and tensors."""
    exact: dict[Sample, Reading] = {}
    for n, (new_from, first, end, counted, start) in enumerate(state["texts"]):
        ids = tensors[f"ids.{n}"].tolist()
        sample = Sample(ids, new_from, slice(first, end), counted, start)
        exact[sample] = reading_of(state, tensors, n)
    samples = [*exact]
    prompts = state["prompt_texts"]
    gradients: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if GRADIENT in name:
            gradients[name.removeprefix(GRADIENT)] = x
    place = state["place"]
    tokenizer = None
    with contextlib.suppress(MiniGPTError):
        tokenizer = Tokenizer.from_pretrained(place)
    facts = CheckpointFacts(
        place=Path(place),
        state=None,
        device=device,
        dtype=cast("torch.dtype", resolve_dtype(state["dtype"])),
        shape=Shape(**state["config"]),
        **{name: state[name] for name in PLAIN_FACTS},
    )
    return Truth(
        facts=facts,
        tokenizer=tokenizer,
        prompts=samples[:prompts],
        windows=samples[prompts:],
        exact=exact,
        norms=norms_of(state, tensors),
        floor=floor_of(state),
        bitwise_error=Distance(*state["distances"]["bitwise_error"]),
        gradients=gradients or None,
        **{name: state[name] for name in PLAIN_FIELDS},
    )


def norms_of(state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, TrueNorm]:
    """Return the norms of a record whose formula is known, by site."""
    norms: dict[str, TrueNorm] = {}
    for site, (kind, eps, rounds) in state["norms"].items():
        weight = tensors.get(f"kept.{site}.weight")
        bias = tensors.get(f"kept.{site}.bias")
        norms[site] = TrueNorm(kind, weight, bias, eps, rounds)
    return norms


def reading_of(state: dict[str, Any], tensors: dict[str, Tensor], n: int) -> Reading:
    """Return what transformers computes of the text of a number."""
    unknown = [site for site in state["sites"] if site not in state["norms"]]  # their outputs alone are known
    outputs: dict[str, Tensor] = {}
    for place in (*state["blocks"], *unknown):
        key = f"{place}.{n}"
        if key in tensors:
            outputs[place] = tensors[key]
    inputs: dict[str, Tensor] = {}
    if outputs:
        for site in state["sites"]:
            inputs[site] = tensors[f"kept.{site}.{n}"]
    return Reading(tensors[f"logits.{n}"], outputs, inputs)


def floor_of(state: dict[str, Any]) -> Floor:
    """Return the noise floor of a record."""
    distances = state["distances"]
    prompts, decoded = distances["noise_floor"], distances["decoding_floor"]
    return Floor(
        prompts=Distance(*prompts),
        decoded=Distance(*decoded),
        windows=[Distance(*figures) for figures in state["window_floors"]],
        position=state["position_noise"],
        places=state["noise"],
        gradients=state["gradient_noise"],
    )
