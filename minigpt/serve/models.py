"""The models to serve: one checkpoint with any number of norms, all on the same Parameters."""

import copy
from collections.abc import Collection, Sequence
from pathlib import Path

from minigpt.checkpoint import locate
from minigpt.errors import ConfigError
from minigpt.model import GPT2
from minigpt.norms.foreign.adapt import KEEP
from minigpt.recipe import from_pretrained
from minigpt.swap import fit_on_text, swap_norms
from minigpt.tokenizer import Tokenizer


def load(
    source: str,
    norms: Sequence[str | None],
    *,
    keep: Collection[str] = KEEP,
    fit: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
) -> tuple[dict[str, GPT2], Tokenizer]:
    """Return the models by their ids, and their tokenizer.

    The id of the first norm's model is the checkpoint's name, and that of each further one is "name:norm".

    Args:
        keep: as ``swap_norms`` takes it.
        fit: a text file to fit every model's norms on.

    Raises:
        MiniGPTError: if the checkpoint, its tokenizer or a norm cannot be loaded.
    """
    if twice := next((norm for norm in norms if norms.count(norm) > 1), None):
        raise ConfigError(f"--norm {twice} is given twice")
    place = locate(source)
    name = Path(source).resolve().name if Path(source).exists() else source
    first = from_pretrained(place, norm=norms[0], keep=keep, dtype=dtype, device=device, quantize=quantize)
    models = {name: first} | {f"{name}:{norm}": with_norm(first, norm, keep) for norm in norms[1:] if norm}
    tokenizer = Tokenizer.from_pretrained(place)
    if fit is not None:
        for model in models.values():
            fit_on_text(model, tokenizer, fit)
    return models, tokenizer


def with_norm(model: GPT2, norm: str, keep: Collection[str] = KEEP) -> GPT2:
    """Return a second model with another norm at every site.

    It shares the first one's Parameters, and the modules that are not norms and contain no modules.
    """
    sites = set(model.norm_sites())
    shared: dict[int, object] = {id(own): own for own in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        is_norm = any(name == site or name.startswith(f"{site}.") for site in sites)
        if not is_norm and not list(module.children()):
            shared[id(module)] = module
    other = copy.deepcopy(model, shared)
    swap_norms(other, norm, keep=keep)
    return other
