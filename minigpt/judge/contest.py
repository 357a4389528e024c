"""The models that are compared, and the texts that all of them read."""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.checkpoint.frozen_norms import is_plain_form
from minigpt.checkpoint.opened import open_checkpoint
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError, GenerationError
from minigpt.generation import prompt_ids
from minigpt.judge.reference import Reference
from minigpt.judge.report import Fields
from minigpt.model import GPT2
from minigpt.model.checks import check_inputs
from minigpt.norms import NormSpec, available, is_registered, notes
from minigpt.norms.foreign.adapt import KEEP, AdaptedNorm
from minigpt.recipe import from_pretrained
from minigpt.swap import center_writers, fit_norms, match_sites, swap_norms
from minigpt.swap.fit import rows_of_text
from minigpt.tokenizer import Tokenizer

# From the world of the demo's tales, but not told as there, so that a changed model shows. Any GPT-2 can read them.
PROMPTS = (
    "Once upon a time there was a young gardener named Tom, who found a silver coin in the forest. His sister laughed.",
    "The old shepherd gave the lantern to the gardener, and the gardener gave it to Mara.",
    "Then Mara came to Tom.",
    "One Sunday, a silver coin",
)

SHAPE = ("n_layer", "n_embd", "n_positions", "vocab_size")  # must be equal for two checkpoints to be compared

Prompts = Sequence[str] | Sequence[Sequence[int]]


class Contest:
    """The candidate, the original in reference arithmetic, and the original twice in transformers.

    The original is the same checkpoint, or another one if the candidate is judged ``against`` it.

    Attributes:
        candidate: ours, with the norm in question at its sites, and its weights as ``quantize`` leaves them.
        plain: ours, the original in reference arithmetic with fused norms, or with frozen ones if a plain GPT-2 holds
            them by a huge eps.
        reference: transformers, the original at the candidate's dtype.
        truth: transformers in float64, on the original's weights as rounded to that dtype.
        swapped: the sites that hold the norm in question.
        new: every site's norm, the ones in question among them.
        fit_rows: the token ids (B, T) that its Parameters are fitted on; None if they are not.
    """

    def __init__(
        self,
        place: Path,
        norm: NormSpec,
        sites: list[str],
        attention: str,
        device: torch.device,
        dtype: torch.dtype | None,
        quantize: str | None = None,
        against: Path | None = None,
        keep: Collection[str] = KEEP,
        center: bool = False,
    ) -> None:
        self.place, self.original = place, against or place
        self.attention, self.device, self.quantize, self.center = attention, device, quantize, center
        self._named = _named_again(place, norm)
        self.candidate = from_pretrained(
            place,
            norm=None if self._named == "fused" else self._named,
            attention=attention,
            device=device,
            dtype=dtype,
            quantize=quantize,
        )
        # Ids that stand for no text count like any other: the model is judged, not what is drawn from it.
        self.candidate.config = self.config = dataclasses.replace(self.candidate.config, used_vocab_size=None)
        self.dtype = self.candidate.wte.weight.dtype
        self._weights = {} if center or against else dict(self.candidate.named_parameters())
        if center:
            center_writers(self.candidate)
        self._own = self.candidate.norm_modules()
        # "fused" leaves the norms that the checkpoint was loaded with, as from_pretrained does.
        if norm in ("fused", self._named):
            self.swapped = match_sites(self.candidate, sites)
        else:
            self.swapped = swap_norms(self.candidate, norm, sites, keep)
        self.new = self.candidate.norm_modules()
        self.fit_rows: Int[Tensor, "batch seq"] | None = None
        self.plain = self.ours(arithmetic="reference")
        if not is_plain_form(self.plain):
            swap_norms(self.plain, "fused")  # a checkpoint may name other norms
        for name in SHAPE:
            if (found := getattr(self.config, name)) != (wanted := getattr(self.plain.config, name)):
                raise ConfigError(
                    f"{place} and {against} must have the same shape to be compared, but {name} is {found} and {wanted}"
                )
        their = partial(Reference, self.original, dtype=self.dtype, device=device)
        self.reference = their(attention=attention)
        other = "eager" if attention == "sdpa" else "sdpa"  # so that float64 has a noise floor too
        self.truth = their(attention=other, compute=torch.float64)

    def ours(self, **other: Any) -> GPT2:
        """Our model of the original with its own norms, under conditions that differ in ``other``."""
        conditions: dict[str, Any] = dict(attention=self.attention, device=self.device, dtype=self.dtype)
        named = None if self._named == "fused" or self.original != self.place else self._named
        model = from_pretrained(self.original, norm=named, **conditions | other)
        for name, parameter in list(model.named_parameters()):
            ours = self._weights.get(name)
            if ours is not None and (ours.dtype, ours.stride()) == (parameter.dtype, parameter.stride()):
                site, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(site), attribute, ours)  # the same values, held once
        return model

    def swap_only(self, sites: Sequence[str]) -> None:
        """Put the norm in question at these of its sites only, and the model's own norms elsewhere."""
        self.put({site: self.new[site] for site in sites})

    def put(self, norms: Mapping[str, nn.Module]) -> None:
        """Put these norms at their sites, and the model's own norms at the others that are swapped."""
        for site in self.swapped:
            self.candidate.set_submodule(site, norms.get(site, self._own[site]))

    def with_site(self, norms: Mapping[str, nn.Module], site: str) -> dict[str, nn.Module]:
        """Return these norms, and the one in question at one more site: fitted there, if norms are fitted."""
        new = self.new[site]
        if self.fit_rows is not None:
            new = copy.deepcopy(new)
            self.put({**norms, site: new})
            fit_norms(self.candidate, self.fit_rows, site)
        return {**norms, site: new}

    @property
    def is_exact(self) -> bool:
        """Whether the candidate claims to be the same model as the original."""
        is_same = self.quantize is None and self.original == self.place
        return is_same and all(claims_layer_norm(self.new[site]) for site in self.swapped)

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the candidate, e.g. that its norm's class has another eps."""
        found = {note for site in self.swapped for note in notes(self.new[site])}
        if self.quantize is not None:
            found.add(f"The weights that multiply are {self.quantize}, with a scale for each output channel.")
        if self.center:
            found.add("The model was folded and centred first, so a norm's input and output are not the original's.")
        return sorted(found)

    def fit(self, file: str | Path, tokenizer: Tokenizer | None) -> list[Fields]:
        """Fit the norms in question on a text file; errors are those of ``minigpt.swap.fit_on_text``."""
        self.fit_rows = rows_of_text(self.candidate, require_tokenizer(tokenizer, file), file)
        found = fit_norms(self.candidate, self.fit_rows, self.swapped)
        return [Fields(site=site, **explained._asdict()) for site, explained in found.items()]

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        """Token ids as a batch of one on the contest's device."""
        return torch.tensor([ids], device=self.device)


