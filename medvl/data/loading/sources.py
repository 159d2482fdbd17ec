"""Where a loader reads samples from: the `Source` protocol, and the files of a corpus as a source."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from medvl.common.untrusted import InputFolders
from medvl.data.shards.regions import RegionManifest
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

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """Return the decoded image of the sample at `position`: uint8 (H, W) or (H, W, C)."""


def region_manifest_of(source: Any) -> RegionManifest | None:
    """Return the manifest of a source's regions, None where it has none."""
    manifest: RegionManifest | None = getattr(source, "region_manifest", None)
    return manifest


def is_remote(source: Any) -> bool:
    """Return whether a source, or one that it is a view of, reads from a remote store."""
    parts = getattr(source, "sources", None) or [getattr(source, "source", None)]
    return bool(getattr(source, "is_remote", False)) or any(is_remote(part) for part in parts if part is not None)


def is_synthetic(source: Any) -> bool:
    """Return whether images of a source, or of one that it is a view of, are synthetic (`medvl shards generated`)."""
    parts = getattr(source, "sources", None) or [getattr(source, "source", None)]
    generators = getattr(getattr(source, "manifest", None), "generators", ())
    return bool(generators) or any(is_synthetic(part) for part in parts if part is not None)


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

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """Return uint8 (H, W), or (H, W, 3) with `color`. Raises DicomError, ImageError or FileNotFoundError.

        A link out of the folders is an error with the code "outside_folder".
        """
        from medvl.data.images.read import read_pixels  # imports pydicom, which takes time

        return read_pixels(self.samples[position].image, color=color, folders=self.folders)[0]
