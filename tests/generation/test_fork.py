"""A child after ``fork`` has none of its parent's threads: ``generate`` says so, and does not wait for them."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough
PROGRAM = """
import os, sys, torch, minigpt

torch.set_num_threads(2)
model = minigpt.from_pretrained("demo", device="cpu")
ids = torch.arange(200).view(1, -1)
wanted = minigpt.generate(model, ids, max_new_tokens=20)
if (child := os.fork()) == 0:
    if sys.argv[1:]:
        torch.set_num_threads(1)
    try:
        print(torch.equal(minigpt.generate(model, ids, max_new_tokens=20), wanted), flush=True)
    except minigpt.GenerationError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize(("words", "said"), [([], "get_context('spawn')"), (["one thread"], "True")])
def test_a_forked_child_gets_a_sentence_or_writes_with_one_thread(words: list[str], said: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=120)
    assert said in ran.stdout, ran.stderr
