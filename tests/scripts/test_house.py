"""The script that holds the size of the package."""

import house

SOURCE = '''
"""A docstring."""

import os


class Norm:
    """Another."""

    def forward(self, x):
        """A third."""
        return x + 1
'''


def test_docstrings_imports_and_contexts_are_no_nodes() -> None:
    # Module, ClassDef; FunctionDef, arguments, two arg; Return, BinOp, Name, Add, Constant
    assert house.size(SOURCE) == {"nodes": 11, "functions": 1}


def test_a_figure_above_the_files_needs_a_reason() -> None:
    held = {"nodes": 10, "functions": 2}
    assert house.raises({"nodes": 10, "functions": 1}, held, "") == []
    entry = {"figure": "nodes", "from": 10, "to": 11, "why": "a feature"}
    assert house.raises({"nodes": 11, "functions": 2}, held, "a feature") == [entry]
