"""A model in plain functions, with mistakes planted by hand, and a GPT-2 of this kind: what a diagnosis has to name.

It shares nothing with minigpt or transformers: it reads config.json and the tensors. Each mistake is another value of a
setting. Other architectures are in ported.py.

T tokens, C embedding, H heads, D = C / H, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32, in which every program computes norms, activations and a softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "sigmoid": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
    "square": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x))),
    "exchanged": lambda x: 0.5 * x * (1 + torch.tanh(0.044715 * (x + math.sqrt(2 / math.pi) * x**3))),
}
ACTIVATIONS |= {"tanh": ACTIVATIONS["gelu_pytorch_tanh"], "erf": ACTIVATIONS["gelu"]}


class Planted:
    """A model in plain functions that computes in a dtype, with settings in place of the right ones.

    Args:
        place: the folder of the checkpoint.
        dtype: of weights and arithmetic.
        settings: of ``RIGHT``.

    Attributes:
        s: the settings.
        config: as config.json has it.
        w: the weights, by their names without the prefix of the family.
    """

    RIGHT: ClassVar[dict[str, Any]]

    def __init__(self, place: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        unknown = settings.keys() - self.RIGHT.keys()
        assert not unknown, unknown
        self.s = {**self.RIGHT, **settings}
        self.config = json.loads((place / "config.json").read_text())
        self.dtype = dtype
        self.w: dict[str, Tensor] = {}
        for name, x in load_file(place / "model.safetensors").items():
            for prefix in ("transformer.", "model.", "gpt_neox."):
                name = name.removeprefix(prefix)
            self.w[name] = x.to(dtype)
        self.prepare()

    def prepare(self) -> None:
        """Change weights as the settings say."""

    def activated(self, x: Tensor, kind: str) -> Tensor:
        return ACTIVATIONS[kind](wide(x)).to(x.dtype)


RIGHT: dict[str, Any] = {
    "act": "tanh",
    "eps": None,  # the config's
    "eps_at": ("ln_1", "ln_2", "ln_f"),
    "ddof": 0,
    "eps_outside": False,
    "power": 0.5,  # of the variance and eps
    "center": True,
    "shift_at": ("ln_1", "ln_2", "ln_f"),
    "scale_at": ("ln_1", "ln_2", "ln_f"),
    "one_plus": False,
    "norm_axis": -1,
    "last_norm": 1,
    "wiring": "pre",
    "swap_norms": False,
    "scale": "head",
    "mask": "causal",
    "softmax_axis": -1,
    "scale_late": False,
    "order": (0, 1, 2),
    "layout": "thirds",
    "project": True,
    "heads": None,
    "transposed": (),
    "reshaped": (),
    "no_bias": (),
    "at_block": None,  # where weights are transposed, reshaped or left out; everywhere by default
    "positions": 0,
    "position_factor": 1.0,
    "behind": None,  # positions behind the prompt: a function of positions and its length
    "padded": False,  # whether positions count the padding up to the longest prompt
    "prompts": (),
    "token_factor": 1.0,
    "blocks": None,
    "id_shift": 0,
    "drop": 0,  # tokens at the beginning that are not read
    "begin": None,
    "end": "first",
    "logits": "raw",
    "head_bias": None,
    "head": None,
    "round_weights": None,
    "round_scope": "all",
    "round_kv": None,
    "round_act": None,
}


class Program(Planted):
    """A GPT-2."""

    RIGHT = RIGHT

    def prepare(self) -> None:
        """Round, transpose and reshape weights as the settings say."""
        rounds = self.s["round_weights"]
        for name, x in self.w.items():
            layer = name.split(".", 2)[-1].rsplit(".", 1)[0]
            if self.s["at_block"] is not None and not name.startswith(f"h.{self.s['at_block']}."):
                layer = ""
            if name.endswith("bias") and layer in self.s["no_bias"]:
                self.w[name] = torch.zeros_like(x)
            if name.endswith("weight") and layer in self.s["transposed"]:
                self.w[name] = x.t().contiguous()
            if name.endswith("weight") and layer in self.s["reshaped"]:
                self.w[name] = x.reshape(x.shape[1], x.shape[0]).t().contiguous()
            is_matrix = x.ndim == 2 and not name.startswith("wpe")
            is_block = name.startswith("h.")
            scope = {"all": True, "matrices": is_matrix, "blocks": is_matrix and is_block}[self.s["round_scope"]]
            if rounds is not None and scope:
                self.w[name] = rounds(x, is_block).to(self.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """(1, T) -> (1, T, V)."""
        s, w = self.s, self.w
        ids = (ids[0, s["drop"] :] + s["id_shift"]) % self.config["vocab_size"]
        if s["begin"] is not None:
            ids = torch.cat([torch.tensor([s["begin"]]), ids])
        x = w["wte.weight"][ids] * s["token_factor"]
        x = x + self.position(ids) * s["position_factor"]
        for block in self.order():
            x = self.block(x, f"h.{block}")
        for _ in range(s["last_norm"]):
            x = self.norm(x, "ln_f")
        head = w["wte.weight"] if s["head"] is None else s["head"].to(x.dtype)
        logits = self.multiply(x, head.t())
        if s["head_bias"] is not None:
            logits = logits + s["head_bias"].to(logits.dtype)
        if s["begin"] is not None:
            logits = logits[1:] if s["end"] == "first" else logits[:-1]
        return self.returned(torch.cat([logits[: s["drop"]], logits]))[None]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def returned(self, logits: Tensor) -> Tensor:
        kind = self.s["logits"]
        if kind == "log":
            return logits.log_softmax(-1)
        if kind == "probabilities":
            return logits.softmax(-1)
        if kind == "centred":
            return logits - logits.mean(-1, keepdim=True)
        if kind == "shifted":
            return logits + 7.5
        if kind == "late":
            return torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])
        if kind == "rolled":
            return logits.roll(1, -1)
        return logits

    def position(self, ids: Tensor) -> Tensor:
        start, seq = self.s["positions"], len(ids)
        table = self.w["wpe.weight"]
        if start == "zero":
            return table[torch.zeros(seq, dtype=torch.long)]
        if start == "last":
            return table[torch.full((seq,), seq - 1)]
        places = torch.arange(seq) + start
        prompts = [prompt for prompt in self.s["prompts"] if prompt == ids[: len(prompt)].tolist()]
        if self.s["behind"] is not None and prompts:
            length = len(prompts[0])
            places[length:] = self.s["behind"](places[length:], length)
        if self.s["padded"] and prompts:
            places += max(map(len, self.s["prompts"])) - len(prompts[0])
        return table[places.clamp(max=len(table) - 1)]

    def order(self) -> list[int]:
        layers = list(range(self.config["n_layer"]))
        change = self.s["blocks"]
        if change is None:
            return layers
        return change(layers)

    def norm(self, x: Tensor, name: str) -> Tensor:
        s, kind = self.s, name.rsplit(".", 1)[-1]
        eps = self.config["layer_norm_epsilon"]
        if s["eps"] is not None and kind in s["eps_at"]:
            eps = s["eps"]
        row = wide(x)
        axis = s["norm_axis"]
        if s["center"]:
            row = row - row.mean(axis, keepdim=True)
        variance = row.square().sum(axis, keepdim=True) / (row.shape[axis] - s["ddof"])
        if s["eps_outside"]:
            deviation = variance.sqrt() + eps
        elif s["power"] == "root of std":
            deviation = (variance.sqrt() + eps).sqrt()
        else:
            deviation = (variance + eps) ** s["power"]
        y = row / deviation
        if kind in s["scale_at"]:
            y = y * (self.w[f"{name}.weight"].to(y.dtype) + s["one_plus"])
        if kind in s["shift_at"]:
            y = y + self.w[f"{name}.bias"].to(y.dtype)
        return y.to(x.dtype)

    def block(self, x: Tensor, name: str) -> Tensor:
        first, second = ("ln_2", "ln_1") if self.s["swap_norms"] else ("ln_1", "ln_2")

        def attn(y: Tensor) -> Tensor:
            return self.attention(y, f"{name}.attn", int(name.split(".")[1]))

        def mlp(y: Tensor) -> Tensor:
            return self.mlp(y, f"{name}.mlp")

        def ln_1(y: Tensor) -> Tensor:
            return self.norm(y, f"{name}.{first}")

        def ln_2(y: Tensor) -> Tensor:
            return self.norm(y, f"{name}.{second}")

        wiring = self.s["wiring"]
        if wiring == "post":
            x = ln_1(x + attn(x))
            return ln_2(x + mlp(x))
        if wiring == "parallel":
            return x + attn(ln_1(x)) + mlp(ln_2(x))
        if wiring == "no attention residual":
            x = attn(ln_1(x))
        elif wiring == "no ln_1":
            x = x + attn(x)
        elif wiring == "x + x":
            x = x + x
        else:
            x = x + attn(ln_1(x))
        if wiring == "no mlp residual":
            return mlp(ln_2(x))
        if wiring == "x + x in the MLP":
            return x + x
        if wiring == "no ln_2":
            return x + mlp(x)
        return x + mlp(ln_2(x))

    def attention(self, x: Tensor, name: str, layer: int) -> Tensor:
        s, w = self.s, self.w
        seq, width = x.shape
        heads = s["heads"] or self.config["n_head"]
        qkv = self.multiply(x, w[f"{name}.c_attn.weight"]) + w[f"{name}.c_attn.bias"]
        q, k, v = self.split(qkv, seq, heads)
        if s["round_kv"] is not None:
            k, v = s["round_kv"](k).to(k.dtype), s["round_kv"](v).to(v.dtype)
        size = width // heads
        factor = {
            "head": size**-0.5, "none": 1.0, "twice": 1 / size, "width": width**-0.5,
            "layer": size**-0.5 / (layer + 1),
        }[s["scale"]]  # fmt: skip
        scores = q @ k.transpose(1, 2)
        scores = scores if s["scale_late"] else scores * factor
        seen = torch.ones(seq, seq, dtype=torch.bool).tril({"next": 1, "not itself": -1}.get(s["mask"], 0))
        if s["mask"] == "zero":
            scores = scores * seen
        elif s["mask"] == "not itself":
            scores = scores.masked_fill(~seen, -1e9)
        elif s["mask"] == "small":
            scores = torch.where(seen, scores, torch.tensor(-math.e, dtype=scores.dtype))
        elif s["mask"] == "inverted":
            scores = scores.masked_fill(seen, -1e9)
        elif s["mask"] not in ("none", "after"):
            scores = scores.masked_fill(~seen, -math.inf)
        weights = torch.softmax(wide(scores), s["softmax_axis"])
        weights = weights.to(v.dtype)
        if s["mask"] == "after":
            weights = weights * seen
        if s["scale_late"]:
            weights = weights * factor
        y = (weights @ v).transpose(0, 1)  # (T, H, D)
        if s["layout"] == "unmerged":
            y = weights @ v
        y = y.reshape(seq, width)
        if not s["project"]:
            return y
        return self.multiply(y, w[f"{name}.c_proj.weight"]) + w[f"{name}.c_proj.bias"]

    def split(self, qkv: Tensor, seq: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """(T, 3C) -> 3 x (H, T, D)."""
        layout = self.s["layout"]
        if layout == "per head":
            parts = qkv.reshape(seq, heads, 3, -1).permute(2, 1, 0, 3)
        elif layout == "strided":
            parts = qkv.reshape(seq, 3, -1, heads).permute(1, 3, 0, 2)
        elif layout == "untransposed":
            parts = torch.stack([part.reshape(heads, seq, -1) for part in qkv.chunk(3, -1)])
        else:
            parts = qkv.reshape(seq, 3, heads, -1).permute(1, 2, 0, 3)
        q, k, v = (parts[number] for number in self.s["order"])
        return q, k, v

    def mlp(self, x: Tensor, name: str) -> Tensor:
        w = self.w
        x = self.multiply(x, w[f"{name}.c_fc.weight"]) + w[f"{name}.c_fc.bias"]
        if self.s["round_act"] is not None:
            rounds = self.s["round_act"]
            x = rounds(self.activated(rounds(x).to(x.dtype), self.s["act"])).to(x.dtype)
        else:
            x = self.activated(x, self.s["act"])
        return self.multiply(x, w[f"{name}.c_proj.weight"]) + w[f"{name}.c_proj.bias"]


def half(x: Tensor, *_: object) -> Tensor:
    return x.to(torch.float16)


def brain(x: Tensor, *_: object) -> Tensor:
    return x.to(torch.bfloat16)


def cut_brain(x: Tensor, *_: object) -> Tensor:
    """Cut the lower 16 bits, as ``bits >> 16`` does."""
    bits = x.float().contiguous().view(torch.int32)
    return (bits >> 16 << 16).view(torch.float32)


def cut_half(x: Tensor, *_: object) -> Tensor:
    """Cut the lower 13 bits of the mantissa, of numbers that are normal in float16."""
    bits = x.float().contiguous().view(torch.int32)
    normal = (bits >> 13 << 13).view(torch.float32)
    step = 2.0**-24  # between numbers that are not
    return torch.where(x.float().abs() < 2.0**-14, torch.trunc(x.float() / step) * step, normal)


def int8(dim: int):
    """Return int8 by rows of the stored matrix for 1, by its columns for 0."""

    def rounds(x: Tensor, *_: object) -> Tensor:
        wide = x.float()
        step = wide.abs().amax(dim, keepdim=True) / 127
        return torch.round(wide / step) * step

    return rounds


def int8_cache(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / step) * step


def ggml(bits: int):
    """Return Q8_0 or Q4_0 of a matrix, in blocks of 32 along its inputs, as GGML's reference code rounds."""

    def rounds(x: Tensor, is_block: bool) -> Tensor:
        rows = (x.t() if is_block else x).contiguous().float()
        blocks = rows.reshape(-1, 32).numpy()
        out = blocks.copy()
        for i, block in enumerate(blocks):
            if bits == 8:
                d = abs(block).max() / 127
                q = (block * (1 / d if d else 0)).round()
            else:
                d = block[abs(block).argmax()] / -8
                q = ((block * (1 / d if d else 0) + 8.5).astype("int8")).clip(max=15) - 8
            out[i] = q * torch.tensor(d).half().float().item()
        rounded = torch.from_numpy(out).reshape(rows.shape)
        return rounded.t().contiguous() if is_block else rounded

    return rounds


