r"""Key maps: tables of how the keys of a published file correspond to medvl's, which read both ways.

    keep("img_encoder.model.**", "image_encoder.backbone.**")
    keep("blocks.*.attention.self.query.*", "blocks.*.attn.qkv.*", part=(0, 3))   # a third of a fused matrix
    drop("**.position_ids", "a counter that older transformers stored")

`*` stands for one component of a key, `**` for all that follows; what the stars of one side match goes to those of the
other side in order. The first line of a table that fits a key decides.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Change = Literal["as it is", "transposed", "flattened", "scalar", "of width 1"]
Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by key."""
_NORMS = {"gamma": "weight", "beta": "bias"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a table."""

    theirs: str
    ours: str | None
    """None: left out."""
    why: str = ""
    """It is left out."""
    change: Change = "as it is"
    part: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n pieces, stacked along the first axis, of the tensor on our side."""
    copy_of: str | None = None
    """The key of the same file that it must be equal to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Zeros:
    """A tensor of ours that the published system does not have, and that changes nothing when it is zero."""

    ours: str
    why: str


def keep(theirs: str, ours: str, *, part: tuple[int, int] = (0, 1), change: Change = "as it is") -> Line:
    """The tensors of these keys are loaded."""
    return Line(theirs=theirs, ours=ours, part=part, change=change)


def drop(theirs: str, why: str) -> Line:
    """The tensors of these keys are left out, for a reason."""
    return Line(theirs=theirs, ours=None, why=why)


def same(theirs: str, as_theirs: str) -> Line:
    """The tensors of these keys are stored twice: they must be equal to those of another key, and are left out."""
    return Line(theirs=theirs, ours=None, why=f"stored twice, the same as {as_theirs}", copy_of=as_theirs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """What a table makes of a file."""

    tensors: Mapping[str, Tensor]
    """By our names."""
    sources: Mapping[str, Sequence[str]]
    """Our name -> the keys that it was made of."""
    left_out: Mapping[str, str]
    """Key -> why."""
    problems: Sequence[str]
    """What does not fit the table, in words: keys that no line speaks of, pieces that are missing, ..."""

    @property
    def shapes(self) -> Shapes:
        """Of the tensors, by our names."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def to_ours(tensors: Mapping[str, Tensor], table: Sequence[Line]) -> Mapped:
    """A file's tensors by our names.

    The `module.` of a parallel wrapper is taken off every key. Old conversions from TensorFlow call a layer norm's
    weight `gamma` and its bias `beta`; they are renamed.
    """
    tensors = dict(zip(_modern(list(tensors)), tensors.values(), strict=True))
    pieces: dict[str, dict[tuple[int, int], tuple[str, Tensor]]] = {}
    left_out: dict[str, str] = {}
    unknown, problems = [], []
    for key, tensor in tensors.items():
        line, stars = _find(key, table)
        if line is None:
            unknown.append(key)
        elif line.ours is None:
            left_out[key] = line.why
            problems += _compare_copy(key, stars, line, tensors)
        else:
            name = _fill(line.ours, stars)
            group = pieces.setdefault(name, {})
            if line.part in group:
                problems.append(f"{key} and {group[line.part][0]} both are {name}")
            group[line.part] = (key, _change(tensor, line.change))
    problems += [f"unexpected {key}" for key in unknown]
    found: dict[str, Tensor] = {}
    for name, group in pieces.items():
        count = next(iter(group))[1]
        wanted = [(index, count) for index in range(count)]
        if sorted(group) != wanted:
            problems.append(f"{name} needs {count} pieces, found {', '.join(key for key, _ in group.values())}")
        else:
            found[name] = _join([group[part][1] for part in wanted])
    sources = {name: [key for key, _ in group.values()] for name, group in pieces.items()}
    return Mapped(tensors=found, sources=sources, left_out=left_out, problems=problems)


def to_theirs(tensors: Mapping[str, Tensor], table: Sequence[Line]) -> tuple[dict[str, Tensor], list[str]]:
    """(our tensors by the keys of the published layout, our names that the table has no line for)."""
    found: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        lines = [(line, stars) for line in table if line.ours is not None and (stars := _match(name, line.ours))]
        if not lines:
            unknown.append(name)
        first = lines[0][0].ours if lines else None
        for line, stars in lines:
            if line.ours == first:  # all pieces of one tensor
                piece = tensor.chunk(line.part[1])[line.part[0]] if line.part[1] > 1 else tensor
                found[_fill(line.theirs, stars.groups())] = _change(piece, line.change).contiguous()
    return found, unknown


def explained(keys: Sequence[str], table: Sequence[Line]) -> int:
    """How many of these keys a table has a line for."""
    return sum(_find(key, table)[0] is not None for key in _modern(keys))


def _find(key: str, table: Sequence[Line]) -> tuple[Line | None, Sequence[str]]:
    for line in table:
        found = _match(key, line.theirs)
        if found is not None:
            return line, found.groups()
    return None, ()


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = [{"*": "([^.]+)", "**": "(.+)"}.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", template)]
    return re.compile("".join(parts))


def _match(key: str, template: str) -> re.Match[str] | None:
    return _pattern(template).fullmatch(key)


def _fill(template: str, stars: Sequence[str]) -> str:
    """A template with its stars replaced in order; stars that are left over, as of `drop`, go nowhere."""
    remaining = iter(stars)
    return re.sub(r"\*\*|\*", lambda _: next(remaining), template)


def _modern(keys: Sequence[str]) -> list[str]:
    """Keys without a parallel wrapper, and with the layer norms' names of today."""
    wrapped = all(key.startswith("module.") for key in keys)
    bare = [key.removeprefix("module.") if wrapped else key for key in keys]
    return [re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda found: _NORMS[found[1]], key) for key in bare]


def _change(tensor: Tensor, change: Change) -> Tensor:
    if change == "transposed":
        return tensor.T
    if change == "of width 1":  # a convolution that is a linear layer
        return tensor.flatten(1)
    if change == "scalar" and tensor.numel() == 1:
        return tensor.reshape(())
    return tensor.flatten() if change == "flattened" else tensor


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _compare_copy(key: str, stars: Sequence[str], line: Line, tensors: Mapping[str, Tensor]) -> list[str]:
    if line.copy_of is None:
        return []
    original = _fill(line.copy_of, stars)
    other, tensor = tensors.get(original), tensors[key]
    if other is None:
        return [f"missing {original}, which {key} is a copy of"]
    equal = tensor.shape == other.shape and (tensor.is_meta or torch.equal(tensor, other))
    return [] if equal else [f"{key} is not equal to {original}"]
