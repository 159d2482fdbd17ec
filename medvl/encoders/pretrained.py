"""Pretrained weights: locate, read and load them strictly.

A file is safetensors, or a checkpoint of nothing but tensors in nested dictionaries: pickled objects are never run.
Every key of the file is either loaded or ignored by an explicit rule, and every tensor of the encoder is filled.
"""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import Tensor, nn

from medvl.common.hub import fetch
from medvl.encoders.presets import Weights
from medvl.errors import WeightsError

_LOG = logging.getLogger(__name__)
_MAX_NAMES = 5
_MAX_BLOCKS = 100
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
_HUB = re.compile(r"(?P<hub_id>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)(?::(?P<filename>[\w./-]+))?")
_CANDIDATES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
CLIP_SCALARS = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""Scalars of a CLIP file that belong to neither encoder."""
CLIP_TEXT_PARTS = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.")
"""Key prefixes of the text Transformer of a CLIP file."""
_OWN_FILE = (
    "give a file, a folder, or 'OWNER/NAME@COMMIT' for a repository on the hub: as `pretrained` of an encoder, as "
    "`image_weights` or `text_weights` of a system"
)
_WRAPPERS = ("state_dict", "model", "model_state_dict")

Pretrained = bool | str | Path
"""Source of the weights.

False: random weights, without network access.
True: the preset's published file, pinned by commit and hash; torchvision's default weights, pinned by hash; the file in
the folder, where the encoder's name is a local folder.
A path: a file (safetensors, or a checkpoint of nothing but tensors), or a folder with one.
`OWNER/NAME@COMMIT[:FILE]`: a file of the Hugging Face hub.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """Rules that map the keys of a file to the parameter names of an encoder."""

    layouts: Sequence[Sequence[tuple[str, str]]]
    """Alternatives, each a list of (prefix in the file, prefix in the encoder). The first one whose first prefix occurs
    in the file is used. A `module.` before every key is removed first."""
    ignored_keys: Sequence[str] = ()
    """Prefixes of keys in the file that are not loaded."""
    ignored_names: Sequence[str] = ()
    """Prefixes of mapped names that are not loaded."""

    def apply(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """Return (tensors by the encoder's names, ignored keys, keys without a rule)."""
        if all(key.startswith("module.") for key in tensors):
            tensors = {key.removeprefix("module."): tensor for key, tensor in tensors.items()}
        layout = next((pairs for pairs in self.layouts if any(key.startswith(pairs[0][0]) for key in tensors)), ())
        mapped: dict[str, Tensor] = {}
        ignored, unknown = [], []
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
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_url(url: str) -> dict[str, Tensor]:
    """Download tensors from a URL whose file name contains the beginning of its sha256, as torchvision's do.

    Raises:
        WeightsError: "not_found" if the download fails or the hash differs.
    """
    try:
        tensors: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", check_hash=True, weights_only=True, progress=False
        )
    except (URLError, OSError, RuntimeError) as error:
        raise WeightsError(f"{url} cannot be downloaded ({error}): {_OWN_FILE}", "not_found") from error
    return tensors


def hub_address(source: Pretrained | None) -> tuple[str, str] | None:
    """Return (repository, commit) of weights on the hub; None for all other sources."""
    match = None if source is None or Path(str(source)).exists() else _HUB.fullmatch(str(source))
    return None if match is None else (match["hub_id"], match["revision"])


