"""A detector that needs no weights, and shards with its regions, for the tests of region
features.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.regions import RegionOptions, write_regions
from medvl.data.corpora import table
from medvl.data.corpora.table import TableColumns
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.regions import Regions
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.train.tasks.pretraining import DataConfig


class QuarterDetector:
    """The quarters of an image, fewer for dark images: means and deviations as features, two
    classes.
    """

    name = "quarters"
    color = False
    trained_on: tuple[Mapping[str, Any], ...] = ()
    class_names: tuple[str, ...] = ("dark", "bright")
    width = 2

    def __init__(self, sha256: str = "d" * 64, scale: float = 1.0) -> None:
        self.sha256, self.scale = sha256, scale
        self.settings: dict[str, Any] = {"boxes": ["quarters"]}
        self.batches: list[int] = []

    def prepare(self, pixels: np.ndarray) -> np.ndarray:
        return pixels.astype(np.float32) / 255

    def __call__(self, images: Sequence[np.ndarray]) -> list[Regions]:
        self.batches.append(len(images))
        return [self.regions(image) for image in images]

    def regions(self, image: np.ndarray) -> Regions:
        rows, columns = image.shape[0] // 2, image.shape[1] // 2
        boxes = [(0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1)]
        parts = [
            image[:rows, :columns],
            image[:rows, columns:],
            image[rows:, :columns],
            image[rows:, columns:],
        ]
        kept = 4 if image.mean() > 0.5 else 2
        features = (
            np.array([(part.mean(), part.std()) for part in parts[:kept]], np.float32) * self.scale
        )
        bright = np.array([part.mean() for part in parts[:kept]], np.float32)
        classes = np.stack([1 - bright, bright], axis=1) if self.class_names else None
        return Regions(features, np.array(boxes[:kept], np.float32), classes)


def with_regions(folder: Path, name: str = "quarters", **options: Any) -> ShardSource:
    """Write the regions of a folder of shards, and open it with them."""
    write_regions(ShardSource(folder), QuarterDetector(), name, RegionOptions(**options))
    return ShardSource(folder, regions=name)


def region_table(home: Path, corpus: str = "lab", images: int = 10, bright: int = 128) -> Path:
    """Convert a table of grey images of unequal brightness, and of texts without an image, in
    shards of four samples.
    """
    home.mkdir(parents=True, exist_ok=True)
    rows = ["image,patient,text,edema,split"]
    for number in range(images):
        has_image = number % 5 != 3
        name = f"{number}.png" if has_image else ""
        split = "validate" if number >= images - 2 else "train"
        rows.append(
            f"{name},{corpus}{number},the left lung of number {number},{number % 2},{split}"
        )
        if has_image:
            noise = np.random.default_rng(number).integers(0, 60, (40, 50))
            (home / name).write_bytes(
                encode_png((noise + (bright if number % 2 else 40)).clip(0, 255).astype(np.uint8))
            )
    (home / "rows.csv").write_text("\n".join(rows) + "\n")
    columns = TableColumns(
        image_column="image",
        patient_column="patient",
        text_column=("text",),
        label_column=("edema",),
        split_column="split",
    )
    deid = Deidentifier(bytes(32))
    plan = table.Table(
        table=home / "rows.csv", columns=columns, name=corpus, keep_imageless=True
    ).plan(deid)
    write_shards(
        plan,
        deid,
        ShardRun(out=home / "out", workers=1),
        ShardOptions(short_side=32, samples_per_shard=4),
    )
    return home / "out"


def region_data(shards: Path, size: int, **changes: Any) -> DataConfig:
    """Return the data settings of pretraining on `region_table`, with images of `size` pixels."""
    settings: dict[str, Any] = {
        "train": str(shards / "train"),
        "valid": shards / "validate",
        "image": EvalTransform(size=size),
        "text": WholeText(),
        "workers": 0,
        "valid_batch": 2,
    }
    return DataConfig(**settings | changes)
