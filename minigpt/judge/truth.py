"""What transformers says of a checkpoint, as plain data, and the file that keeps it.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minigpt.device import resolve_device
from minigpt.errors import CheckpointError, MiniGPTError
from minigpt.files import replaced, require_file
from minigpt.host import Float64, NormSite, Shape, exact_norm
from minigpt.judge.measures import Distance
from minigpt.precision import dtype_name, resolve_dtype
from minigpt.tokenizer import Tokenizer

VERSION = 6  # of the file
PLAIN = (  # fields that JSON holds as they are
    "source", "attention", "versions", "described", "why_random", "norm", "text_file", "text_ids", "losses", "sites",
    "blocks", "embedding", "noise", "gradient_noise", "reference_ms", "position_noise", "kept", "precisions",
)  # fmt: skip
DISTANCES = ("noise_floor", "decoding_floor", "bitwise_error")
FOR_OTHERS = ("model", "dtype", "attention", "versions", "noise_floor_rms", "noise_floor_max")  # beside ``load_truth``


@dataclasses.dataclass(eq=False)
class Sample:
    """A text that every model reads at once, and what transformers in float64 says of it.

    Attributes:
        ids: a prompt and what transformers writes after it, or a window of a text.
        new_from: the length of the prompt; of a window all of it.
        compared: the positions whose logits are compared.
        counted: of how many of these the distribution counts. A later window of the text has the others.
        start: where a window begins in its text.
        truth: the true logits of the compared positions (T, V).
        inputs, outputs: the true input (T, C) of each norm, and the output of each block; empty if there is no room.
    """

    ids: list[int]
    new_from: int
    compared: slice
    counted: int
    start: int = 0
    truth: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0))
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def whole(cls, ids: list[int], new_from: int | None = None) -> "Sample":
        """Return a text whose logits are all compared."""
        return cls(ids, len(ids) if new_from is None else new_from, slice(0, len(ids)), len(ids))

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.new_from]

    @property
    def written(self) -> list[int]:
        """What transformers writes greedily after the prompt."""
        return self.ids[self.new_from :]

    @property
    def before_new(self) -> slice:
        """The positions that predict what was written."""
        return slice(self.new_from - 1, len(self.ids) - 1)


class TrueNorm(NamedTuple):
    """A norm of the original, in float64.

    Attributes:
        kind: "layer_norm", "rms_norm" or "other", whose own ``module`` then computes it.
        weight: what it multiplies by, so 1 + weight where it adds one.
        rounds: where it rounds in half precision, as ``NormSite`` says.
    """

    kind: str
    weight: Float[Tensor, " embd"] | None
    bias: Float[Tensor, " embd"] | None
    eps: float
    rounds: str | None = None
    module: nn.Module | None = None

    @classmethod
    def of(cls, norm: nn.Module, site: NormSite) -> "TrueNorm":
        """Return a norm of a float64 model."""
        if site.kind == "other":
            return cls(site.kind, None, None, 0.0, module=norm)
        weight, bias = (
            parameter.detach() if isinstance(parameter := getattr(norm, role, None), nn.Parameter) else None
            for role in ("weight", "bias")
        )
        return cls(site.kind, weight if weight is None else weight + site.adds_one, bias, site.eps or 0.0, site.rounds)

    def __call__(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        if self.module is None:
            return exact_norm(x, self.kind, self.weight, self.bias, self.eps)
        with Float64():
            return self.module(x.double())


@dataclasses.dataclass
class Truth:
    """What transformers says of a checkpoint.

    Attributes:
        source, place, attention, device, dtype, config: what was read, and how.
        versions: of what read it.
        described: the prompts in words.
        why_random: why they are random ids; None if they are not.
        tokenizer: the checkpoint's, if it has one.
        prompts: the prompts and what transformers writes after them.
        windows: of the text file, or the built-in texts; empty if prompts alone were given.
        text_file, text_ids: the text file and its tokens; None and empty without one.
        losses: tokens and loss of each window of the whole text file, by minigpt in reference arithmetic.
        sites, blocks: the norms and the blocks, in the order of the data.
        embedding: the path of the token embedding.
        norm, norms: the name of the norm that transformers computes, "fused", or "frozen" by a huge eps; and the norms.
        noise: the relative RMS error of transformers at each norm and block.
        noise_floor, decoding_floor, window_floors: how far transformers at the dtype is from its float64 self: on the
            prompts, on tokens read one by one, on each window.
        position_noise: the largest RMS error of transformers at a position of a text.
        precisions: the RMS error of transformers' logits in float32, float16 and bfloat16, on the prompts.
        bitwise_error: how far minigpt in reference arithmetic is from transformers.
        kept: the dtypes, by name, of Parameters and buffers that transformers keeps in another dtype than ``dtype``.
        gradients, gradient_noise: by Parameter; None if the caller did not ask for them.
        reference_ms: the time of one forward over the longest prompt.
    """

    source: str
    place: Path
    attention: str
    device: torch.device
    dtype: torch.dtype
    config: Shape
    described: str
    tokenizer: Tokenizer | None
    text_file: str | None
    text_ids: list[int]
    why_random: str | None = None
    prompts: list[Sample] = dataclasses.field(default_factory=list)
    windows: list[Sample] = dataclasses.field(default_factory=list)
    versions: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[Sequence[float]] = dataclasses.field(default_factory=list)
    sites: list[str] = dataclasses.field(default_factory=list)
    blocks: list[str] = dataclasses.field(default_factory=list)
    embedding: str = ""
    norm: str = "fused"
    norms: dict[str, TrueNorm] = dataclasses.field(default_factory=dict)
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    noise_floor: Distance = dataclasses.field(default_factory=Distance)
    decoding_floor: Distance = dataclasses.field(default_factory=Distance)
    bitwise_error: Distance = dataclasses.field(default_factory=Distance)
    window_floors: list[Distance] = dataclasses.field(default_factory=list)
    position_noise: float = 0.0
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    precisions: dict[str, float] = dataclasses.field(default_factory=dict)
    gradients: dict[str, Tensor] | None = None
    gradient_noise: dict[str, float] = dataclasses.field(default_factory=dict)
    reference_ms: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        """The prompts, then the windows."""
        return [*self.prompts, *self.windows]

    @property
    def longest(self) -> Sample:
        """The longest prompt with what transformers writes after it."""
        return max(self.prompts, key=lambda prompt: len(prompt.ids))

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        """Return token ids as a batch of one on the original's device."""
        return torch.tensor([ids], device=self.device)

    def targets(self, sample: Sample) -> Int[Tensor, " targets"]:
        """Return the tokens whose loss counts: those of a prompt, or of a window's new part, from the second on."""
        targets = sample.ids[sample.compared.start + 1 : sample.new_from]
        return torch.tensor(targets, dtype=torch.long, device=self.device)

    def text(self, ids: list[int]) -> str | None:
        """Return the text of tokens; None without a tokenizer, or if one of them is padding of the vocabulary."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.id_count:
            return None
        return self.tokenizer.decode(ids)

    def true_outputs(self, sample: Sample) -> dict[str, Float[Tensor, "seq *rows"]]:
        """Return the true output of every norm, and the residual stream after every block."""
        norms = {site: self.norms[site](x) for site, x in sample.inputs.items() if site in self.norms}
        return norms | sample.outputs

    # The record

    def save(self, file: str | Path) -> None:
        """Write the original to a safetensors file: the record that ``load`` reads, and other programs too.

        For each text N it has ``ids.N`` (T), ``logits.N`` (T, V) in float64, and the true output of every norm and
        block, ``h.3.ln_1.N`` and ``h.3.N`` (T, C). Keys that begin with ``kept.`` are for ``load``.

        Raises:
            MiniGPTError: if it cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for n, sample in enumerate(self.samples):
            tensors |= {f"ids.{n}": torch.tensor(sample.ids), f"logits.{n}": sample.truth.double()}
            tensors |= {f"{place}.{n}": x for place, x in self.true_outputs(sample).items()}
            tensors |= {f"kept.{site}.{n}": x for site, x in sample.inputs.items()}
        for site, norm in self.norms.items():
            parameters = {"weight": norm.weight, "bias": norm.bias}
            tensors |= {f"kept.{site}.{role}": x for role, x in parameters.items() if x is not None}
        tensors |= {f"kept.gradient.{name}": x for name, x in (self.gradients or {}).items()}
        state = {name: getattr(self, name) for name in PLAIN} | {
            "version": VERSION, "model": self.source, "place": str(self.place), "dtype": dtype_name(self.dtype),
            "config": dataclasses.asdict(self.config), "prompt_texts": len(self.prompts),
            "norms": {s: (norm.kind, norm.eps, norm.rounds) for s, norm in self.norms.items() if norm.module is None},
            "noise_floor_rms": self.noise_floor.rms, "noise_floor_max": self.noise_floor.largest,
            "texts": [[s.new_from, s.compared.start, s.compared.stop, s.counted, s.start] for s in self.samples],
            "distances": {name: dataclasses.astuple(getattr(self, name)) for name in DISTANCES},
            "window_floors": [dataclasses.astuple(floor) for floor in self.window_floors],
        }  # fmt: skip
        public = {name: value if isinstance(value := state[name], str) else json.dumps(value) for name in FOR_OTHERS}
        flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        try:
            with replaced(file) as new:
                save_file(flat, new, metadata={"format": "pt", "minigpt": json.dumps(state)} | public)
        except (OSError, SafetensorError) as error:
            raise MiniGPTError(f"cannot write {file}: {error}") from error


