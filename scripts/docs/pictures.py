"""Make the pictures of the README: a parity report as a page, and two commands in a terminal.

python scripts/docs/pictures.py     # needs Chromium and minigpt[page], and writes docs/images/
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
COMMANDS = (
    ("generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "30"),
    ("parity", "--norm", "rms", "--device", "cpu"),
)


def run(*words: str) -> str:
    """Return what a minigpt command prints."""
    done = subprocess.run([sys.executable, "-m", "minigpt", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def terminal(path: Path) -> None:
    """Draw the commands and what they print as an SVG."""
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=84, file=nowhere)
        for words in COMMANDS:
            shown = " ".join(f'"{word}"' if " " in word else word for word in words if word not in ("--device", "cpu"))
            console.print(Text(f"$ minigpt {shown}", style="bold green"))
            console.print(Text(run(*words)), highlight=False)
        path.write_text(console.export_svg(title="minigpt"), encoding="utf-8")


def report(path: Path) -> None:
    """Take a screenshot of the top of a parity report."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        run("parity", "--norm", "rms", "--device", "cpu", "--html", str(page_file))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        page.goto(page_file.as_uri())
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    terminal(IMAGES / "terminal.svg")
    report(IMAGES / "parity.png")
