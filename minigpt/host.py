"""The lab's view of a model: its norms and what each computes, its blocks and its embedding.

A model is any module that computes logits of ids. Nothing here knows GPT-2: a norm site is a path in a tree of modules.

C embedding.
"""

import contextlib
import inspect
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minigpt.choices import GPT2_TYPES
from minigpt.errors import raised
from minigpt.norms.foreign.adapt import eps_of
from minigpt.norms.formulas import exact_norm, way_of_rounding
from minigpt.norms.record import ATTRIBUTE, NormSite, record_of
from minigpt.norms.registry import KINDS
from minigpt.offload import TRANSPARENT, device_of, is_sharded, plain_copy, uncompiled, values_of
from minigpt.precision import default_dtype
from minigpt.shape import Shape, value_in

EPS_VALUES = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0)  # of a norm that names none
OF_HEADS = re.compile(r"[qkv]{1,2}_")  # norms of queries, keys and values
LOOKS_LIKE_A_NORM = re.compile(r"norm|(^|_)ln(_|$)", re.IGNORECASE)
NO_NORMS = (nn.Sequential, nn.Identity, nn.Dropout)  # whatever they are called
GATE = re.compile(r"gate|z", re.IGNORECASE)  # a second argument that the model gives its norm, though it is optional


@dataclass(frozen=True)
class Host:
    """A causal language model as the lab sees it.

    Attributes:
        prefix: of the paths of all places, which are named without it: "transformer." of transformers' GPT-2.
        sites: the paths of its norms.
        blocks: the paths of its blocks.
        embedding: the path of its token embedding.
    """

    model: nn.Module
    prefix: str
    sites: list[str]
    blocks: list[str]
    embedding: str

    @property
    def root(self) -> nn.Module:
        """The module under the prefix."""
        return self.model.get_submodule(self.prefix.rstrip("."))

    @property
    def paths(self) -> list[str]:
        """The paths of the norms in the model, prefix included."""
        return [self.prefix + site for site in self.sites]

    @property
    def weight(self) -> Tensor:
        """The token embedding (V, C): a placeholder if it is offloaded or sharded."""
        return self.root.get_submodule(self.embedding).get_parameter("weight")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model, which is its token embedding's."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the model reads ids; "meta" if it has no values."""
        return device_of(self.root.get_submodule(self.embedding))

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return Shape.of(config_of(self.model))

    def norms(self) -> dict[str, nn.Module]:
        """Return the modules at the norms' sites."""
        return {site: self.root.get_submodule(site) for site in self.sites}

    def site_of(self, norm: nn.Module) -> NormSite:
        """Return what a norm of the model computes; of one that was swapped in, what the norm before it computed."""
        before = record_of(norm).site
        if before is not None:
            return before
        config: Any = config_of(self.model)
        if hasattr(self.root, "norm_modules"):  # a GPT-2 of minigpt, whose config says it
            return NormSite("layer_norm", config.layer_norm_epsilon, width=config.n_embd)
        return probe_norm(norm, _width(norm, self.model))

    def run(self, input_ids: Tensor) -> None:
        """Compute all norms and blocks, and not the head: the logits of many rows would take gigabytes."""
        model: Any = self.model
        if any(map(is_sharded, model.parameters())):  # whose parts are gathered when it is called as a whole
            model(input_ids)
            return
        if hasattr(model, "hidden_states"):
            model.hidden_states(input_ids)
            return
        body = getattr(model, "base_model", model)
        body(input_ids)

    def logits(self, input_ids: Tensor) -> Any:
        """Return what the model computes of ids (B, T)."""
        returned = self.model(input_ids)
        return getattr(returned, "logits", returned)


def host_of(model: nn.Module) -> Host:
    """Return a model of transformers, or one of minigpt, as a host."""
    paths: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if uncompiled(path):
            paths[uncompiled(path)] = module
    config: Any = config_of(model)
    prefix = None
    if getattr(config, "model_type", "gpt2") in GPT2_TYPES:
        prefix = prefix_of(model, ["h.0.ln_1", "h.0.attn.c_attn"])
    prefix = prefix or ""
    embedding = _embedding_of(model, paths)
    depth = 0 if config is None else Shape.of(config).n_layer
    blocks = _blocks_of(paths, embedding, depth)
    members: list[str] = []
    if blocks:
        members = [f"{blocks}.{name}" for name, _ in paths[blocks].named_children()]
    known_sites: Any = getattr(model.get_submodule(prefix.rstrip(".")), "site_names", None)
    if known_sites is None:
        root = _shared(embedding, blocks) if blocks else []  # the part that reads text, and no tower of images
        sites = _sites_of(paths, root)
    else:  # of a GPT-2 of minigpt
        sites = list[str]()
        for site in known_sites():
            sites += _norms_inside(prefix + site, paths)
    return Host(
        model=model,
        prefix=prefix,
        sites=[site.removeprefix(prefix) for site in sites],
        blocks=[block.removeprefix(prefix) for block in members],
        embedding=embedding.removeprefix(prefix),
    )


