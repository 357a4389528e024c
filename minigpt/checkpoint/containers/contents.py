"""What was in a file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Contents:
    """A file's tensors under the names they have there.

    Attributes:
        tensors: on the CPU, strided, and no larger than the part of the file that holds them.
        fields: the config, where the file carries one of its own.
    """

    tensors: dict[str, Tensor]
    fields: Mapping[str, Any] | None = None
