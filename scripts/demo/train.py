"""Train the bundled demo model: a GPT-2 of a million parameters that tells the tales of tales.py.

    python scripts/demo/train.py --out minigpt/demo --seed 0

It takes five to ten minutes on two idle cores. The same seed, machine and thread count give the same weights, bit for
bit; the bundled ones were made with ``--threads 1``.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import typer
from jaxtyping import Float, Int
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

import minigpt
from minigpt.tokenizer import END_OF_TEXT

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from demo.tales import tales

HELD_OUT = 1 << 32  # the seed of tales that no training run sees
PROMPTS = ("Once upon a time", "The old sailor", "Mara found a", "One morning", "In a small house")


def main(
    out: Path = Path("minigpt/demo"), seed: int = 0, steps: int = 2400, batch_size: int = 8, threads: int = 2
) -> None:
    """Learn a vocabulary and then the tales; write the model to ``out``; print its loss on new tales, and samples."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    config = minigpt.GPT2Config.preset("demo")
    tokenizer = minigpt.Tokenizer(byte_level_bpe(tales(5000, seed), config.vocab_size))
    model = new_model(config)
    train(model, batches(seed + 1, tokenizer, config.n_positions, batch_size), steps)
    minigpt.save_pretrained(model.eval(), out, tokenizer)
    describe(model, tokenizer)


def byte_level_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A vocabulary of GPT-2's kind, learned from the texts: id 0 is the end of a text, the next 256 are the bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def new_model(config: minigpt.GPT2Config) -> minigpt.GPT2:
    """A GPT-2 whose positions start as sines and cosines (arXiv 1706.03762, section 3.5): near ones start alike.

    From random positions, the few million tokens of this training are not enough to learn to look back.
    """
    model = minigpt.GPT2(config)
    position = torch.arange(config.n_positions)[:, None]  # (T, 1)
    frequency = torch.logspace(0, -2.5, config.n_embd // 2)  # radians a token
    with torch.no_grad():
        model.wpe.weight.copy_(0.1 * torch.cat([(position * frequency).sin(), (position * frequency).cos()], dim=1))
    return model


def batches(seed: int, tokenizer: minigpt.Tokenizer, length: int, size: int) -> Iterator[Int[Tensor, "batch seq"]]:
    """Endless batches of new tales. A row holds one id more than the context: each predicts the next."""
    endless = (tale for part in count() for tale in tales(1000, seed + part))
    stream = rows(endless, tokenizer, length + 1)
    while True:
        yield torch.tensor(list(islice(stream, size)))


def rows(texts: Iterable[str], tokenizer: minigpt.Tokenizer, length: int) -> Iterator[list[int]]:
    """Yield rows of ``length`` ids: tales, each followed by end-of-text.

    Every other row begins with end-of-text, as texts without a prompt do; the others begin with a tale.
    """
    (end,) = tokenizer.encode(END_OF_TEXT)
    starts = cycle(([end], []))
    row: list[int] = []
    for text in texts:
        row += [*tokenizer.encode(text), end]
        if len(row) >= length:
            yield row[:length]
            row = list(next(starts))


def train(model: minigpt.GPT2, data: Iterator[Int[Tensor, "batch seq"]], steps: int) -> None:
    """AdamW with warm-up and half a cosine down to nothing. Prints the loss now and then."""
    optimizer = optimizer_for(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    start = time.perf_counter()
    for step, ids in enumerate(islice(data, steps)):
        loss = loss_on(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:5}  loss {loss.item():.3f}  {time.perf_counter() - start:6.1f} s", flush=True)


def optimizer_for(model: minigpt.GPT2) -> torch.optim.AdamW:
    """Only matrices decay. Norm weights and biases, few, get a rate that takes them well away from 1 and 0."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "lr": 4e-3, "weight_decay": 0.05}, {"params": vectors, "lr": 2e-2, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )


def rate(step: int, steps: int, warmup: int = 100) -> float:
    """Share of the full learning rate at a step: a straight rise, then half a cosine down to nothing."""
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))


def loss_on(model: minigpt.GPT2, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
    """Mean cross-entropy, in nats, of each id given the ones before it."""
    logits = model(ids[:, :-1])  # (batch, seq - 1, vocab)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def describe(model: minigpt.GPT2, tokenizer: minigpt.Tokenizer) -> None:
    """Print the perplexity on tales never seen, the norms' ranges, and what the model writes."""
    held_out = torch.tensor(list(rows(tales(300, HELD_OUT), tokenizer, model.config.n_positions + 1)))
    print(f"perplexity on new tales: {loss_on(model, held_out).exp():.3f} a token")
    for site in model.site_names():
        weight, bias = model.get_parameter(f"{site}.weight"), model.get_parameter(f"{site}.bias")
        print(f"{site}: weight {weight.min():.2f} to {weight.max():.2f}, bias {bias.min():.2f} to {bias.max():.2f}")
    for prompt in ("", *PROMPTS):
        pieces = minigpt.stream(model, tokenizer, prompt, max_new_tokens=200, do_sample=True, temperature=0.8, seed=1)
        print(f"\n{prompt}{''.join(pieces)}")


if __name__ == "__main__":
    typer.run(main)
