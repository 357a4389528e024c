"""Ports of other architectures in plain functions, with mistakes planted by hand: what a diagnosis has to name.

T tokens, C embedding, H heads, D width of a head, V vocabulary.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from planted import Planted, wide
from torch import Tensor

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "head_dim": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
NO_GROUPS = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
FOUR = SIZES | {"num_hidden_layers": 4}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.0, 3.0, 5.0], "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, SIZES | {"rope_parameters": LLAMA3}),
    "llama-yarn": (transformers.LlamaConfig, SIZES | {"rope_parameters": YARN}),
    "qwen2": (transformers.Qwen2Config, SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": (transformers.Qwen3Config, SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral": (transformers.MistralConfig, SIZES | {"sliding_window": 8}),
    "gemma2": (
        transformers.Gemma2Config,
        FOUR | {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
                "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        FOUR | {"sliding_window": 8, "layer_types": SLIDING, "query_pre_attn_scalar": 24},
    ),
    "pythia": (transformers.GPTNeoXConfig, NO_GROUPS | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3": (transformers.Phi3Config, SIZES | {"head_dim": 8, "rope_parameters": LONG, "num_key_value_heads": 4,
                                        "original_max_position_embeddings": 16}),
    "olmo2": (transformers.Olmo2Config, {**SIZES, "head_dim": 8}),
    "mixtral": (transformers.MixtralConfig, SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**SIZES, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "head_dim": 8}),
    "granite": (transformers.GraniteConfig, SIZES | {"head_dim": 8,
                "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "logits_scaling": 3.0}),
}  # fmt: skip


def random_family(name: str, place: Path, seed: int = 0, **others: Any) -> None:
    """Write a tiny model of a family, whose weights are so large that a mistake is seen; others are of its config."""
    kind, fields = FAMILIES[name]
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(kind(**fields | others)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" in path:
                parameter.mul_(20)
            else:
                parameter.mul_(8)
    model.save_pretrained(place)


RIGHT: dict[str, Any] = {
    "theta": None, "theta_full": None, "scaling": True, "factor": None, "original": None, "attention_factor": None,
    "low_high": None, "positions": 1.0, "pairs": "halves", "permuted": False, "part": None, "whole_width": False,
    "turn": "both", "window": None, "layers": None, "scale": None, "cap": True, "last_cap": True, "act": None,
    "eps": None, "one_plus": None, "tiled": False, "heads": 1, "tie": None, "no_bias": (), "order": "qkv",
    "gate_up": False, "transposed": (), "head_norms": "right", "last_norm": True, "wiring": None, "experts": "right",
    "top": None, "embedding": None, "residual": None, "logits_scaling": None, "split": "right", "mask": True,
    "weights": None, "returned": None, "long": None, "post_norms": True, "shared": True,
    "softmax_axis": -1, "window_layers": None,
}  # fmt: skip


class Port(Planted):
    """A model of a family."""

    RIGHT = RIGHT

    def prepare(self) -> None:
        """Round the weights as the settings say, and read what the config says of heads."""
        if self.s["weights"] is not None:
            self.w = {name: x.to(self.s["weights"]).to(x.dtype) if x.ndim > 1 else x for name, x in self.w.items()}
        self.c = self.config
        self.kind = self.c["model_type"]
        self.is_neox = self.kind == "gpt_neox"
        self.is_gemma = self.kind.startswith("gemma")
        self.heads = self.c["num_attention_heads"]
        self.groups = self.c.get("num_key_value_heads") or self.heads
        self.size = self.c.get("head_dim") or self.c["hidden_size"] // self.heads
        if self.s["heads"] != 1:
            self.heads, self.groups = self.heads * self.s["heads"], self.groups * self.s["heads"]
            self.size //= self.s["heads"]

    def __call__(self, ids: Tensor) -> Tensor:
        """(1, T) -> (1, T, V)."""
        s, c, w = self.s, self.c, self.w
        name = "embed_in.weight" if self.is_neox else "embed_tokens.weight"
        x = w[name][ids[0]]
        factor = s["embedding"]
        if factor is None:
            factor = c["hidden_size"] ** 0.5 if self.is_gemma else c.get("embedding_multiplier", 1.0)
        x = x * torch.tensor(factor, dtype=x.dtype)
        for layer in range(c["num_hidden_layers"]):
            x = self.block(x, layer)
        if s["last_norm"]:
            x = self.norm(x, "final_layer_norm" if self.is_neox else "norm")
        head = w.get("embed_out.weight" if self.is_neox else "lm_head.weight")
        if head is None or s["tie"]:
            head = w[name]
        logits = x @ head.T / (s["logits_scaling"] or c.get("logits_scaling", 1.0))
        cap = c.get("final_logit_softcapping")
        if cap and s["last_cap"]:
            cap = cap if s["last_cap"] is True else s["last_cap"]
            logits = cap * torch.tanh(logits / cap)
        if s["returned"] == "log":
            logits = logits.log_softmax(-1)
        return logits[None]

    def norm(self, x: Tensor, name: str) -> Tensor:
        c = self.c
        eps = self.s["eps"] or c.get("rms_norm_eps") or c.get("layer_norm_eps")
        row = wide(x)
        if self.is_neox:
            row = row - row.mean(-1, keepdim=True)
        y = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
        one = self.is_gemma if self.s["one_plus"] is None else self.s["one_plus"]
        y = y * (self.w[f"{name}.weight"].to(y.dtype) + one)
        if f"{name}.bias" in self.w:
            y = y + self.w[f"{name}.bias"].to(y.dtype)
        return y.to(x.dtype)

    def block(self, x: Tensor, layer: int) -> Tensor:
        s, name = self.s, f"layers.{layer}"
        times = s["residual"] or self.c.get("residual_multiplier", 1.0)

        def first(y: Tensor) -> Tensor:
            return self.norm(y, f"{name}.input_layernorm")

        def second(y: Tensor) -> Tensor:
            return self.norm(y, f"{name}.post_attention_layernorm")

        def attn(y: Tensor) -> Tensor:
            return self.attention(y, layer) * times

        def mlp(y: Tensor) -> Tensor:
            return self.mlp(y, name) * times

        if self.kind in ("gemma2", "gemma3_text", "olmo2"):
            post = self.norm if s["post_norms"] else lambda y, _: y
            before = self.kind != "olmo2"
            y = attn(first(x) if before else x)
            x = x + post(y, f"{name}.post_attention_layernorm")
            y = mlp(self.norm(x, f"{name}.pre_feedforward_layernorm") if before else x)
            return x + post(y, f"{name}.post_feedforward_layernorm")
        wiring = s["wiring"] or ("parallel" if self.is_neox else "pre")
        if wiring == "parallel":
            return x + attn(first(x)) + mlp(second(x))
        if wiring == "post":
            x = first(x + attn(x))
            return second(x + mlp(x))
        if wiring == "no second norm":
            x = x + attn(first(x))
            return x + mlp(x)
        if wiring == "no residual around the MLP":
            return mlp(second(x + attn(first(x))))
        x = x + attn(first(x))
        return x + mlp(second(x))

    def linear(self, x: Tensor, name: str) -> Tensor:
        short = name.rpartition(".")[2]
        weight = self.w[f"{name}.weight"]
        y = x @ (weight if short in self.s["transposed"] else weight.T)
        if f"{name}.bias" in self.w and short not in self.s["no_bias"]:
            y = y + self.w[f"{name}.bias"]
        return y

    def projected(self, x: Tensor, name: str) -> list[Tensor]:
        """(T, C) -> (T, H D) and two of (T, G D)."""
        if self.is_neox:
            qkv = self.linear(x, f"{name}.query_key_value")
            parts = qkv.view(len(x), self.heads, 3, self.size).transpose(1, 2)
            if self.s["split"] == "thirds":
                parts = qkv.view(len(x), 3, self.heads, self.size)
            q, k, v = (parts[:, i].reshape(len(x), -1) for i in range(3))
        elif self.kind == "phi3":
            qkv = self.linear(x, f"{name}.qkv_proj")
            q, k, v = qkv.split([self.heads * self.size, self.groups * self.size, self.groups * self.size], -1)
            if self.s["split"] == "by head":
                q, k, v = qkv.view(len(x), self.heads, 3, -1).transpose(1, 2).flatten(2).unbind(1)
        else:
            q, k, v = (self.linear(x, f"{name}.{part}_proj") for part in "qkv")
        by_name = {"q": q, "k": k, "v": v}
        return [by_name[part] for part in self.s["order"]]

    def split(self, x: Tensor) -> Tensor:
        """(T, H D) -> (T, H, D)."""
        heads = x.view(len(x), -1, self.size)
        if self.s["split"] in ("reshaped", "merged"):
            return x.reshape(heads.shape[1], len(x), self.size).transpose(0, 1)
        return heads

    def attention(self, x: Tensor, layer: int) -> Tensor:
        s, c = self.s, self.c
        name = f"layers.{layer}.{'attention' if self.is_neox else 'self_attn'}"
        q, k, v = self.projected(x, name)
        has_norms = f"{name}.q_norm.weight" in self.w and s["head_norms"] != "none"
        over_all = has_norms and len(self.w[f"{name}.q_norm.weight"]) != self.size
        if s["head_norms"] == "other":
            over_all = not over_all

        def normed(y: Tensor, part: str) -> Tensor:  # (T, H, D)
            if not has_norms:
                return y
            weight = self.w[f"{name}.{part}_norm.weight"].to(y.dtype) + self.is_gemma
            weight = weight.view(-1, self.size)  # (1 or H, D)
            squares = wide(y).square().mean((-2, -1) if over_all else -1, keepdim=True)
            return (wide(y) * torch.rsqrt(squares + c["rms_norm_eps"]) * weight).to(y.dtype)

        q, k, v = (self.split(part) for part in (q, k, v))
        if s["head_norms"] == "after":
            q, k = self.rotated(q, k, layer)
            q, k = normed(q, "q"), normed(k, "k")
        else:
            q, k = self.rotated(normed(q, "q"), normed(k, "k"), layer)
        times = self.heads // self.groups
        if times > 1:
            if s["tiled"]:
                k, v = k.repeat(1, times, 1), v.repeat(1, times, 1)
            else:
                k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scale = c.get("attention_multiplier") or (c.get("query_pre_attn_scalar") or self.size) ** -0.5
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale if s["scale"] is None else s["scale"])
        cap = c.get("attn_logit_softcapping")
        if cap and s["cap"]:
            cap = cap if s["cap"] is True else s["cap"]
            scores = cap * torch.tanh(scores / cap)
        place = torch.arange(len(x))
        apart = place[:, None] - place
        seen = apart >= {True: 0, "next": -1, False: -len(x)}[s["mask"]]
        window = s["window"] or c.get("sliding_window")
        if window and self.slides(layer):
            seen &= apart < window
        scores = scores.masked_fill(~seen, -math.inf)
        weights = torch.softmax(wide(scores), s["softmax_axis"])
        weights = weights.nan_to_num().to(v.dtype)
        y = torch.einsum("hqk,khd->qhd", weights, v)
        if s["split"] == "merged":
            y = y.transpose(0, 1)
        y = y.reshape(len(x), -1)
        return self.linear(y, f"{name}.{'dense' if self.is_neox else 'o_proj'}")

    def types(self) -> list[str]:
        types = self.c.get("layer_types") or ["sliding_attention"] * self.c["num_hidden_layers"]
        change = self.s["layers"]
        return change(types) if change else types

    def slides(self, layer: int) -> bool:
        if self.s["window_layers"] is not None:
            return layer % 2 == self.s["window_layers"]
        return self.types()[layer].startswith("sliding")

    def rope(self, layer: int) -> dict[str, Any]:
        rope = self.c["rope_parameters"]
        if "rope_theta" not in rope:
            rope = rope[self.types()[layer]]
            full = not self.slides(layer)
        else:
            full = True
        rope = dict(rope)
        if self.s["theta"] is not None:
            rope["rope_theta"] = self.s["theta"]
        if self.s["theta_full"] is not None and full:
            rope["rope_theta"] = self.s["theta_full"]
        return rope

    def angles(self, length: int, layer: int) -> tuple[Tensor, float, int]:
        """Return angles (T, R / 2) in float64, what multiplies the rotated numbers, and how many of them R."""
        s, rope = self.s, self.rope(layer)
        part = s["part"] or rope.get("partial_rotary_factor", 1.0)
        width = int(self.size * part)
        base, power = rope["rope_theta"], torch.arange(0, width, 2, dtype=torch.float64)
        frequencies = base ** -(power / (self.size if s["whole_width"] else width))
        factor = s["factor"] or rope.get("factor")
        original = s["original"] or rope.get("original_max_position_embeddings")
        times, kind = 1.0, rope["rope_type"]
        if kind == "llama3" and s["scaling"] is True:
            low, high = s["low_high"] or (rope["low_freq_factor"], rope["high_freq_factor"])
            waves = 2 * math.pi / frequencies
            share = ((original / waves - low) / (high - low)).clamp(0, 1)
            frequencies = share * frequencies + (1 - share) * frequencies / factor
        elif kind == "yarn" and s["scaling"] is True:

            def turn(rotations: float) -> float:
                return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low, high = max(math.floor(turn(32)), 0), min(math.ceil(turn(1)), width - 1)
            ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
            frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
            times = 0.1 * math.log(factor) + 1
        elif kind == "longrope" and s["scaling"] is True:
            long = length > original if s["long"] is None else s["long"]
            frequencies = frequencies / torch.tensor(rope["long_factor" if long else "short_factor"]).double()
            ratio = self.c["max_position_embeddings"] / original
            times = math.sqrt(1 + math.log(ratio) / math.log(original))
        if s["scaling"] == "linear":
            frequencies = frequencies / factor
        if s["attention_factor"] is not None:
            times = s["attention_factor"](times)
        frequencies = frequencies.float().double() / s["positions"]  # as every program keeps them
        return torch.arange(length)[:, None] * frequencies, times, width

    def rotated(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys (T, H, D)."""
        turn = self.s["turn"]
        if turn == "none":
            return q, k
        angles, times, width = self.angles(len(q), layer)
        sign = -1 if turn == "back" else 1
        cos, sin = (angles.cos() * times).to(q.dtype)[:, None], sign * (angles.sin() * times).to(q.dtype)[:, None]

        def turned(x: Tensor) -> Tensor:
            part, rest = x[..., :width], x[..., width:]
            if self.s["permuted"]:
                part = torch.stack(part.chunk(2, -1), -1).flatten(-2)
            if self.s["pairs"] == "neighbours":
                a, b = part[..., ::2], part[..., 1::2]
                part = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
            else:
                a, b = part.chunk(2, -1)
                part = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            return torch.cat([part, rest], -1)

        if turn == "twice":
            return turned(turned(q)), turned(turned(k))
        return turned(q), k if turn == "queries" else turned(k)

    def act(self, x: Tensor) -> Tensor:
        return self.activated(x, self.s["act"] or self.c.get("hidden_activation") or self.c["hidden_act"])

    def mlp(self, x: Tensor, name: str) -> Tensor:
        if self.is_neox:
            return self.linear(self.act(self.linear(x, f"{name}.mlp.dense_h_to_4h")), f"{name}.mlp.dense_4h_to_h")
        if "num_local_experts" in self.c or "num_experts" in self.c:
            return self.experts(x, f"{name}.mlp")
        if self.kind == "phi3":
            gate, up = self.linear(x, f"{name}.mlp.gate_up_proj").chunk(2, -1)
        else:
            gate, up = self.linear(x, f"{name}.mlp.gate_proj"), self.linear(x, f"{name}.mlp.up_proj")
        if self.s["gate_up"]:
            gate, up = up, gate
        return self.linear(self.act(gate) * up, f"{name}.mlp.down_proj")

    def experts(self, x: Tensor, name: str) -> Tensor:
        is_mixtral = self.kind == "mixtral"
        router = self.w.get(f"{name}.gate.weight")
        if router is None:
            name = name.replace(".mlp", ".block_sparse_moe")
            router = self.w[f"{name}.gate.weight"]
        logits = wide(x @ router.T)
        top = self.s["top"] or self.c["num_experts_per_tok"]
        values, chosen = logits.topk(top)
        normalizes = is_mixtral or self.c.get("norm_topk_prob", False)
        if self.s["experts"] == "other":
            normalizes = not normalizes
        shares = values.softmax(-1) if normalizes else logits.softmax(-1).gather(-1, chosen)
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        y = torch.zeros_like(x)
        for place in range(top):
            for expert in range(logits.shape[-1]):
                rows = chosen[:, place] == expert
                gate, up, down = (self.w[f"{name}.experts.{expert}.{part}.weight"] for part in names)
                if self.s["gate_up"]:
                    gate, up = up, gate
                part = (self.act(x[rows] @ gate.T) * (x[rows] @ up.T)) @ down.T
                y[rows] += part * shares[rows, place, None].to(x.dtype)
        if f"{name}.shared_expert.gate_proj.weight" in self.w and self.s["shared"]:
            part = f"{name}.shared_expert"
            shared = self.linear(
                self.act(self.linear(x, f"{part}.gate_proj")) * self.linear(x, f"{part}.up_proj"), f"{part}.down_proj"
            )
            y = y + torch.sigmoid(self.linear(x, f"{part}_gate")) * shared
        return y


