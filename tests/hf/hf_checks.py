"""What people do with a transformers model, each done to transformers' GPT-2 and to minigpt's with the textbook norm.

A check is a function of ``load``, which gives a fresh demo model of one network. Its results on both must be the same.
"""

import copy
import io
import math
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import ModelOutput

import minigpt.hf
from minigpt.checkpoint import local_place

Load = Callable[..., Any]
TOLERANCE = 1e-4  # of logits whose scale is some 10
FOLDER = str(local_place("demo"))


def outcome(check: Callable[[Load], Any]) -> str:
    """Return "same" if a check gives the same on both networks, else what differs."""
    control, ours = result(check, load_theirs), result(check, load_ours)
    return "same" if same(control, ours) else f"transformers: {short(control)}; minigpt: {short(ours)}"


def result(check: Callable[[Load], Any], load: Load) -> Any:
    """Return what a check gives, or the kind of its error: what transformers refuses, ours refuses."""
    torch.manual_seed(0)
    try:
        return check(load)
    except Exception as error:  # the other network must raise the same error
        return f"{type(error).__name__}: {error}".splitlines()[0]


def load_theirs(**how: Any) -> Any:
    """transformers' class, in eval mode."""
    return transformers.GPT2LMHeadModel.from_pretrained(FOLDER, **how)


def load_ours(**how: Any) -> Any:
    """minigpt's class with another norm."""
    return minigpt.hf.GPT2LMHeadModel.from_pretrained(FOLDER, norm="textbook", **how)


def same(one: Any, other: Any) -> bool:
    """Whether two results agree, floating-point numbers to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def short(actual: Any) -> str:
    """A result in a few words."""
    return (
        f"{tuple(actual.shape)} {actual.flatten()[:3].tolist()}" if isinstance(actual, Tensor) else f"{actual!r:.160}"
    )


def ids(batch: int = 2, seq: int = 9) -> Tensor:
    """Token ids (batch, seq)."""
    return torch.arange(5, 5 + batch * seq).view(batch, seq)


def padding() -> Tensor:
    """A mask (2, 9) with padding on the left of the second row."""
    return torch.tensor([[1] * 9, [0] * 3 + [1] * 6])


# --- the body, as trainers call it


def body(load: Load) -> Any:
    """``base_model`` gives hidden states, and takes embeddings."""
    model = load()
    plain = model.base_model(input_ids=ids(), attention_mask=padding(), use_cache=False)
    embedded = model.get_decoder()(inputs_embeds=model.get_input_embeddings()(ids()))
    return type(plain).__name__, plain.last_hidden_state, plain.past_key_values, embedded.last_hidden_state


def hooks(load: Load) -> Any:
    """Hooks fire at the body and the blocks; attention's sees a tuple; the activation is a module."""
    model, seen = load(), []
    body = model.transformer
    for part in (body, body.h[0], body.h[0].attn, body.h[0].attn.c_attn, body.h[1].mlp.act, model.lm_head):
        part.register_forward_hook(lambda _, inputs, out: seen.append(type(out).__name__))
    body.h[0].attn.register_forward_hook(lambda _, inputs, out: (out[0] * 0, *out[1:]))
    return model(ids()).logits, seen


def weights(load: Load) -> Any:
    """Attention weights and hidden states under eager attention."""
    out = load(attn_implementation="eager")(ids(), output_attentions=True, output_hidden_states=True)
    return out.attentions, out.hidden_states


def tuples(load: Load) -> Any:
    """Tuples in place of named outputs."""
    return load()(ids(), labels=ids(), return_dict=False, use_cache=False)


def is_instance(load: Load) -> Any:
    """What tools ask of the class and the config."""
    model = load()
    kinds = ("GPT2PreTrainedModel", "GPT2LMHeadModel", "PreTrainedModel")
    says = ("_no_split_modules", "_can_compile_fullgraph", "supports_gradient_checkpointing", "_supports_sdpa")
    return (
        [isinstance(model, getattr(transformers, kind)) for kind in kinds],
        {name: getattr(model, name) for name in says},
        [getattr(model, name, None) for name in ("_fsdp_plan", "_tp_plan", "_pp_plan")],
        [name for name, _ in model.named_parameters()],
        [type(block).__name__ for block in model.transformer.h],
        sorted(vars(model.transformer.h[0].attn).keys() - {"__class__"}),
    )


