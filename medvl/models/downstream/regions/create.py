"""Opening a detector for `medvl regions` by name."""

from collections.abc import Sequence
from pathlib import Path

from medvl.common.seeding import seeded
from medvl.data.convert.regions import RegionDetector
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder, read_tensors
from medvl.encoders.pretrained import Pretrained
from medvl.errors import ConfigError, WeightsError
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
        class_names: names of the classes of a Faster R-CNN, the background first; None: COCO's for 91 classes, else
            numbers.
        device: device of the detector.

    Raises:
        ConfigError: the name is unknown, neither weights nor `random_weights` are given, or options conflict.
        CheckpointError, WeightsError: the weights cannot be read, or do not fit.
    """
    folder, selection = Path(name), selection or RegionSelection()
    if not name.startswith((_GRID, _TORCHVISION)):
        return _from_checkpoint(folder, selection, device, has_weights=weights is not None or random_weights)
    if (weights is None) != random_weights:
        message = f"{name} needs weights: give a source of them, or ask for random weights in a test; not both"
        raise ConfigError(message, "missing" if weights is None else "conflict", field="weights")
    if name.startswith(_TORCHVISION):
        if weights is not None and not Path(weights).is_file():
            raise WeightsError(f"{weights} does not exist: give a local file", "not_found", field="weights")
        tensors = None if weights is None else read_tensors(Path(weights))
        return FasterRCNNRegions(name, tensors, selection, class_names, device)
    source: Pretrained = False if weights is None else weights == "published" or weights
    with seeded(0):
        encoder = create_image_encoder(name.removeprefix(_GRID), pretrained=source, image_size=image_size)
    return GridRegions(encoder.to(device), EvalTransform(size=encoder.image_size[0], fit="pad"), name)


def _from_checkpoint(folder: Path, selection: RegionSelection, device: str, *, has_weights: bool) -> RegionDetector:
    if not folder.is_dir():
        message = (
            f"unknown detector {str(folder)!r}: expected {_TORCHVISION}..., {_GRID}ENCODER, or a checkpoint's folder"
        )
        raise ConfigError(message, "unknown_name", field="detector")
    if has_weights:
        raise ConfigError("a checkpoint has weights of its own; leave weights out", "conflict", field="weights")
    model = load(folder).to(device)
    if isinstance(model, Detector):
        return DetectorRegions(model, selection, model.name)
    return GridRegions(image_encoder_of(model), model.transform, f"{_GRID}{model.name}")
