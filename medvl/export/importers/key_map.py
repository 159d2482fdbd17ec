r"""Tables that map the keys of a published file to medvl's, in both directions.

    keep("img_encoder.model.**", "image_encoder.backbone.**")
    keep("blocks.*.attention.self.query.*", "blocks.*.attn.qkv.*", part=(0, 3))   # a third of a
    fused matrix drop("**.classifier.*", "a downstream head") fixed("**.position_ids", counter, "a
    counter that older transformers stored")  # refused if it has other values

`*` matches one component of a key, `**` one or more; the matches of one side are inserted into the
other side in order. The first rule of a table that matches a key is used.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Change = Literal[
    "none", "transpose", "flatten", "scalar", "conv to linear", "conv1d to linear", "reverse",
    "drop axis", "kernel to linear", "negative",
]  # fmt: skip
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by key."""
_NORMS = {"gamma": "weight", "beta": "bias"}
_TOLERANCE = 2e-3
_TOLERANCE_BFLOAT16 = 2e-2
"""Tolerances of the values of a fixed tensor: float32 sines of a position in the thousands differ
by 1e-3 between machines.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """One rule of a table."""

    source: str
    """Key in the published file, with wildcards."""
    target: str | None
    """Key in medvl, with wildcards; None: the tensor is left out."""
    why: str = ""
    """Reason for leaving it out."""
    change: Change = "none"
    part: tuple[int, int] = (0, 1)
    """(i, n): the tensor is the i-th of n pieces of medvl's tensor, stacked along the first
    axis.
    """
    copy_of: str | None = None
    """Key of the same file that the tensor must be equal to."""
    value: Callable[[Tensor], Tensor] | None = None
    """Function from the tensor to the values that it must have, which medvl computes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroTensor:
    """A medvl tensor that the published system does not have; setting it to zero gives the same
    output.
    """

    name: str
    why: str


def keep(
    source: str, target: str, *, part: tuple[int, int] = (0, 1), change: Change = "none"
) -> KeyRule:
    """Return a rule that loads the tensors of these keys."""
    return KeyRule(source=source, target=target, part=part, change=change)


def drop(source: str, why: str) -> KeyRule:
    """Return a rule that leaves the tensors of these keys out, with a reason."""
    return KeyRule(source=source, target=None, why=why)


def same(source: str, copy_of: str) -> KeyRule:
    """Return a rule for tensors stored twice: they must equal those of another key, and are left
    out.
    """
    return KeyRule(
        source=source, target=None, why=f"stored twice, the same as {copy_of}", copy_of=copy_of
    )


def fixed(source: str, value: Callable[[Tensor], Tensor], why: str) -> KeyRule:
    """Return a rule for tensors that medvl computes: they must have the values of `value`, and
    are left out.
    """
    return KeyRule(source=source, target=None, why=why, value=value)


def counter(tensor: Tensor) -> Tensor:
    """Return 0, 1, 2 ... in the shape of a tensor."""
    return torch.arange(tensor.numel()).reshape(tensor.shape)


def is_close(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether a tensor of a file has the expected values; true on the meta device, which
    has no values.
    """
    if tensor.is_meta:
        return tensor.shape == expected.shape
    tolerance = _TOLERANCE_BFLOAT16 if tensor.dtype == torch.bfloat16 else _TOLERANCE
    if tensor.shape != expected.shape:
        return False
    return torch.allclose(
        tensor.double(), expected.to(tensor.device).double(), rtol=tolerance, atol=tolerance
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensors:
    """A file's tensors after a table was applied."""

    tensors: Mapping[str, Tensor]
    """By medvl's names."""
    sources: Mapping[str, Sequence[str]]
    """medvl name -> keys of the file that it was built from."""
    left_out: Mapping[str, str]
    """Key -> reason."""
    problems: Sequence[str]
    """Mismatches between file and table: keys without a rule, missing pieces, copies that
    differ.
    """

    @property
    def shapes(self) -> Shapes:
        """Shapes of the tensors by medvl's names."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def to_medvl(tensors: Mapping[str, Tensor], table: Sequence[KeyRule]) -> MappedTensors:
    """Rename a file's tensors to medvl's names.

    The `module.` prefix of a parallel wrapper is removed, and `gamma` and `beta` of layer norms
    (old conversions from TensorFlow) become `weight` and `bias`.
    """
    keys = _normalized_keys(list(tensors))
    problems = [
        f"{key} is in the file twice, under an old name too"
        for key, n in Counter(keys).items()
        if n > 1
    ]
    tensors = dict(zip(keys, tensors.values(), strict=True))
    pieces: dict[str, dict[tuple[int, int], tuple[str, Tensor]]] = {}
    left_out: dict[str, str] = {}
    unknown = []
    for key, tensor in tensors.items():
        rule, stars = _first_match(key, table)
        if rule is None:
            unknown.append(key)
        elif rule.target is None:
            left_out[key] = rule.why
            problems += _compare_copy(key, stars, rule, tensors)
            problems += _compare_value(key, rule, tensor)
        else:
            name = _fill(rule.target, stars)
            group = pieces.setdefault(name, {})
            if rule.part in group:
                problems.append(f"{key} and {group[rule.part][0]} both map to {name}")
            group[rule.part] = (key, _change(tensor, rule.change))
    problems += [f"unexpected {key}" for key in unknown]
    joined: dict[str, Tensor] = {}
    for name, group in pieces.items():
        count = next(iter(group))[1]
        expected = [(index, count) for index in range(count)]
        if sorted(group) != expected:
            problems.append(
                f"{name} needs {count} pieces, got {', '.join(key for key, _ in group.values())}"
            )
        elif not _can_be_joined([piece for _, piece in group.values()]):
            shapes = ", ".join(f"{key} {tuple(piece.shape)}" for key, piece in group.values())
            problems.append(f"{name} needs {count} pieces of equal shape, got {shapes}")
        else:
            joined[name] = _join([group[part][1] for part in expected])
    sources = {name: [key for key, _ in group.values()] for name, group in pieces.items()}
    return MappedTensors(tensors=joined, sources=sources, left_out=left_out, problems=problems)


def to_published(
    tensors: Mapping[str, Tensor], table: Sequence[KeyRule]
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename medvl's tensors to the published layout; also return the medvl names that have no
    rule.
    """
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        rules = [
            (rule, stars)
            for rule in table
            if rule.target is not None and (stars := _match(name, rule.target))
        ]
        if not rules:
            unknown.append(name)
        first = rules[0][0].target if rules else None
        for rule, stars in rules:
            if rule.target == first:  # all pieces of one tensor
                piece = tensor.chunk(rule.part[1])[rule.part[0]] if rule.part[1] > 1 else tensor
                renamed[_fill(rule.source, stars.groups())] = _undo(piece, rule.change).contiguous()
    return renamed, unknown


def add_copies(tensors: Mapping[str, Tensor], table: Sequence[KeyRule]) -> dict[str, Tensor]:
    """Return a file's tensors with those that its layout stores twice (`same`)."""
    copies = {}
    for rule in table:
        for key, tensor in tensors.items() if rule.copy_of is not None else ():
            match = _match(key, rule.copy_of or "")
            if match is not None:
                copies[_fill(rule.source, match.groups())] = tensor
    return {**tensors, **copies}


def count_covered(keys: Sequence[str], table: Sequence[KeyRule]) -> int:
    """Return how many of these keys have a rule in the table."""
    pattern = _any_pattern(tuple(rule.source for rule in table))
    return sum(pattern.fullmatch(key) is not None for key in _normalized_keys(keys))


def _first_match(key: str, table: Sequence[KeyRule]) -> tuple[KeyRule | None, Sequence[str]]:
    for rule in table:
        match = _match(key, rule.source)
        if match is not None:
            return rule, match.groups()
    return None, ()


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_expression(template))


