"""Our logits and gradients in reference arithmetic against transformers' on the same weights.

The truth is transformers in float64 on the weights as rounded. An error is held to twice transformers' own; with fused
norms, where both sides call the same kernels, the logits are held to the same bits.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.models import SIZES, known_norms, ours_of, theirs_of, with_norm
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import minigpt
from minigpt.judge.reference import judging
from minigpt.precision import dtype_name, full_products
from minigpt.report.noise import MOST_NOISE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = ("fused", "textbook", "triton")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ATTENTIONS = ("eager", "sdpa", *(f"sdpa {backend}" for backend in BACKENDS))
# How PyTorch says that a backend cannot.
UNABLE = ("No available kernel", "No viable backend", "Invalid backend", "cuDNN Frontend error", "mha_graph")

Row = dict[str, Any]


def parity(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: a row for each model, dtype, attention, norm and case; and what could not run, and why."""
    rows, unable = results.setdefault("rows", []), results.setdefault("unable", [])
    for dtype, size in itertools.product(DTYPES[:1] if quick else DTYPES, SIZES[:1] if quick else SIZES):
        yield f"{size}, {dtype_name(dtype)}"
        for row in judged(size, dtype, device, quick):
            (unable if "why" in row else rows).append(row)


def judged(size: str, dtype: torch.dtype, device: torch.device, quick: bool) -> Iterator[Row]:
    """Every attention, norm and case of one model at one dtype."""
    rounded = ours_of(size, device, quick).to(dtype)
    ids, mask = prompt(rounded.config.vocab_size, device)
    truth = Truth(rounded, ids, mask)
    hf = {kind: theirs_of(rounded, kind) for kind in ("eager", "sdpa")}
    for attention in ATTENTIONS:
        for row in compared(rounded, hf, attention, truth, ids, mask):
            yield {"model": size, "dtype": dtype_name(dtype), "attention": attention} | row


class Truth:
    """transformers in float64: logits of every case, and gradients."""

    def __init__(self, rounded: minigpt.GPT2, ids: Tensor, mask: Tensor) -> None:
        model = theirs_of(rounded, "eager", torch.float64)
        with judging():
            self.logits = {case: read() for case, read in their_cases(model, ids, mask).items()}
        self.gradients = gradients(model, lambda: model(ids[:1]).logits)


def compared(
    rounded: minigpt.GPT2, references: dict[str, Any], attention: str, truth: Truth, ids: Tensor, mask: Tensor
) -> Iterator[Row]:
    """A row for each norm and case with this attention; where it cannot run, one that says why."""
    kind, _, backend = attention.partition(" ")
    hf = references[kind]
    ours = {norm: with_norm(rounded, norm, kind) for norm in known_norms(NORMS, ids.device)}
    cases = {norm: our_cases(model, ids, mask) for norm, model in ours.items()}
    for case, read in their_cases(hf, ids, mask).items():
        with judging(), only(backend):
            expected, why = tried(read)
            if why is not None:
                yield {"case": case, "why": why}
                continue
            for norm in ours:
                supplied = cases[norm][case]()
                yield {"norm": norm, "case": case} | errors(norm, [supplied], [expected], [truth.logits[case]])
    with full_products(), only(backend):
        expected, why = tried(lambda: gradients(hf, lambda: hf(ids[:1]).logits))
        if why is not None:
            yield {"case": "gradients", "why": why}
            return
        for norm, model in ours.items():
            supplied = gradients(model, lambda m=model: m(ids[:1]))
            trios = [(supplied[name], expected[name], true) for name, true in truth.gradients.items()]
            yield {"norm": norm, "case": "gradients"} | errors("", *map(list, zip(*trios, strict=True)))


def errors(norm: str, supplied: list[Tensor], expected: list[Tensor], truth: list[Tensor]) -> Row:
    """Distances of ours from transformers', and of both from the truth; with "fused", only the same bits will do."""
    apart = max(
        (one.double() - other.double()).abs().max().item() for one, other in zip(supplied, expected, strict=True)
    )
    scale = max(tensor.abs().max().item() for tensor in truth)
    error, floor = rms_apart(supplied, truth), rms_apart(expected, truth)
    passed = error <= MOST_NOISE * floor and (apart == 0 or norm != "fused")
    return {"bitwise": apart == 0, "max_apart": apart, "scale": scale, "rms_error": error, "floor": floor,
            "ratio": error / floor if floor else float(error > 0), "passed": passed}  # fmt: skip


def rms_apart(supplied: list[Tensor], expected: list[Tensor]) -> float:
    """Root mean square of all differences."""
    squares = sum((one.double() - other).square().sum().item() for one, other in zip(supplied, expected, strict=True))
    return (squares / sum(tensor.numel() for tensor in expected)) ** 0.5


def prompt(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (3, 40), and a mask by which the second and third row are shorter."""
    ids = torch.randint(vocab, (3, 40), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    return ids, mask


def their_cases(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Logits of a single row, of the real tokens of a padded batch, and of one token after a cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {
        "single": lambda: model(ids[:1]).logits,
        "left-padded": lambda: model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()],
        "cached": lambda: model(ids[:, -1:], past_key_values=model(ids[:, :-1]).past_key_values).logits,
    }


def our_cases(model: minigpt.GPT2, ids: Tensor, mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The same of ours."""

    def cached() -> Tensor:
        cache = model.new_cache(*ids.shape)
        model(ids[:, :-1], cache=cache)
        return model(ids[:, -1:], cache=cache)

    return {"single": lambda: model(ids[:1]), "left-padded": lambda: model(ids, mask)[mask.bool()], "cached": cached}


def gradients(model: Any, logits: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of every parameter, by our names, for random gradients of the logits, small enough for float16."""
    generator = torch.Generator().manual_seed(1)
    with torch.enable_grad():
        actual = logits()
        actual.backward(torch.randn(actual.shape, generator=generator).div(16).to(actual.device, actual.dtype))
    made = {name.removeprefix("transformer."): p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {name: gradient for name, gradient in made.items() if gradient is not None}


def only(backend: str) -> contextlib.AbstractContextManager[Any]:
    """That backend of scaled_dot_product_attention and no other; "" leaves the choice to PyTorch."""
    return sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext()


def tried(compute: Callable[[], Any]) -> tuple[Any, str | None]:
    """The outputs of transformers; or, where the chosen backend of attention cannot give them, the reason."""
    try:
        actual = compute()
    except RuntimeError as error:
        if not any(message in str(error) for message in UNABLE):
            raise
        return None, str(error).splitlines()[0]
    tensors = actual.values() if isinstance(actual, dict) else [actual]
    finite = all(tensor.isfinite().all() for tensor in tensors)
    return (actual, None) if finite else (None, "transformers' own result holds numbers that are not finite")


def failures(results: dict[str, Any]) -> list[Row]:
    """The rows that do not hold."""
    return [row for row in results.get("rows", ()) if not row["passed"]]


def verdicts(results: dict[str, Any]) -> list[Row]:
    """A row for each of the published sizes: do its logits have parity in every dtype, attention, norm and case?"""
    told = []
    for size in SIZES:
        rows = [row for row in results.get("rows", ()) if row["model"] == size and row["case"] != "gradients"]
        held = sum(row["passed"] for row in rows)
        verdict = "not judged" if not rows else "pass" if held == len(rows) else "FAIL"
        told.append({
            "model": size, "logits parity": verdict, "comparisons": len(rows), "that hold": held,
            "dtypes": ", ".join(dict.fromkeys(row["dtype"] for row in rows)),
            "largest error / transformers'": max((row["ratio"] for row in rows), default=None),
        })  # fmt: skip
    return told
