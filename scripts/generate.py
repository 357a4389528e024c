"""Write on from a prompt: python scripts/generate.py "Once upon a time" --model gpt2"""

from typing import Annotated

import typer

import minigpt


def main(
    prompt: Annotated[str, typer.Argument()] = "Once upon a time",
    model: str = "demo",
    max_new_tokens: int = 120,
    seed: int = 0,
) -> None:
    """Load a pretrained GPT-2 and print what it writes, as it writes it."""
    gpt2 = minigpt.from_pretrained(model)
    tokenizer = minigpt.Tokenizer.from_pretrained(model)
    print(prompt, end="", flush=True)
    for piece in minigpt.stream(
        gpt2, tokenizer, prompt, max_new_tokens=max_new_tokens, do_sample=True, temperature=0.8, seed=seed
    ):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    typer.run(main)
