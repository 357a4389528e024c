"""The file that keeps an original: what transformers says of a checkpoint, for later judgements and other programs.

T tokens, V vocabulary, C embedding.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt.checkpoint.norms import PLAIN_NORM
from minigpt.device import resolve_device
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.files import parse_object, replaced, require_file
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.measures import Floor
from minigpt.judge.original_data import OriginalData
from minigpt.judge.reading import Reading, Text
from minigpt.judge.texts import Texts, tokenizer_at
from minigpt.norms.formulas import TrueNorm
from minigpt.precision import dtype_name
from minigpt.report.fields import OWN_NORM
from minigpt.report.from_json import from_json, plain_type
from minigpt.scoring import windows_of

VERSION = 8  # of the file
GRADIENT = "kept.gradient."  # begins the keys of gradients


def save_record(original: OriginalData, file: str | Path) -> None:
    """Write an original to a safetensors file: the record that ``load_record`` reads, and other programs too.

    For each text N it has ``ids.N`` (T), ``logits.N`` (T, V) in float64, and the true output of every norm and
    block, ``h.3.ln_1.N`` and ``h.3.N`` (T, C). Keys that begin with ``kept.`` are for ``load_record``.

    Raises:
        MiniGPTError: if it cannot be written.
    """
    facts, floor = original.facts, original.floor.prompts
    norms: dict[str, TrueNorm] = {}
    for site, norm in original.norms.items():
        if norm.module is None:
            norms[site] = dataclasses.replace(norm, weight=None, bias=None)
    fields = vars(dataclasses.replace(facts, state=None)) | {
        "version": VERSION,
        "texts": dataclasses.replace(original.texts, tokenizer=None),
        "norms": norms,
        "floor": original.floor,
    }
    metadata = {
        "format": "pt",
        "minigpt": json.dumps(fields, default=plain_type),
        "model": facts.source,  # this and what follows is for other programs
        "dtype": dtype_name(facts.dtype),
        "attention": facts.attention,
        "versions": json.dumps(facts.versions),
        "noise_floor_rms": str(floor.rms),
        "noise_floor_max": str(floor.largest),
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in tensors_of(original):
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    try:
        with replaced(file) as new:
            save_file(tensors, new, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise MiniGPTError(f"cannot write {file}: {error}") from error


def tensors_of(original: OriginalData) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an original by their keys in the file. Those of a text are read as they are asked for."""
    for n, text in enumerate(original.texts.all):
        yield f"ids.{n}", torch.tensor(text.ids)
        yield f"logits.{n}", original.logits(text).double()
        for place, x in original.true_outputs(text).items():
            yield f"{place}.{n}", x
        for site, x in original.exact[text].inputs.items():
            yield f"kept.{site}.{n}", x
    for site, norm in original.norms.items():
        for role in ("weight", "bias"):
            if (x := getattr(norm, role)) is not None:
                yield f"kept.{site}.{role}", x
    for name, x in (original.gradients or {}).items():
        yield GRADIENT + name, x


def load_record(file: str | Path, device: str | torch.device | None = None) -> OriginalData:
    """Return what ``save_record`` wrote. transformers need not be installed, and no network is asked.

    Raises:
        CheckpointError: if the file is not such a record, is damaged, or another version of minigpt wrote it.
        MiniGPTError: if the noise floor is too high to judge by.
    """
    place = resolve_device(device)
    require_file(file, CheckpointError)
    original = None
    try:
        with safe_open(file, "pt", device=str(place)) as stored:
            fields = parse_object((stored.metadata() or {})["minigpt"].encode())
            if fields.pop("version", None) == VERSION:
                original = RecordReader(fields, [*stored.keys()], stored.get_tensor, place).read()
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{file} is not a record of minigpt parity --record: {why}") from error
    if original is None:
        raise CheckpointError(f"{file} is a record of another version of minigpt; write it again with --record")
    original.require_low_floors()
    return original


