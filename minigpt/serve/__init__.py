"""GPT-2 behind OpenAI's completions API, with any norms, and a page that shows two of them side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minigpt.errors import CheckpointError, ConfigError, to_install
from minigpt.inputs import check_gpt2
from minigpt.model import GPT2
from minigpt.norms import name_of
from minigpt.recipe import Recipe
from minigpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["app", "open_models"]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def app(
    models: Mapping[str, GPT2],
    *,
    tokenizer: Tokenizer | None = None,
    api_key: str | None = None,
    max_batch: int = 16,
    max_queue: int = 256,
    draft: str | None = "auto",
    allowed_hosts: Sequence[str] | None = LOOPBACK,
    allowed_origins: Sequence[str] = (),
) -> "FastAPI":
    """Return an ASGI application that serves the models.

    Args:
        models: the models by their ids. All must have the same vocabulary.
        tokenizer: must have that vocabulary; by default the demo's.
        api_key: what clients must send as ``Authorization: Bearer KEY``; with None they need no key.
        max_batch: texts that each model writes at a time.
        max_queue: texts that may wait; beyond that a request gets status 429.
        draft: as in ``minigpt.generation.Options``: drafts are made while a model writes a single text.
        allowed_hosts: names that a request's Host header may have, whatever its port; None or "*" permits all. Without
            a key, permit only loopback names: a web page could otherwise reach the server by a name that it controls.
        allowed_origins: origins of other web pages that may call the server, e.g. "https://example.org"; "*" permits
            all.

    Raises:
        ConfigError: if FastAPI is not installed, there is no model, an argument is out of range, the tokenizer does
            not fit the models, or the kernel cannot draft for a model.
    """
    try:
        from minigpt.serve.routes import Endpoints, build_app
        from minigpt.serve.scheduler import Scheduler
    except ModuleNotFoundError as error:
        raise missing(error) from error

    if not models:
        raise ConfigError("must hold at least one model", argument="models")
    for name, number in {"max_batch": max_batch, "max_queue": max_queue}.items():
        if number < 1:
            raise ConfigError(f"must be at least 1, got {number}", argument=name)
    if api_key is not None and not (api_key and api_key.isprintable()):
        raise ConfigError("must be text of printable characters in UTF-8, not empty", argument="api_key")
    tokenizer = tokenizer or Tokenizer.from_pretrained("demo")
    for name, model in models.items():
        check_gpt2(model)
        used = model.config.used_vocab_size or model.config.vocab_size
        if tokenizer.id_count < used:
            message = f"has {tokenizer.id_count} ids, and model {name!r} has {used}"
            raise ConfigError(message, argument="tokenizer")
    endpoints = Endpoints(dict(models), tokenizer, Scheduler(models, max_batch, max_queue, draft))
    return build_app(endpoints, api_key, allowed_hosts, allowed_origins)


def open_models(recipes: Sequence[Recipe]) -> tuple[dict[str, GPT2], Tokenizer]:
    """Return the models by their ids, and their tokenizer.

    The id of the first is the checkpoint's name, that of each further one "name:norm", or "name:norm:sites" where the
    recipes have several sites.

    Args:
        recipes: of one checkpoint; only norm and sites differ.

    Raises:
        MiniGPTError: if a model cannot be opened, it has no tokenizer, or two have the same id.
    """
    source = recipes[0].source
    name = str(source)
    if Path(source).exists():
        name = Path(source).resolve().name
    first, tokenizer = recipes[0].open()
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer")
    models = {name: first}
    has_several_sites = len({recipe.sites for recipe in recipes}) > 1
    for recipe in recipes[1:]:
        model, _ = recipe.open()
        id = f"{name}:{recipe.norm and name_of(recipe.norm)}"
        if has_several_sites:
            id += f":{','.join(recipe.sites)}"
        if id in models or recipe in recipes[: len(models)]:
            raise ConfigError(f"{recipe.norm} is given twice", argument="norm")
        share_weights(first, model)
        models[id] = model
    return models, tokenizer


def share_weights(first: GPT2, other: GPT2) -> None:
    """Give ``other`` the modules of ``first`` that are no norms and hold no modules, and the equal Parameters of norms.

    Args:
        first, other: models of one checkpoint.
    """
    sites = other.norm_modules()
    of_norms: set[str] = set()
    for site, norm in sites.items():
        of_norms |= {name for name, _ in norm.named_modules(prefix=site)}
    for name, module in list(other.named_modules()):
        is_leaf = not list(module.children())
        if is_leaf and name not in of_norms:
            other.set_submodule(name, first.get_submodule(name))
    for site, norm in sites.items():
        of_first = dict(first.get_submodule(site).named_parameters(recurse=False))
        for role, parameter in list(norm.named_parameters(recurse=False)):
            if role in of_first and torch.equal(parameter, of_first[role]):
                setattr(norm, role, of_first[role])


def missing(error: ModuleNotFoundError, extra: str = "serve") -> ConfigError:
    """Return the error for a missing package that an extra installs."""
    return ConfigError(f"{error.name} is not installed; {to_install(extra)}")
