"""transformers' own model: it reads texts, writes after prompts, and shows what its norms and blocks compute.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minigpt.checkpoint import Files
from minigpt.checkpoint.transformers_model import load_with_transformers
from minigpt.errors import CheckpointError, MiniGPTError, NormError, listing, raised
from minigpt.garbage import uncollected
from minigpt.host import host_of, uncompiled
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.runners import ModuleRunner
from minigpt.precision import HALVES, Float64, default_dtype, dtype_name, full_products
from minigpt.progress import quiet_transformers

PRODUCTS = (F.linear, torch.addmm, torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
IN_MEMORY = 2**63  # bytes that a model may take whose size has been looked at before


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Compute in float32 by default, without gradients, with ``full_products``; tensors may have gradients later."""
    with full_products(), default_dtype(), torch.inference_mode(False), torch.no_grad():
        yield


def gpt2_of(
    place: Path,
    attention: str,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    tensors: dict[str, Tensor] | None = None,
) -> nn.Module:
    """Return transformers' GPT-2 with the weights of a checkpoint, rounded to ``dtype``, which computes in ``compute``.

    It takes the checkpoint's tensors under their own names, so that a fault in our loading shows.

    Args:
        tensors: by their names in the files, if they have been read.
    """
    with uncollected():
        from transformers import AutoModelForCausalLM, GPT2Config  # imported here, since it takes seconds

    files = Files.at(place)
    if tensors is None:
        tensors = files.tensors()[0]
    config = GPT2Config(**files.config or {})
    if compute == torch.float64:
        config.reorder_and_upcast_attn = False  # it would compute the scores in float32
    config.return_dict = True
    config.output_hidden_states = False
    config.output_attentions = False
    # Shapes only: the values come from the file. transformers imports the architecture's code here.
    with uncollected(), quiet_transformers(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        path = name if name in known else f"transformer.{name}"
        if path not in known:
            continue  # a causal mask, which older files hold
        value = tensor.to(dtype).to(device, compute)
        owner, _, role = path.rpartition(".")
        parameter = nn.Parameter(value, requires_grad=False)
        model.get_submodule(owner).register_parameter(role, parameter)
    for norm in model.modules():
        if not isinstance(norm, nn.LayerNorm):
            continue
        for role, parameter in list(norm.named_parameters()):
            if parameter.is_meta:  # of a norm that was folded away
                value = torch.full(parameter.shape, 1.0 if role == "weight" else 0.0, dtype=compute, device=device)
                norm.register_parameter(role, nn.Parameter(value, requires_grad=False))
    embedding, head = model.transformer.wte, model.lm_head
    if config.tie_word_embeddings and embedding.weight.is_meta:  # the files name the head alone
        embedding.weight = head.weight
    model.tie_weights()
    unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unset:
        raise CheckpointError(f"{place} has no {listing(unset)}, so transformers cannot read it")
    return model.eval()


def other_model(
    place: Path,
    attention: str,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    offload: bool = False,
) -> nn.Module:
    """Return a model of another architecture, rounded to ``dtype``, which computes in ``compute``.

    At ``dtype`` it is what ``from_pretrained`` gives, and nothing is cast: that keeps some tables in float32, such as
    rotary frequencies and routers. In float64 it holds the same values. In another dtype the tables stay too.

    Args:
        offload: whether the weights stay in their files; it may be a GPT-2 then too.
    """
    keeps_more = dtype not in HALVES and compute in HALVES  # then the file's weights are rounded once, here too
    model: Any = load_with_transformers(
        place,
        attention=attention,
        dtype=compute if keeps_more else dtype,
        device=device,
        memory=0 if offload else IN_MEMORY,
    )
    if compute == dtype or keeps_more:
        return model
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    is_exact = compute == torch.float64
    for tensor in tensors_of(model).values():  # of weights on disk too: they are cast as they are read
        if tensor.dtype == dtype or (is_exact and tensor.is_floating_point()):
            tensor.data = tensor.data.to(compute)
    return model


class WideProducts(TorchFunctionMode):
    """Computes products of float16 in float32 in the block, and rounds each result once.

    PyTorch rounds at the same place on a CPU, which has no instructions for float16, but takes forty times as long.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        is_narrow = all(tensor.dtype == torch.float16 for tensor in tensors)  # else PyTorch refuses the product
        if func not in PRODUCTS or not is_narrow:
            return func(*args, **options)
        options = {name: _wide(value) for name, value in options.items()}
        return func(*map(_wide, args), **options).half()


def _wide(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) else argument


def other_attention(attention: str) -> str:
    return "eager" if attention == "sdpa" else "sdpa"


class Reference(ModuleRunner):
    """transformers' model of a checkpoint, rounded to its dtype, which computes in ``compute``.

    In float64 it has the other implementation of attention, so that float64 has a noise floor too.

    Args:
        compute: by default the checkpoint's dtype.
        tensors: of a GPT-2, by their names in the files, if they have been read.
    """

    def __init__(
        self, facts: CheckpointFacts, compute: torch.dtype | None = None, tensors: dict[str, Tensor] | None = None
    ) -> None:
        attention = facts.attention
        dtype = facts.dtype
        if compute == torch.float64:
            attention = other_attention(attention)
        if compute is None:
            compute = dtype
        self.is_gpt2 = facts.is_gpt2 and not facts.offload
        if self.is_gpt2:
            model = gpt2_of(facts.place, attention, dtype, compute, facts.device, tensors)
        else:
            model = other_model(facts.place, attention, dtype, compute, facts.device, facts.offload)
        self.host = host = host_of(model)
        facts = replace(facts, places=[*host.sites, *host.blocks], sites=host.sites, embedding=host.embedding)
        super().__init__(model, facts, partial(explaining, type(model).__name__))
        self.prefix = host.prefix
        self.pads, self.together = self.is_gpt2, not self.is_gpt2
        self.is_exact = compute == torch.float64

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return the gradient of the loss of texts, by Parameter.

        Raises:
            MiniGPTError: if transformers' model has none.
        """
        try:
            with self.exactly():
                return super().gradients(texts) or {}
        except NormError as error:
            name = type(self.model).__name__
            raise MiniGPTError(f"{name} of transformers has no gradients to compare with: {error.message}") from error

    @contextlib.contextmanager
    def other_attention(self) -> Iterator[None]:
        """Compute attention by the other implementation in the block, if transformers' model has it."""
        before = self.model.config._attn_implementation
        try:
            with quiet_transformers(), contextlib.suppress(ValueError):  # it may have no SDPA
                self.model.set_attn_implementation(other_attention(before))
            yield
        finally:
            with quiet_transformers():
                self.model.set_attn_implementation(before)

    def kept(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the dtypes of Parameters and buffers that transformers keeps in another one than ``dtype``."""
        kept = {}
        for name, tensor in tensors_of(self.model).items():
            if tensor.is_floating_point() and tensor.dtype != dtype:
                kept[name.removeprefix(self.host.prefix)] = dtype_name(tensor.dtype)
        return kept

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute in float64 in the block, whatever dtype transformers' code names, if the model is in float64."""
        if not self.is_exact:
            yield
            return
        with default_dtype(torch.float64), Float64():
            yield

    def __call__(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of a batch without padding."""
        with self.exactly(), self.naming():
            return self.model(input_ids, use_cache=False).logits


@contextlib.contextmanager
def explaining(name: str) -> Iterator[None]:
    """Say in one sentence that a model of transformers, of this class, cannot read a text."""
    try:
        yield
    except MiniGPTError:  # as of a file that changes meanwhile
        raise
    except raised() as error:
        reason = " ".join(str(error).split())
        if "meta tensor" in reason:  # accelerate brings a module's weights for its own call alone
            reason = "a weight is used outside of its module, so it is not read block by block; give more memory"
        raise MiniGPTError(f"{name} of transformers cannot read a text: {reason}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the Parameters and buffers of a model, by the names that they have without ``torch.compile``."""
    tensors = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        tensors[uncompiled(name)] = tensor
    return tensors
