"""Measure the norms of one module of this folder, and print a line of JSON for each.

scripts/elsewhere/norms.py runs it in an environment of its own: python measure_norms.py jax_norms
"""

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from minigpt.conformance import check_norm
from minigpt.conformance.subject import GPT2_EPS, Built, Subject
from minigpt.conformance.truth import normal
from minigpt.errors import RAISED, MiniGPTError
from minigpt.norms.foreign.arrays import arrays_of, with_arrays
from minigpt.precision import DTYPES

ROWS, WIDTH = 24, 768
CASES = ("values",)  # of the kit: what the verdict is about
JUDGED = ("float32", "bfloat16", "float16")
KINDS = {  # of rows, at every dtype; the last are seen in bfloat16 too
    "ordinary": lambda x: x,
    "massive": lambda x: with_massive(x),
    "shifted": lambda x: x + 100,
    "wide": lambda x: x,
}


def with_massive(x: Tensor) -> Tensor:
    """Return rows with a few values near 3,000, as a GPT-2's residual stream has them."""
    x = x.clone()
    x[:, WIDTH // 3] += 3000
    x[:, WIDTH // 2] -= 2400
    return x


def relative(value: Tensor, true: Tensor) -> float:
    """Return RMS(value - true) / RMS(true)."""
    error = value.double() - true
    return float(error.square().mean().sqrt() / true.square().mean().sqrt())


def roundings(built: Built, x: Tensor, y: Tensor) -> str:
    """Return where a norm rounds in half precision: the way that gives nearly all of its bits."""
    dtype, rows = x.dtype, x.double()
    weight, bias = built.module.weight.double(), torch.zeros(x.shape[-1]).double()
    if built.module.bias is not None:
        bias = built.module.bias.double()
    mean, spread = rows.mean(-1, keepdim=True), rows.var(-1, correction=0, keepdim=True)
    if not built.subject.centers:
        mean, spread = torch.zeros_like(mean), rows.square().mean(-1, keepdim=True)
    cut = lambda tensor: tensor.to(dtype).double()  # noqa: E731
    row = (rows - mean) / (spread + GPT2_EPS).sqrt()
    coarse = (rows - cut(mean)) / (cut(spread) + GPT2_EPS).sqrt()
    ways = {
        "once": row * weight + bias,
        "row, result": cut(row) * weight + bias,
        "product, result": cut(row * weight) + bias,
        "row, product, result": cut(cut(row) * weight) + bias,
        "statistics, result": coarse * weight + bias,
    }
    differing = {name: float((way.to(dtype) != y).double().mean()) for name, way in ways.items()}
    name = min(differing, key=lambda name: differing[name])
    return name if differing[name] < 0.05 else "otherwise"


def measured(subject: Subject, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of a norm at a dtype, and PyTorch's own beside them."""
    figures: dict[str, Any] = {}
    for kind, make in KINDS.items():
        width = 4096 if kind == "wide" else WIDTH
        drawing = subject.drawing_for(kind)
        built = drawing.candidate(width, dtype)
        x = make(normal(drawing.generator, ROWS, width)).to(dtype)
        y = built(x.clone())
        true = built.truth(x).values
        own = relative(built.by_pytorch(x), true)
        figures[kind] = {"error": relative(y, true), "pytorch": own}
        if kind == "ordinary" and dtype != torch.float32:
            figures["rounds"] = roundings(built, x, y)
        if kind == "ordinary":
            alone = torch.cat([built(row.clone()) for row in x.split(1)])
            figures["same_bits_alone"] = torch.equal(alone, y)
    built = subject.drawing_for("constant").candidate(WIDTH, dtype)
    x = torch.tensor([0.1, 1.0, -2.5, 10.0, 100.3]).to(dtype)[:, None].expand(-1, WIDTH).contiguous()
    y = built(x.clone()).double()
    true = built.truth(x).values
    figures["constant"] = {
        "error": float((y - true).abs().max() / true.square().mean().sqrt()),
        "pytorch": float((built.by_pytorch(x).double() - true).abs().max() / true.square().mean().sqrt()),
    }
    return figures


def verdicts(norm: Any, kind: str) -> dict[str, Any]:
    """Return the kit's verdict on the values at each dtype, and its sentences."""
    try:
        report = check_norm(norm, kind=kind, device="cpu", cases=CASES, seed=0)
    except MiniGPTError:  # it does not run in float32
        return {"verdicts": dict.fromkeys(JUDGED, "not judged"), "diagnoses": []}
    found = {}
    for dtype in JUDGED:
        passed = report.dtypes.get(dtype)
        found[dtype] = {True: "pass", False: "fail", None: "not judged"}[passed]
    return {"verdicts": found, "diagnoses": report.diagnoses}


def shortened(error: BaseException) -> str:
    """Return the beginning of a message, without a place in a file."""
    return str(error).partition(" (/")[0][:160]


def row_of(package: str, name: str, kind: str, norm: Any, eps: float | None, arrays: str | None) -> dict[str, Any]:
    """Return all that is measured of a norm."""
    if arrays is not None and arrays_of(norm) is None:
        norm = with_arrays(norm, arrays)
    version = importlib.metadata.version(package)
    row: dict[str, Any] = {"package": package, "version": version, "norm": name, "kind": kind, "default_eps": eps}
    row["date"] = time.strftime("%Y-%m-%d")
    subject = Subject(norm, torch.device("cpu"), 0, kind=kind)
    for dtype in JUDGED:
        try:
            with torch.no_grad():
                row[dtype] = measured(subject, DTYPES[dtype])
        except RAISED as error:
            row[dtype] = {"raises": shortened(error)}
    row |= verdicts(norm, kind)
    for dtype in JUDGED:
        if "raises" in row[dtype]:
            row["verdicts"][dtype] = "raises"
    return row


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    wanted = sys.argv[2:]
    for package, name, kind, norm, eps in module.NORMS:
        if not wanted or package in wanted:
            print(json.dumps(row_of(package, name, kind, norm, eps, module.ARRAYS)), flush=True)
