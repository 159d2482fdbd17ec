"""Opening a detector for `medvl regions` by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from medvl.common.seeding import seeded
from medvl.data.convert.regions import RegionDetector
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder, read_tensors
from medvl.encoders.pretrained import Pretrained, split_set
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import System
from medvl.models.checkpoint import load
from medvl.models.downstream.classifier import image_encoder_of
from medvl.models.downstream.detector import Detector
from medvl.models.downstream.regions.boxes import DetectorRegions
from medvl.models.downstream.regions.faster_rcnn import FasterRCNNRegions
from medvl.models.downstream.regions.grid import GridRegions
from medvl.models.downstream.regions.selection import RegionSelection

_GRID, _TORCHVISION = "grid:", "fasterrcnn_"


def create_region_detector(
    name: str,
    *,
    weights: str | None = None,
    random_weights: bool = False,
    selection: RegionSelection | None = None,
    image_size: int | None = None,
    fit: Literal["crop", "pad", "squash"] | None = None,
    all_tokens: bool = False,
    class_names: Sequence[str] | None = None,
    device: str = "cpu",
) -> RegionDetector:
    """Create a frozen detector for `medvl.data.write_regions`.

    Args:
        name: `fasterrcnn_resnet50_fpn` or another Faster R-CNN of torchvision; `grid:ENCODER` for the grid of an image
            encoder; or the folder of a checkpoint: the boxes of a `detector`, or the grid of another system's encoder.
        weights: for a Faster R-CNN, a local file, which also decides the number of classes; for a grid, `published`, or
            a source as in `create_image_encoder`.
        random_weights: use random weights, for tests.
        selection: number of regions of an image; a grid always has all of its cells.
        image_size: side of the input of `grid:ENCODER`; None is the encoder's own.
        fit: how `grid:ENCODER` makes images square (`EvalTransform`); None pads them. A checkpoint has its own.
        all_tokens: of a grid, store the encoder's vector and all cells, for training in place of images
            (`medvl.train.DataConfig.image_features`).
        class_names: names of the classes of a Faster R-CNN, the background first; None: COCO's for 91 classes, else
            numbers.
        device: device of the detector.

    Raises:
        ConfigError: the name is unknown, neither weights nor `random_weights` are given, or options conflict.
        CheckpointError, WeightsError: the weights cannot be read, or do not fit.
    """
    folder, selection = Path(name), selection or RegionSelection()
    if fit is not None and not name.startswith(_GRID):
        raise ConfigError(f"fit is a setting of {_GRID}ENCODER; leave it out", "conflict", field="fit")
    if not name.startswith((_GRID, _TORCHVISION)):
        model = _load_checkpoint(folder, device, has_weights=weights is not None or random_weights)
        if not isinstance(model, Detector):
            name = f"{_GRID}{model.name}"
            return GridRegions(image_encoder_of(model), model.transform, name, all_tokens=all_tokens)
        _refuse_tokens(model.name, all_tokens)
        return DetectorRegions(model, selection, model.name)
    if (weights is None) != random_weights:
        message = f"{name} needs weights: give a source of them, or ask for random weights in a test; not both"
        raise ConfigError(message, "missing" if weights is None else "conflict", field="weights")
    if name.startswith(_TORCHVISION):
        _refuse_tokens(name, all_tokens)
        file, chosen = (None, None) if weights is None else split_set(weights)
        if file is not None and not Path(file).is_file():
            raise WeightsError(f"{file} does not exist: give a local file", "not_found", field="weights")
        tensors = None if file is None else read_tensors(Path(file), chosen)
        return FasterRCNNRegions(name, tensors, selection, class_names, device)
    source: Pretrained = False if weights is None else weights == "published" or weights
    with seeded(0):
        encoder = create_image_encoder(name.removeprefix(_GRID), pretrained=source, image_size=image_size)
    transform = EvalTransform(size=encoder.image_size[0], fit=fit or "pad")
    return GridRegions(encoder.to(device), transform, name, all_tokens=all_tokens)


def _refuse_tokens(name: str, all_tokens: bool) -> None:
    if all_tokens:
        message = f"{name} has boxes of its own and no grid; leave all_tokens unset"
        raise ConfigError(message, "unsupported", field="all_tokens")


def _load_checkpoint(folder: Path, device: str, *, has_weights: bool) -> System:
    if not folder.is_dir():
        message = (
            f"unknown detector {str(folder)!r}: expected {_TORCHVISION}..., {_GRID}ENCODER, or a checkpoint's folder"
        )
        raise ConfigError(message, "unknown_name", field="detector")
    if has_weights:
        raise ConfigError("a checkpoint has weights of its own; leave weights out", "conflict", field="weights")
    return load(folder).to(device)
