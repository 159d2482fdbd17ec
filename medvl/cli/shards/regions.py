"""`medvl regions`: region features beside shards."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.convert.regions import RegionDetector


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """Weights of the detector and number of its regions."""

    weights: str | None = None
    """for a Faster R-CNN a local file, which also decides the number of classes; for a grid a file,
    a folder, OWNER/NAME@COMMIT, or "published"; a checkpoint has its own
    """
    random_weights: bool = False
    """use random weights, for tests"""
    class_names: Path | None = None
    """file with a name of the detector's classes on each line, the background's first"""
    image_size: int | None = None
    """size of the images of grid:ENCODER"""
    fit: Literal["crop", "pad", "squash"] | None = None
    """how grid:ENCODER makes images square; default: pad"""
    all_tokens: bool = False
    """of a grid, store the class token (or the encoder's vector) and all cells, also those outside
    of the image: what a model with this frozen encoder trains on in place of images
    (data.image-features NAME)
    """
    max_regions: int = 36
    """largest number of regions of an image; without --min-regions the number of all (VisualBERT
    and LXMERT: 36)
    """
    min_regions: int | None = None
    """smallest number; in between, regions above --confidence are kept (UNITER: 10 to 100)"""
    confidence: float = 0.2
    """smallest confidence of a region beyond --min-regions"""
    nms_iou_threshold: float = 0.3
    """IoU above which the less confident of two boxes of a class is suppressed"""
    device: str = "auto"
    """cpu, cuda, or auto"""

    def create(self, detector: str) -> "RegionDetector":
        """Create the detector. Raises as `create_region_detector` does."""
        from medvl.eval.core.open import resolve_device
        from medvl.models.downstream.detector import RegionSelection
        from medvl.models.downstream.regions import create_region_detector

        return create_region_detector(
            detector,
            weights=self.weights,
            random_weights=self.random_weights,
            selection=RegionSelection(
                max_regions=self.max_regions,
                min_regions=self.min_regions,
                confidence=self.confidence,
                nms_iou_threshold=self.nms_iou_threshold,
            ),
            image_size=self.image_size,
            fit=self.fit,
            all_tokens=self.all_tokens,
            class_names=None if self.class_names is None else _read_names(self.class_names),
            device=resolve_device(self.device),
        )


def regions(
    data: Path,
    detector: str,
    options: Annotated[DetectorOptions, tyro.conf.arg(name="")] = DetectorOptions(),
    *,
    name: str | None = None,
    batch: int = 8,
    workers: int = 4,
    full_precision: bool = False,
    max_skipped: float = 0.001,
) -> None:
    """Write region features, boxes and classes of all images beside their shards, once, with a
    frozen detector.

    Models with image_encoder regions:WIDTH read them (data.regions NAME). With --all-tokens they
    are the output of a frozen image encoder, for training its model without running it
    (data.image-features NAME). The shards stay as they are. Run the same command again to resume.

    Args:
        data: folder of a split, or folder that contains all splits.
        detector: fasterrcnn_resnet50_fpn or another Faster R-CNN of torchvision; grid:ENCODER for
            the cells of an image encoder; or folder of a checkpoint: the boxes of a detector, or
            the grid of another system's image encoder.
        options: weights of the detector and number of its regions.
        name: name of the regions, a subfolder of DATA/regions; default: derived from the
            detector's name.
        batch: images that the detector reads at once.
        workers: threads that decode images.
        full_precision: store features as float32 instead of float16.
        max_skipped: budget of unreadable images: below 1 a fraction, else a number.
    """
    from medvl.data.convert.regions import RegionOptions, write_regions
    from medvl.data.shards.format import split_folders
    from medvl.data.shards.source import ShardSource

    run = RegionOptions(
        batch=batch, workers=workers, full_precision=full_precision, max_skipped=max_skipped
    )
    opened = options.create(detector)
    name = name or opened.name.replace(":", "-").replace("/", "-")
    for folder in split_folders(data):
        manifest = write_regions(
            ShardSource(folder), opened, name, run, progress=sys.stderr.isatty()
        )
        classes = f", {len(manifest.class_names)} classes" if manifest.class_names else ""
        use = (
            f"data.image_features {name}"
            if options.all_tokens
            else f"image_encoder regions:{manifest.width}"
        )
        print(
            f"Wrote {folder}/regions/{name}: {manifest.regions} regions of {manifest.images} "
            f"images, "
            f"{manifest.skipped} images skipped; {use}{classes}"
        )


def _read_names(path: Path) -> list[str]:
    from medvl.common.text_files import read_lines

    return read_lines(
        path, ConfigError, field="class_names", what="a file with a name on each line"
    )
