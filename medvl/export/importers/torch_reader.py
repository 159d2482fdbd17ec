"""Reader of tensors that `torch.save` wrote, without unpickling.

Published checkpoints hold more than tensors: Lightning's hyperparameters, a training configuration (OmegaConf), an
optimizer. torch's safe loader refuses such a file, and the unsafe one runs any code in it. This reader follows the
pickle's instructions one by one (`medvl.data.corpora.common.pickle_reader`) and imports and calls nothing: it builds
dictionaries, lists, texts, numbers and the addresses of tensors, and skips any other object. Objects of packages that
no training checkpoint needs end the reading with an error.
"""

import dataclasses
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medvl.data.corpora.common.pickle_reader import PickleReader
from medvl.encoders.pretrained import read_tensors
from medvl.errors import CorpusError, WeightsError

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PACKAGES = frozenset(
    {
        *("_codecs", "argparse", "collections", "copy_reg", "copyreg", "datetime", "easydict", "enum", "functools"),
        *("lightning", "numpy", "omegaconf", "pathlib", "pytorch_lightning", "ruamel", "sacred", "timm", "torch"),
        *("torchvision", "transformers", "typing", "yacs"),
    }
)
"""Packages whose objects may appear in a checkpoint beside the tensors; all of them are skipped."""
_BUILTINS = frozenset(
    {
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "long", "object"),
        *("set", "slice", "str", "tuple", "unicode"),
    }
)
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_TENSOR = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_BYTES = ("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_LONGEST_PICKLE = 1 << 28
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, MemoryError, OverflowError),
    *(ValueError, IndexError, KeyError, TypeError, AttributeError),
    RuntimeError,  # an archive marked as encrypted, or with a compression that zipfile does not support
)
"""Errors that a damaged archive or pickle causes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The content of a file of weights."""

    tensors: Mapping[str, Tensor]
    """On the CPU, in the file's dtypes. Tensors that share storage in the file share it here."""
    blanks: Sequence[str]
    """Types of the skipped objects, sorted."""


def read_checkpoint(path: Path, parts: Sequence[str] = ()) -> Checkpoint:
    """Read the state dict of a file: safetensors or `torch.save`, at its top or in one of the usual wrappers.

    Args:
        path: path of the file.
        parts: names of several state dicts that the file holds side by side; their keys are then `part/key`.

    Raises WeightsError if the file is missing or damaged, holds no state dict, or holds unexpected objects or expanded
    tensors (stride 0).
    """
    if not path.is_file():
        kind = "is a folder: give the file in it that holds the weights" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {kind}", "not_found")
    if path.suffix == ".safetensors" or not _is_archive(path):
        tensors = read_tensors(path)  # uses torch's safe loader
        for key, tensor in tensors.items():
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise _repeats(path, key)
        return Checkpoint(tensors=tensors, blanks=())
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, path, parts)
    except CorpusError as error:
        raise WeightsError(str(error), error.code, field=error.field) from None
    except _DAMAGE_ERRORS as error:
        message = f"{path} is not a complete torch checkpoint ({type(error).__name__}): copy it again"
        raise WeightsError(message, "malformed") from None


def _repeats(path: Path, key: str) -> WeightsError:
    """Return the error for an expanded tensor, whose size is not bounded by the size of the file."""
    message = f"{path}: {key} repeats its values instead of storing them; save its contiguous copy"
    return WeightsError(message, "unsupported")


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # its end is damaged
        return True


def _read_archive(archive: zipfile.ZipFile, path: Path, parts: Sequence[str]) -> Checkpoint:
    names = set(archive.namelist())
    root = next((name.removesuffix("data.pkl") for name in sorted(names) if name.endswith("data.pkl")), None)
    if root is None:
        inner = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".safetensors")))
        hint = f": unpack it and give {inner[0]}" if inner else ""
        raise WeightsError(f"{path} is an archive without torch's data.pkl{hint}", "malformed")
    if any(name.startswith(f"{root}code/") for name in names):
        raise WeightsError(f"{path} is a TorchScript archive, which holds code: give a state dict", "unsupported")
    order = f"{root}byteorder"
    if order in names and archive.read(order) != sys.byteorder.encode():
        message = f"{path} was written on a machine of another byte order: save it again on a machine like this"
        raise WeightsError(message, "unsupported")
    if archive.getinfo(f"{root}data.pkl").file_size > _LONGEST_PICKLE:
        raise WeightsError(f"{path} has a pickle of over {_LONGEST_PICKLE} bytes: it is not a checkpoint", "too_large")
    reader = _CheckpointReader(path)
    entries = _state_dict(reader.read(archive.read(f"{root}data.pkl")), path, parts)
    store = _Store(archive, f"{root}data/", path)
    return Checkpoint(
        tensors={key: store.tensor(address, key) for key, address in entries.items()}, blanks=sorted(reader.blanks)
    )