def single_plants(truth: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield mistakes of an original: words that its name must have, and the settings that make it."""
    width, size = truth.facts.shape.n_embd, truth.facts.shape.vocab_size
    prompts = [prompt.prompt for prompt in truth.texts.prompts]
    yield "position 0 for every token behind", {"behind": lambda places, length: 0 * places, "prompts": prompts}
    yield "positions from 0 again", {"behind": lambda places, length: places - length, "prompts": prompts}
    yield "prompt's last position", {"behind": lambda places, length: 0 * places + length - 1, "prompts": prompts}
    yield "count the padding", {"padded": True, "prompts": prompts}
    yield "last position for every token", {"positions": "last"}
    yield "without its first token", {"drop": 1}
    yield "attn.c_proj not transposed in h.1 alone", {"transposed": ("attn.c_proj",), "at_block": 1}
    yield "no bias in mlp.c_fc in h.0 alone", {"no_bias": ("mlp.c_fc",), "at_block": 0}
    yield "exact GELU", {"act": "erf"}
    yield "sigmoid", {"act": "sigmoid"}
    yield "ReLU", {"act": "relu"}
    yield "SiLU", {"act": "silu"}
    yield "x^2 in place of x^3", {"act": "square"}
    yield "sqrt(2 / pi) and 0.044715 exchanged", {"act": "exchanged"}
    yield "sqrt(std + eps)", {"power": "root of std"}
    yield "(variance + eps)^2", {"power": 2}
    yield "in place of attention's output: x + x", {"wiring": "x + x"}
    yield "in place of the MLP's output: x + x", {"wiring": "x + x in the MLP"}
    yield "-2.71828 in place of -inf", {"mask": "small"}
    yield "sees later ones alone", {"mask": "inverted"}
    yield "no attn.c_proj", {"project": False}
    yield "the last block alone", {"blocks": lambda layers: layers[-1:]}
    yield "rounded to float16 towards zero", {"round_weights": cut_half}
    yield "rounded to bfloat16 towards zero", {"round_weights": cut_brain}
    yield "input and output rounded to float16", {"round_act": half}
    yield "input and output rounded to bfloat16", {"round_act": brain}
    yield "eps 1e-06", {"eps": 1e-6}
    yield "eps 1e-12", {"eps": 1e-12}
    yield "eps 0.001", {"eps": 1e-3}
    yield "no eps", {"eps": 0.0}
    yield "eps 0.001 in place of 1e-05 in ln_f", {"eps": 1e-3, "eps_at": ("ln_f",)}
    yield "n - 1", {"ddof": 1}
    yield "std + eps", {"eps_outside": True}
    yield "no last norm", {"last_norm": 0}
    yield "last norm twice", {"last_norm": 2}
    yield "post-norm", {"wiring": "post"}
    yield "in parallel", {"wiring": "parallel"}
    yield "no residual around attention", {"wiring": "no attention residual"}
    yield "no residual around the MLP", {"wiring": "no mlp residual"}
    yield "no ln_1", {"wiring": "no ln_1"}
    yield "no ln_2", {"wiring": "no ln_2"}
    yield "exchanged", {"swap_norms": True}
    yield "no shift in every norm", {"shift_at": ()}
    yield "no shift in ln_f", {"shift_at": ("ln_1", "ln_2")}
    yield "no scale in every ln_1", {"scale_at": ("ln_2", "ln_f")}
    yield "1 + weight", {"one_plus": True}
    yield "RMSNorm", {"center": False}
    yield "over the sequence", {"norm_axis": 0}
    yield "not scaled", {"scale": "none"}
    yield "scaled twice", {"scale": "twice"}
    yield "n_embd", {"scale": "width"}
    yield "layer's number", {"scale": "layer"}
    yield "over the queries", {"softmax_axis": -2}
    yield "softmax before", {"scale_late": True}
    yield "no causal mask", {"mask": "none"}
    yield "sees the next", {"mask": "next"}
    yield "no token sees itself", {"mask": "not itself"}
    yield "0 in place of -inf", {"mask": "zero"}
    yield "after the softmax", {"mask": "after"}
    yield "k and v exchanged", {"order": (0, 2, 1)}
    yield "q and k exchanged", {"order": (1, 0, 2)}
    yield "v, k, q", {"order": (2, 1, 0)}
    yield "interleaved per head", {"layout": "per head"}
    yield "split the other way", {"layout": "strided"}
    yield "heads split by a reshape", {"layout": "untransposed"}
    yield "heads merged by a reshape", {"layout": "unmerged"}
    yield "heads in place of", {"heads": 2}
    yield "attn.c_proj not transposed", {"transposed": ("attn.c_proj",)}
    yield "mlp.c_fc reshaped", {"reshaped": ("mlp.c_fc",)}
    yield "attn.c_attn reshaped", {"reshaped": ("attn.c_attn",)}
    yield "no bias in attn.c_attn", {"no_bias": ("attn.c_attn",)}
    yield "no bias in attn.c_proj", {"no_bias": ("attn.c_proj",)}
    yield "no biases in the MLP", {"no_bias": ("mlp.c_fc", "mlp.c_proj")}
    yield "positions from 1", {"positions": 1}
    yield "positions from 2", {"positions": 2}
    yield "no positions", {"position_factor": 0.0}
    yield "positions added twice", {"position_factor": 2.0}
    yield "position 0 for", {"positions": "zero"}
    yield "token embedding scaled", {"token_factor": width**0.5}
    yield "reverse order", {"blocks": lambda layers: layers[::-1]}
    yield "last block missing", {"blocks": lambda layers: layers[:-1]}
    yield "block 1 twice", {"blocks": lambda layers: [*layers[:2], *layers[1:]]}
    made = torch.Generator().manual_seed(3)
    yield "a head with a bias", {"head_bias": torch.randn(size, generator=made)}
    yield "not tied", {"head": 0.05 * torch.randn(size, width, generator=made)}
    yield "too high", {"id_shift": 1}
    yield "before the text", {"begin": 0}
    yield "text shifted", {"begin": 0, "end": "last"}
    yield "shifted by one constant", {"logits": "shifted"}
    yield "log-probabilities", {"logits": "log"}
    yield "probabilities in place", {"logits": "probabilities"}
    yield "centred", {"logits": "centred"}
    yield "position before", {"logits": "late"}
    yield "belongs to the id", {"logits": "rolled"}
    yield "rounded to float16", {"round_weights": half}
    yield "rounded to bfloat16", {"round_weights": brain}
    yield "int8, a scale for each output", {"round_weights": int8(0), "round_scope": "blocks"}
    yield "int8, a scale for each input", {"round_weights": int8(1), "round_scope": "blocks"}
    yield "Q8_0", {"round_weights": ggml(8), "round_scope": "matrices"}
    yield "Q4_0", {"round_weights": ggml(4), "round_scope": "matrices"}
    yield "keys and values rounded to float16", {"round_kv": half}
    yield "keys and values rounded to bfloat16", {"round_kv": brain}
    yield "keys and values rounded to int8", {"round_kv": int8_cache}


PAIRS = (
    ({"act": "erf"}, {"positions": 1}, "exact GELU", "positions from 1"),
    ({"act": "erf"}, {"eps": 1e-6}, "exact GELU", "eps 1e-06"),
    ({"act": "erf"}, {"ddof": 1}, "exact GELU", "n - 1"),
    ({"act": "relu"}, {"transposed": ("attn.c_proj",)}, "ReLU", "attn.c_proj not transposed"),
    ({"scale": "none"}, {"act": "erf"}, "not scaled", "exact GELU"),
    ({"scale": "none"}, {"positions": 1}, "not scaled", "positions from 1"),
    ({"layout": "per head"}, {"no_bias": ("attn.c_attn",)}, "interleaved per head", "no bias in attn.c_attn"),
    ({"mask": "none"}, {"act": "sigmoid"}, "no causal mask", "sigmoid"),
    ({"mask": "next"}, {"shift_at": ("ln_1", "ln_2")}, "sees the next", "no shift in ln_f"),
    ({"order": (0, 2, 1)}, {"scale": "twice"}, "k and v exchanged", "scaled twice"),
    ({"last_norm": 0}, {"act": "erf"}, "no last norm", "exact GELU"),
    ({"wiring": "post"}, {"eps": 1e-3}, "post-norm", "eps 0.001"),
    ({"wiring": "parallel"}, {"ddof": 1}, "in parallel", "n - 1"),
    ({"positions": 1}, {"begin": 0}, "positions from 1", "before the text"),
    ({"token_factor": 128**0.5}, {"act": "silu"}, "token embedding scaled", "SiLU"),
    ({"blocks": lambda layers: layers[:-1]}, {"center": False}, "last block missing", "RMSNorm"),
    ({"no_bias": ("attn.c_proj", "mlp.c_fc")}, {}, "attn.c_proj", "mlp.c_fc"),
    ({"logits": "log"}, {"act": "sigmoid"}, "log-probabilities", "sigmoid"),
    ({"swap_norms": True}, {"positions": 1}, "ln_1 and ln_2 exchanged", "positions from 1"),
    ({"round_weights": half}, {"act": "sigmoid"}, "rounded to float16", "sigmoid"),
    ({"wiring": "post"}, {"last_norm": 0}, "post-norm", "no last norm"),
    ({"mask": "none"}, {"scale": "none"}, "no causal mask", "not scaled"),
    ({"ddof": 1}, {"eps_outside": True}, "n - 1", "std + eps"),
    ({"ddof": 1, "eps_outside": True}, {"eps": 1e-3}, "n - 1", "std + eps", "eps 0.001"),
)


# Right programs: other arithmetic, the same model


def right_programs(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield right programs by name, each as a function that makes a function of ids (1, T) to logits (1, T, V)."""
    from transformers import GPT2LMHeadModel

    import minigpt

    def ours(**opening: Any) -> Any:
        return minigpt.from_pretrained(place, device="cpu", **opening).eval()

    def theirs(dtype: torch.dtype, attention: str) -> Any:
        model = GPT2LMHeadModel.from_pretrained(place, dtype=dtype, attn_implementation=attention).eval()
        return lambda ids: model(ids).logits

    def split_sums(ids: Tensor) -> Tensor:
        return SplitSums(place)(ids)

    def autocast(dtype: torch.dtype) -> Any:
        model = GPT2LMHeadModel.from_pretrained(place, dtype=torch.float32).eval()

        def call(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return model(ids).logits.float()

        return call

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield f"plain functions at {name}", lambda dtype=dtype: Program(place, dtype)
        yield f"transformers at {name}, eager", lambda dtype=dtype: theirs(dtype, "eager")
        yield f"transformers at {name}, sdpa", lambda dtype=dtype: theirs(dtype, "sdpa")
        yield f"minigpt reference at {name}", lambda dtype=dtype: ours(dtype=dtype, arithmetic="reference")
    yield "minigpt fast at float32", lambda: ours(dtype="float32", arithmetic="fast")
    yield "minigpt fast at bfloat16", lambda: ours(dtype="bfloat16", arithmetic="fast")
    yield "sums in halves, float32", lambda: split_sums
    yield "autocast to bfloat16", lambda: autocast(torch.bfloat16)
    yield "autocast to float16", lambda: autocast(torch.float16)
    yield "products of float16 numbers, the rest in float32", lambda: HalfProducts(place, torch.float16)
    yield "products of bfloat16 numbers, the rest in float32", lambda: HalfProducts(place, torch.bfloat16)
    yield "TF32-like products", lambda: TenBits(place)


class SplitSums(Program):
    """Products whose sums are taken in another order: two halves of the inputs, the second first."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., half:] @ weight[half:] + x[..., :half] @ weight[:half]


class HalfProducts(Program):
    """Products of inputs and weights that are rounded to a narrower format, summed in float32."""

    def __init__(self, place: Path, narrow: torch.dtype) -> None:
        super().__init__(place)
        self.narrow = narrow

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return x.to(self.narrow).float() @ weight.to(self.narrow).float()


class TenBits(Program):
    """Products of numbers with ten bits of mantissa, as TF32 has them."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return ten_bits(x) @ ten_bits(weight)


def ten_bits(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
