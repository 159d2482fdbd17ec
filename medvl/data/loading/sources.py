"""Where a loader reads samples from: the `Source` protocol, and the files of a corpus as a source."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from medvl.common.untrusted import InputFolders
from medvl.data.shards.regions import RegionManifest
from medvl.data.transforms.image import EvalTransform
from medvl.errors import SplitError
from medvl.schema import Sample


class Source(Protocol):
    """Random access to samples and their pixels.

    A source may also have `folder` (for messages), `image_keys`, and `region_manifest` with `regions(position)`.
    """

    label_names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels."""

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image of the sample at `position`: uint8 (H, W), or (H, W, 3) with `color`.

        None: as the source has its images, in colour or in grey.
        """


def region_manifest_of(source: Any) -> RegionManifest | None:
    """Return the manifest of a source's regions, None where it has none."""
    manifest: RegionManifest | None = getattr(source, "region_manifest", None)
    return manifest


def is_remote(source: Any) -> bool:
    """Return whether a source, or one that it is a view of, reads from a remote store."""
    return bool(getattr(source, "is_remote", False)) or any(map(is_remote, _parts(source)))


def is_synthetic(source: Any) -> bool:
    """Return whether images of a source, or of one that it is a view of, are synthetic (`medvl shards generated`)."""
    generators = getattr(getattr(source, "manifest", None), "generators", ())
    return bool(generators) or any(map(is_synthetic, _parts(source)))


def has_color(source: Any) -> bool:
    """Return whether shards of a source, or of one that it is a view of, are in colour (`ShardOptions.color`)."""
    return bool(getattr(getattr(source, "manifest", None), "color", False)) or any(map(has_color, _parts(source)))


def color_for(source: Any, transform: EvalTransform) -> bool:
    """Return whether a model whose transform this is gets RGB images of a source in an evaluation.

    It gets them as it was trained, so that files and shards give the same pixels, and without a record of its training
    as the source has them.
    """
    return has_color(source) if transform.trained_color is None else transform.trained_color


def _parts(source: Any) -> list[Any]:
    """Return the sources that a source is made of, or is a view of."""
    parts = getattr(source, "sources", None) or [getattr(source, "source", None)]
    return [part for part in parts if part is not None]


def check_real(source: Any, field: str = "data") -> None:
    """Raise SplitError where images of a source are synthetic: they may train a model, but not test or select one."""
    if is_synthetic(source):
        where = getattr(source, "folder", "the source")
        message = f"{where} has synthetic images, which may only train a model; give shards of real images"
        raise SplitError(message, "synthetic", field=field)


class FileSource:
    """Samples that are read from the files of their corpus: for evaluation without shards.

    Args:
        samples: for example `plan.iter_samples()`.
        label_names: names of the labels, in the order of a batch's columns.
        folders: folders that the images must be in, links resolved, such as `plan.folders`; default the one that holds
            all of them by name.
    """

    def __init__(
        self, samples: Iterable[Sample], label_names: Sequence[str], folders: InputFolders | None = None
    ) -> None:
        self.samples = list(samples)
        self.folders = folders or InputFolders.holding(sample.image for sample in self.samples)
        self.label_names = tuple(label_names)
        content = "\n".join(f"{sample.key} {sorted(sample.labels.items())}" for sample in self.samples)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels."""
        return self.samples[position]

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return uint8 (H, W), or (H, W, 3) with `color`. Raises DicomError, ImageError or FileNotFoundError.

        None is grey. A link out of the folders is an error with the code "outside_folder".
        """
        from medvl.data.images.read import read_pixels  # imports pydicom, which takes time

        return read_pixels(self.samples[position].image, color=bool(color), folders=self.folders)[0]