Plant = tuple[str, str, dict[str, Any]]  # family, words that the name must have, settings
IN_QKV = ("q_proj", "k_proj", "v_proj")


def single_plants() -> Iterator[Plant]:
    yield "llama", "rope theta 10,000 in place of 500,000", {"theta": 1e4}
    yield "llama", "no rope scaling in place of llama3", {"scaling": False}
    yield "llama", "linear rope scaling in place of llama3", {"scaling": "linear"}
    yield "llama", "a rope factor of 32 in place of 8", {"factor": 32.0}
    yield "llama", "an original length of 64 in place of 32", {"original": 64}
    yield "llama", "rotary pairs of neighbours", {"pairs": "neighbours"}
    yield "llama", "rows of q and k permuted", {"permuted": True}
    yield "llama", "half of a head rotated", {"part": 0.5}
    yield "llama", "tiled in place of repeated", {"tiled": True}
    yield "llama", "8 heads in place of 4", {"heads": 2}
    yield "llama", "a head tied", {"tie": True}
    yield "llama", "gate and up exchanged", {"gate_up": True}
    yield "llama", "ReLU in place of SiLU", {"act": "relu"}
    yield "llama", "the exact GELU in place of SiLU", {"act": "gelu"}
    yield "llama", "no last norm", {"last_norm": False}
    yield "llama", "in parallel", {"wiring": "parallel"}
    yield "llama", "post-norm", {"wiring": "post"}
    yield "llama", "no post_attention_layernorm", {"wiring": "no second norm"}
    yield "llama", "no residual around the MLP", {"wiring": "no residual around the MLP"}
    yield "llama", "scores that are not scaled", {"scale": 1.0}
    yield "llama", "no rotary positions", {"turn": "none"}
    yield "llama", "applied twice", {"turn": "twice"}
    yield "llama", "sign of the sine", {"turn": "back"}
    yield "llama", "queries rotated, and keys not", {"turn": "queries"}
    yield "llama", "no causal mask", {"mask": False}
    yield "llama", "sees the next", {"mask": "next"}
    yield "llama", "softmax over the queries", {"softmax_axis": -2}
    yield "llama", "heads split by a reshape", {"split": "reshaped"}
    yield "qwen2", "heads split by a reshape", {"split": "merged"}
    yield "mistral", "every second layer, from the first", {"window_layers": 0}
    yield "gemma2", "the 1 added twice", {"one_plus": 2}
    yield "llama", "1 + weight", {"one_plus": True}
    yield "llama", "eps 0.001", {"eps": 1e-3}
    yield "llama", "k and v exchanged", {"order": "qvk"}
    yield "llama", "positions divided by 2 more", {"positions": 2.0}
    yield "llama", "positions divided by 8 more", {"positions": 8.0}
    yield "llama", "rounded to bfloat16", {"weights": torch.bfloat16}
    yield "llama-yarn", "no attention factor of YaRN", {"attention_factor": lambda times: 1.0}
    yield "llama-yarn", "YaRN's attention factor squared", {"attention_factor": lambda times: times**2}
    yield "llama-yarn", "no rope scaling in place of yarn", {"scaling": False}
    yield (
        "llama-yarn",
        "a rope factor of 8 in place of 4",
        {"factor": 8.0, "attention_factor": lambda times: 0.1 * math.log(8) + 1},
    )
    yield "llama-yarn", "an original length of 64 in place of 16", {"original": 64}
    yield "qwen2", "no biases of q, k and v", {"no_bias": IN_QKV}
    yield "qwen2", "no bias in v_proj", {"no_bias": IN_QKV[2:]}
    yield "qwen2", "rope theta 10,000 in place of 1,000,000", {"theta": 1e4}
    yield "qwen2", "rotary pairs of neighbours", {"pairs": "neighbours"}
    yield "qwen2", "scores scaled twice", {"scale": 1 / 16}
    yield "qwen3", "the norms of q and k after the rotation", {"head_norms": "after"}
    yield "qwen3", "over all heads in place of each", {"head_norms": "other"}
    yield "qwen3", "no norms of q and k", {"head_norms": "none"}
    yield "qwen3", "tiled in place of repeated", {"tiled": True}
    yield "qwen3", "rotary pairs of neighbours", {"pairs": "neighbours"}
    yield "mistral", "no sliding window", {"window": 1000}
    yield "mistral", "a sliding window of 9 in place of 8", {"window": 9}
    yield "mistral", "a sliding window of 7 in place of 8", {"window": 7}
    yield "mistral", "rope theta 1,000,000", {"theta": 1e6}
    yield "gemma2", "no soft cap of the scores", {"cap": False}
    yield "gemma2", "no soft cap of the logits", {"last_cap": False}
    yield "gemma2", "soft caps of scores and logits exchanged", {"cap": 5.0, "last_cap": 2.0}
    yield "gemma2", "shifted by one", {"layers": lambda types: types[-1:] + types[:-1]}
    yield "gemma2", "a sliding window in every layer", {"layers": lambda types: types[:1] * 4}
    yield "gemma2", "no sliding window", {"window": 1000}
    yield "gemma2", "1 / sqrt(head size)", {"scale": 16**-0.5}
    yield "gemma2", "not scaled by", {"embedding": 1.0}
    yield "gemma2", "weight, not 1 + weight", {"one_plus": False}
    yield "gemma2", "the exact GELU in place of tanh", {"act": "gelu"}
    yield "gemma3", "rope theta 10,000 in place of 1,000,000 in layers of full", {"theta": 1e4}
    yield "gemma3", "rope theta 1,000,000 in place of 10,000 in layers of sliding", {"theta": 1e6}
    yield "gemma3", "rope theta 500,000 in every layer", {"theta": 5e5}
    yield "gemma3", "shifted by one", {"layers": lambda types: types[-1:] + types[:-1]}
    yield "gemma3", "after the rotation", {"head_norms": "after"}
    yield "pythia", "1 of a head rotated in place of 0.5", {"part": 1.0}
    yield "pythia", "0.25 of a head rotated in place of 0.5", {"part": 0.25}
    yield "pythia", "over the whole head", {"whole_width": True}
    yield "pythia", "one after the other, not in parallel", {"wiring": "pre"}
    yield "pythia", "not interleaved per head", {"split": "thirds"}
    yield "pythia", "no bias in dense", {"no_bias": ("dense",)}
    yield "pythia", "dense not transposed", {"transposed": ("dense",)}
    yield "pythia", "the tanh GELU in place of erf", {"act": "gelu_pytorch_tanh"}
    yield "phi3", "short factors for long texts too", {"long": False}
    yield "phi3", "no attention factor of longrope", {"attention_factor": lambda times: 1.0}
    yield "phi3", "interleaved per head, as Megatron", {"split": "by head"}
    yield "phi3", "gate and up exchanged", {"gate_up": True}
    yield "olmo2", "over each head in place of all", {"head_norms": "other"}
    yield "olmo2", "after the rotation", {"head_norms": "after"}
    yield "olmo2", "no norms of q and k", {"head_norms": "none"}
    yield "olmo2", "q_proj not transposed", {"transposed": ("q_proj",)}
    yield "mixtral", "the experts' weights not normalized", {"experts": "other"}
    yield "mixtral", "1 experts a token", {"top": 1}
    yield "mixtral", "gate and up exchanged", {"gate_up": True}
    yield "qwen2_moe", "the experts' weights normalized", {"experts": "other"}
    yield "granite", "no embedding_multiplier", {"embedding": 1.0}
    yield "granite", "no residual_multiplier", {"residual": 1.0}
    yield "granite", "1 / sqrt(head size)", {"scale": 8**-0.5}
    yield "granite", "no logits_scaling", {"logits_scaling": 1.0}


