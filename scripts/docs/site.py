"""Check the built documentation: every link and picture has its target, and no page shows the backticks of a fence.

zensical build --strict && python scripts/docs/site.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page shows and points to.

    Attributes:
        targets: addresses of its links, pictures, scripts and style sheets.
        anchors: the ids of its elements.
        text: what it shows.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors, self.text = {""}, ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name == "id" and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def complaints(site: Path) -> list[str]:
    """Return a line for each fence and each dead link in a built site."""
    pages = {file: Page(file) for file in sorted(site.resolve().rglob("*.html"))}
    found = []
    for file, page in pages.items():
        name = file.relative_to(site.resolve())
        if "```" in page.text:
            found.append(f"{name}: shows the backticks of a fence")
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            start = site.resolve() if parts.path.startswith("/") else file.parent
            other = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
            other = other / "index.html" if other.is_dir() else other
            if not other.exists() or (other in pages and unquote(parts.fragment) not in pages[other].anchors):
                found.append(f"{name}: {target} leads nowhere")
    return found


if __name__ == "__main__":
    lines = complaints(Path(sys.argv[1]))
    print("\n".join(lines), end="\n" if lines else "")
    raise SystemExit(bool(lines))
