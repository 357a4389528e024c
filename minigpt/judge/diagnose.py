"""The search for the mistake that gives another program's logits: each is put into our network in float64.

T tokens, V vocabulary, N mistakes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from minigpt.judge.evidence import Network, Prediction, Sums, Text, finished, predict
from minigpt.judge.head import enough, left_by_a_head
from minigpt.judge.mistakes import Mistake
from minigpt.judge.mistakes.text import centred
from minigpt.judge.precision import precision_of
from minigpt.report.fields import MOST_NOISE, NEAR, Diagnosed, noise_ratio

SCREEN_ROWS = 16  # of the beginning of a text on which every mistake is tried
MOST_COLUMNS = 4096  # logits of a position that are compared there
SLACK = 1.5  # the noise of one text may be so many times that of all
INVISIBLE = 0.1  # of the noise floor: a mistake that does less cannot be seen
CLOSE = 1.5  # a mistake that is not farther than so many times the nearest is tried on all texts
MOST_FINAL = 6
FITTED = 2  # nearest mistakes on top of which the logits are changed or fitted
PAIR_WORK = 1e11  # weights times tokens times pairs of the nearest mistakes
MOST_FIRST = 5  # nearest mistakes with which others are tried
ADDED = 24  # others with each, and pairs of all, whose effects add up to the error best
SMALLEST_EFFECT, LARGEST_EFFECT = 1 / 8, 50.0  # effect of a second mistake alone, over what the first one leaves
HALF = 0.5  # a second mistake must bring the distance below this share
APART = 0.05  # of the noise floor: predictions that are closer are one
TIED = 0.2  # of the way to another prediction: the program may as well be there
WHOLE = 0.2  # the share of a mistake's effect may differ from 1 by this
CERTAIN = 5.0  # a mistake that explains a part must bring the error down by this factor
OTHER_HEAD = "a head with a matrix of its own, not tied to the token embedding"
OWN_NOISE = 4.0  # a mistake may have more noise than the right model only if the error falls by this factor


@dataclass(frozen=True)
class Noise:
    """The part of an error that rounding explains.

    Attributes:
        floor: transformers' RMS error at the dtype.
        scale: RMS of the true logits.
        precisions: transformers' RMS error in each dtype.
        own: computes the RMS error of a model of ours at the dtype with mistakes in it.
    """

    floor: float
    scale: float
    precisions: Mapping[str, float]
    own: Callable[[Sequence[Mistake]], float]

    @property
    def least(self) -> float:
        """The floor, which is at least the rounding of float64."""
        return 1 / noise_ratio(1.0, self.floor, self.scale)

    def is_like_a_half(self, distance: float) -> bool:
        """Return whether an error is that of a format narrower than the dtype."""
        for error in self.precisions.values():
            if error > MOST_NOISE * self.floor and error / NEAR <= distance <= error * NEAR:
                return True
        return False


class Screen:
    """Effects of mistakes on the beginning of the shortest text, without the mean of each position."""

    def __init__(self, network: Network, text: Text, rows: int) -> None:
        self.network, self.text, self.rows = network, text, rows
        columns = text.truth.shape[-1]
        self.step = max(1, columns // MOST_COLUMNS)
        self.right = self._flat(text.truth[:rows])
        self.error = (self._flat(text.logits[:rows]) - self.right).float()
        self.known = ~self.error.isnan()
        self.error = self.error[self.known]
        self.effects: dict[Mistake, Tensor] = {}
        self.distances: dict[tuple[Mistake, ...], float] = {(): _rms(self.error)}

    def _flat(self, logits: Tensor) -> Tensor:
        return centred(logits)[:, :: self.step].flatten()  # a shift of all logits changes no probability

    def add(self, mistake: Mistake) -> None:
        """Put a mistake into the network."""
        self.effects[mistake] = self._effect((mistake,))

    def distance(self, *mistakes: Mistake) -> float:
        """Return how far the program is from the network with the mistakes in it."""
        if mistakes not in self.distances:
            only = self.effects.get(mistakes[0]) if len(mistakes) == 1 else None
            effect = self._effect(mistakes) if only is None else only
            self.distances[mistakes] = _rms(self.error - effect)
        return self.distances[mistakes]

    def _effect(self, mistakes: Sequence[Mistake]) -> Tensor:
        """Return what mistakes do to the truth."""
        logits = self.network.logits(mistakes, self.text, self.rows)
        difference = self._flat(logits) - self.right
        return difference[self.known].float().nan_to_num(torch.inf)


Pair = tuple[Mistake, Mistake]


def distance_of(prediction: Prediction) -> float:
    return prediction.distance


def complexity(prediction: Prediction) -> tuple[int, bool]:
    """Return the number of mistakes, and whether one of them is fitted to the program."""
    is_fitted = any(mistake.fit is not None for mistake in prediction.mistakes)
    return len(prediction.mistakes), is_fitted


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


class MistakeSearch:
    """A search for the mistakes that give a program's logits.

    Args:
        network: our model in float64.
        texts: what the program read, the shortest first.
        longer: returns more texts, for what needs many positions.
        weights: how many numbers the model has.
        say: called with a few words as a step begins.
    """

    def __init__(
        self, network: Network, table: Iterable[Mistake], texts: Sequence[Text], longer: Callable[[], list[Text]],
        noise: Noise, weights: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.network, self.texts, self.noise, self.say = network, texts, noise, say
        self.weights, self.longer = weights, longer
        self.table = list(table)
        self.screen = Screen(network, texts[0], min(SCREEN_ROWS, texts[0].ids.shape[1]))
        self.right = Prediction((), texts, [text.truth for text in texts])
        self.predictions: dict[tuple[Mistake, ...], Prediction] = {(): self.right}
        self.own_noises: dict[tuple[Mistake, ...], float] = {}

    def find(self) -> list[Diagnosed]:
        """Return the mistakes that explain the program's error; none if nothing does."""
        if not self.right.known or not self.right.distance > MOST_NOISE * self.noise.least:
            return []
        self.say("putting mistakes into the network")
        singles = self._singles()
        ranked = [(single,) for single in singles]
        finals = self._final(ranked)
        if self._is_explained(finals):
            return self._told(finals)
        self.say("putting pairs of mistakes into the network")
        pairs = self._final([*self._pairs(singles)], ranked[:FITTED])
        if self._is_explained(pairs) and pairs[0].distance <= HALF * finals[0].distance:
            return self._told(pairs)
        if self.noise.is_like_a_half(self.right.distance):
            return []  # its precision explains it
        other_head = self._other_head()
        if other_head:
            return other_head
        if pairs and pairs[0].distance <= HALF * finals[0].distance and self._leaves_a_half(pairs[0]):
            return self._told(pairs)
        return self._told_in_part(finals)

    def _other_head(self) -> list[Diagnosed]:
        """Return the mistake of another matrix in the head, if that explains the error."""
        is_clear = self.right.distance >= CERTAIN * self.noise.least  # so many fitted numbers explain a small error too
        if self.network.hidden is None or not is_clear:
            return []
        texts = [*self.texts]
        width = self.network.hidden(texts[0].ids).shape[-1]
        if not enough(sum(len(text.logits) for text in texts), width):
            texts += self.longer()
        hidden = [self.network.hidden(text.ids) for text in texts]
        distance = left_by_a_head(hidden, [text.logits for text in texts])
        size = Sums()
        for text in texts:
            size.add(text.logits)
        ratio = distance / (self.noise.least * max(1.0, size.rms / self.noise.scale))
        if not ratio <= MOST_NOISE:
            return []
        return [Diagnosed(OTHER_HEAD, ratio, True, precision_of(distance, self.noise.precisions))]

    # Which mistakes are tried

    def _singles(self) -> list[Mistake]:
        """Return mistakes within the network, the nearest first."""
        screen = self.screen
        for mistake in self.table:
            if not mistake.error and not mistake.is_outside:
                screen.add(mistake)
        nearest = min(map(screen.distance, screen.effects))
        if nearest > SLACK * MOST_NOISE * self.noise.least:
            for mistake in self._roundings(screen.distance()):
                screen.add(mistake)
        visible = []
        for mistake, effect in screen.effects.items():
            if _rms(effect) > INVISIBLE * self.noise.least:
                visible.append(mistake)
        return sorted(visible, key=screen.distance)

    def _roundings(self, distance: float) -> list[Mistake]:
        """Return the roundings whose errors may be this large."""
        chosen = []
        for mistake in self.table:
            least, most = mistake.error / 30, mistake.error * 100
            if mistake.error and least * self.noise.scale < distance < most * self.noise.scale:
                chosen.append(mistake)
        return chosen

    def _pairs(self, singles: list[Mistake]) -> list[Pair]:
        """Return pairs, the nearest first.

        Tried are those whose effects, each measured alone, add up to the error best: of all, and of each of the nearest
        mistakes. With the nearest one every other is tried whose effect is about as large as what is left of the error.
        """
        if len(singles) < 2:
            return []
        added = self._added(singles)
        numbers = list(combinations(range(len(singles)), 2))
        firsts, seconds = torch.tensor(numbers).T
        order = added[firsts, seconds].argsort()[:ADDED].tolist()
        tried: dict[Pair, None] = {}
        for number in order:
            first, second = numbers[number]
            self._try_with(singles[first], [singles[second]], tried)
        work = self.weights * self.screen.rows * ADDED
        most = max(1, min(MOST_FIRST, int(PAIR_WORK / work)))
        for number in range(min(most, len(singles))):
            others = added[number].argsort()[:ADDED].tolist()
            self._try_with(singles[number], [singles[other] for other in others], tried)
        nearest = singles[0]
        left = self.screen.distance(nearest)
        others = [other for other in singles if not other.error and self._may_leave(other, left)]
        self._try_with(nearest, [*others, *self._roundings(left)], tried)
        return sorted(tried, key=self._distance_of)

    def _try_with(self, first: Mistake, others: Sequence[Mistake], tried: dict[Pair, None]) -> None:
        """Add pairs with a first mistake to those that are tried."""
        for second in others:
            both_move_blocks = first.moves_blocks and second.moves_blocks  # the numbers of the second would be others
            if second is not first and (second, first) not in tried and not both_move_blocks:
                tried[first, second] = None

    def _may_leave(self, mistake: Mistake, distance: float) -> bool:
        """Return whether a mistake's effect is about as large as a distance."""
        size = _rms(self.screen.effects[mistake])
        return distance * SMALLEST_EFFECT <= size <= distance * LARGEST_EFFECT

    def _distance_of(self, mistakes: tuple[Mistake, ...]) -> float:
        return self.screen.distance(*mistakes)

    def _added(self, singles: list[Mistake]) -> Tensor:
        """Return squared distances (N, N) if the effects of two mistakes add up, but for the error's own square."""
        effects = torch.stack([self.screen.effects[single] for single in singles])  # (N, numbers)
        products, along = effects @ effects.T, effects @ self.screen.error
        alone = products.diagonal() - 2 * along
        both = alone[:, None] + alone + 2 * products
        return both.fill_diagonal_(torch.inf).nan_to_num(torch.inf)

    # On all texts

    def _final(self, ranked: list[tuple[Mistake, ...]], fitted: Sequence[tuple[Mistake, ...]] = ()) -> list[Prediction]:
        """Return predictions on all texts of the nearest mistakes, the nearest first.

        What may be done to logits is tried on top of the nearest mistake. Two mistakes, or a number that is fitted,
        must leave half the distance of what is simpler.

        Args:
            fitted: mistakes on top of which numbers are fitted to the logits.
        """
        predictions = []
        for mistakes in ranked[:MOST_FINAL]:
            if self._distance_of(mistakes) <= CLOSE * self._distance_of(ranked[0]):
                predictions.append(self._predict(mistakes))
        predictions.sort(key=distance_of)
        if self._is_explained(predictions):
            return predictions
        if ranked and len(ranked[0]) == 1:
            for base in predictions[:FITTED]:
                predictions += self._outside(base, is_fitted=False)
        if not fitted:
            predictions += self._outside(self.right, is_fitted=False) + self._outside(self.right, is_fitted=True)
        for mistakes in fitted:
            predictions += self._outside(self._predict(mistakes), is_fitted=True)
        tiers: dict[tuple[int, bool], list[Prediction]] = {}
        for prediction in sorted(predictions, key=distance_of):
            tiers.setdefault(complexity(prediction), []).append(prediction)
        chosen: list[Prediction] = []
        for tier in sorted(tiers):
            nearest = tiers[tier]
            if not chosen or (not self._explains(chosen[0]) and nearest[0].distance <= HALF * chosen[0].distance):
                chosen = nearest
        return chosen

    def _predict(self, mistakes: tuple[Mistake, ...]) -> Prediction:
        if mistakes not in self.predictions:
            self.predictions[mistakes] = predict(self.network, mistakes, self.texts)
        return self.predictions[mistakes]

    def _outside(self, base: Prediction, *, is_fitted: bool) -> list[Prediction]:
        """Return predictions with what may be done to the logits of another one. The network need not compute."""
        predictions = []
        for mistake in self.table:
            if mistake.is_outside and is_fitted == (mistake.fit is not None):
                logits = [
                    finished([mistake], logits, text) for text, logits in zip(self.texts, base.logits, strict=True)
                ]
                predictions.append(Prediction((*base.mistakes, mistake), self.texts, logits))
        return predictions

    # Whether it is certain

    def _is_explained(self, finals: list[Prediction]) -> bool:
        return bool(finals) and self._explains(finals[0])

    def _explains(self, prediction: Prediction) -> bool:
        """Return whether what is left of the error is noise, and all of the mistake is in the program."""
        is_whole = abs(prediction.share - 1) <= WHOLE
        is_noise = self._ratio(prediction) <= MOST_NOISE
        return is_whole and is_noise and self._is_well_known(prediction)

    def _is_well_known(self, prediction: Prediction) -> bool:
        """Return whether a prediction says something on at least half of the logits."""
        return prediction.known >= HALF * self.right.known

    def _ratio(self, prediction: Prediction) -> float:
        """Return the distance over the noise floor, which is the mistaken network's own where that is larger."""
        floor = self.noise.least
        if prediction.distance > MOST_NOISE * floor and self._falls(prediction) >= OWN_NOISE:
            floor = max(floor, self._own_noise(prediction.mistakes))
        return prediction.distance / floor

    def _own_noise(self, mistakes: tuple[Mistake, ...]) -> float:
        if mistakes not in self.own_noises:
            self.own_noises[mistakes] = self.noise.own(mistakes)
        return self.own_noises[mistakes]

    def _falls(self, prediction: Prediction) -> float:
        """Return by which factor the error falls with the mistake."""
        return self.right.distance / max(prediction.distance, 1e-300)

    def _tied(self, finals: list[Prediction]) -> list[Prediction]:
        """Return the nearest prediction, and those that the program's logits cannot tell from it."""
        nearest, tied = finals[0], [finals[0]]
        for other in finals[1:]:
            if not self._is_well_known(other) or len(other.mistakes) > len(nearest.mistakes):
                continue
            way, share = nearest.towards(other)
            if way < APART * self.noise.least or share > TIED:
                tied.append(other)
        return tied

    # In words

    def _told(self, finals: list[Prediction]) -> list[Diagnosed]:
        """Return the mistakes of the nearest prediction, one after another."""
        tied = self._tied(finals)
        rows, nearest = [], self._simplest(tied)
        for number, mistake in enumerate(nearest.mistakes, 1):
            part = nearest if number == len(nearest.mistakes) else self._predict(nearest.mistakes[:number])
            rows.append(self._row(self._words(mistake, tied), part))
        return rows

    def _simplest(self, tied: list[Prediction]) -> Prediction:
        """Return the prediction of fewest mistakes, and of these the first in the table."""
        return min(tied, key=lambda prediction: (len(prediction.mistakes), *map(self.table.index, prediction.mistakes)))

    def _words(self, mistake: Mistake, tied: list[Prediction]) -> str:
        """Return a mistake in words, with those that may be in its place."""
        others = [mistake]
        families = {mistake.family or mistake.words}
        for prediction in tied:
            if mistake in prediction.mistakes:
                continue
            for other in prediction.mistakes:
                family = other.family or other.words
                if family not in families:
                    families.add(family)
                    others.append(other)
        return " or ".join(other.words for other in others)

    def _row(self, words: str, prediction: Prediction) -> Diagnosed:
        ratio = self._ratio(prediction)
        rest = precision_of(prediction.distance, self.noise.precisions)
        return Diagnosed(words, ratio, ratio <= MOST_NOISE, rest)

    def _told_in_part(self, finals: list[Prediction]) -> list[Diagnosed]:
        """Return the mistake that explains a large part of the error, if there is one and it is certain."""
        if not finals:
            return []
        tied = self._tied(finals)
        nearest = self._simplest(tied)
        if len({prediction.families for prediction in tied}) > 1:
            return []
        is_large = self._falls(nearest) >= CERTAIN and abs(nearest.share - 1) <= WHOLE / 2
        if nearest.mistakes[-1].fit is not None or not self._is_well_known(nearest):
            return []
        if is_large or self._leaves_a_half(nearest):
            return self._told(finals)
        return []

    def _leaves_a_half(self, prediction: Prediction) -> bool:
        """Return whether what is left of the error is that of a narrower format, and the error falls clearly."""
        is_whole = abs(prediction.share - 1) <= WHOLE
        falls = self._falls(prediction) >= NEAR**2
        return is_whole and falls and self.noise.is_like_a_half(prediction.distance)
