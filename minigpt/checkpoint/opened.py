"""A checkpoint before it is a model: its config, and its tensors under our names, for every family."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minigpt.checkpoint.contents import (
    ADDED_TOKENS,
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    config_file,
    fields_of,
    folder_of,
    read_contents,
)  # fmt: skip
from minigpt.checkpoint.formats import Format, recognise, same_values
from minigpt.checkpoint.norms import Pairs, is_frozen, unscaled, without_norms
from minigpt.config import GPT2Config
from minigpt.device import DTYPES, dtype_name
from minigpt.errors import CheckpointError, ConfigError, MiniGPTError, listing
from minigpt.files import read_object

HPARAMS = "hparams.json"  # OpenAI's
_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod)\.)*(?:transformer\.)?")  # of DataParallel, of torch.compile


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's files say.

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
    tensors: dict[str, Tensor]
    norms: Pairs


def open_checkpoint(place: Path) -> Checkpoint:
    """Read the checkpoint in a folder or file. If another process saves there meanwhile, read it again.

    Raises:
        CheckpointError: if files are missing or damaged, or a head that the config ties differs from the embedding.
        ConfigError: if the config cannot be honoured.
    """
    while True:
        before = _state(place)
        try:
            checkpoint = _open(place)
        except MiniGPTError:
            if _state(place) == before:
                raise
        else:
            if _state(place) == before:
                return checkpoint


def _state(place: Path) -> tuple[int, int] | None:
    """Return what changes when a checkpoint is saved: its config.json is another file then."""
    try:
        state = ((place if place.is_dir() else place.parent) / CONFIG).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns


def _open(place: Path) -> Checkpoint:
    folder = folder_of(place)
    theirs, fields = read_contents(place)
    form, tensors = as_ours(theirs)
    path, has_config = place, (folder / CONFIG).is_file()
    if fields is None or has_config:  # a config goes before the one that a trainer's file carries
        path = config_file(place) if has_config or not (folder / HPARAMS).is_file() else folder / HPARAMS
        fields = read_object(path, ConfigError)
    norms: Pairs
    fields, norms = without_norms(fields)
    try:
        config = form.config(fields, tensors)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _require_room(config, tensors, place)
    known = max(tokenizer_size(folder), config.used_vocab_size or 0)  # a tokenizer may have been given tokens later
    config = dataclasses.replace(config, used_vocab_size=known if 0 < known < config.vocab_size else None)
    if config.tie_word_embeddings and {"wte.weight", "lm_head.weight"} <= tensors.keys():
        head = tensors.pop("lm_head.weight")
        if not same_values(head, tensors["wte.weight"]):
            raise CheckpointError(
                "lm_head.weight differs from wte.weight, but the config ties them; "
                'a config.json with "tie_word_embeddings": false beside it uses both'
            )
    if is_frozen(config.layer_norm_epsilon):
        tensors = unscaled(tensors, config.layer_norm_epsilon)
        norms = [("*", "frozen")]
        config = dataclasses.replace(config, layer_norm_epsilon=GPT2Config.layer_norm_epsilon)
    return Checkpoint(place, form, config, tensors, norms)


def _require_room(config: GPT2Config, tensors: Mapping[str, Tensor], place: Path) -> None:
    """Check that the tensors can be a model of this size, before one is made.

    Raises:
        CheckpointError: the message names the field of the config that is too large.
    """
    values, width = sum(tensor.numel() for tensor in tensors.values()), config.n_embd
    least = {  # values, or tensors, that a model of this size has
        "n_embd": (3 * width * width, values),
        "n_inner": (config.inner_size * width, values),
        "vocab_size": (config.vocab_size * width, values),
        "n_positions": (config.n_positions * width, values),
        "n_layer": (config.n_layer, len(tensors)),
    }
    if tensors and (large := next((name for name, (needed, there) in least.items() if needed > there), None)):
        raise CheckpointError(
            f"{place} does not hold this model's tensors: {len(tensors)} tensors with {values:,} values are too few "
            f"for {large} {getattr(config, large) or config.inner_size:,}"
        )


def as_ours(tensors: dict[str, Tensor]) -> tuple[Format, dict[str, Tensor]]:
    """Return the family of tensors, and the tensors under our names, in our layout, without those that are not learned.

    Raises:
        CheckpointError: if parts of one parameter do not fit together.
    """
    plain = {_WRAPPERS.sub("", name, count=1): tensor for name, tensor in tensors.items()}
    form = recognise(plain)
    return form, form.ours(plain)


def tokenizer_size(folder: Path) -> int:
    """Return one more than the highest id that the folder's tokenizer files name; 0 if it has none.

    A vocabulary that is padded to a multiple, e.g. 50,304, has more ids than stand for text.

    Raises:
        CheckpointError: if a file is damaged.
    """
    file = next((file for name in VOCABULARIES if (file := folder / name).is_file()), None)
    if file is None:
        return 0
    fields, added = read_object(file, CheckpointError), fields_of(folder / ADDED_TOKENS)
    settings = fields_of(folder / TOKENIZER_CONFIG) | fields_of(folder / SPECIAL_TOKENS)
    try:
        if file.name != "vocab.json":
            vocab = fields.get("model", {}).get("vocab", {})
            added |= {token["content"]: token["id"] for token in fields.get("added_tokens", ())}
            fields = vocab if isinstance(vocab, dict) else dict(enumerate(range(len(vocab))))  # Unigram has a list
        added |= {token["content"]: int(i) for i, token in settings.get("added_tokens_decoder", {}).items()}
        named = [value for name, value in settings.items() if name.endswith("_token")]
        named += [*settings.get("extra_special_tokens", ()), *settings.get("additional_special_tokens", ())]
        texts = {token["content"] if isinstance(token, dict) else token for token in named}
        new = [text for text in texts if isinstance(text, str) and text not in fields and text not in added]
        return 1 + max([*fields.values(), *added.values()], default=-1) + len(new)  # transformers adds them at the end
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a tokenizer's file: {error}") from error


def require_fitting(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: Path) -> None:
    """Check that ``given`` are exactly the tensors wanted.

    Raises:
        CheckpointError: if some are missing, unexpected, of another shape, or of a dtype that no model computes in.
    """
    complaints = misfits(given, wanted)
    strange = [
        f"{name} is {dtype_name(own.dtype)}"
        for name, own in given.items()
        if name in wanted and wanted[name].is_floating_point() and own.dtype not in DTYPES.values()
    ]
    if strange:
        complaints.append(f"of a dtype other than {', '.join(DTYPES)}: {listing(strange)}")
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return what is missing, unexpected or of another shape, in a few words each."""
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in given.keys() & wanted.keys()}
    kinds = {
        "missing": wanted.keys() - given.keys(),
        "unexpected": given.keys() - wanted.keys(),
        "of another shape:": [f"{name} is {has}, not {needs}" for name, (has, needs) in shapes.items() if has != needs],
    }
    return [f"{what} {listing(names)}" for what, names in kinds.items() if names]


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
