"""Is it still the same model? A GPT-2 with its norms swapped, judged against transformers."""