def _sites_of(paths: Mapping[str, nn.Module], root: list[str]) -> list[str]:
    """Return the paths of the norms under a path, given as its names; a norm that is in another is none."""
    sites: list[str] = []
    for path, module in paths.items():
        is_under_root = path.split(".")[: len(root)] == root
        is_inner = any(path.startswith(f"{site}.") for site in sites)
        if is_under_root and not is_inner and _is_norm(path, module):
            sites.append(path)
    return sites


def _norms_inside(site: str, paths: Mapping[str, nn.Module]) -> list[str]:
    """Return a site of a GPT-2 of ours; of one that PEFT wraps, the norms in the wrapper."""
    if site not in paths or not _is_of_peft(paths[site]):
        return [site]
    inside: list[str] = []
    for path, part in paths.items():
        if path.startswith(f"{site}.") and _is_norm(path, part):
            inside.append(path)
    return inside


def _is_of_peft(module: nn.Module) -> bool:
    package = type(module).__module__.partition(".")[0]
    return package == "peft"


def config_of(model: nn.Module) -> Any:
    """Return the config of a model, also of one that ``DistributedDataParallel`` or a compiler wraps; else None."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None:
            return config
    return None


def _embedding_of(model: nn.Module, paths: Mapping[str, nn.Module]) -> str:
    """Return the path of the token embedding: the one that transformers names, or that is in it, else the first."""
    get: Any = getattr(model, "get_input_embeddings", None)
    known = None if get is None else get()
    embeddings: list[str] = []
    places: list[str] = []
    for path, part in paths.items():
        if isinstance(part, nn.Embedding):
            embeddings.append(path)
        if part is known:
            places.append(path)
    for path in embeddings:
        for place in places:
            if path == place or path.startswith(f"{place}."):  # PEFT wraps one to train tokens
                return path
    return embeddings[0] if embeddings else ""


def _blocks_of(paths: Mapping[str, nn.Module], embedding: str, depth: int) -> str:
    """Return the path of the list of blocks: of the model's depth, near the embedding, and long."""
    lengths = {path: len(part) for path, part in paths.items() if isinstance(part, nn.ModuleList)}
    ranks: dict[str, tuple[bool, int, int, int]] = {}
    for path, length in lengths.items():
        ranks[path] = length == depth, len(_shared(path, embedding)), length, -len(path)
    return max(ranks, key=ranks.__getitem__, default="")


def _shared(path: str, other: str) -> list[str]:
    """Return the names with which two paths begin."""
    shared: list[str] = []
    for name, other_name in zip(path.split("."), other.split("."), strict=False):
        if name != other_name:
            break
        shared.append(name)
    return shared


