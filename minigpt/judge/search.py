"""Which sites matter: one at a time, ranked; and the smallest sets that break parity."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from minigpt.judge.contest import Contest
from minigpt.judge.decoding import decoding_distance, ours
from minigpt.judge.greedy import Continued
from minigpt.judge.measures import Distance
from minigpt.judge.parity_report import MOST_DECODING_NOISE, MOST_NOISE, Bisection, Logits, SiteSensitivity

# T tokens, V vocabulary


def sensitivity(contest: Contest, text: list[int], logits: Logits) -> list[SiteSensitivity]:
    """How much each swapped site alone moves the logits of the model with its own norms, most first."""
    ids = contest.tensor(text)  # (1, T)
    contest.swap_only([])
    unswapped = contest.candidate(ids)  # (1, T, V)
    ranked = []
    for site in contest.swapped:
        contest.swap_only([site])
        change = Distance()
        change.add(contest.candidate(ids), unswapped)
        ranked.append(SiteSensitivity(site, change.rms, logits.over_noise(change.rms)))
    contest.swap_only(contest.swapped)
    return sorted(ranked, key=lambda site: -site.rms_error)


class Verdicts:
    """Asks whether parity holds with the norm in question at some of its sites only, on logits of the true tokens.

    Greedy decoding need not be run for it: up to the first difference both read the same tokens, so the first token
    where the candidate's likeliest differs from what transformers wrote shows in one forward over the text.

    Args:
        logits, decoding: with the noise floor of each.
    """

    def __init__(
        self,
        contest: Contest,
        texts: list[Continued],
        truths: list[Float[Tensor, "_seq vocab"]],
        logits: Logits,
        decoding: Logits | None,
    ) -> None:
        self.contest, self.texts, self.truths = contest, texts, truths
        self.logits, self.decoding = logits, decoding
        self.asked = 0

    def fails(self, sites: Sequence[str]) -> bool:
        """Whether these sites alone break parity."""
        self.asked += 1
        self.contest.swap_only(sites)
        fails = self._fails_on_whole_texts() or self._fails_in_decoding()
        self.contest.swap_only(self.contest.swapped)
        return fails

    def _fails_on_whole_texts(self) -> bool:
        distance, parts = Distance(), False
        for text, truth in zip(self.texts, self.truths, strict=True):
            logits = self.contest.candidate(self.contest.tensor(text.text))[0]  # (T, V)
            distance.add(logits, truth)
            parts = parts or self._parts_beyond_noise(logits, truth, text)
        return parts or not self.logits.over_noise(distance.rms) <= MOST_NOISE

    def _fails_in_decoding(self) -> bool:
        if self.decoding is None:
            return False
        distance = decoding_distance(ours(self.contest.candidate), self.texts, self.truths, self.contest.device)
        return not self.decoding.over_noise(distance.rms) <= MOST_DECODING_NOISE

    def _parts_beyond_noise(
        self, logits: Float[Tensor, "seq vocab"], truth: Float[Tensor, "seq vocab"], text: Continued
    ) -> bool:
        written = self.contest.tensor(text.reference)[0]  # (new,)
        differs = logits[text.before_new].argmax(-1) != written
        if not differs.any():
            return False
        best = truth[text.before_new][differs][0].topk(2).values  # (2,), at the first difference
        return float(best[0] - best[1]) > self.logits.greedy_noise


def bisect(verdicts: Verdicts, sites: Sequence[str]) -> Bisection:
    """The sites that must be given back for parity to hold, found as minimal failing sets until what is left passes.

    No site where it does not hold without them either, since something else breaks it.
    """
    found: list[list[str]] = []
    remaining = list(sites)
    while remaining and verdicts.fails(remaining):
        if not found and verdicts.fails([]):
            break
        found.append(minimal_failing(remaining, verdicts.fails))
        remaining = [site for site in remaining if site not in found[-1]]
    return Bisection([site for site in sites if site not in remaining], found, verdicts.asked)


def minimal_failing(sites: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """A subset that fails and from which no site can be left out (delta debugging, Zeller & Hildebrandt 2002).

    Args:
        sites: a set that is known to fail.
    """
    parts = 2
    while len(sites) > 1:
        chunks = _split(sites, min(parts, len(sites)))
        complements = [[site for site in sites if site not in chunk] for chunk in chunks]
        if (failing := next(filter(fails, chunks), None)) is not None:
            sites, parts = failing, 2
        elif len(chunks) > 2 and (failing := next(filter(fails, complements), None)) is not None:
            sites, parts = failing, len(chunks) - 1
        elif len(chunks) == len(sites):
            break
        else:
            parts = 2 * len(chunks)
    return sites


def _split(items: list[str], parts: int) -> list[list[str]]:
    size, longer = divmod(len(items), parts)
    ends = [i * size + min(i, longer) for i in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]
