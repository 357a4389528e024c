"""The models to serve: one checkpoint, and as many norms as are asked for, on the same Parameters."""

import copy
from collections.abc import Sequence
from pathlib import Path

from minigpt.checkpoint import from_pretrained, locate
from minigpt.engine import GPT2
from minigpt.errors import ConfigError
from minigpt.swap import swap_norms
from minigpt.tokenizer import Tokenizer


def load(
    source: str,
    norms: Sequence[str],
    *,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
) -> tuple[dict[str, GPT2], Tokenizer]:
    """Return the models by their ids, and their tokenizer.

    The id of the first norm's model is the checkpoint's name, and that of each further one is "name:norm".

    Raises:
        MiniGPTError: if the checkpoint, its tokenizer or a norm cannot be loaded.
    """
    if twice := next((norm for norm in norms if norms.count(norm) > 1), None):
        raise ConfigError(f"--norm {twice} is given twice")
    place = locate(source)
    name = Path(source).resolve().name if Path(source).exists() else source
    first = from_pretrained(place, norm=norms[0], dtype=dtype, device=device, quantize=quantize)
    return {name: first} | {f"{name}:{norm}": with_norm(first, norm) for norm in norms[1:]}, Tokenizer.from_pretrained(
        place
    )


def with_norm(model: GPT2, norm: str) -> GPT2:
    """Return a second model with another norm at every site.

    It shares the first one's Parameters, and the very modules that are neither norms nor made of modules.
    """
    sites = set(model.norm_sites())
    shared: dict[int, object] = {id(own): own for own in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        is_norm = any(name == site or name.startswith(f"{site}.") for site in sites)
        if not is_norm and not list(module.children()):
            shared[id(module)] = module
    other = copy.deepcopy(model, shared)
    swap_norms(other, norm)
    return other
