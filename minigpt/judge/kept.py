"""Readings of transformers in float64, in files where a model does not fit into memory."""

from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt.errors import MiniGPTError
from minigpt.files import TemporaryFolder
from minigpt.judge.reading import Reading, Sample

OUTPUT, INPUT = "output.", "input."  # begin the keys of a norm's or block's output, and of a norm's input


class StoredReadings(dict[Sample, Any]):
    """Readings by text, each in a file of a temporary folder that goes with this object.

    Args:
        device: to which they are read.

    Raises:
        MiniGPTError: where a reading is set, if there is no room for it on the disk.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.folder = device, TemporaryFolder("truth")

    def __setitem__(self, sample: Sample, reading: Reading) -> None:
        file = self.folder.path / f"{len(self)}.safetensors"
        tensors = {"logits": reading.logits.cpu().contiguous()}
        for place, y in reading.outputs.items():
            tensors[OUTPUT + place] = _apart(y)
        for site, x in reading.inputs.items():
            tensors[INPUT + site] = _apart(x)
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            raise MiniGPTError(
                f"cannot keep the true logits in {self.folder.path}: {error}; TMPDIR names a folder with more room"
            ) from error
        super().__setitem__(sample, file)

    def __getitem__(self, sample: Sample) -> Reading:
        outputs: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        with safe_open(super().__getitem__(sample), "pt", device=str(self.device)) as stored:
            logits = stored.get_tensor("logits")
            for name in stored.keys():  # noqa: SIM118 (it is no dict)
                if name.startswith(OUTPUT):
                    outputs[name.removeprefix(OUTPUT)] = stored.get_tensor(name)
                if name.startswith(INPUT):
                    inputs[name.removeprefix(INPUT)] = stored.get_tensor(name)
        return Reading(logits, outputs, inputs)


def _apart(x: Tensor) -> Tensor:
    """Return a copy on the CPU: what a block returns, the next norm is given, and a file holds no tensor twice."""
    return x.cpu().contiguous().clone()