def claims_layer_norm(norm: nn.Module) -> bool:
    """Whether a norm claims to compute LayerNorm: all do, but those registered as inexact, and kinds of RMSNorm."""
    cls = type(norm.norm if isinstance(norm, AdaptedNorm) else norm)
    inexact = tuple(info.cls for info in available().values() if not info.exact)
    return not issubclass(cls, (*inexact, nn.RMSNorm)) and "rms" not in cls.__name__.lower()


def require_tokenizer(tokenizer: Tokenizer | None, file: str | Path) -> Tokenizer:
    """Return the tokenizer that a text file needs; raise GenerationError if there is none."""
    if tokenizer is None:
        raise GenerationError(f"{file} needs a tokenizer, and the checkpoint has none")
    return tokenizer


def _named_again(place: Path, norm: NormSpec) -> NormSpec:
    """Return ``norm`` if the checkpoint names a norm that is not registered, which a caller must name again."""
    named = open_checkpoint(place).norms
    return "fused" if all(is_registered(of_site) for _, of_site in named) else norm


class Judged(NamedTuple):
    """The token ids that are read, with a description for people."""

    prompts: list[list[int]]
    described: str
    tokenizer: Tokenizer | None = None

    def text(self, ids: list[int]) -> str | None:
        """The text of tokens, or None without a tokenizer."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode(ids)


def judged_prompts(place: Path, prompts: Prompts | None, config: GPT2Config) -> Judged:
    """Return the prompts' token ids. By default ``PROMPTS``, or random ids if the model cannot read those.

    An empty text is end-of-text, with which a document starts.

    Raises:
        CheckpointError: if texts are given and there is no tokenizer for them.
        GenerationError: if there is no prompt, or one is an empty list, too long, or outside the vocabulary.
    """
    if prompts is None:
        try:
            found = judged_prompts(place, PROMPTS, config)
        except CheckpointError as error:
            return Judged(_random_ids(config), f"4 sequences of random ids, since {error}")
        except GenerationError:
            return Judged(_random_ids(config), "4 sequences of random ids, since the default texts do not fit it")
        return found._replace(described=f"{len(PROMPTS)} built-in texts")
    if isinstance(prompts, str) or len(prompts) == 0:
        raise GenerationError(f"prompts must be a list of texts, or of lists of token ids, got {prompts!r}")
    are_texts = isinstance(prompts[0], str)
    try:
        tokenizer = Tokenizer.from_pretrained(place)
    except CheckpointError:
        if are_texts:
            raise
        tokenizer = None
    if tokenizer is not None and are_texts:
        ids = [prompt_ids(tokenizer, text) for text in cast("Sequence[str]", prompts)]
        described = f"{len(ids)} text{'s' if len(ids) > 1 else ''}"
    else:
        ids = [list(prompt) for prompt in cast("Sequence[Sequence[int]]", prompts)]
        described = f"{len(ids)} lists of ids"
    for i, prompt in enumerate(ids):
        try:
            check_inputs(config, torch.tensor([prompt], dtype=torch.long), None, None, None)
        except GenerationError as error:
            raise GenerationError(f"prompt {i}: {error}") from error
    return Judged(ids, described, tokenizer)


def _random_ids(config: GPT2Config) -> list[list[int]]:
    seq = min(24, max(1, config.n_positions // 2))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (4, seq), generator=generator).tolist()
