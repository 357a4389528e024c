"""Cases of torch.compile: the compiled norm equals the eager norm, forward and backward."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from minigpt.conformance.case import Case, Measurement, worst, worst_element
from minigpt.conformance.gradients import gradients
from minigpt.conformance.rows import constant, massive, ordinary
from minigpt.conformance.subject import Subject

WIDTH = 768
UNLIMITED = 10**6


def best_backend(device: torch.device) -> str:
    """Return inductor if it can generate code for ``device``, else aot_eager: the same trace, run by PyTorch itself."""
    if device.type == "cpu":
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
        return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
    return "inductor" if importlib.util.find_spec("triton") else "aot_eager"


@contextlib.contextmanager
def always_compiling() -> Iterator[None]:
    """Lift torch.compile's limits, so that a norm that compiles itself does so for every width and dtype."""
    from torch._dynamo import config

    with config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED):
        yield


@torch.no_grad()
def compiled_values(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.candidate(WIDTH), _rows(subject, dtype)
    bound = 2 * candidate.truth(x).bound
    eager = candidate(x.clone()).cpu().double()
    compiled = _compiled(candidate.module, subject.compile_backend)(x.clone())
    return worst_element(compiled, eager, bound)._replace(note=f"compiled with {subject.compile_backend}")


def compiled_gradients(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.candidate(WIDTH), _rows(subject, dtype)
    dy = subject.rows(len(x), WIDTH, dtype=dtype)
    true = candidate.gradient_truth(x, dy)
    eager = gradients(candidate, candidate, x, dy)
    compiled = gradients(candidate, _compiled(candidate.module, "aot_eager"), x, dy)
    return worst(
        {name: worst_element(compiled[name], eager[name].cpu().double(), 2 * true[name].bound) for name in true}
    )


def _compiled(module: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """Forget earlier programs and compile: beyond its limit of recompilations torch.compile would run eagerly."""
    torch.compiler.reset()
    return torch.compile(module, backend=backend, dynamic=False)


def _rows(subject: Subject, dtype: torch.dtype) -> Tensor:
    kinds = [make(8, WIDTH, subject.generator) for make in (ordinary, massive, constant)]
    return subject.put(torch.cat(kinds), dtype)  # (24, WIDTH)


COMPILE_CASES = [
    Case("compiled equals eager", "compile", "values under torch.compile",
         "twice the bound of float32 values, since either may be off by it", compiled_values),
    Case("compiled gradients equal eager", "compile", "gradients under torch.compile, traced by aot_eager",
         "twice the bound of float32 gradients, since either may be off by it", compiled_gradients),
]  # fmt: skip
