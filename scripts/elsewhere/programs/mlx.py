"""mlx-lm's GPT-2, on the CPU."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from elsewhere.gpt2 import Row
from torch import Tensor

PACKAGES = ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2"]


def rows(folder: Path) -> Iterator[Row]:
    yield Row("MLX", "mlx-lm's GPT-2, float32", partial(loaded, folder / "demo"), "mlx")


def loaded(place: Path) -> Callable[[Tensor], Any]:
    """Return the model as a function."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(place, model_config={"n_ctx": 256})
    return lambda ids: np.array(model(mx.array(ids.numpy())).astype(mx.float32))
