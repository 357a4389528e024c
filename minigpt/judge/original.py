"""What transformers says of a checkpoint: read once, kept, and held against any number of candidates.

B batch, T tokens, V vocabulary, C embedding, L layers, H heads.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minigpt.checkpoint import Files, open_checkpoint
from minigpt.checkpoint.norms import is_frozen
from minigpt.checkpoint.opened import only_dtype
from minigpt.config import GPT2Config, norm_sites
from minigpt.device import (
    Progress,
    Steps,
    dtype_name,
    full_products,
    require_values,
    resolve_device,
    resolve_dtype,
    versions,
)
from minigpt.errors import CheckpointError, GenerationError, MiniGPTError, listing
from minigpt.generation import prompt_ids
from minigpt.judge.gradients import gradients_of
from minigpt.judge.measures import Distance, RowDistance, exact_layer_norm
from minigpt.judge.perplexity import file_ids, window_losses, windows_of
from minigpt.model.checks import check_inputs
from minigpt.model.masking import left_padded
from minigpt.recipe import Recipe
from minigpt.report.numerals import brief
from minigpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minigpt.report.parity_report import ParityReport

# From the world of the demo's tales, but not told as there, so that a changed model shows. Any GPT-2 can read them.
PROMPTS = (
    "Once upon a time there was a young gardener named Tom, who found a silver coin in the forest. His sister laughed.",
    "The old shepherd gave the lantern to the gardener, and the gardener gave it to Mara.",
    "Then Mara came to Tom.",
    "One Sunday, a silver coin",
)
PEOPLE = ("Tom", "Mara", "the old shepherd", "the young gardener", "his sister", "the miller")
DEEDS = ("gave the lantern to", "found the silver coin before", "laughed at", "went into the forest with", "waited for")

NEW_TOKENS = 32
BATCH = 8  # prompts written at once: a step costs hardly more for 8 rows than for one
MOST_LONG = 1024  # tokens of the built-in text that fills the context
MOST_LONG_WORK = 2e11  # its tokens times the model's weights: float64 reads 100 to 200 of these a nanosecond
MOST_LOGITS = 2**27  # numbers of a text's true logits that are kept: 2,670 tokens of GPT-2, 131,072 of the demo
MOST_STREAM = 2**27  # numbers of the residual stream that are kept, in float64: 1 GiB

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

Prompts = Sequence[str] | Sequence[Sequence[int]]

KEPT = (  # what a record holds as it is
    "source", "attention", "versions", "described", "text_file", "text_ids", "losses", "noise", "gradient_noise",
    "reference_ms", "position_noise",
)  # fmt: skip


@dataclasses.dataclass
class Text:
    """A text that every model reads at once, and what transformers in float64 says of it.

    Attributes:
        ids: a prompt and what transformers writes after it, or a window of a text.
        new_from: the length of the prompt; of a window all of it.
        compared: the positions whose logits are compared.
        start: where a window begins in its text.
        truth: the true logits of those positions (T, V).
        inputs: the true input (T, C) of each norm; empty if there is no room for it.
    """

    ids: list[int]
    new_from: int
    compared: slice
    start: int = 0
    truth: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0))
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.new_from]

    @property
    def written(self) -> list[int]:
        """What transformers writes greedily after the prompt."""
        return self.ids[self.new_from :]

    @property
    def targets(self) -> list[int]:
        """The tokens whose loss counts: those of the prompt, or of the window's new part, from the second on."""
        return self.ids[self.compared.start + 1 : self.new_from]

    @property
    def before_new(self) -> slice:
        """The positions that predict what was written."""
        return slice(self.new_from - 1, len(self.ids) - 1)


