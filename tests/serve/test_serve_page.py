"""The page in a real browser: both texts stream, and nothing but this server is asked for anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, live

pytestmark = pytest.mark.thorough

COARSE = """
import time
from torch import nn
class Coarse(nn.LayerNorm):
    def forward(self, x):
        time.sleep(0.001)
        return (super().forward(x) * 2).round() / 2
"""  # 9 of them in the demo: 240 tokens take 2 s at least, so that there is time to stop


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    norm = tmp_path_factory.mktemp("norms") / "coarse.py"
    norm.write_text(COARSE)
    with live("--norm", "fused", "--norm", f"{norm}:Coarse", "--api-key", "right") as server:
        yield server


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_both_texts_stream_and_the_divergence_shows(
    server: Live, browser: Any, width: int, scheme: str, tmp_path: Path
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(server.url)

    page.get_by_role("alert").get_by_text("the API key is missing").wait_for()
    assert len(messages) == 1, "the refusal alone"
    messages.clear()
    page.get_by_label("API key").fill("right")
    page.keyboard.press("Tab")
    page.locator("#left option").nth(1).wait_for(state="attached")
    assert page.locator("#right").input_value().endswith(":Coarse")

    page.get_by_label("Prompt").fill("The dog")
    page.get_by_label("Tokens", exact=True).fill("60")
    page.get_by_role("button", name="Write").click()
    page.locator(".first .token").nth(3).wait_for()
    page.get_by_text("Done.").wait_for()
    for side in (".first", ".second"):
        tokens = page.locator(f"{side} .token")
        count = tokens.count()
        assert 1 < count <= 60
        heights = [float(h) for h in page.locator(f"{side} rect").evaluate_all(
            "bars => bars.map(bar => bar.getAttribute('height'))")]  # fmt: skip
        assert len(heights) == count
        assert len(set(heights)) > 3
    marked = page.locator(".token.differs > .said")
    assert marked.count() == 2
    left, right = marked.all_inner_texts()
    assert left != right
    before = [page.locator(f"{side} .token > .said").all_inner_texts() for side in (".first", ".second")]
    place = next(i for i, pair in enumerate(zip(*before, strict=False)) if pair[0] != pair[1])
    assert before[0][place] == left

    first = page.locator(".second .token").first
    first.focus()
    page.keyboard.press("ArrowRight")
    current = page.locator(".second .token").nth(1)
    assert current.evaluate("token => token === document.activeElement")
    assert current.locator(".alternatives").is_visible()
    assert current.locator(".row").count() >= 6
    assert "%" in current.locator(".bar").first.inner_text()
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)  # a token under the mouse shows its alternatives too
    assert not current.locator(".alternatives").is_visible()
    page.get_by_label("Alternatives under every token").check()
    assert page.locator(".first .token .alternatives").nth(2).is_visible()

    page.get_by_role("button", name="Copy as curl").click()
    page.get_by_text("Copied as curl").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl -N {server.url}/compare ")
    assert '"seed":2' in copied
    page.get_by_role("button", name="Copy as Python").click()
    page.get_by_text("Copied as Python").wait_for()
    compile(page.evaluate("navigator.clipboard.readText()"), "copied", "exec")

    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    page.get_by_label("Tokens", exact=True).fill("240")
    page.get_by_role("button", name="Write").click()
    page.locator(".first .token").nth(3).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert page.locator(".first .token").count() < 240
    assert messages == []
    assert {url.split("/")[2] for url in requests if not url.startswith("data:")} == {server.url.split("/")[2]}
    page.screenshot(path=tmp_path / "page.png")
    context.close()