# --- masks, caches, arguments


def arguments(load: Load) -> Any:
    """Arguments that GPT-2 does not have."""
    return load()(ids(), special_tokens_mask=torch.zeros(2, 9), length=torch.tensor([9, 9]), cache_position=None).logits


def widths(load: Load) -> Any:
    """Masks over the new tokens alone, and wider than the cache."""
    model = load()
    actual = []
    for width in (2, 9, 12):
        cache = model(ids()[:, :7]).past_key_values
        try:
            mask = torch.ones(2, width, dtype=torch.int64)
            actual.append(model(ids()[:, 7:], attention_mask=mask, past_key_values=cache).logits)
        except (RuntimeError, ValueError, IndexError) as error:
            actual.append(type(error).__name__)
    return actual


def masks(load: Load) -> Any:
    """Padding on the left with and without positions, masks of four dimensions, packed texts, who speaks."""
    model, actual = load(), []
    causal = torch.ones(9, 9).tril().bool()[None, None]
    places = (padding().cumsum(-1) - 1).clamp(min=0)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for how in ({"attention_mask": padding()}, {"attention_mask": padding(), "position_ids": places},
                {"attention_mask": causal}, {"position_ids": packed, "use_cache": False},
                {"token_type_ids": ids().flip(1)}):  # fmt: skip
        actual.append(model(ids(), **how).logits[padding().bool()])
    return actual


def caches(load: Load) -> Any:
    """The caches of transformers, one of an encoder and a decoder among them."""
    model, actual = load(), []
    config = model.config
    for cache in (DynamicCache(), StaticCache(config=config, max_cache_len=16),
                  EncoderDecoderCache(DynamicCache(), DynamicCache())):  # fmt: skip
        first = model(ids()[:, :5], past_key_values=cache)
        actual += [first.logits, model(ids()[:, 5:], past_key_values=cache).logits, cache.get_seq_length()]
    return actual


def kept(load: Load) -> Any:
    """Logits of some positions."""
    model = load()
    each = (3, torch.tensor([0, 5]), torch.tensor([[0, 5], [7, 7]]), padding().bool())
    return [model(ids(), logits_to_keep=which).logits for which in each]


def generation(load: Load) -> Any:
    """Greedy, drawn, beams, a static cache, looked-up tokens, an assistant."""
    model, actual = load(), []
    static = {"cache_implementation": "static", "disable_compile": True}
    for how in ({}, {"do_sample": True, "top_k": 9}, {"num_beams": 3}, static,
                {"use_cache": False}, {"repetition_penalty": 1.3}):  # fmt: skip
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | how
        torch.manual_seed(1)
        actual.append(model.generate(ids(), attention_mask=padding(), **settings))
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": load()}):
        actual.append(model.generate(ids(1), max_new_tokens=8, do_sample=False, pad_token_id=0, **how))
    return actual


def scores(load: Load) -> Any:
    """What ``generate`` returns beside the ids."""
    how = {"output_scores": True, "output_hidden_states": True, "output_attentions": True, "output_logits": True}
    model = load(attn_implementation="eager")
    out = model.generate(ids(), max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **how)
    return out.sequences, out.scores, out.hidden_states, out.attentions


# --- attention functions


def own_attention(load: Load) -> Any:
    """A function registered with ``AttentionInterface``."""
    seen: list[Any] = []

    def mine(module: Any, *args: Any, **how: Any) -> Any:
        seen.append((module.layer_idx, module.is_causal, how["scaling"]))
        return sdpa_attention_forward(module, *args, **how)

    AttentionInterface.register("of_a_check", mine)
    transformers.AttentionMaskInterface.register("of_a_check", transformers.masking_utils.sdpa_mask)
    model = load(attn_implementation="of_a_check")
    logits = model(ids(), attention_mask=padding()).logits[padding().bool()]
    model.set_attn_implementation("eager")
    return logits, seen, model(ids()).logits


def paged(load: Load) -> Any:
    """Continuous batching with paged attention."""
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    out = load().generate_batch(
        [[7, 8, 9], [11, 12, 13, 14, 15]], generation_config=settings, continuous_batching_config=pages
    )
    return [request.generated_tokens for request in out.values()]


# --- training