PROMPTS = [
    [5, 17, 42, 8, 23, 11, 9, 30, 2, 7, 61, 33, 4, 90, 15, 78, 52, 6, 71, 20, 44, 13, 88, 3, 27, 59, 66, 10, 35, 81],
    [3, 60, 1, 12, 50, 33, 21, 94, 16, 40, 73, 8, 29, 64, 80, 41, 7, 18],
    [44, 2, 9, 28, 6, 31, 14, 52, 70, 85, 19, 37, 91, 25, 48, 63, 5, 77, 22, 56],
]
# Family, two settings, and words for each that the names must have.
PAIRS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("llama", {"theta": 1e4}, {"pairs": "neighbours"}, "rope theta 10,000", "rotary pairs of neighbours"),
    ("llama", {"scaling": False}, {"tiled": True}, "no rope scaling", "tiled in place of repeated"),
    ("llama", {"act": "gelu"}, {"theta": 1e4}, "the exact GELU in place of SiLU", "rope theta 10,000"),
    ("llama", {"tie": True}, {"theta": 1e4}, "a head tied", "rope theta 10,000"),
    ("llama", {"eps": 1e-3}, {"pairs": "neighbours"}, "eps 0.001", "rotary pairs of neighbours"),
    ("llama", {"gate_up": True}, {"scale": 1.0}, "gate and up exchanged", "not scaled"),
    ("qwen2", {"no_bias": IN_QKV}, {"theta": 1e4}, "no biases of q, k and v", "rope theta 10,000"),
    ("qwen3", {"head_norms": "after"}, {"tiled": True}, "after the rotation", "tiled in place of repeated"),
    ("qwen3", {"head_norms": "none"}, {"theta": 1e4}, "no norms of q and k", "rope theta 10,000"),
    ("mistral", {"window": 1000}, {"pairs": "neighbours"}, "no sliding window", "rotary pairs of neighbours"),
    ("mistral", {"window": 9}, {"theta": 1e6}, "a sliding window of 9", "rope theta 1,000,000"),
    ("gemma2", {"cap": False}, {"last_cap": False}, "no soft cap of the scores", "no soft cap of the logits"),
    ("gemma2", {"embedding": 1.0}, {"scale": 16**-0.5}, "not scaled by", "1 / sqrt(head size)"),
    ("pythia", {"wiring": "pre"}, {"part": 1.0}, "not in parallel", "1 of a head rotated"),
    ("phi3", {"gate_up": True}, {"long": False}, "gate and up exchanged", "short factors for long texts"),
    ("mixtral", {"experts": "other"}, {"pairs": "neighbours"}, "not normalized", "rotary pairs of neighbours"),
    ("granite", {"embedding": 1.0}, {"residual": 1.0}, "no embedding_multiplier", "no residual_multiplier"),
]


