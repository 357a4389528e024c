"""minigpt serve: OpenAI's completions API, and a page that shows two norms side by side."""

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from minigpt.cli.options import parse_draft, refuse_if

if TYPE_CHECKING:
    from minigpt.recipe import Recipe

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # listens on all; the loopback address is one of these


def serve(
    *,
    recipes: "list[Recipe]",
    host: str = "127.0.0.1",
    port: int = 8000,
    draft: str = "auto",
    api_key: Annotated[str | None, typer.Option(envvar="MINIGPT_API_KEY")] = None,
    max_batch: int = 16,
    max_queue: int = 256,
    allow_host: list[str] | None = None,
    allow_origin: list[str] | None = None,
    grace: int = 30,
) -> None:
    """Serve a model behind OpenAI's completions API, with a page that shows two norms side by side.

    Args:
        norm: A norm to serve, by default the model's own; may be repeated: all share the weights.
        sites: Where to put --norm, e.g. 'h.*.ln_1'; may be repeated.
        host: Address to listen on; any but loopback needs a key.
        port: Port to listen on; 0 takes a free one.
        api_key: Key that clients must send as a bearer token.
        max_batch: Texts that each model writes at a time.
        max_queue: Texts that may wait; beyond them the answer is 429.
        allow_host: A further name in requests' Host header, '*' for any; may be repeated.
        allow_origin: Origin of web pages that may call the server, '*' for any; may be repeated.
        grace: Seconds that texts have to finish after SIGTERM.

    Examples:
        minigpt serve
        minigpt serve --model gpt2 --norm fused --norm std_eps
        MINIGPT_API_KEY=secret minigpt serve --host 0.0.0.0
    """
    from minigpt.serve import LOOPBACK, app, missing, open_models

    try:
        from minigpt.serve.run import is_loopback, listen, run, server_of
    except ModuleNotFoundError as error:
        raise missing(error) from error
    from minigpt.machine import settle_memory

    is_local = is_loopback(host)
    is_open = not is_local and api_key is None
    refuse_if(
        (is_open, "host", f"{host} is open to others, so it needs --api-key or MINIGPT_API_KEY"),
        (not 0 <= grace <= 86400, "grace", f"must be within [0, 86400], got {grace}"),
    )
    allowed_hosts = None
    if is_local or allow_host:
        allowed_hosts = [*LOOPBACK, host, *(allow_host or [])]
    settle_memory()
    with listen(host, port) as listening:
        models, tokenizer = open_models(recipes)
        application = app(
            models,
            tokenizer=tokenizer,
            api_key=api_key,
            max_batch=max_batch,
            max_queue=max_queue,
            draft=parse_draft(draft),
            allowed_hosts=allowed_hosts,
            allowed_origins=allow_origin or (),
        )
        _, port = listening.getsockname()[:2]
        first_model = next(iter(models))
        ready = _first_lines(f"http://{_name_in_url(host)}:{port}", first_model, api_key is not None)
        run(server_of(application, grace), listening, ready)


def _name_in_url(host: str) -> str:
    """Return the name by which this machine reaches a server that listens on an address."""
    if host in ANY_ADDRESS:
        return ANY_ADDRESS[host]
    if ":" in host:  # of IPv6
        return f"[{host}]"
    return host


def _first_lines(address: str, model: str, needs_key: bool) -> str:
    """Return the page's address, and a command that can be pasted. It has no key, since logs keep it."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 40})
    headers = "-H 'Content-Type: application/json'"
    if needs_key:
        headers += ' -H "Authorization: Bearer $MINIGPT_API_KEY"'
    return f"{address}/\ncurl {address}/v1/completions {headers} -d {shlex.quote(body)}"
