"""The models to serve: one checkpoint with any number of norms, all on the same Parameters."""

from collections.abc import Sequence
from pathlib import Path

import torch

from minigpt import norms
from minigpt.errors import CheckpointError, ConfigError
from minigpt.model import GPT2
from minigpt.recipe import Recipe
from minigpt.tokenizer import Tokenizer


def load(recipes: Sequence[Recipe]) -> tuple[dict[str, GPT2], Tokenizer]:
    """Return the models by their ids, and their tokenizer.

    The id of the first is the checkpoint's name, that of each further one "name:norm", or "name:norm:sites" where the
    recipes have several sites.

    Args:
        recipes: of one checkpoint; only norm and sites differ.

    Raises:
        MiniGPTError: if a model cannot be opened, it has no tokenizer, or two have the same id.
    """
    source, models = recipes[0].source, dict[str, GPT2]()
    name = Path(source).resolve().name if Path(source).exists() else str(source)
    for recipe in recipes:
        model, tokenizer = recipe.open()
        if tokenizer is None:
            raise CheckpointError(f"{source} has no tokenizer")
        sites = f":{','.join(recipe.sites)}" if len({recipe.sites for recipe in recipes}) > 1 else ""
        id = f"{name}:{recipe.norm and norms.name_of(recipe.norm)}{sites}" if models else name
        if id in models or recipe in recipes[: len(models)]:
            raise ConfigError(f"{recipe.norm} is given twice", argument="norm")
        if models:
            share(models[name], model)
        models[id] = model
    return models, tokenizer


def share(first: GPT2, other: GPT2) -> None:
    """Give ``other`` the modules of ``first`` that are no norms and hold no modules, and the equal Parameters of norms.

    Args:
        first, other: models of one checkpoint.
    """
    sites = other.norm_modules()
    for name, module in list(other.named_modules()):
        if not (list(module.children()) or any(name == site or name.startswith(f"{site}.") for site in sites)):
            other.set_submodule(name, first.get_submodule(name))
    for site, norm in sites.items():
        of_first = dict(first.get_submodule(site).named_parameters(recurse=False))
        for role, parameter in list(norm.named_parameters(recurse=False)):
            if role in of_first and torch.equal(parameter, of_first[role]):
                setattr(norm, role, of_first[role])
