"""How large the values of a pickle are when each is spelled out, found without running it.

A tuple may hold another one twice, that one a third one twice, and so on: sixty of them are a few hundred bytes, and to
hash the last, as a dict does with its keys, takes 2^60 steps.
"""

import itertools
from pickletools import OpcodeInfo, markobject
from typing import Any

MOST = 10**6  # members of members, of one value
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_HOLDS = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX")  # hashed by its members


class Sizes:
    """The sizes of what lies on a pickle's stack and in its memo, kept while its instructions are looked through."""

    def __init__(self) -> None:
        self.stack: list[int | None] = []  # None is a mark
        self.memo: dict[Any, int] = {}

    def follow(self, operation: OpcodeInfo, argument: Any) -> None:
        """One instruction further.

        Raises:
            ValueError: a value is larger than any checkpoint's, or there is nothing on the stack to take.
        """
        name = operation.name
        if name in _PUTS or name == "MEMOIZE":
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self._top()
        elif name in _GETS:
            self.stack.append(self.memo.get(argument, 1))
        elif name == "MARK":
            self.stack.append(None)
        elif name == "DUP":
            self.stack.append(self._top())
        else:
            taken = self._take(operation.stack_before)
            size = 1 + sum(taken) if name in _HOLDS else 1
            if size > MOST:
                raise ValueError(f"a value in it has more than {MOST:,} members within members")
            self.stack.extend([size] * len(operation.stack_after))

    def _top(self) -> int:
        if not self.stack or self.stack[-1] is None:
            raise ValueError("its pickle is damaged")
        return self.stack[-1]

    def _take(self, kinds: list[Any]) -> list[int]:
        """What an instruction takes off the stack: so many, or all down to the mark and what it takes below that."""
        taken: list[int] = []
        if markobject in kinds:
            if None not in self.stack:
                raise ValueError("its pickle is damaged")
            taken += iter(self.stack.pop, None)  # down to the mark, and that too
        for _ in itertools.takewhile(lambda kind: kind is not markobject, kinds):
            taken.append(self._top())
            self.stack.pop()
        return taken