def locate_weights(name: str, pretrained: Pretrained, published: Weights | None, note: str = "") -> Path:
    """Return the local weights file that `pretrained` selects for encoder `name`, downloaded from the hub if needed.

    Args:
        name: name of the encoder, for messages.
        pretrained: see `Pretrained`; not False.
        published: the preset's file, for `pretrained=True`.
        note: hint for the message if there is no published file.

    Raises:
        WeightsError: "not_found" if there is no such file, "out_of_range" if `pretrained` has none of the known forms.
    """
    if pretrained is True:
        if published is None:
            reason = f"{name} has no pinned published weights{': ' + note if note else ''}"
            raise WeightsError(f"{reason}; {_OWN_FILE}", "not_found", field="pretrained")
        return fetch(published.hub_id, published.filename, published.revision, sha256=published.sha256)
    source = str(pretrained)
    match = None if Path(source).exists() else _HUB.fullmatch(source)
    if match is None and (Path(source).exists() or source.endswith(_SUFFIXES)):
        return _local(Path(source), published)
    if match is None:
        message = f"expected a file, a folder or OWNER/NAME@COMMIT[:FILE] with a commit, got {source!r}"
        raise WeightsError(message, "out_of_range", field="pretrained")
    filenames = [match["filename"]] if match["filename"] else _CANDIDATES
    failures = []
    for filename in filenames:
        try:
            return fetch(match["hub_id"], filename, match["revision"])
        except WeightsError as error:
            failures.append(error)
    raise failures[0]


def _local(path: Path, published: Weights | None) -> Path:
    if path.is_file():
        return path
    filenames = [*([published.filename] if published else []), *_CANDIDATES]
    for filename in filenames:
        if (path / filename).is_file():
            return path / filename
    if path.is_dir():
        raise WeightsError(f"{path} contains none of {', '.join(filenames)}", "not_found", field="pretrained")
    raise WeightsError(f"{path} does not exist: pass a weights file or its folder", "not_found", field="pretrained")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a weights file to the CPU, by key.

    Raises:
        WeightsError: "malformed" if the file is damaged, contains anything but tensors, or needs pickle to be read.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a hostile or damaged file can raise anything
        reason = f"{type(error).__name__}: damaged, or with pickled objects, which are never run"
        raise WeightsError(
            f"cannot read tensors of {path} ({reason}): save them as safetensors", "malformed"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):  # nested, as by Lightning
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise WeightsError(f"{path}: expected a dictionary of tensors, alone or under one of {_WRAPPERS}", "malformed")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    import safetensors
    import safetensors.torch

    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged or not a safetensors file ({error})", "malformed") from error
    return tensors


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], keys: KeyMap, source: str) -> None:
    """Load `tensors` into every parameter and buffer of `module`, cast to their dtypes.

    `num_batches_tracked` of batch norms may be missing (old files lack it). The `gamma` and `beta` of layer norms in
    old TensorFlow conversions are renamed to `weight` and `bias`.

    Args:
        module: the module to fill; unchanged if an error is raised.
        tensors: the file's content.
        keys: rules that map its keys.
        source: path or URL, for messages.

    Raises:
        WeightsError: "mismatch" if a tensor is missing, unexpected or of another shape; the message names the first.
    """
    mapped, ignored, unknown = keys.apply({_rename_layer_norm(key): tensor for key, tensor in tensors.items()})
    state = module.state_dict()
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
        text = "; ".join(f"{len(names)} {kind}: {_first(names)}" for kind, names in differences.items() if names)
        raise WeightsError(f"{source} does not fit this encoder: {text}", "mismatch")
    module.load_state_dict(mapped, strict=True)
    if ignored:
        _LOG.info("%s: %d tensors loaded, %d ignored: %s", source, len(mapped), len(ignored), _first(ignored))


def _rename_layer_norm(key: str) -> str:
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key)) if "LayerNorm." in key else key


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def unused_blocks(blocks: str, names: Iterable[str]) -> list[str]:
    """Return the prefixes of a published model's blocks above those that a shallower encoder has.

    Args:
        blocks: prefix of the names of numbered blocks, as "encoder.layer.".
        names: names of the encoder's parameters.
    """
    numbers = [int(name.removeprefix(blocks).split(".")[0]) for name in names if name.startswith(blocks)]
    return [f"{blocks}{number}." for number in range(max(numbers) + 1, _MAX_BLOCKS)] if numbers else []
