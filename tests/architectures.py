"""Small models of transformers' architectures with random weights, none of whose norms are at 1 and 0."""

from typing import Any, NamedTuple

import torch
import transformers

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
OLD = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
EXPERTS = HEADS | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OF_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OF_DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
OF_DEEPSEEK_4 = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "max_position_embeddings": 40, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "q_lora_rank": 16, "sliding_window": 16, "index_n_heads": 2, "index_head_dim": 8,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},  # 6 tokens reach all norms
    "index_topk": 8, "o_lora_rank": 16, "o_groups": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OF_HRM = HEADS | {"H_cycles": 2, "L_cycles": 2, "num_layers_per_stack": 2, "num_hidden_layers": 12}
OF_RWKV = {"attention_hidden_size": 32, "context_length": 40}


class Architecture(NamedTuple):
    """An architecture.

    Attributes:
        norm: the built-in norm that its sites compute.
        site: one of them, whose norm matters much to the logits.
    """

    config: type[transformers.PretrainedConfig]
    fields: dict[str, Any]
    norm: str
    site: str


def _rms(config: Any, fields: dict[str, Any], site: str) -> Architecture:
    return Architecture(config, fields, "rms", site)


def _layer(config: Any, fields: dict[str, Any], site: str) -> Architecture:
    return Architecture(config, fields, "fused", site)


ARCHITECTURES = {
    "llama": _rms(transformers.LlamaConfig, GROUPED, "model.layers.1.input_layernorm"),
    "llama4": _rms(transformers.Llama4TextConfig, EXPERTS, "model.layers.1.input_layernorm"),
    "mistral": _rms(transformers.MistralConfig, GROUPED, "model.layers.1.post_attention_layernorm"),
    "mixtral": _rms(transformers.MixtralConfig, EXPERTS, "model.layers.1.input_layernorm"),
    "qwen2": _rms(transformers.Qwen2Config, GROUPED, "model.norm"),
    "qwen2_moe": _rms(transformers.Qwen2MoeConfig, EXPERTS, "model.norm"),
    "qwen3": _rms(transformers.Qwen3Config, HEADS, "model.layers.1.self_attn.q_norm"),
    "gemma": _rms(transformers.GemmaConfig, HEADS, "model.layers.0.input_layernorm"),
    "gemma2": _rms(transformers.Gemma2Config, HEADS, "model.layers.1.pre_feedforward_layernorm"),
    "gemma3": _rms(transformers.Gemma3TextConfig, HEADS, "model.layers.1.self_attn.k_norm"),
    "phi": _layer(transformers.PhiConfig, SIZES, "model.final_layernorm"),
    "phi3": _rms(transformers.Phi3Config, GROUPED, "model.layers.1.post_attention_layernorm"),
    "olmo": _layer(transformers.OlmoConfig, SIZES, "model.layers.1.input_layernorm"),
    "olmo2": _rms(transformers.Olmo2Config, SIZES, "model.layers.1.post_feedforward_layernorm"),
    "pythia": _layer(transformers.GPTNeoXConfig, SIZES, "gpt_neox.layers.1.input_layernorm"),
    "gptj": _layer(transformers.GPTJConfig, OLD | {"rotary_dim": 4}, "transformer.h.1.ln_1"),
    "gpt_bigcode": _layer(transformers.GPTBigCodeConfig, OLD, "transformer.h.1.ln_2"),
    "openai-gpt": _layer(transformers.OpenAIGPTConfig, OLD, "transformer.h.1.ln_2"),  # without a cache
    "opt": _layer(
        transformers.OPTConfig, SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "model.decoder.layers.1.final_layer_norm",
    ),
    "bloom": _layer(transformers.BloomConfig, OF_BLOOM, "transformer.word_embeddings_layernorm"),
    "mpt": _layer(transformers.MptConfig, SIZES, "transformer.blocks.1.norm_1"),
    "falcon": _layer(transformers.FalconConfig, SIZES, "transformer.h.1.input_layernorm"),
    "stablelm": _layer(transformers.StableLmConfig, GROUPED, "model.norm"),
    "starcoder2": _layer(transformers.Starcoder2Config, GROUPED, "model.norm"),
    "cohere": _layer(transformers.CohereConfig, GROUPED, "model.layers.1.input_layernorm"),
    "granite": _rms(transformers.GraniteConfig, GROUPED, "model.layers.1.input_layernorm"),
    "persimmon": _layer(transformers.PersimmonConfig, SIZES, "model.layers.1.input_layernorm"),
    "nemotron": _layer(transformers.NemotronConfig, GROUPED, "model.layers.1.input_layernorm"),  # 1 + weight
    "glm": _rms(transformers.GlmConfig, HEADS, "model.layers.1.post_attention_layernorm"),
    "exaone4": _rms(transformers.Exaone4Config, HEADS, "model.layers.1.self_attn.q_norm"),
    "hunyuan": _rms(transformers.HunYuanDenseV1Config, HEADS, "model.layers.1.self_attn.query_layernorm"),
    "deepseek_v3": _rms(transformers.DeepseekV3Config, OF_DEEPSEEK, "model.layers.1.self_attn.kv_a_layernorm"),
    # of deepseek_v4 and hrm_text, a wrong norm within a block may move bfloat16 logits by less than twice the noise
    "minimax": _rms(transformers.MiniMaxConfig, EXPERTS, "model.layers.1.input_layernorm"),
    "nanochat": _rms(transformers.NanoChatConfig, GROUPED, "model.layers.1.self_attn.q_norm"),
    "mamba": _rms(transformers.MambaConfig, SIZES | {"state_size": 4}, "backbone.norm_f"),
    "rwkv": _layer(transformers.RwkvConfig, SIZES | OF_RWKV, "rwkv.blocks.0.pre_ln"),
    "gpt2": _layer(transformers.GPT2Config, OLD, "transformer.h.1.ln_1"),
}  # fmt: skip
if hasattr(transformers, "DeepseekV4Config"):  # not in the oldest versions
    ARCHITECTURES["deepseek_v4"] = _rms(transformers.DeepseekV4Config, OF_DEEPSEEK_4, "model.norm")
if hasattr(transformers, "HrmTextConfig"):
    ARCHITECTURES["hrm_text"] = _rms(transformers.HrmTextConfig, OF_HRM, "model.H_module.final_norm")


def config_of(name: str, **fields: Any) -> transformers.PretrainedConfig:
    """The config of an architecture; ``fields`` are others of it."""
    return ARCHITECTURES[name].config(**ARCHITECTURES[name].fields | fields)


def random_model(name: str, seed: int = 0, **fields: Any) -> Any:
    """A model in eval mode; ``fields`` are others of its config."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model