class Chunked(Port):
    """A right port that adds up products in another order."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        y = sum(part @ rows.T for part, rows in zip(x.split(7, -1), weight.split(7, -1), strict=True))
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y


def with_transformers(place: Path, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation=attention).eval()


def whole(place: Path, dtype: torch.dtype) -> Any:
    model = with_transformers(place, dtype, "eager")
    return lambda ids: model(ids).logits.detach()


def cached(place: Path, dtype: torch.dtype) -> Any:
    """Return a program that reads a text token by token, with a cache."""
    model = with_transformers(place, dtype)

    def program(ids: Tensor) -> Tensor:
        cache, rows = None, []
        for token in ids.split(1, dim=1):
            out = model(token, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits.detach())
        return torch.cat(rows, dim=1)

    return program


def padded(place: Path, dtype: torch.dtype) -> Any:
    """Return a program that reads a text behind padding, beside a longer one."""
    model = with_transformers(place, dtype)

    def program(ids: Tensor) -> Tensor:
        length = min(ids.shape[1] + 5, 64)
        before = length - ids.shape[1]
        rows = torch.full((2, length), 3)
        rows[0, before:] = ids
        mask = torch.ones_like(rows)
        mask[0, :before] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return model(rows, attention_mask=mask, position_ids=positions).logits[:1, before:].detach()

    return program


def doubled(place: Path, dtype: torch.dtype) -> Any:
    return Port(place, torch.float64)


def brain(place: Path, dtype: torch.dtype) -> Any:
    return Port(place, torch.bfloat16)


def half(place: Path, dtype: torch.dtype) -> Any:
    return Port(place, torch.float16)


def right_programs() -> Iterator[tuple[str, str, Any]]:
    for family in FAMILIES:
        yield family, "a plain port", Port
    for family in ("llama", "gemma2", "pythia"):
        yield family, "sums in another order", Chunked
    for family in ("llama", "olmo2"):
        yield family, "float64", doubled
    for family in ("llama", "qwen3", "mixtral"):
        yield family, "bfloat16", brain
        yield family, "float16", half
    for family in ("gemma3", "qwen2_moe"):
        yield family, "transformers, eager", whole
    for family in ("llama", "mistral", "qwen3"):
        yield family, "token by token with a cache", cached
    for family in ("llama", "qwen2", "pythia"):
        yield family, "behind padding, in a batch", padded
