"""Make the page of the annotated network: comments and shapes beside the code, in the order in which data flows.

python scripts/docs/network.py      # writes docs/network.md

The comments are those of the files, so the page says nothing that the code does not. ORDER names each definition once.
"""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "network.md"
PACKAGE = ROOT / "minigpt"
NAMES = "names"  # of a file: its statements that define no function and no class
NORM, GPT2, MASKING = "norms/textbook.py", "model/gpt2.py", "model/masking.py"
ATTENTION, MLP, CACHE = "model/attention.py", "model/mlp.py", "model/cache.py"

# The sections: a title, a sentence, and definitions by their files. A class comes without its methods.
ORDER: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "LayerNorm",
        "The formula, and the same as one call of PyTorch's.",
        ((NORM, "names LayerNorm LayerNorm.forward LayerNorm.standardize LayerNorm.row_dims"),
         (NORM, "FusedLayerNorm FusedLayerNorm.forward")),
    ),
    (
        "From ids to logits",
        "The parts of the model, and the way through it.",
        ((GPT2, "names GPT2 GPT2.__init__ GPT2.forward GPT2.hidden_states GPT2.embed GPT2.run"),),
    ),
    (
        "Positions, and who sees whom",
        "Causality, padding and the tokens already read.",
        ((MASKING, "names real_tokens positions causal_mask visible packed_mask"),),
    ),
    (
        "A block",
        "Two reads of the residual stream, two additions to it.",
        ((GPT2, "Block Block.__init__ Block.forward"),
         (MLP, "names Conv1D Conv1D.__init__ Conv1D.forward Conv1D.extra_repr")),
    ),
    (
        "Attention",
        "Tokens read one another.",
        ((ATTENTION, "CausalSelfAttention CausalSelfAttention.__init__ CausalSelfAttention.forward "
          "CausalSelfAttention.mix CausalSelfAttention.laid_out CausalSelfAttention.sdpa CausalSelfAttention.eager "
          "CausalSelfAttention.scores"),
         (MASKING, "additive_mask")),
    ),
    (
        "The cache",
        "Keys and values of the tokens already read.",
        ((CACHE, "names LayerCache LayerCache.update KVCache KVCache.__init__ KVCache.update KVCache.advance"),
         (GPT2, "GPT2.new_cache")),
    ),
    (
        "The MLP",
        "Each token by itself.",
        ((MLP, "MLP MLP.__init__ MLP.forward activation gelu_new gelu_tanh"),),
    ),
    (
        "The logits",
        "A number for each token of the vocabulary.",
        ((GPT2, "GPT2.head"),),
    ),
    (
        "Around it",
        "The first weights, and what others ask of the model.",
        ((GPT2, "GPT2.initialize GPT2.device GPT2.dtype GPT2.site_names GPT2.norm_modules GPT2.extra_repr"),),
    ),
)  # fmt: skip


class Piece(NamedTuple):
    """A definition: its docstring, and its lines of code without it."""

    docstring: str
    lines: list[str]


def pieces_of(source: str) -> dict[str, Piece]:
    """Return the definitions of a file by their names, a method by "Class.method"; other statements are NAMES."""
    lines = source.splitlines()
    found: dict[str, Piece] = {}
    others: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            found[node.name] = _piece(node, lines, without=methods)
            for method in methods:
                found[f"{node.name}.{method.name}"] = _piece(method, lines)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = _piece(node, lines)
        elif isinstance(node, ast.Assign):
            others += lines[node.lineno - 1 : node.end_lineno]
    if others:
        found[NAMES] = Piece("", others)
    return found


def _piece(
    node: ast.ClassDef | ast.FunctionDef, lines: list[str], without: list[ast.FunctionDef] | None = None
) -> Piece:
    """Return a definition without its docstring, and without these methods."""
    left_out: list[ast.stmt] = [*(without or [])]
    docstring = ast.get_docstring(node)
    if docstring is not None:
        left_out.append(node.body[0])
    gone: set[int] = set()
    for inner in left_out:
        gone.update(range(_first_line(inner), (inner.end_lineno or 0) + 1))
    numbers = range(_first_line(node), (node.end_lineno or 0) + 1)
    code = "\n".join(lines[number - 1] for number in numbers if number not in gone)
    code = re.sub(r"^(class .*:)\n+", r"\1\n", code, flags=re.MULTILINE)
    code = re.sub(r"\n\n+", "\n\n", inspect.cleandoc("\n" + code).strip())
    return Piece(docstring or "", code.splitlines())


