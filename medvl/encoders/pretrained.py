"""Published weights: where they come from, how they are read, and how they are fitted in without silence.

A file is safetensors, or a checkpoint that holds nothing but tensors in nested dictionaries: pickle is never run.
Every key of the file is either loaded or dropped by a rule that names it; every tensor of the encoder is filled.
"""

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from medvl.common.hub import fetch
from medvl.encoders.presets import Weights
from medvl.errors import WeightsError

_LOG = logging.getLogger(__name__)
_SHOWN = 5
_MOST_BLOCKS = 100
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
_HUB = re.compile(r"(?P<hub_id>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)(?::(?P<filename>[\w./-]+))?")
_CANDIDATES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
CLIP_SCALARS = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""Single numbers in a whole CLIP file that belong to neither tower."""
_WRAPPERS = ("state_dict", "model", "model_state_dict")

Pretrained = bool | str | Path
"""False: random weights, and the network is never touched.
True: the preset's published file, pinned by commit and content; torchvision's default weights, pinned by content; the
file in a local folder that the encoder was named by.
A path: a file (safetensors, or a checkpoint that holds nothing but tensors), or a folder with one.
`OWNER/NAME@COMMIT[:FILE]`: from the hub."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """How the keys of a file become the keys of an encoder.

    `layouts` are alternatives, tried in order: each is a list of (beginning in the file, beginning in the encoder), and
    the first one whose first beginning occurs in the file is taken. A wrapper's `module.` before every key is taken off
    first. `drop` names beginnings of keys in the file, and `without` beginnings of names in the encoder's terms, that
    the encoder has no place for: both are left out, and anything else that does not fit is an error.
    """

    layouts: Sequence[Sequence[tuple[str, str]]]
    drop: Sequence[str] = ()
    without: Sequence[str] = ()

    def apply(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """(tensors by the encoder's names, keys left out, keys that no rule speaks of)."""
        if all(key.startswith("module.") for key in tensors):
            tensors = {key.removeprefix("module."): tensor for key, tensor in tensors.items()}
        layout = next((pairs for pairs in self.layouts if any(key.startswith(pairs[0][0]) for key in tensors)), ())
        mapped: dict[str, Tensor] = {}
        left_out, unknown = [], []
        for key, tensor in tensors.items():
            pair = next((pair for pair in layout if key.startswith(pair[0])), None)
            name = None if pair is None else pair[1] + key.removeprefix(pair[0])
            if key.startswith(tuple(self.drop)) or (name is not None and name.startswith(tuple(self.without))):
                left_out.append(key)
            elif name is None:
                unknown.append(key)
            else:
                mapped[name] = tensor
        return mapped, left_out, unknown


def read_url(url: str) -> dict[str, Tensor]:
    """Tensors from an address whose file name carries the beginning of its sha256, as torchvision's do.

    Raises `WeightsError` when the file cannot be had or its content is another one.
    """
    from urllib.error import URLError

    try:
        tensors: dict[str, Tensor] = torch.hub.load_state_dict_from_url(
            url, map_location="cpu", check_hash=True, weights_only=True, progress=False
        )
    except (URLError, OSError, RuntimeError) as error:
        raise WeightsError(f"{url} cannot be had ({error}): fetch it elsewhere and give pretrained=PATH") from error
    return tensors


def locate_weights(name: str, pretrained: Pretrained, published: Weights | None, note: str = "") -> Path:
    """The local file that `pretrained` means for encoder `name`, fetched from the hub where it has to be.

    Raises `WeightsError` when it cannot be had; the text says how a local copy is given.
    """
    if pretrained is True:
        if published is None:
            raise WeightsError(
                f"{name} has no published weights that are pinned here{': ' + note if note else ''}; "
                "give pretrained=PATH, or pretrained='OWNER/NAME@COMMIT' for a repository on the hub"
            )
        return fetch(published.hub_id, published.filename, published.revision, sha256=published.sha256)
    source = str(pretrained)
    match = None if Path(source).exists() else _HUB.fullmatch(source)
    if match is None and (Path(source).exists() or source.endswith(_SUFFIXES)):
        return _local(Path(source), published)
    if match is None:
        raise WeightsError(
            f"pretrained={source!r} is neither a file, nor a folder, nor OWNER/NAME@COMMIT[:FILE]: the commit must be "
            "named, so that the run can be made again"
        )
    filenames = [match["filename"]] if match["filename"] else _CANDIDATES
    failures = []
    for filename in filenames:
        try:
            return fetch(match["hub_id"], filename, match["revision"])
        except WeightsError as error:
            failures.append(str(error))
    raise WeightsError(failures[0])


def _local(path: Path, published: Weights | None) -> Path:
    if path.is_file():
        return path
    filenames = [*([published.filename] if published else []), *_CANDIDATES]
    for filename in filenames:
        if (path / filename).is_file():
            return path / filename
    if path.is_dir():
        raise WeightsError(f"{path} holds none of {', '.join(filenames)}")
    raise WeightsError(f"{path} does not exist: pretrained must be a file of weights, or a folder that holds one")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a weights file, on the CPU, by key.

    Raises `WeightsError` when the file is damaged, holds anything but tensors, or needs pickle to be read.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a hostile or damaged file can raise anything
        raise WeightsError(
            f"{path} cannot be read as a file of tensors ({type(error).__name__}): it is damaged, or it holds pickled "
            "objects, which are never run; save its tensors as safetensors where it was made"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):  # Lightning and others nest it
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise WeightsError(f"{path} does not hold a dictionary of tensors, neither at its top nor under {_WRAPPERS}")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    import safetensors
    import safetensors.torch

    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise WeightsError(
            f"{path} cannot be read as safetensors ({error}): it is damaged, or another format"
        ) from error
    return tensors


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], keys: KeyMap, source: str) -> None:
    """Fill every tensor of `module` from `tensors`, casting to its own dtypes.

    `num_batches_tracked` of batch norms may be missing (old files lack it). Old TensorFlow conversions call a layer
    norm's weight `gamma` and its bias `beta`; they are renamed.

    Raises:
        WeightsError: a tensor is missing, unexpected or of another shape. The text names the first ones.
    """
    mapped, left_out, unknown = keys.apply({_modern(key): tensor for key, tensor in tensors.items()})
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
        found = "; ".join(f"{len(names)} {kind}: {_first(names)}" for kind, names in differences.items() if names)
        raise WeightsError(f"{source} does not fit this encoder: {found}")
    module.load_state_dict(mapped, strict=True)
    if left_out:
        _LOG.info("%s: %d tensors loaded, %d left out: %s", source, len(mapped), len(left_out), _first(left_out))


def _modern(key: str) -> str:
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key)) if "LayerNorm." in key else key


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def beyond(blocks: str, names: Iterable[str]) -> list[str]:
    """What a published model has above the blocks of an encoder that is built with only its lower ones.

    Args:
        blocks: beginning of the names of numbered blocks, as "encoder.layer.".
        names: names of the encoder's parameters, among them those blocks.
    """
    numbers = [int(name.removeprefix(blocks).split(".")[0]) for name in names if name.startswith(blocks)]
    return [f"{blocks}{number}." for number in range(max(numbers) + 1, _MOST_BLOCKS)] if numbers else []
