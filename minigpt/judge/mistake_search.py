"""The search for the mistake that gives another program's logits: each is put into our network in float64.

T tokens, V vocabulary, N mistakes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, product

import torch
from torch import Tensor

from minigpt.judge.evidence import Evidence, Network, Prediction, Sums, finished, predict
from minigpt.judge.head import enough, left_by_a_head
from minigpt.judge.measures import precision_of
from minigpt.judge.mistakes import Mistake, MistakePart
from minigpt.judge.mistakes.text import centred
from minigpt.judge.screen import LIMITS, Noise, Screen, rms_of
from minigpt.progress import Steps
from minigpt.report.fields import Diagnosed
from minigpt.report.noise import MOST_NOISE, NEAR
from minigpt.shape import Shape

TOGETHER = (  # mistakes that people make together, and whose effects need not add up
    (MistakePart.SPREAD, MistakePart.DIVISOR),
    (MistakePart.SPREAD, MistakePart.EPS),
    (MistakePart.DIVISOR, MistakePart.EPS),
    (MistakePart.SPREAD, MistakePart.DIVISOR, MistakePart.EPS),
    (MistakePart.WIRING, MistakePart.LAST_NORM),
    (MistakePart.SCALE, MistakePart.MASK),
)
OTHER_HEAD = "a head with a matrix of its own, not tied to the token embedding"


def distance_of(prediction: Prediction) -> float:
    return prediction.distance


def complexity(prediction: Prediction) -> tuple[int, bool]:
    """Return the number of mistakes, and whether one of them is fitted to the program."""
    is_fitted = any(mistake.fit is not None for mistake in prediction.mistakes)
    return len(prediction.mistakes), is_fitted


def is_possible(mistakes: tuple[Mistake, ...]) -> bool:
    """Return whether mistakes can be put in together: where two move blocks, the second's numbers would be others."""
    return len({*mistakes}) == len(mistakes) and sum(mistake.moves_blocks for mistake in mistakes) < 2


