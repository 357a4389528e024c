"""A page of user code for a type checker. It never runs: tests/test_types.py has pyright judge it.

A line that ends in ``# wrong`` must be an error; no other may be. ``reveal_type`` shows what the functions return.
"""

from pathlib import Path

import torch
from torch import nn

import minigpt
from minigpt.generation import complete, warp

model = minigpt.from_pretrained("demo", norm="textbook", dtype="float32", device="cpu")
tokenizer = minigpt.Tokenizer.from_pretrained("demo")
ids = torch.tensor([tokenizer.encode("Once upon a time")])

reveal_type(model)
reveal_type(model(ids))
reveal_type(model.new_cache(1, 64))
reveal_type(tokenizer.encode("a"))
reveal_type(tokenizer.decode([1, 2]))
reveal_type(minigpt.generate(model, ids, max_new_tokens=5))
reveal_type(minigpt.generate(model, ids, max_new_tokens=5, output_logprobs=True).logprobs)
reveal_type(minigpt.generate(model, ids, max_new_tokens=5, output_scores=True))
reveal_type(minigpt.stream(model, tokenizer, "a", max_new_tokens=5, do_sample=True, temperature=0.8, stop="."))
reveal_type(complete(model, tokenizer, ["a"], max_new_tokens=5, output_logprobs=True))
reveal_type(warp(torch.zeros(1, 9), top_p=0.5))
reveal_type(minigpt.swap_norms(model, minigpt.LayerNorm, sites=["ln_f"]))
reveal_type(minigpt.norms.build("fused", 64, eps=1e-5))
reveal_type(minigpt.norms.available())
reveal_type(minigpt.fold_norms(model))
reveal_type(minigpt.load_norms(model, "demo"))
reveal_type(minigpt.save_pretrained(model, Path("out"), tokenizer))
reveal_type(minigpt.parity("demo", norm="std_eps").passed)
reveal_type(minigpt.GPT2Config.preset("gpt2").n_embd)
reveal_type(minigpt.GPT2Config.from_dict({"n_layer": 2}))
reveal_type(minigpt.GPT2(minigpt.GPT2Config.preset("demo"), norm="textbook"))

minigpt.generate(model, ids, max_new_tokens=5, temprature=0.5)  # wrong
minigpt.generate(model, ids, max_new_tokens=5, top_k=0.5)  # wrong
minigpt.generate(model, ids, max_new_tokens="5")  # wrong
minigpt.generate(model, ids, do_sample=True)  # wrong
minigpt.generate(model, ids, max_new_tokens=5, stop=[1])  # wrong
minigpt.generate(model, ids, max_new_tokens=5).sequences.sum()  # wrong
minigpt.generate(model, "text", max_new_tokens=5)  # wrong
minigpt.stream(model, tokenizer, "a", max_new_tokns=5)  # wrong
minigpt.stream(model, tokenizer, "a", max_new_tokens=5, output_scores=True)  # wrong
minigpt.stream(model, tokenizer, ids, max_new_tokens=5)  # wrong
minigpt.stream(model, tokenizer, "a", max_new_tokens=5, seed="1")  # wrong
complete(model, tokenizer, [1], max_new_tokens=5)  # wrong
complete(model, tokenizer, ["a"], max_new_tokens=5, batchsize=4)  # wrong
warp(torch.zeros(1, 9), top_q=0.5)  # wrong
minigpt.genrate(model, ids, max_new_tokens=5)  # wrong
minigpt.from_pretrained("demo", attenton="eager")  # wrong
minigpt.GPT2Config(n_layers=3)  # wrong
tokenizer.encode(5)  # wrong
nn.Linear(3, 3, biass=True)  # wrong
