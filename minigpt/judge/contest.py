"""One checkpoint four times, and the texts that all four read."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.checkpoint import from_pretrained
from minigpt.config import GPT2Config
from minigpt.engine import GPT2
from minigpt.errors import CheckpointError, GenerationError, is_several
from minigpt.generation import prompt_ids
from minigpt.judge.reference import Reference
from minigpt.norms import NormSpec, notes
from minigpt.norms.foreign.adapt import KEEP
from minigpt.swap import calibrate, swap_norms
from minigpt.tokenizer import Tokenizer

PROMPTS = (
    "Once upon a time there was a",
    "The old sailor looked at the sea and said that",
    "In the morning the village was quiet, because everyone who could walk had gone to the river. When they came back,",
    'She opened the door. "Who is there?" she asked. Nobody answered, but',
)

Prompts = Sequence[str] | Sequence[Sequence[int]]


class Contest:
    """A checkpoint with the norm in question, in reference arithmetic, and twice in transformers.

    Attributes:
        candidate: ours, with the norm at its sites, and its weights as ``quantize`` leaves them.
        plain: ours, in reference arithmetic with fused norms.
        reference: transformers at the candidate's dtype.
        truth: transformers in float64, on the weights as rounded to that dtype.
        swapped: the sites that hold the norm in question.
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
        check_finite: bool = False,
        keep: Collection[str] = KEEP,
    ) -> None:
        self.place, self.attention, self.device, self.quantize = place, attention, device, quantize
        self.candidate = from_pretrained(
            place, attention=attention, device=device, dtype=dtype, quantize=quantize, check_finite=check_finite
        )
        # Ids that stand for no text count as any other: the model is judged, and not what is drawn from it.
        self.candidate.config = dataclasses.replace(self.candidate.config, used_vocab_size=None)
        self._weights = dict(self.candidate.named_parameters())
        self._own = self.candidate.norm_modules()
        self.swapped = swap_norms(self.candidate, norm, sites, keep)
        self._new = self.candidate.norm_modules()
        self.dtype = self.candidate.wte.weight.dtype
        self.plain = self.ours(arithmetic="reference")
        self.reference = Reference(place, attention=attention, dtype=self.dtype, device=device)
        other = "eager" if attention == "sdpa" else "sdpa"  # so that float64 too has a noise floor to be judged by
        self.truth = Reference(place, attention=other, dtype=self.dtype, device=device, compute=torch.float64)

    @property
    def config(self) -> GPT2Config:
        return self.candidate.config

    def ours(self, **other: Any) -> GPT2:
        """Our model of the same checkpoint with its own norms, in something ``other`` than the contest's conditions."""
        conditions: dict[str, Any] = dict(attention=self.attention, device=self.device, dtype=self.dtype)
        model = from_pretrained(self.place, **conditions | other)
        for name, parameter in list(model.named_parameters()):
            ours = self._weights.get(name)
            if ours is not None and (ours.dtype, ours.stride()) == (parameter.dtype, parameter.stride()):
                site, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(site), attribute, ours)  # the same values, held once
        return model

    def swap_only(self, sites: Sequence[str]) -> None:
        """Leave the norm in question at these of its sites alone, the model's own norms elsewhere."""
        for site in self.swapped:
            self.candidate.set_submodule(site, (self._new if site in sites else self._own)[site])

    @property
    def notes(self) -> list[str]:
        """What should be known of the candidate: that its norm's class has an eps of its own, for one."""
        found = {note for site in self.swapped for note in notes(self._new[site])}
        if self.quantize is not None:
            found.add(f"The weights that multiply are {self.quantize}, with a scale for each output channel.")
        return sorted(found)

    def calibrate(self, ids: list[int]) -> None:
        """Let frozen norms collect their deviations from a text, read in rows as long as the context allows.

        Raises:
            NormError: none of the swapped norms is frozen, or the text is too short.
        """
        length = min(len(ids), self.config.n_positions)
        rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        calibrate(self.candidate, torch.tensor(rows, dtype=torch.long, device=self.device))

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        """Token ids as a batch of one on the contest's device."""
        return torch.tensor([ids], dtype=torch.long, device=self.device)


class Judged(NamedTuple):
    """What is read, and how that is told to a person."""

    prompts: list[list[int]]
    described: str
    tokenizer: Tokenizer | None

    def piece(self, token: int) -> str:
        """A token as a person reads it; its number where there is no tokenizer."""
        text = self.text([token])
        return f"#{token} " if text is None else text

    def text(self, ids: list[int]) -> str | None:
        """A text; None where there is no tokenizer."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode(ids)


def judged_prompts(place: Path, prompts: Prompts | None, config: GPT2Config) -> Judged:
    """The prompts' token ids: of texts, as given, or, without prompts and without a tokenizer to read, at random.

    Raises:
        CheckpointError: texts were given, and there is no tokenizer for them.
        GenerationError: there is no prompt, or one is a list of no ids, too long, or outside the vocabulary. An empty
            text is none of these: it is end-of-text, from which a document starts.
    """
    if prompts is not None:
        prompts = _texts_or_ids(prompts)
    judged = _as_ids(place, prompts, config)
    if faults := _faults(judged.prompts, config):
        raise GenerationError(faults[0])
    return judged


def _as_ids(place: Path, prompts: Prompts | None, config: GPT2Config) -> Judged:
    try:
        tokenizer = Tokenizer.from_pretrained(place)
    except CheckpointError as error:
        if prompts is None:
            return Judged(_random_ids(config), f"4 sequences of random ids, since {error}", None)
        if isinstance(prompts[0], str):
            raise
        tokenizer = None
    texts = PROMPTS if prompts is None else prompts
    if tokenizer is not None and isinstance(texts[0], str):
        ids = [prompt_ids(tokenizer, str(text)) for text in texts]
        if prompts is None and _faults(ids, config):
            return Judged(_random_ids(config), "4 sequences of random ids, since our own texts do not fit it", None)
        return Judged(ids, f"{len(texts)} texts" if len(texts) > 1 else "1 text", tokenizer)
    return Judged([[int(token) for token in ids] for ids in texts], f"{len(texts)} lists of ids", tokenizer)


def _texts_or_ids(prompts: Any) -> list[Any]:
    if isinstance(prompts, Mapping) or not is_several(prompts):
        one = type(prompts).__name__
        raise GenerationError(f"prompts must be a list of texts, or a list of lists of token ids, not a {one}")
    prompts = list(prompts)
    if not prompts:
        raise GenerationError("there is no prompt to judge on; give at least one")
    texts = all(isinstance(prompt, str) for prompt in prompts)
    lists = all(isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt) for prompt in prompts)
    if not texts and not lists:
        raise GenerationError("prompts must be a list of texts, or a list of lists of token ids, and not a mixture")
    return prompts


def _random_ids(config: GPT2Config) -> list[list[int]]:
    seq = min(24, max(1, config.n_positions // 2))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (4, seq), generator=generator).tolist()


def _faults(prompts: list[list[int]], config: GPT2Config) -> list[str]:
    """Why the model cannot read those of the prompts that it cannot."""
    return [f"prompt {i} {fault}" for i, ids in enumerate(prompts) if (fault := _fault(ids, config)) is not None]


def _fault(ids: list[int], config: GPT2Config) -> str | None:
    if not ids:
        return "is empty; give at least one token"
    if len(ids) > config.n_positions:
        return f"is {len(ids)} tokens, more than the model's context of {config.n_positions}"
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        return f"holds a token id outside the model's vocabulary of {config.vocab_size}"
    return None
