"""Interpreter for pickles of plain data, which runs nothing.

A pickle is a program: unpickling an untrusted file executes untrusted code. `pickletools` lists the instructions of
such a file without executing any; the few that build lists, dictionaries, texts and numbers are interpreted here, and
any other one is an error. Checkpoints of torch are read by a subclass (`medvl.encoders.torch_files`).
"""

import pickletools
from pathlib import Path
from typing import Any, BinaryIO

from medvl.errors import CorpusError

_MARK = object()
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
_NUMBERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT")
_VALUES = frozenset((*_TEXTS, *_NUMBERS))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_PUTS, _GETS = frozenset(["PUT", "BINPUT", "LONG_BINPUT"]), frozenset(["GET", "BINGET", "LONG_BINGET"])
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _checked(value: Any) -> Any:
    """Return a text or a number. Raises ValueError for half of a surrogate pair, and for an integer over 1024 bits."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int) and value.bit_length() > 1024:
        raise ValueError("an integer over 1024 bits")
    return value


class PickleReader:
    """Interpreter for the pickle instructions that build plain data; subclasses handle more in `handle_opcode`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[str, Any] = {}  # protocol 0 uses text keys, the others numbers

    def read(self, data: bytes | BinaryIO) -> Any:
        """Return the object that the pickle builds; a file is left behind the pickle's end.

        Raises CorpusError for instructions that are not supported. A damaged pickle raises ValueError, IndexError,
        KeyError, TypeError or AttributeError.
        """
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in ("PROTO", "FRAME"):
                continue
            if name in _VALUES:
                self.stack.append(_checked(argument))
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _PUTS:
                self.memo[str(argument)] = self.stack[-1]
            elif name in _GETS:
                self.stack.append(self.memo[str(argument)])
            elif not self._build(name):
                self.handle_opcode(name, argument)
        raise ValueError("no STOP")

    def handle_opcode(self, name: str, argument: Any) -> None:
        """Raise CorpusError: the instruction does not build plain data."""
        advice = "a pickle can run any program. Get the file from its publisher, or as JSON"
        raise CorpusError(f"{self.path} is not read, as it contains {name}: {advice}", "unsupported")

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the items above the last mark, and remove the mark."""
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _build(self, name: str) -> bool:
        """Execute an instruction that combines plain values; return False for any other instruction."""
        if name == "MARK":
            self.stack.append(_MARK)
        elif name == "MEMOIZE":
            self.memo[str(len(self.memo))] = self.stack[-1]
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self.pop_to_mark()
            self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self.stack.pop(-2), self.stack.pop()] if name == "SETITEM" else self.pop_to_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("LIST", "TUPLE", "DICT"):
            items = self.pop_to_mark()
            pairs = dict(zip(items[::2], items[1::2], strict=True)) if name == "DICT" else None
            self.stack.append(pairs if pairs is not None else items if name == "LIST" else tuple(items))
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            return False
        return True