def load_truth(file: str | Path, device: str | torch.device | None = None) -> Truth:
    """Return what ``Truth.save`` wrote. transformers need not be installed.

    Raises:
        CheckpointError: if the file is not such a record, or another version of minigpt wrote it.
    """
    place = resolve_device(device)
    require_file(file, CheckpointError)
    try:
        with safe_open(file, "pt", device=str(place)) as record:
            state = json.loads((record.metadata() or {})["minigpt"])
            tensors = {name: record.get_tensor(name) for name in record.keys()}  # noqa: SIM118
        truth = _truth(state, tensors, place) if state.get("version") == VERSION else None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{file} is not a record of minigpt parity --record: {why}") from error
    if truth is None:
        raise CheckpointError(f"{file} is a record of another version of minigpt; write it again with --record")
    return truth


def _truth(state: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Truth:
    samples = []
    for n, (new_from, first, end, counted, start) in enumerate(state["texts"]):
        unknown = [site for site in state["sites"] if site not in state["norms"]]  # their outputs alone are known
        places = [*state["blocks"], *unknown]
        outputs = {place: tensors[f"{place}.{n}"] for place in places if f"{place}.{n}" in tensors}
        inputs = {site: tensors[f"kept.{site}.{n}"] for site in (state["sites"] if outputs else ())}
        truth, ids = tensors[f"logits.{n}"], tensors[f"ids.{n}"].tolist()
        samples.append(Sample(ids, new_from, slice(first, end), counted, start, truth, inputs, outputs))
    gradients = {name.removeprefix("kept.gradient."): x for name, x in tensors.items() if "kept.gradient." in name}
    tokenizer = None
    with contextlib.suppress(MiniGPTError):
        tokenizer = Tokenizer.from_pretrained(state["place"])
    norms = {
        site: TrueNorm(kind, tensors.get(f"kept.{site}.weight"), tensors.get(f"kept.{site}.bias"), eps, rounds)
        for site, (kind, eps, rounds) in state["norms"].items()
    }
    return Truth(
        place=Path(state["place"]), device=device, dtype=cast("torch.dtype", resolve_dtype(state["dtype"])),
        config=Shape(**state["config"]), tokenizer=tokenizer, norms=norms, gradients=gradients or None,
        prompts=samples[: state["prompt_texts"]], windows=samples[state["prompt_texts"] :],
        window_floors=[Distance(*figures) for figures in state["window_floors"]],
        **{name: Distance(*figures) for name, figures in state["distances"].items()},
        **{name: state[name] for name in PLAIN},
    )  # fmt: skip
