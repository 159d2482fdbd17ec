"""Pretrained weights: locate, read and load them strictly.

A file is safetensors or of `torch.save` (`medvl.encoders.weight_files`); pickled objects are never
run. Every key of the file is either loaded or ignored by an explicit rule, and every tensor of the
encoder is filled.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from medvl.common.files import sha256
from medvl.common.hub import fetch
from medvl.encoders.published_weights import Weights, Wheel
from medvl.encoders.weight_files import (
    CANDIDATES,
    copies,
    file_in_folder,
    listed_parts,
    read_weight_file,
    several_sets,
)
from medvl.errors import ConfigError, MedvlError, WeightsError

_LOG = logging.getLogger(__name__)
_MAX_NAMES = 5
_MAX_WRAPPERS = 4
_MAX_BLOCKS = 100
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
_HUB = re.compile(r"(?P<hub_id>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)(?::(?P<filename>[\w./-]+))?")
CLIP_SCALARS = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""Scalars of a CLIP file that belong to neither encoder."""
CLIP_TEXT_PARTS = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.")
"""Key prefixes of the text Transformer of a CLIP file."""
_OWN_FILE = (
    "give a file, a folder, or 'OWNER/NAME@COMMIT' for a repository on the hub: as `pretrained` of "
    "an encoder, as `image_weights` or `text_weights` of a system"
)
_INSTALL = "`pip install 'medvl[weights]'`"
_SET = "#"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Pretrained = bool | str | Path
"""Source of the weights.

False: random weights, without network access.
True: the preset's published file, pinned by hash in an installed wheel (`medvl[weights]`), else by
commit and hash on the hub; torchvision's default weights, pinned by hash; the file in the folder,
where the encoder's name is a local folder.
A path: a file (safetensors or of `torch.save`), a folder with one, or the index of a file in parts.
`OWNER/NAME@COMMIT[:FILE]`: a file of the Hugging Face hub. With `#NAME` at its end, a path or
address names one of several sets of weights in the file: `last.ckpt#teacher`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """Rules that map the keys of a file to the parameter names of an encoder."""

    layouts: Sequence[Sequence[tuple[str, str]]]
    """Alternatives, each a list of (prefix in the file, prefix in the encoder). The first one whose
    first prefix occurs in the file is used.
    """
    ignored_keys: Sequence[str] = ()
    """Prefixes of keys in the file that are not loaded."""
    ignored_names: Sequence[str] = ()
    """Prefixes of mapped names that are not loaded."""

    def count_fitting(self, keys: Sequence[str], names: Container[str]) -> int:
        """Return how many of the keys have a rule that leads to one of the names, or ignores
        them by it.
        """
        nothing = torch.empty(0)
        mapped, ignored, _ = self.apply(dict.fromkeys(keys, nothing))
        return sum(name in names for name in mapped) + len(ignored)

    def apply(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """Return (tensors by the encoder's names, ignored keys, keys without a rule)."""
        layout = next(
            (
                pairs
                for pairs in self.layouts
                if any(key.startswith(pairs[0][0]) for key in tensors)
            ),
            (),
        )
        mapped: dict[str, Tensor] = {}
        ignored = []
        unknown = []
        for key, tensor in tensors.items():
            pair = next((pair for pair in layout if key.startswith(pair[0])), None)
            name = None if pair is None else pair[1] + key.removeprefix(pair[0])
            is_ignored_name = name is not None and name.startswith(tuple(self.ignored_names))
            if is_ignored_name or key.startswith(tuple(self.ignored_keys)):
                ignored.append(key)
            elif name is None:
                unknown.append(key)
            else:
                mapped[name] = tensor
        return mapped, ignored, unknown


def weights_sha256(module: nn.Module, settings: Mapping[str, Any]) -> str:
    """Return the hash of a module's tensors and of its settings (JSON values)."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def read_url(url: str) -> dict[str, Tensor]:
    """Download tensors from a URL whose file name contains the beginning of its sha256, as
    torchvision's do.

    Raises:
        WeightsError: "not_found" if the download fails or the hash differs.
    """
    try:
        tensors: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", check_hash=True, weights_only=True, progress=False
        )
    except (URLError, OSError, RuntimeError) as error:
        raise WeightsError(
            f"{url} cannot be downloaded ({error}): {_OWN_FILE}", "not_found"
        ) from error
    return tensors


def split_set(source: Pretrained) -> tuple[str, str | None]:
    """Return a path or address without `#NAME` at its end, and that name of a set of weights;
    None without one.
    """
    name, mark, weights = str(source).rpartition(_SET)
    return (
        (name, weights) if mark and name and not Path(str(source)).exists() else (str(source), None)
    )


def with_set(source: Pretrained, weights: str | None) -> Pretrained:
    """Return a source that names a set of weights in its file: `FILE#weights`; without `weights`,
    as it is.

    Raises:
        ConfigError: "conflict" if the source is no file, or names another set.
    """
    if weights is None:
        return source
    if isinstance(source, bool):
        message = "weights names a set of weights in a file; give the file as pretrained"
        raise ConfigError(message, "conflict", field="weights")
    if split_set(source)[1] is not None:
        raise ConfigError(
            f"{source} names a set of weights already; leave weights out",
            "conflict",
            field="weights",
        )
    return f"{source}{_SET}{weights}"


def hub_address(source: Pretrained | None) -> tuple[str, str] | None:
    """Return (repository, commit) of weights on the hub; None for all other sources."""
    name = "" if source is None else split_set(source)[0]
    match = None if Path(name).exists() else _HUB.fullmatch(name)
    return None if match is None else (match["hub_id"], match["revision"])


def installed_file(published: Weights | None) -> Path | None:
    """Return the published file in an installed wheel; None without the wheel.

    A file of another hash is left out with a warning.
    """
    wheel = None if published is None else published.wheel
    if wheel is None:
        return None
    try:
        path = Path(str(metadata.distribution(wheel.package).locate_file(wheel.path)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() and _is_pinned(path, wheel) else None


@functools.cache
def _is_pinned(path: Path, wheel: Wheel) -> bool:
    digest = sha256(path)
    if digest != wheel.sha256:
        message = "%s of the package %s is not used: expected sha256 %s, got %s"
        _LOG.warning(message, path, wheel.package, wheel.sha256, digest)
    return digest == wheel.sha256


def locate_weights(
    name: str, pretrained: Pretrained, published: Weights | None, note: str = ""
) -> Path:
    """Return the local weights file that `pretrained` selects for encoder `name`, downloaded from
    the hub if needed.

    Args:
        name: name of the encoder, for messages.
        pretrained: see `Pretrained`; not False. The name of a set at its end is left out.
        published: the preset's file, for `pretrained=True`.
        note: hint for the message if there is no published file.

    Raises:
        WeightsError: "not_found" if there is no such file, "out_of_range" if `pretrained` has none
            of the known forms.
    """
    if pretrained is True:
        if published is None:
            reason = f"{name} has no pinned published weights{': ' + note if note else ''}"
            raise WeightsError(f"{reason}; {_OWN_FILE}", "not_found", field="pretrained")
        return installed_file(published) or _fetch(published)
    source, _ = split_set(pretrained)
    match = None if Path(source).exists() else _HUB.fullmatch(source)
    if match is None and (Path(source).exists() or source.endswith(_SUFFIXES)):
        return _local(Path(source), published)
    if match is None:
        message = (
            f"expected a file, a folder or OWNER/NAME@COMMIT[:FILE] with a commit, got {source!r}"
        )
        raise WeightsError(message, "out_of_range", field="pretrained")
    filenames = [match["filename"]] if match["filename"] else CANDIDATES
    failures = []
    for filename in filenames:
        try:
            path = fetch(match["hub_id"], filename, match["revision"])
        except WeightsError as error:
            failures.append(error)
        else:
            for part in listed_parts(path):
                fetch(match["hub_id"], str(Path(filename).parent / part), match["revision"])
            return path
    raise failures[0]


def _fetch(published: Weights) -> Path:
    try:
        return fetch(
            str(published.hub_id),
            published.filename,
            published.revision,
            sha256=published.sha256,
        )
    except WeightsError as error:
        if published.wheel is None:
            raise
        raise WeightsError(f"{error}, or {_INSTALL}", error.code) from error


def _local(path: Path, published: Weights | None) -> Path:
    if published is not None and (path / published.filename).is_file():
        return path / published.filename
    if not path.exists():
        message = f"{path} does not exist: pass a weights file or its folder"
        raise WeightsError(message, "not_found", field="pretrained")
    return file_in_folder(path)


def read_source(
    name: str, pretrained: Pretrained, published: Weights | None, note: str = ""
) -> tuple[str, dict[str, Tensor]]:
    """Return the source of the weights that `pretrained` selects, for messages, and its tensors.

    Arguments as of `locate_weights`, errors as of it, of `read_url` and of `read_tensors`.
    """
    address = None if published is None or pretrained is not True else published.url
    if address is not None and installed_file(published) is None:
        try:
            return address, read_url(address)
        except WeightsError as error:
            raise WeightsError(f"{error}, or {_INSTALL}", error.code) from error
    path = locate_weights(name, pretrained, published, note)
    weights = split_set(pretrained)[1]
    return str(with_set(str(path), weights)), read_tensors(path, weights)


def read_tensors(path: Path, weights: str | None = None) -> dict[str, Tensor]:
    """Read the weights of a file to the CPU, by key.

    Args:
        path: a file, a folder with one, or the index of a file in parts.
        weights: name of a set of weights, where the file has several
            (`medvl.encoders.weight_files`).

    Raises:
        WeightsError: the file is missing, damaged or no file of weights, or has several sets or not
            that one.
    """
    return dict(read_weight_file(path, weights=weights).tensors)


def fitting_keys(
    tensors: Mapping[str, Tensor], fitting: Callable[[Sequence[str]], int]
) -> dict[str, Tensor]:
    """Return tensors without the prefixes that wrappers put before their keys, where more keys fit
    the model then.

    `_orig_mod.` of `torch.compile` and `module.` of parallel wrappers are removed anywhere in a
    key, and others that all keys have, such as Lightning's `model.`. `fitting` returns how many of
    some keys fit.
    """
    keys = list(tensors)
    plain = [key.replace("_orig_mod.", "") for key in keys]
    without_module = [re.sub(r"(?<![^./])module\.", "", key) for key in plain]
    best = keys
    most = fitting(keys)
    for candidate in (plain, without_module):
        for _ in range(_MAX_WRAPPERS):
            if len(set(candidate)) == len(keys) and (count := fitting(candidate)) > most:
                best = candidate
                most = count
            firsts = {key.partition(".")[0] for key in candidate}
            if len(firsts) != 1 or not all("." in key for key in candidate):
                break
            candidate = [key.partition(".")[2] for key in candidate]
    return dict(zip(best, tensors.values(), strict=True))


def check_values(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str
) -> None:
    """Compare the values of tensors with what those of the same names can hold.

    Raises:
        WeightsError: "unsupported" if integers stand for floats, as in quantised weights;
            "nonfinite" if a value is NaN or infinite, or beyond the range of the expected dtype.
    """
    floats = {
        key: tensor
        for key, tensor in tensors.items()
        if key in expected and expected[key].is_floating_point()
    }
    quantised = [f"{key} ({str(tensor.dtype).removeprefix('torch.')})" for key,
        tensor in floats.items()
                 if tensor.dtype not in _FLOATS]  # fmt: skip
    if quantised:
        message = (
            f"{source} has quantised weights: {_first(quantised)}; save them as float16 or float32"
        )
        raise WeightsError(message, "unsupported")
    check_finite({key: tensor.to(expected[key].dtype) for key, tensor in floats.items()}, source)


def check_finite(
    tensors: Mapping[str, Tensor], source: str, error: type[MedvlError] = WeightsError
) -> None:
    """Raise `error` with the code "nonfinite" and their names if tensors have NaN or infinite
    values.
    """
    wrong = [
        key
        for key, tensor in tensors.items()
        if tensor.is_floating_point() and not _is_finite(tensor)
    ]
    if wrong:
        message = (
            f"{source} has NaN or infinite values in {len(wrong)} of {len(tensors)} "
            f"tensors: {_first(wrong)}"
        )
        raise error(f"{message}; take an earlier checkpoint, or get the file again", "nonfinite")


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(tensor.isfinite().all())


def load_strictly(
    module: nn.Module, tensors: Mapping[str, Tensor], keys: KeyMap, source: str
) -> None:
    """Load `tensors` into every parameter and buffer of `module`, cast to their dtypes.

    The prefixes of wrappers are removed (`fitting_keys`). `num_batches_tracked` of batch norms may
    be missing (old files lack it). The `gamma` and `beta` of layer norms in old TensorFlow
    conversions are renamed to `weight` and `bias`.

    Args:
        module: the module to fill; unchanged if an error is raised.
        tensors: the file's content.
        keys: rules that map its keys.
        source: path or URL, for messages.

    Raises:
        WeightsError: "mismatch" if a tensor is missing, unexpected or of another shape; the message
            names the first. "conflict" if the file has several sets of weights. "unsupported",
            "nonfinite": see `check_values`.
    """
    state = module.state_dict()
    tensors = {_rename_layer_norm(key): tensor for key, tensor in tensors.items()}
    tensors = fitting_keys(tensors, lambda names: keys.count_fitting(names, state))
    mapped, ignored, unknown = keys.apply(tensors)
    counters = {key: tensor for key, tensor in state.items() if key.endswith("num_batches_tracked")}
    mapped = counters | mapped
    shapes = [
        f"{key} is {tuple(mapped[key].shape)}, expected {tuple(state[key].shape)}"
        for key in state
        if key in mapped and mapped[key].shape != state[key].shape
    ]
    differences = {
        "missing": [key for key in state if key not in mapped],
        "unexpected": [*(key for key in mapped if key not in state), *unknown],
        "of another shape": shapes,
    }
    if any(differences.values()):
        sets = copies({key: tensor.shape for key, tensor in tensors.items()})
        if sets and not copies({key: tensor.shape for key, tensor in state.items()}):
            raise several_sets(source, sets)
        text = "; ".join(
            f"{len(names)} {kind}: {_first(names)}" for kind, names in differences.items() if names
        )
        message = f"{source} does not fit this encoder: {text}{_advice(tensors, state, source)}"
        raise WeightsError(message, "mismatch")
    check_values(mapped, state, source)
    module.load_state_dict(mapped, strict=True)
    if ignored:
        _LOG.info(
            "%s: %d tensors loaded, %d ignored: %s",
            source,
            len(mapped),
            len(ignored),
            ", ".join(ignored),
        )


def _advice(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> str:
    """Return the advice to choose the prefix below which a file has all tensors of an encoder;
    "" without one.
    """
    names = {name for name in state if not name.endswith("num_batches_tracked")}
    bare = {name.removeprefix("backbone.") for name in names}
    starts = {
        key[: -len(name) - 1]
        for name in sorted(bare)[:1]
        for key in tensors
        if key.endswith(f".{name}")
    }
    prefixes = sorted(
        start for start in starts if all(f"{start}.{name}" in tensors for name in bare)
    )
    if not prefixes:
        return ""
    outer = split_set(source)[1]
    address = prefixes[0] if outer is None else f"{outer}/{prefixes[0]}"
    return f". Its keys under {prefixes[0]} fit: choose them with weights={address!r}"


def _rename_layer_norm(key: str) -> str:
    return (
        re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key))
        if "LayerNorm." in key
        else key
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def unused_blocks(blocks: str, names: Iterable[str]) -> list[str]:
    """Return the prefixes of a published model's blocks above those that a shallower encoder has.

    Args:
        blocks: prefix of the names of numbered blocks, as "encoder.layer.".
        names: names of the encoder's parameters.
    """
    numbers = [
        int(name.removeprefix(blocks).split(".")[0]) for name in names if name.startswith(blocks)
    ]
    return (
        [f"{blocks}{number}." for number in range(max(numbers) + 1, _MAX_BLOCKS)] if numbers else []
    )
