"""Train the bundled demo model: a GPT-2 of a million parameters that tells the tales of tales.py.

    python scripts/train_demo.py --out minigpt/demo --seed 0

It takes about ten minutes on two cores. The same seed, machine and thread count give the same weights, bit for bit.
"""

import math
import time
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import torch.nn.functional as F
import typer
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

import minigpt
from tales import tales

END_OF_TEXT = "<|endoftext|>"
HELD_OUT = 1 << 32  # the seed of the tales that no training run sees
PROMPTS = ("Once upon a time", "The old sailor", "Mara found a", "One morning", "In a small house")


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


def rows(texts: Iterable[str], tokenizer: minigpt.Tokenizer, length: int) -> Iterator[list[int]]:
    """Rows of ``length`` ids: tales with the end of text between them. Each row begins with a tale, as a prompt does."""
    row: list[int] = []
    for text in texts:
        row += [*tokenizer.encode(text), tokenizer.end_of_text_id]
        if len(row) >= length:
            yield row[:length]
            row = []


def batches(seed: int, tokenizer: minigpt.Tokenizer, length: int, size: int) -> Iterator[Tensor]:
    """Endless batches of rows of new tales; each predicts its ids from the ones before, so it is one id longer."""
    endless = (tale for part in count() for tale in tales(1000, seed + part))
    stream = rows(endless, tokenizer, length + 1)
    while True:
        yield torch.tensor(list(islice(stream, size)))  # (batch, length + 1)


def loss_on(model: minigpt.GPT2, ids: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each id given the ones before it."""
    logits = model(ids[:, :-1])  # (batch, length, vocab)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def optimizer_for(model: minigpt.GPT2, lr: float, vector_lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; only matrices decay. Norm weights and biases start at 1 and 0 and get a rate that takes them well away."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "lr": lr, "weight_decay": weight_decay},
            {"params": vectors, "lr": vector_lr, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )


def schedule(step: int, steps: int, warmup: int) -> float:
    """Share of the full learning rate at a step: a straight rise, then half a cosine down to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")] = Path("minigpt/demo"),
    seed: Annotated[int, typer.Option(help="Decides the tales, the first weights, and so all.")] = 0,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 2000,
    batch_size: int = 16,
    lr: float = 4e-3,
    vector_lr: float = 2e-2,
    weight_decay: float = 0.05,
    threads: int = 2,
) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    config = minigpt.GPT2Config(vocab_size=1024, n_positions=256, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = minigpt.GPT2(config)
    tokenizer = minigpt.Tokenizer(byte_level_bpe(tales(5000, seed), config.vocab_size))
    opt = optimizer_for(model, lr, vector_lr, weight_decay)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: schedule(s, steps, steps//20))
    held = torch.tensor(list(rows(tales(300, HELD_OUT), tokenizer, 257)))
    t0=time.time()
    for step, ids in enumerate(islice(batches(seed + 1, tokenizer, 256, batch_size), steps)):
        loss = loss_on(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sched.step(); opt.zero_grad()
        if step % 50 == 0: print(step, round(loss.item(),4), round(time.time()-t0,1), round(time.process_time(),1), flush=True)
    model.eval()
    with torch.no_grad(): print("held", loss_on(model, held).item(), math.exp(loss_on(model, held).item()))
    minigpt.save_pretrained(model, out, tokenizer)
    for n,p in model.named_parameters():
        if 'ln' in n: print(n, [round(x,3) for x in (p.min().item(), p.mean().item(), p.max().item(), ((p-(1 if 'weight' in n else 0)).abs().mean()).item())])
    for temp in (0,.8):
        for p in PROMPTS:
            print('---', temp); print(p + ''.join(minigpt.stream(model, tokenizer, p, max_new_tokens=240, do_sample=temp>0, temperature=temp or 1.0, seed=1)))

if __name__ == "__main__":
    typer.run(main)
