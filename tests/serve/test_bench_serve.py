"""``minigpt bench serve`` on the demo: every contestant writes the same number of tokens, and the report is whole."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")

from minigpt import ConfigError
from minigpt.bench.serve import ServePlan


def test_an_unknown_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="vllm"):
        ServePlan(against=("vllm",))


@pytest.mark.thorough
def test_all_contestants_write_the_same_and_first_tokens_are_timed() -> None:
    theirs = "transformers serve"
    sizes = ["--clients", "2", "--requests", "2", "--new-tokens", "5", "--repeats", "1", "--prompt-characters", "9"]
    command = [sys.executable, "-m", "minigpt", "bench", "serve", "--model", "demo", *sizes]
    command += ["--against", "transformers", "--json", "-"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    servers = [f"{name}{how}" for name in ("minigpt serve", theirs) for how in ("", ", whole answers")]
    contestants = report["contestants"]
    assert list(contestants) == ["complete", *servers]
    assert {tuple(found["tokens"]) for found in contestants.values()} == {(20,)}
    for name, found in contestants.items():
        assert found["tokens_per_second"] == pytest.approx(20 / found["seconds"][0])
        assert ("first_token_ms" in found) == (name in ("minigpt serve", theirs))
    waits = contestants["minigpt serve"]["first_token_ms"]
    assert 0 < waits["p50"] <= waits["p90"] <= waits["p99"] < 1000 * contestants["minigpt serve"]["seconds"][0]
    for name in servers[:2]:
        share = contestants[name]["tokens_per_second"] / contestants["complete"]["tokens_per_second"]
        assert report["share_of_complete"][name] == pytest.approx(share)
    for ours, their in zip(servers[:2], servers[2:], strict=True):
        ratio = contestants[ours]["tokens_per_second"] / contestants[their]["tokens_per_second"]
        assert report["times_as_fast_as"][their] == pytest.approx(ratio)
