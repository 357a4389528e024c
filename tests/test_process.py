"""A process of ours keeps the memory that it frees, and few of the programs that oneDNN compiles."""

import json
import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import json, os, resource, sys
from minigpt.process import settle_memory
if sys.argv[1] == "settled":
    settle_memory()
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"faults": min(faults() for _ in range(8)), "shapes": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY")}))
"""


def told(how: str, **more: str) -> dict[str, object]:
    command = [sys.executable, "-c", FAULTS, how]
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=os.environ | more).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator that is set")
def test_pages_that_are_freed_are_there_when_they_are_asked_for_again() -> None:
    settled, unsettled = told("settled"), told("unsettled")
    # 64 MB are 16,384 pages. It may take a second piece until one that was freed fits the next.
    assert settled["faults"] < 500 < 5000 < unsettled["faults"]  # pyright: ignore[reportOperatorIssue]
    assert (settled["shapes"], unsettled["shapes"]) == ("32", None)


def test_what_the_environment_says_is_left_at_that() -> None:
    assert told("settled", ONEDNN_PRIMITIVE_CACHE_CAPACITY="7")["shapes"] == "7"