def prefix_of(model: nn.Module, places: Iterable[str]) -> str | None:
    """Return the prefix under which a module has all of these places; None if it has not."""
    places = list(places)
    if not places:
        return None
    first = places[0]
    paths = {uncompiled(path) for path, _ in model.named_modules(remove_duplicate=False)}
    for path in paths:
        if path != first and not path.endswith(f".{first}"):
            continue
        prefix = path.removesuffix(first)
        if all(prefix + place in paths for place in places):
            return prefix
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` or another wrapper of PyTorch holds, or the module itself."""
    for name in TRANSPARENT:
        if name in module._modules:
            return unwrapped(module.get_submodule(name))
    return module


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model, or one of its parts, has been compiled: wrapped, in place, or its ``forward`` alone."""
    for part in model.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            return True
        if hasattr(part.forward, "_torchdynamo_orig_callable") and any(part.children()):
            return True
    return False


def hooked(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which hooks run that were put on a model just now: compiled code would not run them."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext()


def install(model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
    """Put norms at the sites of a model, each at every path that the module there has."""
    new = {model.get_submodule(site): norm for site, norm in norms.items()}
    for path, module in [*model.named_modules(remove_duplicate=False)]:
        if module in new:
            model.set_submodule(path, new[module])


def _is_norm(path: str, module: nn.Module) -> bool:
    """Return True for a module that has parameters of rows only, looks like a norm, and takes one input.

    A norm that was swapped in is one, whatever Parameters it has. A norm that takes a gate and its input is none.
    Nor is a wrapper of PEFT: the norms in it are sites of their own.
    """
    if _is_of_peft(module):
        return False
    if getattr(getattr(module, ATTRIBUTE, None), "site", None) is not None:
        return True
    forward = getattr(type(module), "forward", nn.Module.forward)  # TorchScript's classes have none
    if isinstance(module, NO_NORMS) or forward is nn.Module.forward:  # a container
        return False
    if not _takes_one_input(forward):
        return False
    if any(parameter.ndim > 1 for parameter in module.parameters()):
        return False
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    names = (path.rpartition(".")[2], type(module).__name__)
    return any(map(LOOKS_LIKE_A_NORM.search, names))


def _takes_one_input(forward: Callable[..., Any]) -> bool:
    """Return whether a method can be called with one input, and is not meant to get a gate too."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    inputs = [parameter for parameter in parameters if parameter.kind in positional]
    for parameter in inputs[2:]:  # behind self and the input
        if parameter.default is inspect.Parameter.empty or GATE.fullmatch(parameter.name):
            return False
    return True


def norm_sites(model: nn.Module) -> dict[str, NormSite]:
    """Return what the norms of a model compute, by their paths.

    A module at several paths is one site, at the first of them. ``torch.compile`` changes no path. The
    model may be on the device "meta", without values.

    Args:
        model: a ``minigpt.GPT2``, or any causal language model of transformers.
    """
    host = host_of(model)
    sites: dict[str, NormSite] = {}
    for site, norm in host.norms().items():
        sites[host.prefix + site] = probe_norm(norm, _width(norm, model))
    return sites


def _width(norm: nn.Module, model: Any) -> int:
    """Return the length of a norm's rows: of its Parameters, else of a head, a matrix beside it or the stream."""
    rows = [parameter for parameter in norm.parameters() if parameter.ndim and parameter.numel() > 1]
    if rows:
        return max(parameter.shape[-1] for parameter in rows)
    path = next((path for path, part in model.named_modules() if part is norm), "")
    around, _, name = path.rpartition(".")
    config = config_of(model)
    width = Shape.of(config).n_embd
    parent = model.get_submodule(around)
    if OF_HEADS.match(name):  # the heads' width may be the attention's own, as in Gemma 4
        head_width = getattr(parent, "head_dim", None) or value_in(config, "head_dim")
        return head_width or width // config.num_attention_heads
    for parameter in parent.parameters(recurse=False):
        if parameter.ndim == 2:  # it multiplies what the norm returns: all streams at once in DeepSeek V4
            return parameter.shape[-1]
    return width


@contextlib.contextmanager
def _alone(norm: nn.Module) -> Iterator[None]:
    """Have a norm in eval mode, and its hooks off, in the block."""
    off: dict[str, Any] = {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict(), "training": False}
    states: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each module, and what it was before
    for part in norm.modules():
        before = {name: part.__dict__[name] for name in off}
        states.append((part.__dict__, before))
    for state, _ in states:
        state.update(off)
    try:
        yield
    finally:
        for state, before in states:
            state.update(before)


@default_dtype()
def probe_norm(norm: nn.Module, width: int) -> NormSite:
    """Return what a norm computes, found by comparing it with formulas on random rows (8, width).

    A copy of the norm is called with Parameters of random values on the CPU. The norm itself is left as it is.
    """
    norm = unwrapped(norm)
    values = values_of(norm, gathering=False)
    with contextlib.suppress(Exception):  # what cannot be copied is called itself
        norm = plain_copy(norm, gathering=False)
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = torch.logspace(-4, 1, 8, device="cpu")[:, None]  # small rows show the eps
    rows = sizes * (torch.randn(8, width, generator=generator, device="cpu") + 0.5)
    weight = torch.randint(32, 96, (width,), generator=generator, device="cpu") / 64  # bfloat16 holds 1 + weight too
    bias = torch.randn(width, generator=generator, device="cpu")
    parameters = dict(norm.named_parameters())
    used: dict[str, Tensor] = {}
    if "weight" in parameters and parameters["weight"].shape == weight.shape:
        used["weight"] = weight.clone()
    if "bias" in parameters and parameters["bias"].shape == bias.shape:
        used["bias"] = bias.clone()
    others = {name: _on_cpu(x) for name, x in values.items() if name not in used}
    try:
        output = _output(norm, used | others, rows)
    except raised():
        return NormSite("other", width=width)
    if output.shape != rows.shape:
        return NormSite("other", width=width)
    may_add_one = (False, True) if "weight" in used else (False,)
    for kind, adds_one, eps in itertools.product(KINDS, may_add_one, sorted(eps_of(norm)) or EPS_VALUES):
        scale = weight + adds_one if "weight" in used else None
        expected = exact_norm(rows, kind, scale, used.get("bias"), eps)
        largest = expected.abs().amax(-1, keepdim=True)
        is_close = (output - expected).abs() <= 1e-4 * largest  # of each row; NaN is not
        if not is_close.all():
            continue
        if scale is None:
            return NormSite(kind, eps, adds_one, width)
        without_bias = used | others
        if "bias" in used:
            without_bias["bias"] = torch.zeros_like(bias)
        rows = rows.bfloat16()
        try:
            y = _output(norm, without_bias, rows)
        except raised():
            return NormSite(kind, eps, adds_one, width)
        return NormSite(kind, eps, adds_one, width, way_of_rounding(y, exact_norm(rows, kind, eps=eps), scale))
    return NormSite("other", width=width)


@torch.no_grad()
def _output(norm: nn.Module, tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Return what a norm computes of rows (N, C) with these Parameters and buffers, at the dtype of the rows."""
    at_dtype: dict[str, Tensor] = {}
    for name, x in tensors.items():
        at_dtype[name] = x.to(rows.dtype) if x.is_floating_point() else x
    with _alone(norm):
        return functional_call(norm, at_dtype, (rows[None],))[0]


def _on_cpu(x: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float32 if it has a floating dtype; zeros for one without values."""
    x = torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().to("cpu", copy=True)
    return x.float() if x.is_floating_point() else x
