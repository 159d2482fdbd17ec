"""Files of weights: safetensors and files of `torch.save`, one or in parts, by their content
whatever their name.

Pickled objects are never run. A file with several sets of weights (`state_dict` and
`state_dict_ema`, a teacher and a student) is read only where the caller names one: nothing is
chosen in silence. Other files under the name of weights (a Git LFS pointer, a web page, an archive)
are refused with what they are.
"""

import dataclasses
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torch import Tensor

from medvl.common.untrusted import ANYWHERE, read_json
from medvl.encoders.torch_files import MAGIC, Address, Blank, open_torch_file
from medvl.errors import WeightsError

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
CANDIDATES = (
    *("model.safetensors", SAFETENSORS_INDEX, "open_clip_model.safetensors"),
    *("pytorch_model.bin", TORCH_INDEX, "open_clip_pytorch_model.bin"),
)
"""Names of the file of weights in a folder, in the order in which they are looked for."""
TOP = "."
"""Name of the set of weights at the top of a file, beside which there are others."""
_INDEX = ".index.json"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
_HEAD = 1 << 10
_MAX_DEPTH = 5
_MAX_SETS = 200
_SHOWN = 8

_OTHER_FILES: Sequence[tuple[bytes, str]] = (
    (
        b"version https://git-lfs",
        "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository",
    ),
    (
        b"version https://hawser",
        "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository",
    ),
    (
        b"/annex/objects/",
        "is a git-annex pointer, not the weights; run `git annex get` in its repository",
    ),
    (
        b"\x1f\x8b",
        "is compressed with gzip; unpack it with `gunzip`, or `tar -xzf` for a tar archive",
    ),
    (b"BZh", "is compressed with bzip2; unpack it with `bunzip2`, or `tar -xjf` for a tar archive"),
    (b"\xfd7zXZ", "is compressed with xz; unpack it with `unxz`, or `tar -xJf` for a tar archive"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it with `unzstd`"),
    (b"7z\xbc\xaf", "is a 7-Zip archive; unpack it"),
    (b"Rar!", "is a RAR archive; unpack it"),
    (
        b"\x89HDF",
        "is HDF5, as Keras and TensorFlow write; convert it to safetensors where it was written",
    ),
    (b"GGUF", "is GGUF, quantised weights of llama.cpp; get the original safetensors"),
    (b"\x93NUMPY", "is a NumPy array; save a dictionary of tensors as safetensors"),
)
"""First bytes -> what the file is, and what to do."""
_COUNTER = "n_averaged"
_REBUILT = (
    "_rebuild_qtensor",
    "_rebuild_sparse_tensor",
    "_rebuild_tensor_v3",
    "multiarray._reconstruct",
)
"""Functions of pickles that make quantised and sparse tensors, 8-bit numbers and NumPy arrays."""
_WEB_PAGE = re.compile(rb"\s*(<!doctype|<html|<head|<\?xml|<error|<body)", re.IGNORECASE)
_NO_WEIGHTS = re.compile(
    r"optim|sched|scaler|rng|random|hyper|hparam|metric|loss|criterion|"
    r"(^|_)(amp|args?|cfg|conf|config|configs|grads?|gradients?|queue)$",
    re.IGNORECASE,
)
"""Names of entries of a checkpoint that hold tensors but no weights of a model."""
_COPY_WORDS = frozenset(
    {
        "ema",
        "teacher",
        "momentum",
        "target",
        "averaged",
        "average",
        "avg",
        "swa",
        "shadow",
        "slow",
        "polyak",
        "k",
        "m",
        "key",
        "mean",
    }
)
"""Words in the name of a module that is a copy of another one: an average, a teacher, a momentum
encoder.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """The content of a file of weights."""

    tensors: Mapping[str, Tensor]
    """On the CPU, in the file's dtypes. Tensors that share storage in the file share it here."""
    weights: str = TOP
    """Name of the set that was read."""
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Entry of the file that was not read -> why."""
    blanks: Sequence[str] = ()
    """Types of the skipped objects, sorted."""


def read_weight_file(
    path: Path, *, weights: str | None = None, parts: Sequence[str] = ()
) -> WeightFile:
    """Read the weights of a file, of a folder with one, or of the parts that an index
    (`.index.json`) lists.

    Args:
        path: path of the file, folder or index.
        weights: name of a set of weights, where the file has several: a dictionary in it
            (`state_dict_ema`, `ema/state_dict`), or the prefix of its keys without the last dot
            (`teacher`), which is then removed.
        parts: names of state dicts that the file holds side by side and that are read together;
            their keys are then `part/key`.

    Raises WeightsError if the file is missing or damaged ("not_found", "malformed"), is no file of
    weights ("unsupported"), or has several sets ("conflict") or not that set ("unknown_name"), with
    their names.
    """
    path = file_in_folder(path)
    if path.name.endswith(_INDEX):
        content: Any = _read_parts(path)
        return _chosen(content, lambda value, _: value, path, weights, parts, ())
    part = _PART.fullmatch(path.name)
    if part is not None and int(part["count"]) > 1:
        index = f"{part['stem']}{part['suffix']}{_INDEX}"
        message = (
            f"{path} is part {int(part['number'])} of {int(part['count'])}; give the "
            f"index of all, {index}"
        )
        raise WeightsError(message, "unsupported")
    return _read_one(path, weights, parts)


def file_in_folder(path: Path) -> Path:
    """Return the file of weights in a folder; other paths as they are.

    Raises WeightsError "not_found" for a folder without one.
    """
    if not path.is_dir():
        return path
    candidate = next((path / name for name in CANDIDATES if (path / name).is_file()), None)
    if candidate is not None:
        return candidate
    if any(path.glob("*.distcp")):
        advice = (
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save joins them into a file"
        )
        raise WeightsError(
            f"{path} is a checkpoint in parts of torch.distributed: {advice}", "unsupported"
        )
    message = (
        f"{path} is a folder without {', '.join(CANDIDATES)}: give the file in it that "
        f"holds the weights"
    )
    raise WeightsError(message, "not_found", field="pretrained")


def _read_one(path: Path, weights: str | None, parts: Sequence[str]) -> WeightFile:
    try:
        file = ANYWHERE.open(path, WeightsError)
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist: give a file of weights or its folder", "not_found"
        ) from None
    with file:
        kind = _kind(file, path)
        if kind == "safetensors":
            return _chosen(
                _read_safetensors(path), lambda value, _: value, path, weights, parts, ()
            )
        with open_torch_file(file, path, zipped=kind == "zip") as checkpoint:
            return _chosen(
                checkpoint.content, checkpoint.tensor, path, weights, parts, checkpoint.blanks
            )


def _kind(file: BinaryIO, path: Path) -> Literal["safetensors", "zip", "legacy"]:
    """Return the format of an open file by its content. Raises WeightsError for what is no file
    of weights.
    """
    head = file.read(_HEAD)
    size = file.seek(0, 2)
    file.seek(0)
    if not head:
        raise WeightsError(
            f"{path} is empty: its download or copy failed, get it again", "malformed"
        )
    if not head.strip(b"\0") and size > _HEAD:
        raise WeightsError(
            f"{path} begins with zeros: its download did not finish, get it again", "malformed"
        )
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for start, what in _OTHER_FILES:
        if head.startswith(start) or text.startswith(start):
            raise WeightsError(f"{path} {what}", "unsupported")
    if _WEB_PAGE.match(text):
        message = (
            f"{path} is a web page or the error of a server, not weights; download the "
            f"file itself, logged in"
        )
        raise WeightsError(f"{message} where that is needed", "unsupported")
    if head.startswith(b"PK") or _is_archive(file):
        return "zip"
    if head[:1] == b"\x80" and MAGIC in head:
        return "legacy"
    header = int.from_bytes(head[:8], "little")
    if path.suffix == ".safetensors" or (head[8:9] == b"{" and header < size):
        return "safetensors"
    if head[:1] == b"\x80":
        message = (
            f"{path} is a pickle that torch.save did not write; save a dictionary of "
            f"tensors as safetensors"
        )
        raise WeightsError(message, "unsupported")
    if text[:1] in (b"{", b"["):
        message = (
            f"{path} is JSON, not weights; give the file beside it, or "
            f"{SAFETENSORS_INDEX} for weights in parts"
        )
        raise WeightsError(message, "unsupported")
    if head[257:262] == b"ustar":
        raise WeightsError(
            f"{path} is a tar archive; unpack it with `tar -xf` and give a file in it",
            "unsupported",
        )
    message = (
        f"{path} is neither safetensors nor a file of torch.save, or its beginning is "
        f"damaged: get it again"
    )
    raise WeightsError(message, "malformed")


def _is_archive(file: BinaryIO) -> bool:
    """Return whether a file is a zip archive behind other bytes."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # its end is damaged
        return True
    finally:
        file.seek(0)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    import safetensors
    import safetensors.torch

    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        message = f"{path} is damaged or not a safetensors file ({error}): copy it again"
        raise WeightsError(message, "malformed") from error
    return tensors


def listed_parts(index: Path) -> list[str]:
    """Return the names of the files that an index of weights in parts lists; [] for another file.

    Raises WeightsError "malformed" if it is damaged, or lists anything but files beside it.
    """
    return sorted(set(_weight_map(index).values())) if index.name.endswith(_INDEX) else []


def _weight_map(index: Path) -> dict[str, str]:
    try:
        file_of: dict[str, str] = read_json(index, WeightsError)["weight_map"]
        names = set(file_of.values())
    except FileNotFoundError:
        raise WeightsError(f"{index} does not exist", "not_found") from None
    except (KeyError, TypeError, AttributeError):
        message = f"{index} is no index of weights: expected an object weight_map, key -> file"
        raise WeightsError(message, "malformed") from None
    wrong = next(
        (name for name in names if not isinstance(name, str) or Path(name).name != name), None
    )
    if wrong is not None:
        raise WeightsError(f"{index} lists {wrong!r}, which is no file beside it", "malformed")
    return file_of


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Read the tensors of all parts that an index lists, which must be files beside it with
    exactly its keys.
    """
    file_of = _weight_map(index)
    files = listed_parts(index)
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        message = (
            f"{index} lists {_first(missing)}, which {index.parent} lacks: download all "
            f"{len(files)} parts"
        )
        raise WeightsError(message, "not_found")
    tensors: dict[str, Tensor] = {}
    for name in files:
        part = _read_one(index.parent / name, None, ()).tensors
        keys = {key for key, file in file_of.items() if file == name}
        if part.keys() != keys:
            different = _first(sorted(part.keys() ^ keys))
            message = (
                f"{index.parent / name} differs from {index.name} in {different}: "
                f"download both again"
            )
            raise WeightsError(message, "mismatch")
        tensors |= part
    return tensors


def _chosen(
    content: Any,
    tensor: Callable[[Any, str], Tensor],
    path: Path,
    weights: str | None,
    parts: Sequence[str],
    blanks: Sequence[str],
) -> WeightFile:
    """Return the tensors of one set of weights of a file's content."""
    if (
        parts
        and isinstance(content, dict)
        and all(isinstance(content.get(part), dict) for part in parts)
    ):
        if weights is not None:
            message = f"{path} has {', '.join(parts)}, which are read together; leave weights out"
            raise WeightsError(message, "conflict", field="weights")
        sets = [key for key in content if key not in parts and find_sets({key: content[key]})]
        if any(_COPY_WORDS & set(str(key).lower().split("_")) for key in sets):
            message = f"{path} has several sets of weights: {', '.join(parts)} and {_first(sets)}"
            raise WeightsError(
                f"{message}; keep one of each in the file", "conflict", field="weights"
            )
        entries = {f"{part}/{key}": value for part in parts for key, value in content[part].items()}
        name = TOP
        beside = {key: _why(key, value) for key, value in content.items() if key not in parts}
    else:
        name, prefix = _choose(content, path, weights)
        entries, beside = _entries(content, name)
        if prefix:
            start = f"{prefix}."
            beside |= {
                key: f"not among the weights {prefix}"
                for key in entries
                if not str(key).startswith(start)
            }
            entries = {
                key.removeprefix(start): value
                for key, value in entries.items()
                if str(key).startswith(start)
            }
            name = prefix if name == TOP else f"{name}/{prefix}"
    if _COUNTER in entries:
        entries = {key: value for key, value in entries.items() if key != _COUNTER}
        beside[_COUNTER] = "a counter of torch's averages of weights"
    for key, value in entries.items():
        if not isinstance(value, Address | Tensor):
            raise WeightsError(
                f"{path} holds no state dict: {key!r} {_not_tensor(value)}", "mismatch"
            )
    if not entries or not all(isinstance(key, str) for key in entries):
        raise WeightsError(f"{path} holds no state dict: {_no_dict(content)}", "mismatch")
    tensors = {key: tensor(value, key) for key, value in entries.items()}
    return WeightFile(tensors=tensors, weights=name, beside=beside, blanks=blanks)


def _choose(content: Any, path: Path, weights: str | None) -> tuple[str, str]:
    """Return the name of a set in a file's content, and the prefix of the keys in it."""
    sets = find_sets(content)
    if weights is None:
        if len(sets) > 1:
            raise several_sets(path, list(sets))
        return next(iter(sets), TOP), ""
    address = weights.replace("\\", "/").strip("/")
    if address == TOP in sets:
        return TOP, ""
    below = [name for name in sets if name == address] or [
        name for name in sets if name.startswith(f"{address}/")
    ]
    if len(below) == 1:
        return below[0], ""
    for name, entries in sets.items():
        prefix = address.removeprefix(f"{name}/")
        if (len(sets) == 1 or prefix != address) and any(
            str(key).startswith(f"{prefix}.") for key in entries
        ):
            return name, prefix
    names = [*(name for name in sets if name != TOP), *(_prefixes(sets) if len(sets) == 1 else ())]
    message = (
        f"{path} has no weights {weights!r}; it has {_first(names) or 'one set without a name'}"
    )
    raise WeightsError(message, "unknown_name", field="weights")


def several_sets(source: Path | str, names: Sequence[str]) -> WeightsError:
    """Return the error for weights that the caller has to choose from."""
    message = f"{source} has several sets of weights: {_first(names)}"
    return WeightsError(
        f"{message}; choose one by its name, such as weights={names[0]!r}",
        "conflict",
        field="weights",
    )


def find_sets(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return the sets of weights in the content of a file: path of the dictionary -> its entries.

    Dictionaries in dictionaries and lists are looked at; the name of the top is `.`. The state of
    an optimizer, random numbers, losses and settings are left out, and so are dictionaries of
    vectors only beside one with matrices.
    """
    sets: dict[str, Mapping[str, Any]] = {}
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", content)]
    for _ in range(_MAX_DEPTH):
        following: list[tuple[str, Any]] = []
        for name, value in level:
            is_known = id(value) in seen or _NO_WEIGHTS.search(name.rpartition("/")[2]) is not None
            if is_known or not isinstance(value, dict | list) or len(sets) >= _MAX_SETS:
                continue
            seen.add(id(value))
            if isinstance(value, dict) and "param_groups" in value:
                continue
            if isinstance(value, dict) and any(_is_tensor(each) for each in value.values()):
                sets[name] = value
            items = value.items() if isinstance(value, dict) else enumerate(value)
            following += [(f"{name}/{key}" if name else str(key), each) for key, each in items]
        level = following
    sizes = {
        name: sum(_axes(value) > 1 for value in entries.values()) for name, entries in sets.items()
    }
    if any(sizes.values()):
        sets = {name: entries for name, entries in sets.items() if sizes[name]}
    outer = {
        name
        for name in sets
        for other in sets
        if other != name
        and (not name or other.startswith(f"{name}/"))
        and sizes[name] * 2 <= sizes[other]
    }  # a queue or a table beside the weights
    return {name or TOP: entries for name, entries in sets.items() if name not in outer}


def copies(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the prefixes of two modules in one state dict of which one is a copy of the other; []
    without such.

    A name such as `teacher`, `encoder_k` or `model_ema` beside another module with the same keys
    and shapes.
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        components = key.split(".")
        for depth in range(1, min(len(components), 4)):
            # some averages lose the dots
            prefix = ".".join(components[:depth])
            rest = "".join(components[depth:])
            groups.setdefault(prefix, {})[rest] = tuple(shape)
    for prefix, entries in groups.items():
        parent, _, last = prefix.rpartition(".")
        if not _COPY_WORDS & set(last.lower().split("_")):
            continue
        for other, others in groups.items():
            equal = sum(others.get(rest) == shape for rest, shape in entries.items())
            is_large = equal > 1 and 5 * equal >= len(shapes) and 2 * equal >= len(entries)
            if other != prefix and other.rpartition(".")[0] == parent and is_large:
                return [other, prefix]
    return []


def _entries(content: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of the set of that name, and the entries of the file beside it with the
    reason.
    """
    beside: dict[str, str] = {}
    if name == TOP:
        entries = dict(content) if isinstance(content, dict) else {}
        sets = [
            key
            for key, value in entries.items()
            if isinstance(value, dict) and find_sets({key: value})
        ]
        return entries, {key: _why(key, entries.pop(key)) for key in sets}
    place = ""
    rest = name
    while rest:
        items = dict(enumerate(content)) if isinstance(content, list) else content
        key = next(each for each in items if rest == str(each) or rest.startswith(f"{each}/"))
        beside |= {
            f"{place}{other}": _why(other, value) for other, value in items.items() if other != key
        }
        content = items[key]
        place = f"{place}{key}/"
        rest = rest.removeprefix(str(key)).removeprefix("/")
    return (dict(content) if isinstance(content, dict) else {}), beside


def _why(key: Any, value: Any) -> str:
    return (
        "another set of weights"
        if find_sets({key: value}).keys() - {TOP}
        else "no weights of the model"
    )


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or of a kind of tensor or array that is refused by its
    name.
    """
    return isinstance(value, Address | Tensor) or (
        isinstance(value, Blank) and value.kind.endswith(_REBUILT)
    )


def _axes(value: Any) -> int:
    return (
        len(value.size)
        if isinstance(value, Address)
        else value.ndim
        if isinstance(value, Tensor)
        else 0
    )


def _not_tensor(value: Any) -> str:
    if isinstance(value, Blank):
        return f"is no plain tensor but {value.kind or 'an object'}; save it as a float tensor"
    return "is not a tensor"


def _no_dict(content: Any) -> str:
    if isinstance(content, Blank):
        return (
            f"it is a pickled {content.kind or 'object'}; save `model.state_dict()` where "
            f"the class is known"
        )
    return "no dictionary in it holds tensors; save `model.state_dict()`"


def _prefixes(sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the first components of the keys of all sets, behind those that all keys have."""
    keys = [str(key) for entries in sets.values() for key in entries]
    common = ""
    for _ in range(_MAX_DEPTH):
        firsts = list(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key))
        if len(firsts) != 1 or not all("." in key for key in keys):
            break
        common = f"{common}{firsts[0]}."
        keys = [key.partition(".")[2] for key in keys]
    return [f"{common}{first}" for first in firsts]


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
