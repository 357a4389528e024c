"""A checkpoint before it is a model: its config, and its tensors under our names, for every family."""

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint.contents import CONFIG, FileContent, Files, is_gguf, quantized
from minigpt.checkpoint.formats import FORMATS, Format, Tensors, same_values
from minigpt.checkpoint.norms import PLAIN_FORM, Pairs, is_frozen, split_norms, unscaled
from minigpt.choices import DTYPE_NAMES
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError, listing
from minigpt.offload import uncompiled
from minigpt.precision import DTYPES, dtype_name

_WRAPPERS = re.compile(r"(?:module\.)*(?:transformer\.)?")  # of DataParallel; of transformers' GPT-2 with a head
# Other heads than a language model's: of TRL's reward models, and of transformers' other GPT-2 classes.
_OTHER_HEADS = re.compile(r"(v_head|score|classifier|qa_outputs|multiple_choice_head)\..*")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint's files.

    Attributes:
        place: its folder or file.
        form: its family.
        config: the shape of its model.
        tensors: by our names, in our layout. Whether they are exactly the model's is not checked yet.
        norms: those that config.json names, by patterns of sites.
    """

    place: Path
    form: Format
    config: GPT2Config
    tensors: Tensors
    norms: Pairs


def read_checkpoint(files: Files, known_ids: int = 0, content: FileContent | None = None) -> Checkpoint:
    """Return the content of a checkpoint's files. ``read_stable`` reads again if another process saves there meanwhile.

    Args:
        known_ids: number of ids that the tokenizer knows. A vocabulary that is padded to a multiple, e.g. 50,304, has
            more ids than are used for text. 0 if there is no tokenizer.
        content: what ``files.tensors()`` returns, if it has been called.

    Raises:
        CheckpointError: if files are missing or damaged, or a head that the config ties differs from the embedding.
        ConfigError: if the config cannot be honoured.
    """
    source_tensors, trainer_fields = content or files.tensors()
    form, tensors = converted(source_tensors, files.place)
    fields, origin = files.config, files.folder / CONFIG  # which goes before the config that a trainer's file carries
    if fields is None or is_gguf(files.place):
        fields, origin = fields or trainer_fields, files.place
    if fields is None:
        where = " in its folder" if files.place.is_file() else ""
        raise CheckpointError(f"{files.place} has no {CONFIG}{where}")
    if method := fields.get("quantization_config"):
        raise quantized(files.place, method.get("quant_method") if isinstance(method, dict) else method)
    _warn_of_other_dtype(fields, tensors, files.place)
    plain_fields, norms = split_norms(fields)
    try:
        config = form.config(plain_fields, tensors)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error
    width, block = config.n_embd, 4 * config.n_embd + 2 * config.inner_size
    needed = (config.n_layer * block + config.vocab_size + config.n_positions) * width
    values = sum(tensor.numel() for tensor in tensors.values())
    if needed > 2 * values:  # of the matrices alone, before a model is made
        raise CheckpointError(f"{files.place} holds {values:,} values, and its config needs {needed:,}")
    used = max(known_ids, config.used_vocab_size or 0)  # a tokenizer may have been given tokens later
    config = dataclasses.replace(config, used_vocab_size=used if 0 < used < config.vocab_size else None)
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")  # which safetensors' save_model may have kept in place of the embedding
        if not same_values(head, tensors.setdefault("wte.weight", head)):
            raise CheckpointError(
                "lm_head.weight differs from wte.weight, but the config ties them; "
                'a config.json with "tie_word_embeddings": false in its folder uses both'
            )
    if not norms:
        tensors = _with_identity_norms(config, tensors, files.place)
    eps = config.layer_norm_epsilon
    if is_frozen(eps):
        tensors, norms = unscaled(tensors, eps), PLAIN_FORM
        config = dataclasses.replace(config, layer_norm_epsilon=GPT2Config.layer_norm_epsilon)
    return Checkpoint(files.place, form, config, tensors, norms)


def _warn_of_other_dtype(fields: Mapping[str, Any], tensors: Tensors, place: Path) -> None:
    """Warn of a dtype in a config that the weights do not have."""
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    held = {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.ndim}
    if len(held) == 1 and dtype in DTYPE_NAMES and dtype not in held:
        _warn(
            f"{place}: {CONFIG} says {dtype}, and its weights are {held.pop()}; they stay as they are unless a dtype "
            f"is asked for, and transformers rounds them to {dtype}"
        )


def converted(source_tensors: Tensors, place: Path) -> tuple[Format, Tensors]:
    """Return the format and the tensors with our names and layouts. Buffers and the heads of other tasks are dropped.

    Raises:
        CheckpointError: if parts of one parameter do not fit together.
    """
    plain: Tensors = {}
    for name, tensor in source_tensors.items():
        plain[_WRAPPERS.sub("", uncompiled(name), count=1)] = tensor
    form = next(family for family in FORMATS if family.recognises(plain))
    heads = list(filter(_OTHER_HEADS.fullmatch, plain))
    if heads:
        _warn(f"{place}: left out {listing(heads)}, since a language model has no such head, as transformers does")
        for name in heads:
            del plain[name]
    return form, form.converted(plain)


def _with_identity_norms(config: GPT2Config, tensors: Tensors, place: Path) -> Tensors:
    """Return the tensors with scales of 1 and shifts of 0 for norms that were folded into the next layers.

    Such a file leaves the same norms' parameters out in every block, and has nothing that is not the model's. Otherwise
    nothing is filled in, since a norm that is misnamed or lost would become another norm in silence.
    """
    lost = []
    for part in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
        if f"h.0.{part}" not in tensors:
            lost.append(part)
    missing = []
    for layer in range(config.n_layer):
        missing += [f"h.{layer}.{part}" for part in lost]
    for name in ("ln_f.weight", "ln_f.bias"):
        if name not in tensors:
            missing.append(name)
    embedding = tensors.get("wte.weight")
    if not lost or embedding is None or not tensors.keys().isdisjoint(missing):
        return tensors
    _warn(
        f"{place} has no {listing(missing)}: norms that were folded into the next layers are loaded as 1 and 0, as "
        "transformers does"
    )
    filled = dict(tensors)
    for name in missing:
        is_scale = name.endswith("weight")
        filled[name] = embedding.new_full((config.n_embd,), float(is_scale))
    return filled


@functools.cache  # once, though a judgement opens a checkpoint several times
def _warn(message: str) -> None:
    logging.getLogger("minigpt").warning("%s", message)


def require_fitting(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: Path) -> None:
    """Check that ``tensors`` are exactly the expected ones.

    Raises:
        CheckpointError: if some are missing, unexpected, of another shape, or of a dtype that no model computes in.
    """
    complaints = misfits(tensors, expected)
    strange = []
    for name, tensor in tensors.items():
        is_computed = name in expected and expected[name].is_floating_point()
        if is_computed and tensor.dtype not in DTYPES.values():
            strange.append(f"{name} is {dtype_name(tensor.dtype)}")
    if strange:
        complaints.append(f"of a dtype other than {', '.join(DTYPES)}: {listing(strange)}")
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def misfits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors that are missing, unexpected or of another shape, in a few words each."""
    reshaped = []
    for name in tensors.keys() & expected.keys():
        has, needs = tuple(tensors[name].shape), tuple(expected[name].shape)
        if has != needs:
            reshaped.append(f"{name} is {has}, not {needs}")
    kinds = {
        "missing": expected.keys() - tensors.keys(),
        "unexpected": tensors.keys() - expected.keys(),
        "of another shape:": reshaped,
    }
    return [f"{kind} {listing(names)}" for kind, names in kinds.items() if names]


def only_dtype(tensors: Mapping[str, Tensor], place: Path) -> torch.dtype:
    """Return the dtype of all tensors.

    Raises:
        CheckpointError: if they have several, or there are none.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.ndim}  # a norm may count its calls
    if len(dtypes) != 1:
        names = ", ".join(sorted(map(dtype_name, dtypes))) or "no dtype"
        raise CheckpointError(f"{place} holds tensors of {names}; choose the dtype to compute in, e.g. float32")
    return dtypes.pop()