class TrueNorm(NamedTuple):
    """A LayerNorm of the original, in float64."""

    weight: Float[Tensor, " embd"]
    bias: Float[Tensor, " embd"]
    eps: float

    def __call__(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        return exact_layer_norm(x, self.weight, self.bias, self.eps)


class Kept(NamedTuple):
    """What transformers at the dtype says of a text, until the truth is known."""

    logits: Float[Tensor, "seq vocab"]
    outputs: dict[str, Float[Tensor, "seq embd"]]


class Original:
    """A checkpoint as transformers computes it, read once. ``judge`` holds any number of candidates against it.

    transformers reads it at the dtype, and is freed; minigpt reads it in reference arithmetic; then transformers
    reads it in float64 on the weights as rounded to the dtype, and is freed. So there is one model in memory at a
    time, and none while a candidate is judged. What is kept: true logits in float64, of a text file the first 2**27
    in float32; the true input of each norm in float64, for the first prompts, 1 GiB at most.

    Args:
        source, attention, device, dtype, revision, local_files_only: as ``minigpt.Recipe`` takes them.
        prompts: texts, or lists of token ids; by default four texts and one that fills the context, or random ids if
            there is no tokenizer. That one has at most 1,024 tokens, and fewer for more than 195 million weights.
        text: a UTF-8 file that the models read in windows of the context.
        max_new_tokens: greedy tokens to compare after each prompt, fewer where the context ends; 0 for none.
        gradients: also keep the gradient of the loss for every Parameter.
        progress: called with a few words on each step as it begins, and the share of the steps that are done.

    Attributes:
        texts: the prompts and what transformers writes after them.
        windows: of the text file, or the built-in text that fills the context; empty if prompts alone were given.
        floor, decoding_floor, window_floors: how far transformers at the dtype is from its float64 self: on the
            prompts, on tokens read one by one, on each window.
        bits: how far minigpt in reference arithmetic is from transformers.
        noise: the relative RMS error of transformers at each norm and block.
        norms: the original's LayerNorms.
        losses: tokens and loss of each window of the whole text file, by minigpt in reference arithmetic.
        gradients, gradient_noise: by Parameter; None if not asked for.

    Raises:
        CheckpointError, ConfigError, GenerationError: if it cannot be read; the message says why.
        MiniGPTError: if the noise floor is so high that transformers itself cannot be trusted.
    """

    def __init__(
        self,
        source: str | Path = "demo",
        *,
        attention: str = "sdpa",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        prompts: Prompts | None = None,
        text: str | Path | None = None,
        max_new_tokens: int = NEW_TOKENS,
        gradients: bool = False,
        revision: str | None = None,
        local_files_only: bool = False,
        progress: Progress | None = None,
    ) -> None:
        steps = Steps(progress, total=4)
        steps(f"reading {source}")
        recipe = Recipe(source, attention=attention, revision=revision, local_files_only=local_files_only)
        self.source, self.place, self.attention = str(source), recipe.place(), attention
        self.device = resolve_device(device)
        require_values(self.device)
        checkpoint = open_checkpoint(self.place)
        self.config: GPT2Config = dataclasses.replace(checkpoint.config, used_vocab_size=None)
        self.dtype = resolve_dtype(dtype) or only_dtype(checkpoint.tensors, self.place)
        weights = sum(tensor.numel() for tensor in checkpoint.tensors.values())
        del checkpoint
        read = judged_prompts(self.place, prompts, self.config, min(MOST_LONG, int(MOST_LONG_WORK / weights)))
        self.described, self.tokenizer = read.described, read.tokenizer
        self.text_file = None if text is None else str(text)
        self.text_ids = [] if text is None else file_ids(text, read.tokenizer, self.config)
        self.windows = self._windows(read.long)
        self.floor, self.decoding_floor, self.bits = Distance(), Distance(), Distance()
        self.norms: dict[str, TrueNorm] = {}
        self.noise: dict[str, float] = {}
        self.gradients: dict[str, Tensor] | None = None
        self.gradient_noise: dict[str, float] = {}
        with judging():
            steps(f"transformers at {dtype_name(self.dtype)}")
            kept, decoded, noisy = self._read_reference(read.prompts, max_new_tokens, gradients)
            steps("minigpt in reference arithmetic")
            self._read_ours(kept)
            steps("transformers in float64")
            self._read_truth(kept, decoded, noisy)
        self.versions = versions(self.device) | {"float32_products": "full float32 (TF32 off)"}
        self._require_trusted()

    @property
    def sites(self) -> list[str]:
        """The norms in the order of the data."""
        return norm_sites(self.config.n_layer)

    @property
    def blocks(self) -> list[str]:
        return [f"h.{i}" for i in range(self.config.n_layer)]

    @property
    def norm(self) -> str:
        """The name of the norm that transformers computes: a checkpoint of frozen norms says so by its huge eps."""
        return "frozen" if is_frozen(self.norms["ln_f"].eps) else "fused"

    @property
    def reads_file(self) -> bool:
        """Whether the windows are of a text file that the caller gave."""
        return self.text_file is not None

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        """Token ids as a batch of one on the original's device."""
        return torch.tensor([ids], device=self.device)

    def text(self, ids: list[int]) -> str | None:
        """The text of tokens, or None without a tokenizer."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode(ids)

    def true_outputs(self, text: Text) -> dict[str, Float[Tensor, "seq embd"]]:
        """Return the true output of every norm, and the residual stream after every block."""
        if not text.inputs:
            return {}
        after = dict(zip(self.blocks, [*(f"h.{i}.ln_1" for i in range(1, self.config.n_layer)), "ln_f"], strict=True))
        outputs = {site: self.norms[site](x) for site, x in text.inputs.items()}
        return outputs | {block: text.inputs[site] for block, site in after.items()}

    def judge(self, candidate: Any = None, **how: Any) -> "ParityReport":
        """Judge a candidate; see ``minigpt.parity`` for what it may be, and for the other arguments."""
        from minigpt.judge.verdict import judge  # which reads an original

        return judge(self, candidate, **how)

    def judge_outputs(self, file: str | Path, **how: Any) -> "ParityReport":
        """Judge what another program wrote: a safetensors file with ``logits.N`` for each text of the record.

        Raises:
            CheckpointError: if it cannot be read, lacks logits, or a tensor is unknown or has another shape.
        """
        from minigpt.judge.candidate import FileCandidate

        return self.judge(FileCandidate(self, Path(file)), **how)

    def _windows(self, long: list[int] | None) -> list[Text]:
        if long is not None and not self.text_ids:
            return [Text(long, len(long), slice(0, len(long) - 1))]
        texts, most = [], MOST_LOGITS // self.config.vocab_size
        for start, first, end in windows_of(len(self.text_ids), self.config.n_positions):
            if sum(text.compared.stop - text.compared.start for text in texts) + end - first > most and texts:
                break
            compared = slice(first - 1 - start, end - start - 1)
            texts.append(Text(self.text_ids[start:end], end - start, compared, start))
        return texts

    def _read_reference(
        self, prompts: list[list[int]], most: int, gradients: bool
    ) -> tuple[list[Kept], list[Tensor], dict[str, Tensor]]:
        """Let transformers at the dtype write and read; return what it computes, and the logits while it wrote."""
        reference = Reference(self.place, attention=self.attention, dtype=self.dtype, device=self.device)
        self.texts, decoded = reference.write(prompts, most, self.config.eos_token_ids)
        room, kept = MOST_STREAM // (len(self.sites) * self.config.n_embd), []
        with Recorder(reference.model.transformer, [*self.sites, *self.blocks]) as recorder:
            for text in self.texts:
                begun = time.perf_counter()
                logits = reference(self.tensor(text.ids))[0]
                if len(text.ids) == max(len(one.ids) for one in self.texts):
                    self.reference_ms = 1000 * (time.perf_counter() - begun)
                room -= len(text.ids)
                kept.append(Kept(logits, {name: y[0] for name, y in recorder.outputs.items()} if room >= 0 else {}))
        kept += [Kept(reference(self.tensor(text.ids))[0, text.compared].clone(), {}) for text in self.windows]
        noisy = gradients_of(reference.model, self, "transformer.") if gradients else {}
        return kept, decoded, noisy

    def _read_ours(self, kept: list[Kept]) -> None:
        eps = (Files.at(self.place).config or {}).get("layer_norm_epsilon", 1e-5)
        named = None if is_frozen(eps) else "fused"
        recipe = Recipe(
            self.place, norm=named, attention=self.attention, arithmetic="reference", device=self.device,
            dtype=self.dtype,
        )  # fmt: skip
        model = recipe.open()[0]
        for text, (logits, _) in zip(self.texts, kept, strict=False):
            self.bits.add(model(self.tensor(text.ids))[0], logits)
        self.losses = [(row.tokens, row.loss) for row in window_losses(model, self.text_ids)]

    def _read_truth(self, kept: list[Kept], decoded: list[Tensor], noisy: dict[str, Tensor]) -> None:
        """Let transformers in float64 read, and count how far it is from itself at the dtype."""
        other = "eager" if self.attention == "sdpa" else "sdpa"  # so that float64 has a noise floor too
        truth = Reference(self.place, attention=other, dtype=self.dtype, device=self.device, compute=torch.float64)
        model = truth.model.transformer
        for site in self.sites:
            norm = model.get_submodule(site)
            self.norms[site] = TrueNorm(norm.weight.detach(), norm.bias.detach(), norm.eps)
        noise = {place: RowDistance() for place in (*self.sites, *self.blocks)}
        with Recorder(model, [*self.sites, *self.blocks]) as recorder:
            for i, text in enumerate(self.texts):
                text.truth = truth(self.tensor(text.ids))[0]
                if kept[i].outputs:
                    text.inputs = {site: recorder.inputs[site][0].clone() for site in self.sites}
                self.floor.add(kept[i].logits, text.truth)
                self.decoding_floor.add(decoded[i], text.truth[text.before_new])
                for name, output in kept[i].outputs.items():
                    noise[name].add(output, recorder.outputs[name][0])
        self.noise = {name: distance.relative for name, distance in noise.items()}
        self.window_floors, self.position_noise = [], 0.0
        narrow = torch.float64 if self.dtype == torch.float64 else torch.float32
        for text, (logits, _) in zip(self.windows, kept[len(self.texts) :], strict=True):
            true_logits = truth(self.tensor(text.ids))[0, text.compared]
            floor = Distance()
            floor.add(logits, true_logits)
            self.window_floors.append(floor)
            errors = (logits.double() - true_logits).square().mean(-1).sqrt()
            self.position_noise = max(self.position_noise, float(errors.max()))
            text.truth = true_logits.to(narrow, copy=True)
        if noisy:
            exact = gradients_of(truth.model, self, "transformer.")
            self.gradients = {name: gradient.to(narrow) for name, gradient in exact.items()}
            for name, gradient in exact.items():
                distance = Distance()
                distance.add(noisy[name], gradient)
                self.gradient_noise[name] = distance.relative

    def _require_trusted(self) -> None:
        if self.floor.rms > MOST_FLOOR[self.dtype] * self.floor.scale:
            raise MiniGPTError(
                f"transformers at {dtype_name(self.dtype)} is {brief(self.floor.rms)} from itself in float64, on "
                f"logits of scale {brief(self.floor.scale)}, so it cannot be the reference; update transformers, or "
                "try another --attention or --dtype"
            )

    # The record

    def save(self, file: str | Path) -> None:
        """Write the original to a safetensors file: the record that ``load`` reads, and other programs too.

        For each text N it has ``ids.N`` (T), ``logits.N`` (T, V) in float64, and the true output of every norm and
        block, ``h.3.ln_1.N`` and ``h.3.N`` (T, C). Keys that begin with ``kept.`` are for ``load``.

        Raises:
            MiniGPTError: if it cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for n, text in enumerate((*self.texts, *self.windows)):
            tensors |= {f"ids.{n}": torch.tensor(text.ids), f"logits.{n}": text.truth.double()}
            tensors |= {f"{place}.{n}": x for place, x in self.true_outputs(text).items()}
            tensors |= {f"kept.{site}.{n}": x for site, x in text.inputs.items()}
        for site, norm in self.norms.items():
            tensors |= {f"kept.{site}.weight": norm.weight, f"kept.{site}.bias": norm.bias}
        tensors |= {f"kept.gradient.{name}": x for name, x in (self.gradients or {}).items()}
        every = (*self.texts, *self.windows)
        floors = (self.floor, self.decoding_floor, self.bits, *self.window_floors)
        state = {name: getattr(self, name) for name in KEPT} | {
            "model": self.source, "place": str(self.place), "dtype": dtype_name(self.dtype),
            "config": self.config.to_dict(), "eps": self.norms["ln_f"].eps,
            "noise_floor_rms": self.floor.rms, "noise_floor_max": self.floor.largest, "prompt_texts": len(self.texts),
            "texts": [[text.new_from, text.compared.start, text.compared.stop, text.start] for text in every],
            "distances": [dataclasses.astuple(floor) for floor in floors],
        }  # fmt: skip
        told = ("model", "dtype", "attention", "versions", "noise_floor_rms", "noise_floor_max")  # to other programs
        plain = {name: value if isinstance(value := state[name], str) else json.dumps(value) for name in told}
        flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        try:
            save_file(flat, file, metadata={"format": "pt", "minigpt": json.dumps(state)} | plain)
        except (OSError, SafetensorError) as error:
            raise MiniGPTError(f"cannot write {file}: {error}") from error

    @classmethod
    def load(cls, file: str | Path, *, device: str | torch.device | None = None) -> "Original":
        """Return the original that ``save`` wrote. transformers need not be installed.

        Raises:
            CheckpointError: if the file is not such a record.
        """
        self = cls.__new__(cls)
        self.device = resolve_device(device)
        try:
            with safe_open(file, "pt", device=str(self.device)) as record:
                state = json.loads((record.metadata() or {})["minigpt"])
                tensors = {name: record.get_tensor(name) for name in record.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            why = "" if isinstance(error, KeyError) else f": {error}"
            raise CheckpointError(f"{file} is not a record of minigpt parity --record{why}") from error
        for name in KEPT:
            setattr(self, name, state[name])
        self.place, self.config = Path(state["place"]), GPT2Config.from_dict(state["config"])
        self.dtype, self.tokenizer = cast("torch.dtype", resolve_dtype(state["dtype"])), None
        with contextlib.suppress(MiniGPTError):
            self.tokenizer = Tokenizer.from_pretrained(self.place)
        self.norms = {
            site: TrueNorm(tensors[f"kept.{site}.weight"], tensors[f"kept.{site}.bias"], state["eps"])
            for site in self.sites
        }
        texts = []
        for n, (new_from, first, end, start) in enumerate(state["texts"]):
            inputs = {site: tensors[key] for site in self.sites if (key := f"kept.{site}.{n}") in tensors}
            ids, truth = tensors[f"ids.{n}"].tolist(), tensors[f"logits.{n}"]
            texts.append(Text(ids, new_from, slice(first, end), start, truth, inputs))
        self.texts, self.windows = texts[: state["prompt_texts"]], texts[state["prompt_texts"] :]
        distances = [Distance(*values) for values in state["distances"]]
        self.floor, self.decoding_floor, self.bits, *self.window_floors = distances
        gradients = {name.removeprefix("kept.gradient."): x for name, x in tensors.items() if "kept.gradient." in name}
        self.gradients = gradients or None
        return self


# transformers


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Compute without gradients, with ``full_products``."""
    with full_products(), torch.no_grad():
        yield


class Reference:
    """transformers' GPT-2 with the weights of a checkpoint, rounded to ``dtype``, which computes in ``compute``.

    It reads the checkpoint's tensors itself, under their own names, so that a fault in our loading shows.
    """

    def __init__(
        self,
        place: Path,
        *,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config  # imported here, since it takes five seconds

        config = GPT2Config.from_json_file(Files.at(place).folder / "config.json")
        if (compute or dtype) == torch.float64:
            config.reorder_and_upcast_attn = False  # it would compute the scores in float32
        config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
        with quiet_transformers(), torch.device("meta"):  # shapes only: the values come from the file
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        tensors, parameters = Files.at(place).tensors()[0], dict(model.named_parameters(remove_duplicate=False))
        for name in list(tensors):
            tensor, known = tensors.pop(name), name if name in parameters else f"transformer.{name}"
            if known not in parameters:
                continue  # a causal mask, which older files hold
            value = tensor.to(dtype).to(device, compute or dtype)
            owner, _, role = known.rpartition(".")
            model.get_submodule(owner).register_parameter(role, nn.Parameter(value, requires_grad=False))
        model.tie_weights()
        if unset := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
            raise CheckpointError(f"{place} has no {listing(unset)}, so transformers cannot read it")
        self.model, self.device = model.eval(), device

    def __call__(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of a batch without padding."""
        return self.model(input_ids).logits

    def write(
        self, prompts: list[list[int]], most: int, ends: Sequence[int]
    ) -> tuple[list[Text], list[Float[Tensor, "new vocab"]]]:
        """Continue the prompts greedily, up to their end or the context's; return the logits of what is written too."""
        texts = [Text(prompt, len(prompt), slice(0, len(prompt))) for prompt in prompts]
        logits = [torch.empty(0, self.model.config.vocab_size, device=self.device) for _ in prompts]
        context = self.model.config.n_positions
        for new, batch in batches([min(most, context - len(prompt)) for prompt in prompts]):
            ids, mask = left_padded([prompts[i] for i in batch], self.device)  # both (B, T)
            read, steps = self.reader(), []
            for _ in range(new):
                steps.append(read(ids, mask))  # (B, V)
                ids = steps[-1].argmax(-1, keepdim=True)
                mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
            rows = torch.stack(steps, dim=1)  # (B, new, V)
            for row, i in zip(rows, batch, strict=True):
                written = to_its_end(row.argmax(-1).tolist(), ends)
                whole = prompts[i] + written
                texts[i], logits[i] = Text(whole, len(prompts[i]), slice(0, len(whole))), row[: len(written)].clone()
        return texts, logits

    def reader(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of more ids (B, T) and the mask (B, all) of all so far; it returns logits (B, V)."""
        from transformers import DynamicCache

        cache = DynamicCache()

        def read(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            return self.model(
                input_ids, cache, attention_mask=attention_mask, position_ids=positions, use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip

        return read


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the log messages and progress bars of transformers."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def batches(lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Group texts that are written together: a length above 0, and the numbers of up to ``BATCH`` texts of it."""
    for length in sorted(set(lengths) - {0}):
        alike = [i for i, one in enumerate(lengths) if one == length]
        yield from ((length, alike[start : start + BATCH]) for start in range(0, len(alike), BATCH))


def to_its_end(new: list[int], ends: Sequence[int]) -> list[int]:
    """Return the new tokens of a row up to the first that ends it."""
    last = next((i for i, token in enumerate(new) if token in ends), len(new))
    return new[: last + 1]


class Recorder:
    """Keeps the last input and output of chosen norms and blocks, while it is active."""

    def __init__(self, model: nn.Module, places: Iterable[str]) -> None:
        self.modules = {place: model.get_submodule(place) for place in places}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self.hooks = [
            module.register_forward_hook(partial(self._keep, place)) for place, module in self.modules.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, place: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        self.inputs[place] = args[0]
        self.outputs[place] = output if isinstance(output, Tensor) else output[0]  # blocks may return a tuple


# Prompts


class Judged(NamedTuple):
    """The token ids that are read, with a description for people."""

    prompts: list[list[int]]
    described: str
    tokenizer: Tokenizer | None = None
    long: list[int] | None = None  # the built-in text that fills the context


def long_text() -> str:
    """Return the built-in text that fills the context of a GPT-2, of which its first tokens are read."""
    told = itertools.product(PEOPLE, DEEDS, PEOPLE)
    return " ".join(f"{who[0].upper()}{who[1:]} {did} {whom}." for who, did, whom in told if who != whom)


def judged_prompts(place: Path, prompts: Prompts | None, config: GPT2Config, most_long: int) -> Judged:
    """Return the prompts' token ids. By default built-in texts, or random ids if the model cannot read those.

    An empty text is end-of-text, with which a document starts.

    Raises:
        CheckpointError: if texts are given and there is no tokenizer for them.
        GenerationError: if there is no prompt, or one is an empty list, too long, or outside the vocabulary.
    """
    if prompts is None:
        length = min(config.n_positions, max(most_long, 2))
        try:
            read = judged_prompts(place, PROMPTS, config, most_long)
            long = cast("Tokenizer", read.tokenizer).encode(long_text())
            long = (long * (1 + length // len(long)))[:length]
            return read._replace(described=f"{len(PROMPTS)} built-in texts", long=long if length > 1 else None)
        except CheckpointError as error:
            why = str(error)
        except GenerationError:
            why = "the default texts do not fit it"
        long = _random_ids(config, 1, length)[0] if length > 1 else None
        ids = _random_ids(config, 4, min(24, max(1, config.n_positions // 2)))
        return Judged(ids, f"4 sequences of random ids, since {why}", long=long)
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


def _random_ids(config: GPT2Config, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (count, length), generator=generator).tolist()
