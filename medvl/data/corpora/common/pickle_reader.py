"""Plain data out of a pickle, without unpickling it.

A pickle is a program, and running one that a stranger wrote is running the stranger's program. Some releases are
published as pickles of nothing but lists, dictionaries, texts and numbers. `pickletools` takes such a file apart into
its instructions and runs none; the few that build plain data are carried out here, and any other one ends the reading.
(`medvl.export.importers.torch_reader` reads checkpoints in the same way.)
"""

import pickletools
from pathlib import Path
from typing import Any

from medvl.errors import CorpusError

_MARK = object()
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
_NUMBERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT")
_VALUES = frozenset((*_TEXTS, *_NUMBERS))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_PUTS, _GETS = frozenset(["PUT", "BINPUT", "LONG_BINPUT"]), frozenset(["GET", "BINGET", "LONG_BINGET"])
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_pickle(path: Path) -> Any:
    """The lists, dictionaries, tuples, texts and numbers of a pickle.

    Raises CorpusError when the file does not exist, is cut off, or holds anything else: objects, functions, bytes.
    """
    try:
        data = path.read_bytes()
        return PickleReader(path).read(data)
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is no whole pickle ({type(error).__name__}): copy it again") from None


class PickleReader:
    """A stack and a memo, as the pickle machine has them. `other` is for those who need more than plain data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[str, Any] = {}  # protocol 0 names places by text, the others by number

    def read(self, data: bytes) -> Any:
        """What the pickle builds. Raises CorpusError as `other` says, and what a damaged pickle leads to: ValueError,
        IndexError, KeyError, TypeError, AttributeError."""
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in ("PROTO", "FRAME"):
                continue
            if name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _PUTS:
                self.memo[str(argument)] = self.stack[-1]
            elif name in _GETS:
                self.stack.append(self.memo[str(argument)])
            elif not self._build(name):
                self.other(name, argument)
        raise ValueError("no STOP")

    def other(self, name: str, argument: Any) -> None:
        """An instruction that is none of plain data's: refused."""
        raise CorpusError(
            f"{self.path} holds more than lists, dictionaries, texts and numbers ({name}): it is not read, because "
            "a pickle can run any program. Get the file from its publisher, or as JSON"
        )

    def to_mark(self) -> list[Any]:
        """What lies above the last mark, taken off the stack with it."""
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _build(self, name: str) -> bool:
        """Whether it is an instruction that puts plain values together, which is then carried out."""
        if name == "MARK":
            self.stack.append(_MARK)
        elif name == "MEMOIZE":
            self.memo[str(len(self.memo))] = self.stack[-1]
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self.to_mark()
            self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self.stack.pop(-2), self.stack.pop()] if name == "SETITEM" else self.to_mark()
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("LIST", "TUPLE", "DICT"):
            items = self.to_mark()
            pairs = dict(zip(items[::2], items[1::2], strict=True)) if name == "DICT" else None
            self.stack.append(pairs if pairs is not None else items if name == "LIST" else tuple(items))
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            return False
        return True