def _first_line(node: ast.stmt) -> int:
    """Return the line at which a definition begins, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def rows_of(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return code in rows, each with the comment that stands before it or behind its line."""
    rows: list[tuple[str, list[str]]] = [("", [])]
    for line, comment in zip(lines, _comments(lines), strict=True):
        code = line.removesuffix(comment).rstrip()
        words = comment.lstrip("# ")
        if comment.startswith("# fmt") or comment.startswith("# pyright"):
            words = ""
        before, of_row = rows[-1]
        if comment and not code:  # a line of its own is about what follows
            if of_row:
                rows.append((words, []))
            else:
                rows[-1] = (f"{before} {words}".strip(), [])
        elif words:
            rows += [(words, [code]), ("", [])]
        else:
            of_row.append(code)
    return [(comment, code) for comment, code in rows if any(code)]


def _comments(lines: list[str]) -> list[str]:
    """Return the comment of each line, or an empty text."""
    comments = [""] * len(lines)
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0] - 1] = token.string
    return comments


def as_markdown(docstring: str) -> str:
    """Return a docstring in Markdown: a list for the items of a section such as Args."""
    text = docstring.replace("::\n", ":\n").replace("``", "`")
    text = re.sub(r"^(\w+):\n(?= {4}\S)", r"**\1**\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", _item, text, flags=re.MULTILINE)
    spans = re.split(r"(`[^`]*`|^ {4}.*$)", text, flags=re.MULTILINE)
    for place in range(0, len(spans), 2):
        spans[place] = re.sub(r"(?<!\*)\*(?!\*)", r"\\*", spans[place]).replace("<", "&lt;")
    return "".join(spans)


def _item(match: re.Match[str]) -> str:
    return f"- `{match[1]}`: {' '.join(match[2].split())}"


def page() -> str:
    """Return the page."""
    files = {
        name: pieces_of((PACKAGE / name).read_text(encoding="utf-8")) for _, _, parts in ORDER for name, _ in parts
    }
    count = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in files)
    shown = [
        "---\nhide: [toc]\n---",
        "# The network, line by line",
        f"The {len(files)} files of the network have {count} lines. Here are their definitions in the order in which "
        "data flows: what it is, then its comments and shapes at the left, and its code at the right. "
        "`scripts/docs/network.py` makes this page of the files, without their imports.",
        "B batch, T new tokens, S tokens in all, C embedding, H heads, D = C / H width of a head, V vocabulary.",
    ]
    for number, (title, sentence, parts) in enumerate(ORDER, 1):
        shown += [f"## {number}. {title}", sentence]
        for file, names in parts:
            for name in names.split():
                shown.append(_shown(file, name, files[file].pop(name)))
    left = [f"{file}: {', '.join(pieces)}" for file, pieces in files.items() if pieces]
    if left:
        raise SystemExit(f"ORDER has no place for {'; '.join(left)}")
    return "\n\n".join(shown) + "\n"


def _shown(file: str, name: str, piece: Piece) -> str:
    """Return a definition in HTML with Markdown in it, which GitHub shows too."""
    label = f"`{file}`" if name == NAMES else f"`{name}` in `{file}`"
    about = f"{label}\n\n{as_markdown(piece.docstring)}".strip()
    parts = [f'<div class="annotated" markdown>\n\n<div class="about" markdown>\n\n{about}\n\n</div>']
    for comment, code in rows_of(piece.lines):
        while not code[-1]:
            code.pop()
        body = "\n".join(code)
        words = as_markdown(comment)
        parts.append(f'<div class="words" markdown>\n\n{words}\n\n</div>\n\n```py\n{body}\n```')
    return "\n\n".join([*parts, "</div>"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
