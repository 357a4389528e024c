"""Put the norm in question at one site after another, the least harmful first.

T tokens, V vocabulary.
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minigpt.errors import MiniGPTError
from minigpt.files import read_text
from minigpt.judge.contest import Contest
from minigpt.judge.measures import LogitsMeter, over_noise
from minigpt.judge.perplexity import AT_ONCE
from minigpt.judge.report import Fields
from minigpt.norms.foreign.construct import source_file

BEGIN = '{"search": '  # of a line of the file


class Remover:
    """The greedy search: at each step every site that is left is tried beside those that are swapped already.

    Args:
        ids: the text that the models read.
        file: keeps what was measured, a line a trial. A search that is started again goes on with it.
    """

    def __init__(self, contest: Contest, ids: list[int], file: str | Path | None = None) -> None:
        self.contest, self.ids = contest, contest.tensor(ids)  # (1, T)
        self.kept: dict[str, nn.Module] = {}
        contest.put({})
        self.unswapped = contest.candidate(self.ids)[0]  # (T, V)
        self.file = None if file is None else Path(file)
        self.fingerprint = "" if file is None else _fingerprint(contest, ids)
        self.known = {} if self.file is None else _read(self.file, self.fingerprint)

    def sensitivity(self, logits: Fields) -> list[Fields]:
        """How much each swapped site alone changes the logits of the model with its own norms, most first."""
        return [
            Fields(
                site=site,
                rms_error=trial.rms_error,
                ratio=over_noise(trial.rms_error, logits.noise_floor_rms, logits.scale),
            )
            for site, trial in sorted(self._step().items(), key=lambda one: -one[1].rms_error)
        ]

    def curve(self, most_kl: float, begin: Callable[[str], None]) -> Fields:
        """Swap site after site, until all are swapped or the KL divergence is above ``most_kl``."""
        steps: list[Fields] = []
        sites = self.contest.swapped
        while len(steps) < len(sites) and (not steps or steps[-1].kl_mean <= most_kl):
            begin(f"choosing site {len(steps) + 1} of {len(sites)} to swap")
            best = min(self._step().values(), key=lambda trial: (math.isnan(trial.kl_mean), trial.kl_mean))
            self.kept = self.contest.with_site(self.kept, best.site)
            steps.append(best)
        self.kept = {}
        self.contest.swap_only(sites)
        return Fields(loss=self._measure(None).loss, steps=steps)

    def _step(self) -> dict[str, Fields]:
        """Try every site that is left."""
        found = {}
        for site in self.contest.swapped:
            if site in self.kept:
                continue
            key = (*self.kept, site)
            if key not in self.known:
                self.contest.put(self.contest.with_site(self.kept, site))
                self.known[key] = self._measure(site)
                self._append(key)
            found[site] = self.known[key]
        self.contest.swap_only(self.contest.swapped)
        return found

    def _measure(self, site: str | None) -> Fields:
        """Compare the candidate as it stands, or with no site swapped, with the model that has its own norms."""
        meter, targets = LogitsMeter(), self.ids[0, 1:]
        logits = self.unswapped if site is None else self.contest.candidate(self.ids)[0]  # (T, V)
        for start in range(0, len(logits), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            meter.add(self.unswapped[part].double(), logits[part], targets[part])
        kl, loss = float(torch.cat(meter.kl).mean()), meter.loss / max(meter.targets, 1)
        return Fields(site=site, kl_mean=kl, loss=loss, rms_error=meter.distance.rms)

    def _append(self, sites: tuple[str, ...]) -> None:
        if self.file is None:
            return
        line = {"search": self.fingerprint, "sites": sites, **self.known[sites]}
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def _read(file: Path, fingerprint: str) -> dict[tuple[str, ...], Fields]:
    """Return the trials of the same search that a file holds. A last line that a kill has torn is cut off the file."""
    text = read_text(file) if file.exists() else ""
    if not BEGIN.startswith(text[: len(BEGIN)]):
        raise MiniGPTError(f"{file} does not hold the trials of --remove; give another file")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    found = {}
    for line in map(json.loads, whole.splitlines()):
        search, sites = line.pop("search"), tuple(line.pop("sites"))
        if search == fingerprint:
            found[sites] = Fields(line)
    return found


def _fingerprint(contest: Contest, ids: list[int]) -> str:
    """Return what decides the trials: the texts, the config, the weights, the norm's Parameters and code."""
    rows = None if contest.fit_rows is None else contest.fit_rows.tolist()
    config = contest.config.to_dict()  # its eps and its heads are in no weight
    what: list[Any] = [ids, rows, config, contest.swapped, contest.attention, str(contest.device), contest.center]
    digest = hashlib.sha256(json.dumps(what).encode())
    for name, own in contest.candidate.state_dict().items():
        digest.update(f"{name} {own.dtype}".encode())
        digest.update(own.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    for norm in {type(part): part for site in contest.swapped for part in contest.new[site].modules()}.values():
        code = source_file(norm)
        digest.update(Path(code).read_bytes() if code else type(norm).__qualname__.encode())
    return digest.hexdigest()[:16]
