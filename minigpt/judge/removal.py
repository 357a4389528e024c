"""Put the norm in question at one site after another, the least harmful first.

T tokens, V vocabulary.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from minigpt.errors import MiniGPTError
from minigpt.judge.contest import Contest
from minigpt.judge.measures import LogitsMeter
from minigpt.judge.parity_report import Logits, Removal, RemovalStep, SiteSensitivity
from minigpt.judge.perplexity import AT_ONCE
from minigpt.norms.foreign.construct import source_file
from minigpt.text_file import read_text

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
        self.known = {} if self.file is None else dict(_read(self.file, self.fingerprint))

    def sensitivity(self, logits: Logits) -> list[SiteSensitivity]:
        """How much each swapped site alone changes the logits of the model with its own norms, most first."""
        trials = sorted(self._step().values(), key=lambda one: -one.rms_error)
        return [SiteSensitivity(one.site, one.rms_error, logits.over_noise(one.rms_error)) for one in trials]

    def curve(self, most_kl: float, begin: Callable[[str], None]) -> Removal:
        """Swap site after site, until all are swapped or the KL divergence is above ``most_kl``."""
        steps: list[RemovalStep] = []
        sites = self.contest.swapped
        while len(steps) < len(sites) and (not steps or steps[-1].kl_mean <= most_kl):
            begin(f"choosing site {len(steps) + 1} of {len(sites)} to swap")
            best = min(self._step().values(), key=lambda one: (not one.kl_mean >= 0, one.kl_mean))  # NaN last
            self.kept = self.contest.with_site(self.kept, best.site)
            steps.append(best)
        self.kept = {}
        self.contest.swap_only(sites)
        return Removal(self._measure("").loss, steps)

    def _step(self) -> dict[str, RemovalStep]:
        """Try every site that is left."""
        found = {}
        for site in self.contest.swapped:
            if site in self.kept:
                continue
            key = json.dumps([*self.kept, site])
            if key not in self.known:
                self.contest.put(self.contest.with_site(self.kept, site))
                self.known[key] = self._measure(site)
                self._append(key)
            found[site] = self.known[key]
        self.contest.swap_only(self.contest.swapped)
        return found

    def _measure(self, site: str) -> RemovalStep:
        """Compare the candidate as it stands with the model that has its own norms."""
        meter, targets = LogitsMeter(), self.ids[0, 1:]
        logits = self.unswapped if not site else self.contest.candidate(self.ids)[0]  # (T, V)
        for start in range(0, len(logits), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            meter.add(self.unswapped[part].double(), logits[part], targets[part])
        kl = float(torch.cat(meter.kl).mean())
        return RemovalStep(site, kl, meter.loss / max(meter.targets, 1), meter.distance.rms)

    def _append(self, key: str) -> None:
        if self.file is None:
            return
        line = {"search": self.fingerprint, "sites": json.loads(key)} | dataclasses.asdict(self.known[key])
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise MiniGPTError(f"cannot write {self.file}: {error.strerror}") from error


def _read(file: Path, fingerprint: str) -> Iterator[tuple[str, RemovalStep]]:
    """Yield the trials of the same search that a file holds. A last line that a kill has torn is cut off the file."""
    if not file.exists():
        return
    text = read_text(file)
    whole = text[: text.rfind("\n") + 1]
    torn, others = text[len(whole) :], f"{file} does not hold the trials of --remove; give another file"
    for line in whole.splitlines():
        try:
            fields = json.loads(line)
            trial = RemovalStep(fields["site"], fields["kl_mean"], fields["loss"], fields["rms_error"])
        except (ValueError, KeyError, TypeError) as error:
            raise MiniGPTError(others) from error
        if fields["search"] == fingerprint:
            yield json.dumps(fields["sites"]), trial
    if not (torn.startswith(BEGIN) or BEGIN.startswith(torn)):
        raise MiniGPTError(others)
    if torn:
        file.write_text(whole, encoding="utf-8")


def _fingerprint(contest: Contest, ids: list[int]) -> str:
    """Return what decides the trials: the config, the weights, the norm's Parameters and code, the texts."""
    digest = hashlib.sha256(json.dumps([ids, contest.swapped, contest.attention, str(contest.device)]).encode())
    digest.update(json.dumps(contest.config.to_dict()).encode())  # its eps and its heads are in no weight
    digest.update(contest.center.to_bytes())
    if contest.fit_rows is not None:
        digest.update(json.dumps(contest.fit_rows.tolist()).encode())
    for name, own in contest.candidate.state_dict().items():
        digest.update(f"{name} {own.dtype}".encode())
        digest.update(own.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    for norm in {type(part): part for site in contest.swapped for part in contest.norm_at(site).modules()}.values():
        code = source_file(norm)
        digest.update(Path(code).read_bytes() if code else type(norm).__qualname__.encode())
    return digest.hexdigest()[:16]