def gradients(load: Load) -> Any:
    """Gradients, plainly and with every kind of checkpointing."""
    actual = []
    for how in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = load(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
        if how is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            model.enable_input_require_grads()
        loss = model(ids(), labels=ids(), num_items_in_batch=7).loss
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        actual += [loss.item(), grads]
    return actual


def surgery(load: Load) -> Any:
    """Layers removed and saved, another activation, a wider vocabulary."""
    model = load()
    del model.transformer.h[1]
    for place, block in enumerate(model.transformer.h):
        block.attn.layer_idx = place
    model.config.n_layer = len(model.transformer.h)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        shorter = type(model).from_pretrained(place)(ids()).logits
    model = load()
    model.transformer.h[0].mlp.act = nn.ReLU()
    bent = model(ids()).logits
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    return shorter, bent, model(ids()).logits.shape, model.config.vocab_size


def copies(load: Load) -> Any:
    """deepcopy, ``torch.save`` of the model whole, half precision, a device map."""
    model, file = load(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    halved = load(dtype=torch.bfloat16)(ids()).logits.dtype
    return copy.deepcopy(model)(ids()).logits, again(ids()).logits, halved, load(device_map="auto")(ids()).logits


def fields(load: Load) -> Any:
    """Fields of a config that GPT-2 does not have are kept, and saved again."""
    config = transformers.GPT2Config.from_pretrained(FOLDER)
    config.update({"author": "me", "chunk_size_feed_forward": 4})
    model = load(config=config)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        again = type(model).from_pretrained(place)
    return [getattr(again.config, name) for name in ("author", "chunk_size_feed_forward")], again(ids()).logits


# --- other tools


def exported(load: Load) -> Any:
    """Export with a static cache, as for ExecuTorch."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    how = {"cache_implementation": "static", "cache_config": {"batch_size": 1, "max_cache_len": 16}}
    model = load()
    model.generation_config = transformers.GenerationConfig(use_cache=True, **how)
    program = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
    with torch.no_grad():
        made = torch.export.export(program, (), {"input_ids": ids(1, 1), "cache_position": torch.tensor([0])})
        return made.module()(input_ids=ids(1, 1), cache_position=torch.tensor([0]))


def compiled(load: Load) -> Any:
    """One graph for the whole forward."""
    torch.compiler.reset()
    model = load()
    program = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        return program(ids(), use_cache=False).logits


def adapted(load: Load) -> Any:
    """PEFT's LoRA, merged."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model: Any = get_peft_model(load(), settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    return model(input_ids=ids()).logits, model.merge_and_unload()(ids()).logits


def quantized(kind: str) -> Callable[[Load], Any]:
    """A check of loading with a ``quantization_config``."""

    def check(load: Load) -> Any:
        if kind == "torchao":
            from torchao.quantization import Int8WeightOnlyConfig  # pyright: ignore[reportMissingImports]

            settings: Any = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        elif kind == "quanto":
            settings = transformers.QuantoConfig(weights="int8")
        else:
            settings = transformers.BitsAndBytesConfig(load_in_4bit=kind == "4bit", load_in_8bit=kind == "8bit")
        model = load(quantization_config=settings)
        return type(model.transformer.h[0].attn.c_attn).__name__.removeprefix("Fast"), model(ids()).logits

    return check


def cross(load: Load) -> Any:
    """A decoder that reads an encoder."""
    torch.manual_seed(0)
    model = load(add_cross_attention=True)
    for name, parameter in model.named_parameters():
        if "cross" in name:
            parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    actual: ModelOutput = model(ids(), encoder_hidden_states=torch.linspace(-1, 1, 2 * 5 * 128).view(2, 5, 128))
    return actual["logits"]


CHECKS: dict[str, Callable[[Load], Any]] = {
    check.__name__: check
    for check in (
        body, hooks, weights, tuples, is_instance, arguments, widths, masks, caches, kept, generation, scores,
        own_attention, paged, gradients, surgery, copies, fields, exported, compiled, cross,
    )
}  # fmt: skip
CHECKS |= {"adapted": adapted} if find_spec("peft") else {}
CHECKS |= {"torchao": quantized("torchao")} if find_spec("torchao") else {}
CHECKS |= {"quanto": quantized("quanto")} if find_spec("optimum") else {}
CHECKS |= {f"bitsandbytes {kind}": quantized(kind) for kind in ("8bit", "4bit") if find_spec("bitsandbytes")}
