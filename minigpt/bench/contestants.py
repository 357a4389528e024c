"""The contestants: each loads one checkpoint, and continues the same prompts greedily by a given number of tokens.

``prefill`` reads the prompts and gives the logits of the next tokens. ``generate`` returns how many tokens it wrote.
B rows, T tokens of the longest prompt.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.bench.llama import LlamaCpp
from minigpt.device import settle_memory
from minigpt.engine import compile_steps
from minigpt.engine.kernel import path_of, use_kernel
from minigpt.engine.parts import head_rows
from minigpt.errors import ConfigError
from minigpt.generation import complete
from minigpt.generation.batch import left_padded
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import parse_settings
from minigpt.judge.original import quiet_transformers
from minigpt.model import GPT2
from minigpt.recipe import from_pretrained
from minigpt.tokenizer import Tokenizer

Prompts = list[list[int]]
READ, TIMES = 2**28, 16  # bytes read to measure the speed of memory, more than caches hold; and how often


class Minigpt:
    """This project in a dtype or in "int8", with compiled steps or drafts if asked."""

    def __init__(
        self, folder: str, prompts: Prompts, kind: str, compiled: bool = False, draft: str | None = None
    ) -> None:
        self.model, self.prompts, self.draft = writer(folder, kind), prompts, draft
        self.drafted = self.accepted = 0
        if compiled:
            compile_steps(self.model)
        self.decoding = path_of(self.model)
        self.ids, self.mask = left_padded(prompts)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        cache = self.model.new_cache(*self.ids.shape)
        return self.model.head(self.model.hidden_states(self.ids, self.mask, cache=cache)[:, -1:])

    def generate(self, new: int) -> int:
        settings = parse_settings(max_new_tokens=new, eos_token_id=None, draft=self.draft)
        rows = rows_of(self.model, self.prompts, settings, None)
        for _ in write_rows(self.model, rows, settings, len(rows)):
            pass
        self.drafted += sum(row.drafted for row in rows)
        self.accepted += sum(row.accepted for row in rows)
        return sum(len(row.new_ids) for row in rows)


class Complete:
    """``complete`` on texts, so many at a time."""

    def __init__(self, folder: str, prompts: list[str], kind: str, places: int) -> None:
        self.model, self.tokenizer = writer(folder, kind), Tokenizer.from_pretrained(folder)
        self.prompts, self.places = prompts, places

    def prefill(self) -> None:
        pass

    def generate(self, new: int) -> int:
        texts = complete(self.model, self.tokenizer, self.prompts, batch_size=self.places, max_new_tokens=new)
        return sum(len(text.ids) for text in texts)


class Transformers:
    """Hugging Face transformers: sdpa attention, its default cache."""

    def __init__(self, folder: str, prompts: Prompts, kind: str) -> None:
        from transformers import AutoModelForCausalLM

        if kind == "int8":
            raise ConfigError("transformers has no int8 for the CPU; compare with transformers:float32")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.ids, self.mask = left_padded(prompts)

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(self.ids, attention_mask=self.mask, position_ids=positions, logits_to_keep=1).logits

    def generate(self, new: int) -> int:
        out = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=new, do_sample=False)
        return out[:, self.ids.shape[1] :].numel()


class CTranslate2:
    """CTranslate2, with the weights in its own format."""

    def __init__(self, folder: str, prompts: Prompts, kind: str) -> None:
        import ctranslate2  # pyright: ignore[reportMissingImports]

        place, threads = str(Path(folder) / f"ctranslate2-{kind}"), torch.get_num_threads()
        self.model = ctranslate2.Generator(place, device="cpu", compute_type=kind, intra_threads=threads)
        self.prompts = [[f"t{token}" for token in prompt] for prompt in prompts]

    def prefill(self) -> object:
        return self.model.forward_batch(self.prompts)

    def generate(self, new: int) -> int:
        how = dict(beam_size=1, sampling_topk=1, include_prompt_in_result=False, end_token=[])
        results = self.model.generate_batch(self.prompts, max_length=new, min_length=0, **how)
        return sum(len(result.sequences_ids[0]) for result in results)


class Products:
    """Not a contestant but the limits.

    ``generate`` computes a step's matrix products one after another with the same weights, by PyTorch, and nothing
    else. ``prefill`` reads ``READ`` bytes ``TIMES`` times, for the limit that memory sets.
    """

    def __init__(self, folder: str, prompts: Prompts, kind: str) -> None:
        use_kernel(kind == "int8")  # other kinds by PyTorch's products
        model, self.rows = writer(folder, kind), len(prompts)
        blocks, (c, inner), dtype = model.h, (model.config.n_embd, model.config.inner_size), model.wte.weight.dtype
        inputs = {width: torch.randn(self.rows, 1, width).to(dtype) for width in (c, inner)}
        widths = {"attn.c_attn": c, "attn.c_proj": c, "mlp.c_fc": c, "mlp.c_proj": inner}
        self.products: list[tuple[Any, Tensor]] = [
            (block.get_submodule(name), inputs[width]) for block in blocks for name, width in widths.items()
        ]
        self.products.append((model.head, inputs[c]))
        self.memory = torch.ones(READ // 4)

    def prefill(self) -> object:
        """Read memory; there are no prompts here."""
        return [self.memory.sum() for _ in range(TIMES)]

    @torch.inference_mode()
    def step(self) -> list[Tensor]:
        """Return the products that every new token needs."""
        return [product(x) for product, x in self.products]  # each (B, 1, out)

    def generate(self, new: int) -> int:
        for _ in range(new):
            self.step()
        return new * self.rows


CONTESTANTS: dict[str, Any] = {
    "minigpt": Minigpt,
    "undrafted": Minigpt,
    "complete": Complete,
    "transformers": Transformers,
    "ctranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
    "products": Products,
}


def writer(folder: str, kind: str) -> GPT2:
    """Return the model as the command line loads it."""
    settle_memory()
    how: dict[str, Any] = {"quantize": "int8"} if kind == "int8" else {"dtype": kind}
    return from_pretrained(folder, device="cpu", **how)


def convert_for_ctranslate2(folder: str, kind: str) -> None:
    """Write the checkpoint in CTranslate2's format beside it.

    CTranslate2's converter needs a tokenizer, to count the tokens: they are t0, t1, t2 and so on.

    Raises:
        ConfigError: if CTranslate2 does not compute in that kind on this processor.
    """
    import ctranslate2  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    known = ctranslate2.get_supported_compute_types("cpu")
    if kind not in known:
        raise ConfigError(f"CTranslate2 has no {kind} on this processor; it has {', '.join(sorted(known))}")
    vocabulary = {f"t{token}": token for token in range(AutoConfig.from_pretrained(folder).vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), f"t{len(vocabulary) - 1}")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    with quiet_transformers():
        TransformersConverter(folder).convert(f"{folder}/ctranslate2-{kind}", quantization=kind)


def weight_bytes(model: GPT2) -> int:
    """Return the bytes of the weights that every new token reads: all matrices with the head, without embeddings."""
    return head_rows(model).nbytes + sum(p.nbytes for part in (model.h, model.ln_f) for p in part.parameters())
