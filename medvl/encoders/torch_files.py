"""Files that `torch.save` wrote, read without unpickling.

Published checkpoints hold more than tensors: Lightning's hyperparameters, a training configuration
(OmegaConf), an optimizer. torch's safe loader refuses such a file, and the unsafe one runs any code
in it. This reader follows the pickle's instructions one by one (`medvl.common.untrusted`) and
imports and calls nothing: it builds dictionaries, lists, texts, numbers and the addresses of
tensors, and skips any other object. Objects of packages that no training checkpoint needs end the
reading with an error.
"""

import contextlib
import dataclasses
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from medvl.common.untrusted import PickleReader
from medvl.errors import CorpusError, WeightsError

_PACKAGES = frozenset(
    {
        "_codecs",
        "accelerate",
        "addict",
        "apex",
        "argparse",
        "collections",
        "copy_reg",
        "copyreg",
        "dataclasses",
        "datetime",
        "deepspeed",
        "detectron2",
        "easydict",
        "enum",
        "fairseq",
        "functools",
        "fvcore",
        "lightning",
        "ml_collections",
        "mmcv",
        "mmengine",
        "monai",
        "munch",
        "numpy",
        "omegaconf",
        "open_clip",
        "pathlib",
        "pytorch_lightning",
        "ruamel",
        "sacred",
        "timm",
        "torch",
        "torchmetrics",
        "torchvision",
        "transformers",
        "typing",
        "yacs",
    }
)
"""Packages whose objects may appear in a checkpoint beside the tensors; all of them are skipped."""
_BUILTINS = frozenset(
    {
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "long",
        "object",
        "set",
        "slice",
        "str",
        "tuple",
        "unicode",
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
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_BYTES = ("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_LONGEST_PICKLE = 1 << 28
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, MemoryError, OverflowError),
    *(ValueError, IndexError, KeyError, TypeError, AttributeError),
    # an archive marked as encrypted, or with a compression that zipfile does not support
    RuntimeError,
)
"""Errors that a damaged archive or pickle causes."""

MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
"""Number at the beginning of files of torch before 1.6, as its pickle holds it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TorchFile:
    """An open file of `torch.save`."""

    content: Any
    """Dictionaries, lists, texts, numbers, addresses of tensors and skipped objects."""
    blanks: Sequence[str]
    """Types of the skipped objects, sorted."""
    tensor: Callable[["Address", str], Tensor]
    """Function from an address and its key, for messages, to the tensor. Tensors that share storage
    in the file share it here.
    """


@contextlib.contextmanager
def open_torch_file(file: BinaryIO, path: Path, *, zipped: bool) -> Iterator[TorchFile]:
    """Read the structure of a file of `torch.save`; its tensors are read while the context lasts.

    Raises WeightsError if the file is damaged, or holds unexpected objects or expanded tensors
    (stride 0).
    """
    try:
        if zipped:
            with zipfile.ZipFile(file) as archive:
                yield _open_archive(archive, path)
        else:
            yield _open_legacy(file, path)
    except CorpusError as error:
        raise WeightsError(str(error), error.code, field=error.field) from None
    except _DAMAGE_ERRORS as error:
        message = (
            f"{path} is not a complete torch checkpoint ({type(error).__name__}): copy it again"
        )
        raise WeightsError(message, "malformed") from None


def _open_archive(archive: zipfile.ZipFile, path: Path) -> TorchFile:
    names = set(archive.namelist())
    root = next(
        (name.removesuffix("data.pkl") for name in sorted(names) if name.endswith("data.pkl")), None
    )
    if root is None:
        inner = sorted(
            name for name in names if name.endswith((".bin", ".pt", ".pth", ".safetensors"))
        )
        hint = f": unpack it and give {inner[0]}" if inner else ""
        raise WeightsError(f"{path} is an archive without torch's data.pkl{hint}", "malformed")
    if any(name.startswith(f"{root}code/") for name in names):
        raise WeightsError(
            f"{path} is a TorchScript archive, which holds code: give a state dict", "unsupported"
        )
    order = f"{root}byteorder"
    if order in names and archive.read(order) != sys.byteorder.encode():
        message = (
            f"{path} was written on a machine of another byte order: save it again on a "
            f"machine like this"
        )
        raise WeightsError(message, "unsupported")
    if archive.getinfo(f"{root}data.pkl").file_size > _LONGEST_PICKLE:
        raise WeightsError(
            f"{path} has a pickle of over {_LONGEST_PICKLE} bytes: it is not a checkpoint",
            "too_large",
        )
    reader = _CheckpointReader(path)
    content = reader.read(archive.read(f"{root}data.pkl"))

    def read(storage: _Storage) -> bytes:
        entry = archive.getinfo(f"{root}data/{storage.key}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.nbytes:
            message = (
                f"{path} is damaged: storage {storage.key} does not have {storage.nbytes} bytes"
            )
            raise WeightsError(message, "malformed")
        return archive.read(entry)

    return TorchFile(
        content=content, blanks=sorted(reader.blanks), tensor=_Store(read, path).tensor
    )


def _open_legacy(file: BinaryIO, path: Path) -> TorchFile:
    """Open a file of torch before 1.6: five pickles, then each storage with its number of
    elements before it.
    """
    stream: Any = _LimitedFile(file)
    PickleReader(path).read(stream)  # the magic number
    PickleReader(path).read(stream)  # the version of the format
    system = PickleReader(path).read(stream)
    if system["little_endian"] != (sys.byteorder == "little"):
        message = (
            f"{path} was written on a machine of another byte order: save it again on a "
            f"machine like this"
        )
        raise WeightsError(message, "unsupported")
    reader = _CheckpointReader(path)
    content = reader.read(stream)
    places = {}
    for key in PickleReader(path).read(stream):
        storage = reader.storages[key]
        (numel,) = struct.unpack("<q", file.read(8))
        if numel != storage.numel:
            raise WeightsError(
                f"{path} is damaged: storage {key} does not have {storage.numel} elements",
                "malformed",
            )
        places[key] = file.tell()
        file.seek(storage.nbytes, 1)

    def read(storage: _Storage) -> bytes:
        file.seek(places[storage.key])
        data = file.read(storage.nbytes)
        if len(data) < storage.nbytes:
            raise WeightsError(
                f"{path} ends within storage {storage.key}: copy it again", "malformed"
            )
        return data

    return TorchFile(
        content=content, blanks=sorted(reader.blanks), tensor=_Store(read, path).tensor
    )


class _LimitedFile:
    """Reader for `pickletools` that refuses values that no pickle of a checkpoint has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > _LONGEST_PICKLE:
            raise ValueError("a value longer than a pickle")
        return self._file.read(size)

    def readline(self) -> bytes:
        """Return the next line."""
        return self._file.readline(_LONGEST_PICKLE)


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

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Address(NamedTuple):
    """Position of a tensor in the file."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Blank:
    """An object that is not built; updating it does nothing."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def update(self, items: Any) -> None:
        """Ignore items of a dictionary."""

    def extend(self, items: Any) -> None:
        """Ignore items of a list."""


class _CheckpointReader(PickleReader):
    """Pickle reader that also builds addresses of tensors, and skips objects; `blanks` has the
    types of those.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blanks: set[str] = set()
        self.storages: dict[str, _Storage] = {}

    def handle_opcode(self, name: str, argument: Any) -> None:
        """Follow an instruction that does not build plain data."""
        if name in ("GLOBAL", "STACK_GLOBAL"):
            self._push_global(
                argument if name == "GLOBAL" else " ".join([self.stack.pop(-2), self.stack.pop()])
            )
        elif name == "BINPERSID":
            self._push_storage(self.stack.pop())
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = self.stack.pop()
            function = self.stack.pop()
            self.stack.append(self._call(function, arguments))
        elif name == "NEWOBJ_EX":
            del self.stack[-2:]
            self.stack.append(self._blank(self.stack.pop()))
        elif name in (
            "BUILD",
            "POP",
        ):  # an object's state; that of an ordered dictionary is metadata
            self.stack.pop()
        elif name in _BYTES:
            self.stack.append(argument)
        elif name == "EMPTY_SET":
            self.stack.append(Blank())
        elif name in ("ADDITEMS", "POP_MARK"):
            self.pop_to_mark()
        elif name == "FROZENSET":
            self.pop_to_mark()
            self.stack.append(Blank())
        else:
            message = f"{self.path} holds an instruction that no torch checkpoint needs ({name})"
            raise WeightsError(message, "unsupported")

    def _push_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        package = module.partition(".")[0]
        value = (
            name in _BUILTINS if package in ("builtins", "__builtin__") else package in _PACKAGES
        )
        if not value:
            raise WeightsError(
                f"{self.path} refers to {module}.{name}, which no torch checkpoint needs: it is "
                "refused, because a pickle can run any program. Where it was written, save only "
                "its tensors, best as safetensors",
                "unsupported",
            )
        self.stack.append(_Global(module, name))

    def _push_storage(self, address: Any) -> None:
        kind, storage, key, _, numel, *view = address
        if (
            kind != "storage"
            or storage.name not in _STORAGES
            or any(part is not None for part in view)
        ):
            message = (
                f"{self.path} holds tensors of an unsupported storage ({storage}): "
                f"quantised ones are not read"
            )
            raise WeightsError(f"{message}; save the weights as float32 or float16", "unsupported")
        self.storages[key] = _Storage(_STORAGES[storage.name], key, numel)
        self.stack.append(self.storages[key])

    def _call(self, function: Any, arguments: Any) -> Any:
        """Return the result of functions that rebuild tensors and ordered dictionaries, else a
        blank.
        """
        name = str(function)
        if name == _SUBCLASS:  # of a class, its function and that one's arguments
            name = str(arguments[0])
            arguments = arguments[2]
        if name in _TENSOR:
            storage, offset, size, stride = arguments[:4]
            if isinstance(storage, _Storage):
                return Address(storage, offset, tuple(size), tuple(stride))
        if name in _PARAMETER and isinstance(arguments[0], Address):
            return arguments[0]
        if name == "collections.OrderedDict":
            return dict(arguments[0]) if arguments else {}
        return self._blank(function)

    def _blank(self, function: Any) -> Blank:
        if isinstance(function, _Global):
            self.blanks.add(str(function))
        return Blank(str(function) if isinstance(function, _Global) else "")


class _Store:
    """Storages of a file, each read once."""

    def __init__(self, read: Callable[[_Storage], bytes], path: Path) -> None:
        self._read = read
        self._path = path
        self._storages: dict[str, Tensor] = {}

    def tensor(self, address: Address, key: str) -> Tensor:
        """Return a tensor as a view of its storage. Raises WeightsError if it reaches outside of
        the storage.
        """
        storage, offset, size, stride = address
        if math.prod(size) == 0:
            return torch.empty(size, dtype=storage.dtype)
        numbers = (offset, *size, *stride)
        if len(size) == len(stride) and 0 in stride and math.prod(size) > storage.numel:
            message = (
                f"{self._path}: {key} repeats its values instead of storing them; save "
                f"its contiguous copy"
            )
            raise WeightsError(message, "unsupported")
        if len(size) != len(stride) or min(numbers) < 0 or math.prod(size) > storage.numel:
            raise WeightsError(f"{self._path} is damaged: {key} has no possible shape", "malformed")
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if last >= storage.numel:
            raise WeightsError(
                f"{self._path} is damaged: {key} reaches behind its storage", "malformed"
            )
        return self._storage(storage).as_strided(size, stride, offset)

    def _storage(self, storage: _Storage) -> Tensor:
        if storage.key not in self._storages:
            data = bytearray(self._read(storage))
            self._storages[storage.key] = torch.frombuffer(data, dtype=storage.dtype)
        return self._storages[storage.key]