class RecordReader:
    """Reads a record, and checks all of it. What raises is a ValueError, but for a key that is missing.

    Args:
        fields: of the record's JSON.
        names: of its tensors.
        tensor: returns one by its name.
        device: on which its tensors are.
    """

    def __init__(
        self, fields: dict[str, Any], names: list[str], tensor: Callable[[str], Tensor], device: torch.device
    ) -> None:
        self.names, self.tensor = names, tensor
        self.texts = from_json(Texts, fields.pop("texts"))
        self.floor = from_json(Floor, fields.pop("floor"))
        self.norms = from_json(dict[str, TrueNorm], fields.pop("norms"))
        self.facts = from_json(CheckpointFacts, fields | {"device": str(device)})

    def read(self) -> OriginalData:
        self._check_texts()
        norms: dict[str, TrueNorm] = {}
        for site, norm in self.norms.items():
            keys = {role: f"kept.{site}.{role}" for role in ("weight", "bias")}
            values = {role: self._finite(key) for role, key in keys.items() if key in self.names}
            norms[site] = dataclasses.replace(norm, **values)
        exact = {text: self._reading(n, text) for n, text in enumerate(self.texts.all)}
        gradients: dict[str, Tensor] = {}
        for name in self.names:
            if name.startswith(GRADIENT):
                gradients[name.removeprefix(GRADIENT)] = self._finite(name)
        self._check_floor(gradients)
        texts = dataclasses.replace(self.texts, tokenizer=tokenizer_at(self.facts.place))
        original = OriginalData(self.facts, texts, self.floor, exact, norms, gradients or None)
        for text in exact:
            original.true_outputs(text)  # which raises if a norm's weight does not fit its input
        return original

    def _check_texts(self) -> None:
        """Check names, ids and positions, and that the file has the same ids."""
        facts, shape, texts = self.facts, self.facts.shape, self.texts
        require(facts.norm in ("fused", PLAIN_NORM, OWN_NORM), f"transformers has no norm {facts.norm!r:.50}")
        require({*facts.sites, *facts.blocks} == {*facts.places}, "its places are not its sites and blocks")
        require(texts.prompts and shape.window > 1, "it has no prompt, or no window of a text")
        for n, text in enumerate(texts.all):
            length, ids = len(text.ids), self.tensor(f"ids.{n}")
            require(ids.tolist() == text.ids, f"ids.{n} are not those of its metadata")
            require(0 < text.new_from <= length <= shape.n_positions, f"ids.{n} do not fit the model")
            require(
                0 <= min(text.first, text.counted) < length >= text.first + text.counted,
                f"ids.{n} have other positions",
            )
        for ids in (texts.file_ids, *(text.ids for text in texts.all)):
            least, most = min(ids, default=0), max(ids, default=0)
            require(least >= 0 and most < shape.vocab_size, "an id is not in the vocabulary")
        require(texts.windows or texts.file is None, f"it has no window of {texts.file}")

    def _check_floor(self, gradients: dict[str, Tensor]) -> None:
        """Check that the noise floor is of these texts, and consists of finite numbers."""
        floor, texts = self.floor, self.texts
        distances = (floor.prompts, floor.decoded, floor.bitwise, *floor.windows)
        numbers = [floor.position]
        for distance in distances:
            numbers += dataclasses.astuple(distance)
        require(all(0 <= number < math.inf for number in numbers), "its noise floor holds NaN, infinity or less than 0")
        require(len(floor.windows) == len(texts.windows), "its noise floor is of other windows")
        require(floor.gradients.keys() == gradients.keys(), "its noise floor is of other gradients")
        windows = [*windows_of(len(texts.file_ids), self.facts.shape.window)] if texts.file else []
        require(len(floor.losses) == len(windows), f"its losses are of another {texts.file}")

    def _reading(self, n: int, text: Text) -> Reading:
        """Return what transformers computes of the text of a number."""
        facts, seq = self.facts, len(text.ids)
        logits = self._finite(f"logits.{n}")
        expected = (seq - text.first, facts.shape.vocab_size)
        require(tuple(logits.shape) == expected, f"logits.{n} has shape {tuple(logits.shape)}, not {expected}")
        outputs, inputs = dict[str, Tensor](), dict[str, Tensor]()
        for place in facts.places:
            if place in self.norms or f"{place}.{n}" not in self.names:  # the output of a norm is made of its input
                continue
            outputs[place] = self._finite(f"{place}.{n}", seq)
            require(
                place in facts.sites or outputs[place].shape[-1] == facts.shape.n_embd,
                f"{place}.{n} has rows of {outputs[place].shape[-1]:,}, not of {facts.shape.n_embd:,}",
            )
        for site in facts.sites if outputs else ():
            name, output = f"kept.{site}.{n}", f"{site}.{n}"
            if name not in self.names and output not in self.names:  # a short text may not reach every norm
                continue
            inputs[site] = self._finite(name)
            shape = inputs[site].shape  # norms of compressed keys have a row for several tokens
            require(seq in shape or shape == self.tensor(output).shape, f"{name} has shape {tuple(shape)}")
        return Reading(logits, outputs, inputs)

    def _finite(self, name: str, tokens: int = 0) -> Tensor:
        """Return a tensor.

        Args:
            tokens: one of its dimensions, if it has tokens.
        """
        x = self.tensor(name)
        is_finite = not x.numel() or torch.stack(x.aminmax()).isfinite().all()
        require(x.is_floating_point() and is_finite, f"{name} holds NaN or infinity, or has no floating dtype")
        require(not tokens or tokens in x.shape, f"{name} has shape {tuple(x.shape)}, for {tokens:,} tokens")
        return x


def require(fits: object, why: str) -> None:
    """Check a part of a record.

    Raises:
        ValueError: if it does not fit.
    """
    if not fits:
        raise ValueError(why)
