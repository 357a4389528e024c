"""Check the English of documentation, docstrings, comments and messages with proselint and the project's own rules.

    python scripts/docs/style.py [FILE_OR_FOLDER]...

Without arguments it reads the README, docs/, minigpt/ and scripts/. In Markdown files it reads the text outside of
code, in Python files docstrings, comments and strings of at least four words. The exit status is 1 if it finds
something.
"""

import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Any

from proselint.checks import __register__ as general_checks
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.registry.checks.engine import Fancy
from proselint.tools import LintFile

ROOT = Path(__file__).parents[2]
PLACES = ("README.md", "docs", "minigpt", "scripts")
MOST_WORDS = 30  # in a sentence
UNWANTED = ("typography", "lexical_illusions", "dates_times")  # general checks that take code for prose

# Old or literary words, and what to write instead.
PLAIN_WORDS = {
    "whoever": "anyone who",
    "whatever": "any, everything that",
    "wherein": "in which",
    "thereof": "of it",
    "whence": "from where",
    "hence": "so",
    "thus": "so",
    "nobody": "no one, no ...",
    "nor": "and not, or",
    "anew": "again",
    "likewise": "also",
    "lest": "so that ... does not",
    "shall": "must, or the present tense",
    "such as": "for example, e.g.",
    "of its own": "own, separate",
    "of one's own": "your own",
    "all the same": "still",
    "lies in": "is in",
    "lie in": "are in",
    "as it lies": "in place",
    "stands for": "means",
    "at hand": "available",
}
IS_NO = r"(?<!there )(?<!has )\b(?:is|are|was|were|be) no (?!longer|more|less|later|earlier|smaller|larger|faster)\w+"
BETWEEN_WORDS = r"(?:[ ,;:()]+(?:\n[ ,;:()]*)?|\n[ ,;:()]*)"  # an empty line ends a sentence
MARKUP = r"```.*?```|`[^`\n]+`|\]\([^)]*\)|<[^>\n]+>|^\|[^\n]*\|$|\$\$.*?\$\$|\$[^$\n]+\$"  # what is not prose
LONG_SENTENCE = rf"\b[\w'-]+(?:{BETWEEN_WORDS}[\w'/-]+){{{MOST_WORDS},}}"


def rule(path: str, check_type: Any, message: str) -> Check:
    """Return one of the project's own checks."""
    return Check(check_type=check_type, engine=Fancy(), path=f"minigpt.{path}", message=message)


RULES = (
    rule("plain_words", types.PreferredForms(items=PLAIN_WORDS), "'{1}' is old or literary; write: {0}"),
    rule("is_no", types.ExistenceSimple(pattern=IS_NO), "'{}': write 'is not a ...'"),
    rule("long_sentence", types.ExistenceSimple(pattern=LONG_SENTENCE), f"over {MOST_WORDS} words in a sentence"),
)


def prose_of_markdown(text: str) -> str:
    """Return the text with code, links' addresses and HTML as blanks, so that positions stay."""
    return re.sub(MARKUP, _blank, text, flags=re.DOTALL | re.MULTILINE)


def prose_of_python(source: str) -> str:
    """Return docstrings, comments and strings of several words; everything else as blanks, so that positions stay."""
    lines = [[" "] * len(line) for line in source.splitlines()]
    last_comment = 0  # its line; comments on successive lines of their own are one text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            continues = token.line.lstrip().startswith("#") and token.start[0] == last_comment + 1
            _copy(token, lines, is_start=not continues)
            last_comment = token.end[0]
        elif token.type == tokenize.STRING and len(_words(token.string)) > 3:
            _copy(token, lines, is_start=True)
    text = "\n".join("".join(line) for line in lines)
    return re.sub(r"``[^`]+``|`[^`]+`|\{[^{}\n]*\}|https?://\S+", _blank, text)


def _words(string: str) -> list[str]:
    return re.findall(r"(?<![\w.])[A-Za-z]{2,}(?![\w.(=])", string)


def _copy(token: tokenize.TokenInfo, lines: list[list[str]], is_start: bool) -> None:
    """Put a token's text at its place, after a mark that ends the sentence before it."""
    row, column = token.start
    mark = "|" if is_start else " "
    for offset, piece in enumerate((mark + token.string[1:]).split("\n")):
        first = column if offset == 0 else 0
        lines[row - 1 + offset][first : first + len(piece)] = piece.replace('"', " ")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def complaints(path: Path, config: Config) -> list[str]:
    """Return one line for each finding in a file."""
    read = {".md": prose_of_markdown, ".py": prose_of_python}[path.suffix]
    text = read(path.read_text("utf-8"))
    found = LintFile(str(path), text).lint(config) if text.strip() else []
    return [
        f"{path}:{one.pos[0]}:{one.pos[1]}: {one.check_result.check_path}: {one.check_result.message}" for one in found
    ]


def main(arguments: list[str]) -> int:
    given = [Path(name) for name in arguments or [str(ROOT / place) for place in PLACES]]
    files = [file for path in given for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    if not (registry := CheckRegistry()).checks:
        registry.register_many((*general_checks, *RULES))
    checks = {"minigpt": True} | DEFAULT["checks"] | dict.fromkeys(UNWANTED, False)
    config = Config(max_errors=1000, checks=checks)
    lines = [line for file in files if file.suffix in (".md", ".py") for line in complaints(file, config)]
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
