"""How far a run has come: told at every step, never backwards, never done before the end."""

from pathlib import Path

from checkpoints import reference, saved, tiny_bpe

import minigpt
from minigpt.measure.steps import Steps


def test_shares_grow_and_stay_below_the_whole() -> None:
    said: list[tuple[str, float]] = []
    begin = Steps(lambda *step: said.append(step), total=2)
    for step in "abcd":  # more than were expected
        begin(step)
    assert said == [("a", 0.0), ("b", 0.5), ("c", 2 / 3), ("d", 3 / 4)]


def test_a_judgement_counts_all_its_steps(tmp_path: Path) -> None:
    place = saved(reference(n_layer=1, vocab_size=300), tmp_path)
    tiny_bpe(300).save(str(place / "tokenizer.json"))
    (tmp_path / "text").write_text("the dog saw the house. " * 9, encoding="utf-8")
    said: list[tuple[str, float]] = []
    minigpt.parity(
        place, norm="textbook", prompts=["the dog", "a cat", "x"], max_new_tokens=1, device="cpu", noise=True,
        sensitivity=True, bisect=True, text=tmp_path / "text", progress=lambda *step: said.append(step),
    )  # fmt: skip
    assert all(step and step == step.strip() for step, _ in said)
    steps = len(said)
    assert [share for _, share in said] == [i / steps for i in range(steps)]
    assert [step for step, _ in said[:3]] == [
        "loading the models", "decoding greedily", "comparing logits and norms on prompt 1 of 3",
    ]  # fmt: skip
