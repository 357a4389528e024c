# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The application as a Ray Serve deployment, with replicas and autoscaling as Ray has them.

Two replicas on a local Ray, at http://127.0.0.1:8000::

    serve run minigpt.serve.ray:build model=demo replicas=2
"""

import os
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from minigpt.recipe import Recipe
from minigpt.serve import LOOPBACK, app, missing, open_models

try:
    from ray import serve
except ModuleNotFoundError as error:
    raise missing(error, "ray") from error

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application  # pyright: ignore[reportMissingImports]


class RayOptions(BaseModel):
    """Options of ``serve run minigpt.serve.ray:build NAME=VALUE ...``.

    Attributes:
        model: as ``minigpt.from_pretrained`` takes it.
        norms: the norms to serve, with commas between them; by default the model's own.
        replicas: how many at least.
        max_replicas: how many at most; more than ``replicas`` lets Ray add some under load.
        api_key: what clients must send; by default the environment's MINIGPT_API_KEY. With one, any Host header is
            answered, since other machines may reach Ray's proxy.
        max_batch, max_queue: of each replica.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "demo"
    norms: str | None = None
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = None
    dtype: str | None = None
    device: str | None = None
    quantize: str | None = None
    api_key: str | None = Field(default_factory=lambda: os.environ.get("MINIGPT_API_KEY"))
    max_batch: int = 16
    max_queue: int = 256


def _recipes(options: RayOptions) -> list[Recipe]:
    """Return a recipe for each of the norms."""
    norms = options.norms.split(",") if options.norms else [None]
    opening = options.model_dump(include={"dtype", "device", "quantize"})
    recipes: list[Recipe] = []
    for norm in norms:
        recipes.append(Recipe(options.model, norm=norm, **opening))
    return recipes


def build(options: RayOptions) -> "Application":
    """Return the deployment; each replica loads the models for itself."""

    def make_app() -> "FastAPI":
        models, tokenizer = open_models(_recipes(options))
        allowed_hosts = None if options.api_key else LOOPBACK
        limits = options.model_dump(include={"api_key", "max_batch", "max_queue"})
        return app(models, tokenizer=tokenizer, allowed_hosts=allowed_hosts, **limits)

    scaling = {
        "min_replicas": options.replicas,
        "max_replicas": max(options.max_replicas or 0, options.replicas),
        "target_ongoing_requests": options.max_batch,
    }
    deployment = serve.deployment(
        serve.ingress(make_app)(),
        name="minigpt",
        autoscaling_config=scaling,
        max_ongoing_requests=options.max_batch + options.max_queue,
    )
    return deployment.bind()