def _state_dict(content: Any, path: Path, parts: Sequence[str]) -> dict[str, "_Address"]:
    if parts and isinstance(content, dict) and all(isinstance(content.get(part), dict) for part in parts):
        state = {f"{part}/{key}": value for part in parts for key, value in content[part].items()}
    else:
        state = content
        for wrapper in _WRAPPERS:
            if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
                state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(key, str) for key in state):
        message = f"{path} holds no state dict, neither at its top nor under {', '.join(_WRAPPERS)}"
        raise WeightsError(message, "mismatch")
    others = [key for key, value in state.items() if not isinstance(value, _Address)]
    if others:
        raise WeightsError(f"{path} holds no state dict: {others[0]!r} is not a tensor", "mismatch")
    return state


class _Global(NamedTuple):
    """A function or class that the pickle refers to."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    numel: int


class _Address(NamedTuple):
    """Position of a tensor in the archive."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Blank:
    """An object that is not built; updating it does nothing."""

    def update(self, items: Any) -> None:
        """Ignore items of a dictionary."""

    def extend(self, items: Any) -> None:
        """Ignore items of a list."""


class _CheckpointReader(PickleReader):
    """Pickle reader that also builds addresses of tensors, and skips objects; `blanks` has the types of those."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blanks: set[str] = set()

    def handle_opcode(self, name: str, argument: Any) -> None:
        """Follow an instruction that does not build plain data."""
        if name in ("GLOBAL", "STACK_GLOBAL"):
            self._push_global(argument if name == "GLOBAL" else " ".join([self.stack.pop(-2), self.stack.pop()]))
        elif name == "BINPERSID":
            self._push_storage(self.stack.pop())
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = self.stack.pop(), self.stack.pop()
            self.stack.append(self._call(function, arguments))
        elif name == "NEWOBJ_EX":
            del self.stack[-2:]
            self.stack.append(self._blank(self.stack.pop()))
        elif name in ("BUILD", "POP"):  # an object's state; that of an ordered dictionary is metadata
            self.stack.pop()
        elif name in _BYTES:
            self.stack.append(argument)
        elif name == "EMPTY_SET":
            self.stack.append(_Blank())
        elif name in ("ADDITEMS", "POP_MARK"):
            self.pop_to_mark()
        elif name == "FROZENSET":
            self.pop_to_mark()
            self.stack.append(_Blank())
        else:
            message = f"{self.path} holds an instruction that no torch checkpoint needs ({name})"
            raise WeightsError(message, "unsupported")

    def _push_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        package = module.partition(".")[0]
        known = name in _BUILTINS if package in ("builtins", "__builtin__") else package in _PACKAGES
        if not known:
            raise WeightsError(
                f"{self.path} refers to {module}.{name}, which no torch checkpoint needs: it is refused, because a "
                "pickle can run any program. Where it was written, save only its tensors, best as safetensors",
                "unsupported",
            )
        self.stack.append(_Global(module, name))

    def _push_storage(self, address: Any) -> None:
        kind, storage, key, _, numel = address
        if kind != "storage" or storage.name not in _STORAGES:
            raise WeightsError(f"{self.path} holds tensors of an unsupported storage: {storage}", "unsupported")
        self.stack.append(_Storage(_STORAGES[storage.name], key, numel))

    def _call(self, function: Any, arguments: Any) -> Any:
        """Return the result of functions that rebuild tensors and ordered dictionaries, else a blank."""
        name = str(function)
        if name in _TENSOR:
            storage, offset, size, stride = arguments[:4]
            if isinstance(storage, _Storage):
                return _Address(storage, offset, tuple(size), tuple(stride))
        if name in _PARAMETER and isinstance(arguments[0], _Address):
            return arguments[0]
        if name == "collections.OrderedDict":
            return dict(arguments[0]) if arguments else {}
        return self._blank(function)

    def _blank(self, function: Any) -> _Blank:
        if isinstance(function, _Global):
            self.blanks.add(str(function))
        return _Blank()


class _Store:
    """Storages of an archive, each read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, path: Path) -> None:
        self._archive, self._folder, self._path = archive, folder, path
        self._storages: dict[str, Tensor] = {}

    def tensor(self, address: _Address, key: str) -> Tensor:
        """Return a tensor as a view of its storage. Raises WeightsError if it reaches outside of the storage."""
        storage, offset, size, stride = address
        if math.prod(size) == 0:
            return torch.empty(size, dtype=storage.dtype)
        numbers = (offset, *size, *stride)
        if len(size) == len(stride) and 0 in stride and math.prod(size) > storage.numel:
            raise _repeats(self._path, key)
        if len(size) != len(stride) or min(numbers) < 0 or math.prod(size) > storage.numel:
            raise WeightsError(f"{self._path} is damaged: {key} has no possible shape", "malformed")
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if last >= storage.numel:
            raise WeightsError(f"{self._path} is damaged: {key} reaches behind its storage", "malformed")
        return self._storage(storage).as_strided(size, stride, offset)

    def _storage(self, storage: _Storage) -> Tensor:
        if storage.key not in self._storages:
            entry = self._archive.getinfo(self._folder + storage.key)
            expected = storage.numel * storage.dtype.itemsize
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != expected:
                message = f"{self._path} is damaged: storage {storage.key} does not have {expected} bytes"
                raise WeightsError(message, "malformed")
            self._storages[storage.key] = torch.frombuffer(bytearray(self._archive.read(entry)), dtype=storage.dtype)
        return self._storages[storage.key]