class MistakeSearch:
    """A search for the mistakes that give a program's logits.

    Args:
        network: our model in float64.
        texts: what the program read, the shortest first.
        longer: returns more texts, for what needs many positions.
        weights: how many numbers the model has.
        say: called as a step begins, and for each mistake that is put into the network.
    """

    def __init__(
        self, network: Network, table: Iterable[Mistake], texts: Sequence[Evidence],
        longer: Callable[[], list[Evidence]], noise: Noise, weights: int, say: Steps,
    ) -> None:  # fmt: skip
        self.network, self.texts, self.noise, self.say = network, texts, noise, say
        self.weights, self.longer = weights, longer
        self.table = list(table)
        self.screen = Screen(network, *self._shown())
        self.right = Prediction((), texts, [text.truth for text in texts])
        self.predictions: dict[tuple[Mistake, ...], Prediction] = {(): self.right}
        self.own_noises: dict[tuple[Mistake, ...], float] = {}

    def find(self) -> list[Diagnosed]:
        """Return the mistakes that explain the program's error, by the first explanation; none if nothing does."""
        if not self.right.known or not self.right.distance > MOST_NOISE * self.noise.least:
            return []
        for diagnosed in self._explanations():
            if diagnosed is not None:
                return diagnosed
        return []

    def _explanations(self) -> Iterator[list[Diagnosed] | None]:
        """Yield explanations, the simplest first; None for one that does not hold."""
        yield self._told(self.nearest) if self._is_explained(self.nearest) else None
        pairs = self.nearest_pairs
        yield self._told(pairs) if self._is_explained(pairs) else None
        yield self._by_one_in_one_block()
        if self.is_like_a_half and not self.is_mostly_of_mistakes:
            yield []  # the precision explains it
        yield self._by_another_head()
        if pairs and self._leaves_a_half(pairs[0]):  # a narrower format explains the rest
            yield self._told(pairs)
        yield self._by_one_in_part()

    def _by_one_in_one_block(self) -> list[Diagnosed] | None:
        """Explain the error by a mistake in the weights of one block alone."""
        blocks = range(Shape.of(self.network.model.config).n_layer)
        of_weights = [mistake for mistake in self.singles if mistake.part is MistakePart.WEIGHTS]
        most = self._most(LIMITS.kind_work) // max(1, len(blocks))
        alone = [(mistake.in_block(number),) for mistake in of_weights[:most] for number in blocks]
        nearest = self._near(sorted(alone, key=self._distance_of))
        return self._told(nearest) if self._is_explained(nearest) else None

    def _by_another_head(self) -> list[Diagnosed] | None:
        """Explain the error by another matrix in the head."""
        # so many fitted numbers explain a small error too
        is_clear = self.right.distance >= LIMITS.certain * self.noise.least
        if self.network.hidden is None or not is_clear:
            return None
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
            return None
        return [Diagnosed(OTHER_HEAD, ratio, True, precision_of(distance, self.noise.precisions))]

    def _by_one_in_part(self) -> list[Diagnosed] | None:
        """Explain a large part of the error by one mistake, if it is certain."""
        tied = self._tied(self.nearest)
        nearest = self._simplest(tied)
        is_certain = len({prediction.families for prediction in tied}) == 1 and self._is_well_known(nearest)
        if not is_certain or nearest.mistakes[-1].fit is not None:
            return None
        is_large = self._falls(nearest) >= LIMITS.certain and abs(nearest.share - 1) <= LIMITS.whole / 2
        is_large = is_large and nearest.distance <= LIMITS.remnant * self.noise.scale
        return self._told(self.nearest) if is_large or self._leaves_a_half(nearest) else None

    def _shown(self) -> tuple[Evidence, int]:
        """Return the first text that is off, and the end of the rows that show it."""
        most = LIMITS.certain * self.noise.least
        for text in self.texts:
            errors = (text.logits - text.truth).square().mean(-1).sqrt()  # (T)
            is_off = ~(errors <= most)
            if is_off.any():
                end = max(LIMITS.rows, int(is_off.long().argmax()) + LIMITS.after)
                return text, min(end, len(errors))
        return self.texts[0], min(LIMITS.rows, len(self.texts[0].truth))

    def _most(self, work: float) -> int:
        """Return how many times the network may read the rows of the screen."""
        return int(work / (self.weights * self.screen.end))

    @property
    def is_like_a_half(self) -> bool:
        """True if the error is as large as that of a narrower format."""
        return self.noise.is_like_a_half(self.right.distance)

    @cached_property
    def is_mostly_of_mistakes(self) -> bool:
        """Whether one or two mistakes take most of the error away."""
        nearest = [*self.nearest[:1], *self.nearest_pairs[:1]]
        return any(self._falls(prediction) >= LIMITS.certain for prediction in nearest)

    # Which mistakes are tried

    @cached_property
    def singles(self) -> list[Mistake]:
        """Mistakes within the network, the nearest first."""
        self.say("putting mistakes into the network")
        screen, nearest = self.screen, list[Mistake]()
        within = [mistake for mistake in self.table if not mistake.error and not mistake.is_outside]
        if screen.end >= 2 * LIMITS.rows:
            before, most = Screen(self.network, screen.text, LIMITS.rows), MOST_NOISE * self.noise.least
            # the others show where the program is right
            within = [mistake for mistake in within if not before.size(before.effect((mistake,))) > most]
        tiers = [[mistake for mistake in within if mistake.rank == rank] for rank in (0, 1)]
        tiers.append(self._roundings(screen.distance()))
        total = sum(map(len, tiers))
        for tier in tiers:
            if tier is tiers[-1] and self._is_of_mistakes(nearest):
                break
            for mistake in self.say.each(tier, total, first=len(screen.effects) + 1, of="mistake"):
                screen.add(mistake)
                if LIMITS.invisible * self.noise.least < rms_of(screen.effects[mistake]) < math.inf:
                    nearest.append(mistake)
            nearest.sort(key=screen.distance)
            if self._is_found([(mistake,) for mistake in nearest]):
                break
        return nearest

    def _is_of_mistakes(self, singles: list[Mistake]) -> bool:
        """Return whether one mistake gives most of the error, or two give all, so that no rounding need be tried."""
        is_mostly_one = self.screen.distance() >= LIMITS.certain * self.screen.distance(*singles[:1])
        pairs = [] if is_mostly_one else self._adding_up(singles)
        return is_mostly_one or self._is_found(sorted(pairs, key=self._distance_of))

    def _is_found(self, ranked: Sequence[tuple[Mistake, ...]]) -> bool:
        """Return whether the nearest mistakes explain the error, on the screen and on all texts."""
        most = LIMITS.slack * MOST_NOISE * self.noise.least
        return bool(ranked) and self._distance_of(ranked[0]) <= most and self._is_explained(self._near(ranked))

    def _roundings(self, distance: float) -> list[Mistake]:
        """Return the roundings whose errors may be this large."""
        chosen = []
        for mistake in self.table:
            least, most = mistake.error / 30, mistake.error * 100
            if mistake.error and least * self.noise.scale < distance < most * self.noise.scale:
                chosen.append(mistake)
        return chosen

    @cached_property
    def pairs(self) -> list[tuple[Mistake, ...]]:
        """Pairs of mistakes within the network, and three mistakes in norms, the nearest first.

        Tried are those whose effects, each measured alone, add up to the error best: of all, and of each of the nearest
        mistakes. With the nearest one every other is tried whose effect is about as large as what is left of the error.
        Those that people make together are tried whatever their effects are.
        """
        if len(self.singles) < 2:
            return []
        self.say("putting pairs of mistakes into the network")
        ranked: list[tuple[Mistake, ...]] = []
        for stage in self._stages():
            for mistakes in self.say.each(stage, len(stage), of="pair"):
                if is_possible(mistakes) and not {mistakes, mistakes[::-1]} & {*ranked}:
                    self._distance_of(mistakes)
                    ranked.append(mistakes)
            ranked.sort(key=self._distance_of)
            if self._is_found(ranked):
                break
        return ranked

    def _stages(self) -> Iterator[list[tuple[Mistake, ...]]]:
        """Yield pairs, the likeliest first."""
        singles, added = self.singles, self._added(self.singles)
        yield self._adding_up(singles)
        most = max(1, min(LIMITS.firsts, self._most(LIMITS.pair_work) // LIMITS.added))
        with_nearest: list[tuple[Mistake, ...]] = []
        for number in range(min(most, len(singles))):
            others = added[number].argsort()[: LIMITS.added].tolist()
            with_nearest += [(singles[number], singles[other]) for other in others]
        yield with_nearest
        nearest, left = singles[0], self.screen.distance(singles[0])
        others = [singles[other] for other in added[0].argsort().tolist()]
        others = [other for other in others if not other.error and self._may_leave(other, left)]
        yield [(nearest, other) for other in [*others[: self._most(LIMITS.kind_work)], *self._roundings(left)]]
        yield self._made_together()[: self._most(LIMITS.kind_work)]

    def _adding_up(self, singles: list[Mistake]) -> list[tuple[Mistake, ...]]:
        """Return the pairs whose effects add up to the error best."""
        pairs = list(combinations(range(len(singles)), 2))
        if not pairs:
            return []
        firsts, seconds = torch.tensor(pairs).T
        nearest = self._added(singles)[firsts, seconds].argsort()[: LIMITS.added].tolist()
        together = [(singles[pairs[number][0]], singles[pairs[number][1]]) for number in nearest]
        return [pair for pair in together if is_possible(pair)]

    def _made_together(self) -> list[tuple[Mistake, ...]]:
        """Return mistakes of the parts that people get wrong together."""
        together = []
        for parts in TOGETHER:
            members = [[mistake for mistake in self.table if mistake.part is part] for part in parts]
            together += product(*members)
        return together

    def _may_leave(self, mistake: Mistake, distance: float) -> bool:
        """Return whether a mistake's effect is about as large as a distance."""
        size = rms_of(self.screen.effects[mistake])
        return distance * LIMITS.smallest_effect <= size <= distance * LIMITS.largest_effect

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

    @cached_property
    def nearest(self) -> list[Prediction]:
        """Predictions of one mistake, or of one and what may be done to the logits, the nearest first."""
        predictions = self._near([(single,) for single in self.singles])
        if not self._is_explained(predictions):
            for base in (*predictions[: LIMITS.bases], self.right):
                predictions += self._outside(base, is_fitted=False)
            predictions += self._outside(self.right, is_fitted=True)
        return self._simplest_tier(predictions)

    @cached_property
    def nearest_pairs(self) -> list[Prediction]:
        """Predictions of two mistakes, one of them fitted at most, the nearest first; none if one is about as near."""
        predictions = self._near(self.pairs)
        if not self._is_explained(predictions):
            for single in self.singles[: LIMITS.bases]:
                predictions += self._outside(self._predict((single,)), is_fitted=True)
            predictions = self._simplest_tier(predictions)
        if predictions and predictions[0].distance > LIMITS.simpler * self.nearest[0].distance:
            return []
        return predictions

    def _near(self, ranked: Sequence[tuple[Mistake, ...]]) -> list[Prediction]:
        """Return predictions on all texts of those that are about as near as the first, the nearest first."""
        near = []
        for mistakes in ranked[: LIMITS.finals]:
            if self._distance_of(mistakes) <= LIMITS.close * self._distance_of(ranked[0]):
                near.append(self._predict(mistakes))
        return sorted(near, key=distance_of)

    def _simplest_tier(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return the predictions of the simplest kind, the nearest first.

        Those of two mistakes, or with fitted numbers, must leave half the distance of simpler ones, which do not
        explain the error.
        """
        tiers: dict[tuple[int, bool], list[Prediction]] = {}
        for prediction in sorted(predictions, key=distance_of):
            tiers.setdefault(complexity(prediction), []).append(prediction)
        chosen: list[Prediction] = []
        for tier in sorted(tiers):
            first = tiers[tier][0]
            is_nearer = not chosen or first.distance <= LIMITS.simpler * chosen[0].distance
            if is_nearer and not self._is_explained(chosen):
                chosen = tiers[tier]
        return chosen

    def _predict(self, mistakes: tuple[Mistake, ...]) -> Prediction:
        if mistakes not in self.predictions:
            self.predictions[mistakes] = predict(self.network, mistakes, self.texts)
        return self.predictions[mistakes]

    def _outside(self, base: Prediction, *, is_fitted: bool) -> list[Prediction]:
        """Return nearer predictions with what may be done to the logits of another one.

        The network need not compute.
        """
        predictions = []
        for mistake in self.table:
            if mistake.is_outside and is_fitted == (mistake.fit is not None):
                logits = [
                    finished([mistake], logits, text) for text, logits in zip(self.texts, base.logits, strict=True)
                ]
                prediction = Prediction((*base.mistakes, mistake), self.texts, logits)
                if prediction.distance < base.distance:
                    predictions.append(prediction)
        return predictions

    # Whether it is certain

    def _is_explained(self, finals: list[Prediction]) -> bool:
        """Return whether what the first leaves of the error is noise, and all of its mistake is in the program."""
        if not finals or not self._ratio(finals[0]) <= MOST_NOISE:
            return False
        return self._is_whole(finals[0]) and self._is_well_known(finals[0])

    def _is_whole(self, prediction: Prediction) -> bool:
        """Return whether all of a mistake is in the program: a share cannot say it of one that rounds in steps."""
        if self.texts[0].least:
            return self._falls(prediction) >= LIMITS.certain
        return abs(prediction.share - 1) <= LIMITS.whole

    def _is_well_known(self, prediction: Prediction) -> bool:
        """Return whether a prediction says something on at least half of the logits."""
        return prediction.known >= LIMITS.known * self.right.known

    def _ratio(self, prediction: Prediction) -> float:
        """Return the distance over the noise floor, which is the mistaken network's own where that is larger.

        What multiplies the logits multiplies their noise.
        """
        floor = self.noise.least
        if prediction.mistakes and all(mistake.is_outside for mistake in prediction.mistakes):
            floor *= max(1.0, self._multiple(prediction))
        if prediction.distance > MOST_NOISE * floor and self._falls(prediction) >= LIMITS.own_noise:
            if prediction.mistakes not in self.own_noises:
                self.own_noises[prediction.mistakes] = self.network.noise(prediction.mistakes, self.texts)
            floor = max(floor, self.own_noises[prediction.mistakes])
        return prediction.distance / floor

    def _multiple(self, prediction: Prediction) -> float:
        """Return the multiple of the true logits that is nearest to the predicted ones, without each row's mean."""
        sums = Sums()
        for text, logits in zip(self.texts, prediction.logits, strict=True):
            sums.add(centred(logits), centred(text.truth))
        return abs(sums.share)

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
            if way < LIMITS.apart * self.noise.least or share > LIMITS.tied:
                tied.append(other)
        return tied

    # In words

    def _told(self, finals: list[Prediction]) -> list[Diagnosed]:
        """Return the mistakes of the nearest prediction, one after another."""
        tied = self._tied(finals)
        rows, nearest = [], self._simplest(tied)
        for number, mistake in enumerate(nearest.mistakes, 1):
            part = nearest if number == len(nearest.mistakes) else self._predict(nearest.mistakes[:number])
            rows.append(self._row(self._or_others(mistake, nearest, tied), part))
        return rows

    def _simplest(self, tied: list[Prediction]) -> Prediction:
        """Return the prediction of fewest mistakes, and of these the simplest."""

        def key(prediction: Prediction) -> tuple[int, list[tuple[int, int, str]]]:
            return len(prediction.mistakes), [mistake.simplicity for mistake in prediction.mistakes]

        return min(tied, key=key)

    @staticmethod
    def _or_others(mistake: Mistake, nearest: Prediction, tied: list[Prediction]) -> list[Mistake]:
        """Return a mistake of the nearest prediction, with those that may be in its place."""
        others, kinds = [mistake], {*nearest.families}
        for prediction in tied:
            if mistake.kind in prediction.families:
                continue
            for other in prediction.mistakes:
                if other.kind not in kinds:
                    kinds.add(other.kind)
                    others.append(other)
        return others

    def _row(self, mistakes: list[Mistake], prediction: Prediction) -> Diagnosed:
        words = " or ".join(mistake.words for mistake in mistakes)
        ratio = self._ratio(prediction)
        rest = precision_of(prediction.distance, self.noise.precisions)
        cure = mistakes[0].cure if len(mistakes) == 1 else ""
        return Diagnosed(words, ratio, ratio <= MOST_NOISE, rest, cure)

    def _leaves_a_half(self, prediction: Prediction) -> bool:
        """Return whether what is left of the error is that of a narrower format, and the error falls clearly."""
        falls = self._falls(prediction) >= NEAR**2
        return self._is_whole(prediction) and falls and self.noise.is_like_a_half(prediction.distance)
