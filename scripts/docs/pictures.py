"""Make the pictures of the pages: losses of a study, a parity report, two commands, and the server's page at work.

Each is made for a light and for a dark page, except the terminal, which is dark on both.

python scripts/docs/pictures.py     # needs Chromium and minigpt[dev], and writes docs/images/

The pictures show times, so nothing else should run on the machine.
"""

import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.text import Text
from tables import rows  # pyright: ignore[reportMissingImports]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
MINIGPT = (sys.executable, "-m", "minigpt")
COLUMNS = 92  # of the terminal
WIDTH = 1100  # of a report's picture, in pixels
IN_SHORT = """
    main { padding: 2rem } section { margin-top: 2.5rem } .tiles { margin-top: 2rem }
    header > .aside, .reason ~ .reason ~ .reason, section:not(#sites),
    #sites :is(.scroll:has(.stays), .scrolls, .beside, details)
    { display: none }
"""
Scheme = Literal["light", "dark"]
# The end of a name, and matplotlib's style.
SCHEMES: dict[Scheme, tuple[str, str]] = {"light": ("", "default"), "dark": ("-dark", "dark_background")}
COMMANDS = (
    ("generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "30"),
    ("parity", "--norm", "rms", "--norm", "dyt", "--sites", "*", "--sites", "ln_f", "--device", "cpu"),
)


def run(*words: str) -> str:
    """Return what a minigpt command prints."""
    environment = os.environ | {"COLUMNS": str(COLUMNS)}
    command = [*MINIGPT, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def losses(path: Path, style: str) -> None:
    """Draw the held-out loss of DyT, as it is and fitted, and of frozen norms, against the steps."""
    import matplotlib.pyplot as plt

    plt.style.use(["default", style])
    plt.rcParams["svg.hashsalt"] = "minigpt"  # the same bytes every time
    plain, dyt, fitted = rows("recover")
    frozen = rows("remove-layernorm")[-1]
    curves = {"DyT, as it is": dyt, "DyT, fitted": fitted, "frozen, by schedule": frozen, "LayerNorm": plain}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for (name, row), style in zip(curves.items(), (":", "-", "--", "-."), strict=True):
        axes.plot(*zip(*row["eval_losses"], strict=True), style, label=name)
    axes.set(yscale="log", xlabel="step", ylabel="held-out loss, nats a token", xlim=(0, 300))
    axes.set_yticks([0.15, 0.2, 0.3, 0.5, 1, 2, 5], ["0.15", "0.2", "0.3", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight", transparent=True)
    plt.close(figure)


def terminal(path: Path) -> None:
    """Draw the commands and what they print as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for number, words in enumerate(COMMANDS):
        shown = shlex.join(word for word in words if word not in ("--device", "cpu"))
        console.print("\n" * bool(number), end="")
        console.print(Text(f"$ minigpt {shown}", style="bold green"))
        console.print(Text(run(*words)), highlight=False)
    path.write_text(console.export_svg(title="minigpt"), encoding="utf-8")


def report(page: Page, path: Path) -> None:
    """Take a screenshot of a parity report's verdict, its most important figures and its map."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        run("parity", "--norm", "rms", "--device", "cpu", "--html", str(file))
        page.goto(file.as_uri())
        page.add_style_tag(content=IN_SHORT)
        page.locator("main").screenshot(path=path)


def recording(page: Page, path: Path) -> None:
    """Record the page of the server as an animated PNG: it writes, and shows the alternatives at some tokens.

    The finished texts with the alternatives come first, for who sees only the first picture.
    """
    command = [*MINIGPT, "serve", "--port", "0", "--norm", "fused", "--norm", "rms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        page.goto(server.stdout.readline().strip())
        page.locator("#right option").nth(1).wait_for(state="attached")
        slow = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}
        # Or no one would see it write.
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
        frames = [(page.screenshot(), 1000)]
        page.get_by_role("button", name="Write").click()
        while not page.get_by_text("Done.").is_visible():
            frames.append((page.screenshot(), 300))
            page.wait_for_timeout(150)
        frames.append((page.screenshot(), 1500))
        page.locator(".second .token.differs").click()
        frames.append((page.screenshot(), 3000))
        for _ in range(3):
            page.keyboard.press("ArrowRight")
            frames.append((page.screenshot(), 1200))
        server.terminate()
    frames = [(frames[-4][0], 2500), *frames]
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data, _ in frames]
    colors = images[-1].quantize(64)  # one palette for all: the file is a quarter as large
    first, *others = (image.quantize(palette=colors, dither=Image.Dither.NONE) for image in images)
    first.save(path, save_all=True, append_images=others, duration=[duration for _, duration in frames], optimize=True)


if __name__ == "__main__":
    terminal(IMAGES / "terminal.svg")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, (end, style) in SCHEMES.items():
            losses(IMAGES / f"recover{end}.svg", style)
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
            report(page, IMAGES / f"parity{end}.png")
            recording(page, IMAGES / f"compare{end}.png")