@functools.cache
def _any_pattern(templates: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(_expression(template) for template in templates) or "(?!)")


def _expression(template: str) -> str:
    parts = [
        {"*": "([^.]+)", "**": "(.+)"}.get(part, re.escape(part))
        for part in re.split(r"(\*\*|\*)", template)
    ]
    return "".join(parts)


def _match(key: str, template: str) -> re.Match[str] | None:
    return _pattern(template).fullmatch(key)


def _fill(template: str, stars: Sequence[str]) -> str:
    """Replace the wildcards of a template in order; surplus matches are ignored."""
    remaining = iter(stars)
    return re.sub(r"\*\*|\*", lambda _: next(remaining), template)


def without_wrapper(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file without the `module.` prefix of a parallel wrapper."""
    return dict(zip(_bare_keys(list(tensors)), tensors.values(), strict=True))


def _bare_keys(keys: Sequence[str]) -> list[str]:
    wrapped = all(key.startswith("module.") for key in keys)
    return [key.removeprefix("module.") if wrapped else key for key in keys]


def _normalized_keys(keys: Sequence[str]) -> list[str]:
    """Remove a parallel wrapper's prefix, and rename `gamma` and `beta` of layer norms."""
    bare = _bare_keys(keys)
    return [
        re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda match: _NORMS[match[1]], key)
        for key in bare
    ]


def _change(tensor: Tensor, change: Change) -> Tensor:
    if change == "transpose":
        return tensor.T
    # a convolution of width 1 is a linear layer
    if change in ("conv to linear", "conv1d to linear"):
        return tensor.flatten(1) if tensor.ndim > 1 else tensor
    if change == "reverse":  # of two classes
        return tensor.flip(0)
    if change == "kernel to linear" and tensor.ndim == 3:  # a 1-d convolution over all of its input
        return tensor.transpose(1, 2).flatten(1)
    if change == "negative":
        return -tensor.reshape(()) if tensor.numel() == 1 else -tensor
    if change == "drop axis" and tensor.shape[:1] == (1,):
        return tensor[0]
    if change == "scalar" and tensor.numel() == 1:
        return tensor.reshape(())
    return tensor.flatten() if change == "flatten" else tensor


def _undo(tensor: Tensor, change: Change) -> Tensor:
    """Return the published tensor of a medvl tensor; where it is not the same change again, its
    axes are added.
    """
    if change == "conv to linear":
        return tensor[..., None, None]
    return tensor[..., None] if change == "conv1d to linear" else _change(tensor, change)


def _can_be_joined(pieces: Sequence[Tensor]) -> bool:
    return len(pieces) == 1 or (pieces[0].ndim > 0 and len({piece.shape for piece in pieces}) == 1)


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _compare_copy(
    key: str, stars: Sequence[str], rule: KeyRule, tensors: Mapping[str, Tensor]
) -> list[str]:
    if rule.copy_of is None:
        return []
    original = _fill(rule.copy_of, stars)
    other = tensors.get(original)
    tensor = tensors[key]
    if other is None:
        return [f"missing {original}, which {key} is a copy of"]
    equal = tensor.shape == other.shape and (tensor.is_meta or torch.equal(tensor, other))
    return [] if equal else [f"{key} is not equal to {original}"]


def _compare_value(key: str, rule: KeyRule, tensor: Tensor) -> list[str]:
    if rule.value is None or is_close(tensor, rule.value(tensor)):
        return []
    return [f"{key} has other values than the published code computes ({rule.why})"]
