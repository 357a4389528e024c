"""A checkpoint before it is a model: its config, and its tensors under our names, for every family."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minigpt.checkpoint.files import CONFIG, config_file, folder_of, read_contents
from minigpt.checkpoint.formats import Format, recognise
from minigpt.checkpoint.frozen_norms import is_frozen, unscaled
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError, listing
from minigpt.json_file import read_object
from minigpt.placement import DTYPES, dtype_name
from minigpt.swap.saved import Pairs, without_norms

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
    """Read the checkpoint in a folder or file.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConfigError: if the config cannot be honoured.
    """
    contents, folder = read_contents(place), folder_of(place)
    tensors = without_wrappers(contents.tensors)
    form = recognise(tensors)
    if contents.fields is not None and not (folder / CONFIG).is_file():
        path, fields = place, contents.fields  # a trainer's file with its own config
    else:
        is_openai = form.fields is not None and not (folder / CONFIG).is_file() and (folder / HPARAMS).is_file()
        path = folder / HPARAMS if is_openai else config_file(place)
        fields = read_object(path, ConfigError)
    norms: Pairs
    fields, norms = without_norms(fields)
    try:
        config = form.config(fields, tensors) if form.describes(fields) else GPT2Config.from_dict(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = max(tokenizer_size(folder), config.used_vocab_size or 0)  # a tokenizer may have been given tokens later
    config = dataclasses.replace(config, used_vocab_size=known if 0 < known < config.vocab_size else None)
    ours = as_ours(tensors, form, config)
    if is_frozen(config.layer_norm_epsilon):
        ours = unscaled(ours, config.layer_norm_epsilon)
        norms = [("*", "frozen")]
        config = dataclasses.replace(config, layer_norm_epsilon=GPT2Config.layer_norm_epsilon)
    return Checkpoint(place, form, config, ours, norms)


def without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that wrappers around the network put before their names."""
    return {_WRAPPERS.sub("", name, count=1): tensor for name, tensor in tensors.items()}


def as_ours(tensors: dict[str, Tensor], form: Format, config: GPT2Config) -> dict[str, Tensor]:
    """Return the tensors under our names and in our layout, without those that are not parameters.

    Args:
        tensors: as ``without_wrappers`` returns them.
        form: the family that they belong to.
        config: of the model that they are for.

    Raises:
        CheckpointError: if a head that the config ties differs from the embedding.
    """
    ours = form.ours(tensors, config.n_layer)
    if config.tie_word_embeddings and "wte.weight" in ours and "lm_head.weight" in ours:
        head, embedding = ours.pop("lm_head.weight"), ours["wte.weight"]
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise CheckpointError(
                "lm_head.weight differs from wte.weight, but the config ties them; "
                'a config.json with "tie_word_embeddings": false beside it uses both'
            )
    return ours


def tokenizer_size(folder: Path) -> int:
    """Return one more than the highest id in the folder's tokenizer files; 0 if it has none.

    A vocabulary that is padded to a multiple, e.g. 50,304, has more ids than stand for text.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if (folder / "tokenizer.json").is_file():
        fields = read_object(folder / "tokenizer.json", CheckpointError)
        vocab = fields.get("model", {}).get("vocab", {})
        ids = [*vocab.values()] if isinstance(vocab, dict) else [*range(len(vocab))]  # a Unigram model has a list
        ids += [token["id"] for token in fields.get("added_tokens", ())]
        return max(ids, default=-1) + 1
    if (folder / "vocab.json").is_file():
        return max(read_object(folder / "vocab.json", CheckpointError).values()) + 1
    return 0


def require_fitting(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: Path) -> None:
    """Check that ``given`` are exactly the tensors wanted.

    Raises:
        CheckpointError: if some are missing, unexpected, of another shape, or of a dtype that no model computes in.
    """
    complaints = misfits(given, wanted)
    known = {name: given[name].dtype for name in given.keys() & wanted.keys() if wanted[name].is_floating_point()}
    strange = [f"{name} is {dtype_name(dtype)}" for name, dtype in known.items() if dtype not in DTYPES.values()]
    if strange:
        complaints.append(f"of a dtype other than {', '.join(DTYPES)}: {listing(strange)}")
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return what is missing, unexpected or of another shape, in a few words each."""
    missing, unexpected = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in given.keys() & wanted.keys()}
    misshapen = [f"{name} is {has}, not {needs}" for name, (has, needs) in shapes.items() if has != needs]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape:": misshapen}
    return [f"{what} {listing(names)}" for what, names in kinds.items() if names]


def only_dtype(tensors: Mapping[str, Tensor], place: Path) -> torch.dtype:
    """Return the dtype of all tensors.

    Raises:
        CheckpointError: if they have several, or there are none.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.ndim}  # a norm may count its calls
    if not dtypes:
        raise CheckpointError(f"{place} holds no tensors")
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise CheckpointError(f"{place} holds tensors of {names}; choose the dtype to compute in, e.g. float32")
    return dtypes.pop()
