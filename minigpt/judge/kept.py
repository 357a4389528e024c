"""Readings of transformers in float64, kept in memory, or in files where a model does not fit either."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minigpt.errors import MiniGPTError
from minigpt.files import TemporaryFolder
from minigpt.judge.reading import Reading, Sample

OUTPUT, INPUT = "output.", "input."  # begin the keys of a norm's or block's output, and of a norm's input


class KeptReadings(Mapping[Sample, Reading]):
    """Readings by text.

    Args:
        in_files: whether a file has each of them, in a temporary folder that goes with this object.
        device: to which what is in a file is read.
    """

    def __init__(self, in_files: bool, device: torch.device) -> None:
        self.device = device
        self.folder = TemporaryFolder("truth") if in_files else None
        self.files: dict[Sample, Path] = {}
        self.readings: dict[Sample, Reading] = {}

    def keep(self, sample: Sample, reading: Reading) -> None:
        """Keep what is computed of a text.

        Raises:
            MiniGPTError: if there is no room for it on the disk.
        """
        if self.folder is None:
            self.readings[sample] = reading
            return
        file = self.folder.path / f"{len(self.files)}.safetensors"
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
        self.files[sample] = file

    def __getitem__(self, sample: Sample) -> Reading:
        if self.folder is None:
            return self.readings[sample]
        outputs: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        with safe_open(self.files[sample], "pt", device=str(self.device)) as stored:
            logits = stored.get_tensor("logits")
            for name in stored.keys():  # noqa: SIM118 (it is no dict)
                if name.startswith(OUTPUT):
                    outputs[name.removeprefix(OUTPUT)] = stored.get_tensor(name)
                if name.startswith(INPUT):
                    inputs[name.removeprefix(INPUT)] = stored.get_tensor(name)
        return Reading(logits, outputs, inputs)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.readings if self.folder is None else self.files)

    def __len__(self) -> int:
        return len(self.readings if self.folder is None else self.files)


def _apart(x: Tensor) -> Tensor:
    """Return a copy on the CPU: what a block returns, the next norm is given, and a file holds no tensor twice."""
    return x.cpu().contiguous().clone()
