"""GGUF files that tests write by the package gguf."""

from pathlib import Path
from typing import Any

import gguf


def writer_of(config: Any, architecture: str, file: Path) -> Any:
    """Return a writer that has the sizes of a Llama's config, or of one alike."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    return writer


def finish(writer: Any) -> None:
    """Write what a writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
