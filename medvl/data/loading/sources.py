"""Where a loader reads samples from: the `Source` protocol, and the files of a corpus as a
source.
"""

import bisect
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.untrusted import InputFolders
from medvl.data.shards.format import Manifest
from medvl.data.shards.regions import RegionManifest, Regions, check_one_detector
from medvl.data.shards.source import ShardSource
from medvl.data.storage.tars import read_part
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import TextPolicy
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError, ImageError, SplitError
from medvl.schema import CHANGES, FilePart, Sample


class Source(Protocol):
    """Random access to samples and their pixels.

    A source may also have `folder` (for messages), `image_keys`, `image_bytes(position)`,
    `region_manifest` with `regions(position)`, `has_volumes` and `has_organs` with `volume` and
    `organs(position, slices)`, and `prior_pixels(position, color)`, or `prior_positions`.
    """

    label_names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels."""

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image of the sample at `position`: uint8 (H, W), or (H, W, 3) with
        `color`.

        None: as the source has its images, in colour or in grey.
        """


def region_manifest_of(source: Any) -> RegionManifest | None:
    """Return the manifest of a source's regions, None where it has none."""
    manifest: RegionManifest | None = getattr(source, "region_manifest", None)
    return manifest


def is_remote(source: Any) -> bool:
    """Return whether a source, or one that it is a view of, reads from a remote store."""
    return bool(getattr(source, "is_remote", False)) or any(map(is_remote, parts_of(source)))


def is_synthetic(source: Any) -> bool:
    """Return whether images of a source, or of one that it is a view of, are synthetic (`medvl
    shards generated`).
    """
    generators = getattr(getattr(source, "manifest", None), "generators", ())
    return bool(generators) or any(map(is_synthetic, parts_of(source)))


def has_color(source: Any) -> bool:
    """Return whether shards of a source, or of one that it is a view of, are in colour
    (`ShardOptions.color`).
    """
    return bool(getattr(getattr(source, "manifest", None), "color", False)) or any(
        map(has_color, parts_of(source))
    )


def has_volumes(source: Any) -> bool:
    """Return whether shards of a source, or of one that it is a view of, hold volumes."""
    return bool(getattr(source, "has_volumes", False)) or any(map(has_volumes, parts_of(source)))


def has_organs(source: Any) -> bool:
    """Return whether volumes of a source, or of one that it is a view of, have masks."""
    return bool(getattr(source, "has_organs", False)) or any(map(has_organs, parts_of(source)))


def color_for(source: Any, transform: EvalTransform) -> bool:
    """Return whether a model whose transform this is gets RGB images of a source in an evaluation.

    It gets them as it was trained, so that files and shards give the same pixels, and without a
    record of its training as the source has them.
    """
    return has_color(source) if transform.trained_color is None else transform.trained_color


def parts_of(source: Any) -> list[Any]:
    """Return the sources that a source is made of, or is a view of."""
    parts = getattr(source, "sources", None) or [getattr(source, "source", None)]
    return [part for part in parts if part is not None]


def check_real(source: Any, field: str = "data") -> None:
    """Raise SplitError where images of a source are synthetic: they may train a model, but not
    test or select one.
    """
    if is_synthetic(source):
        where = getattr(source, "folder", "the source")
        message = f"{where} has synthetic images, which may only train a model; give real ones"
        raise SplitError(message, "synthetic", field=field)


class FileSource:
    """Samples that are read from the files of their corpus: for evaluation without shards.

    Args:
        samples: for example `plan.iter_samples()`.
        label_names: names of the labels, in the order of a batch's columns.
        folders: folders that the images must be in, links resolved, such as `plan.folders`; default
            the one that holds all of them by name.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        label_names: Sequence[str],
        folders: InputFolders | None = None,
    ) -> None:
        self.samples = list(samples)
        self.folders = folders or InputFolders.holding(
            sample.image for sample in self.samples if isinstance(sample.image, Path)
        )
        self.label_names = tuple(label_names)
        content = "\n".join(
            f"{sample.key} {sorted(sample.labels.items())}" for sample in self.samples
        )
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels."""
        return self.samples[position]

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return uint8 (H, W), or (H, W, 3) with `color`. Raises DicomError, ImageError or
        FileNotFoundError.

        None is grey. A link out of the folders is an error with the code "outside_folder".
        """
        from medvl.data.images.read import read_pixels  # imports pydicom, which takes time

        image = self.samples[position].image
        content = read_part(image) if isinstance(image, FilePart) else None
        options: dict[str, Any] = {"color": bool(color), "folders": self.folders}
        return read_pixels(image, content=content, **options)[0]


class SourceView:
    """Base class of views of a source, by default of the same samples in the same order.

    Args:
        source: the samples.
        content: what determines the view, for its fingerprint.
        label_names: label columns; None for those of the source.
    """

    def __init__(
        self, source: Source, content: bytes, label_names: Sequence[str] | None = None
    ) -> None:
        self.source = source
        self.label_names = tuple(source.label_names if label_names is None else label_names)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.folder = getattr(source, "folder", "the files")  # for messages
        self.region_manifest = region_manifest_of(source)

    def __len__(self) -> int:
        return len(self.source)

    def source_position(self, position: int) -> int:
        """Return the position in the source of the sample at `position`."""
        return position

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels."""
        return self.source.sample(self.source_position(position))

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image at `position`."""
        return self.source.pixels(self.source_position(position), color)

    def image_bytes(self, position: int) -> bytes:
        """Return the encoded image at `position`, of a source that stores them."""
        source: Any = self.source
        data: bytes = source.image_bytes(self.source_position(position))
        return data

    def volume(self, position: int, slices: slice | None = None) -> Volume:
        """Return the volume at `position`, of a source that has them."""
        source: Any = self.source
        volume: Volume = source.volume(self.source_position(position), slices)
        return volume

    def organs(self, position: int, slices: slice | None = None) -> np.ndarray | None:
        """Return the organs of the volume at `position`, of a source that has them."""
        source: Any = self.source
        mask: np.ndarray | None = source.organs(self.source_position(position), slices)
        return mask

    def volume_bytes(self, position: int) -> int:
        """Return the stored bytes of the volume at `position`, of a source that has them."""
        source: Any = self.source
        size: int = source.volume_bytes(self.source_position(position))
        return size

    def regions(self, position: int) -> Regions:
        """Return the regions at `position`, of a source that has them."""
        source: Any = self.source
        regions: Regions = source.regions(self.source_position(position))
        return regions


class Subset(SourceView):
    """The samples of a source at some positions, in that order."""

    def __init__(self, source: Source, positions: Sequence[int] | NDArray[np.int64]) -> None:
        self.positions = np.asarray(positions, dtype=np.int64)
        content = source.fingerprint.encode() + self.positions.astype("<i8").tobytes()
        super().__init__(source, content)

    def __len__(self) -> int:
        return len(self.positions)

    def source_position(self, position: int) -> int:
        return int(self.positions[position])


class LabelPolicyView(SourceView):
    """A source whose labels are mapped to 1, 0 or absent, in chosen columns.

    Args:
        source: the samples.
        names: label columns; a name that the source lacks is absent everywhere.
        settle: maps labels (1, 0, -1 or NaN) and their names to 1, 0 or NaN, one row at a time. It
            gets all columns of the source and must be picklable (a module-level function or a bound
            method) for the loader's workers.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        settle: Callable[[NDArray[np.float64], Sequence[str]], NDArray[np.float64]],
    ) -> None:
        super().__init__(source, "\n".join([source.fingerprint, *names]).encode(), names)
        self.settle = settle

    def sample(self, position: int) -> Sample:
        """Return the sample at `position` with its mapped labels."""
        sample = self.source.sample(position)
        columns = self.source.label_names
        table_1L = np.array([[sample.labels.get(name, np.nan) for name in columns]])
        row = dict(zip(columns, self.settle(table_1L, columns)[0].tolist(), strict=True))
        labels = {
            name: int(row[name])
            for name in self.label_names
            if name in row and not np.isnan(row[name])
        }
        return dataclasses.replace(sample, labels=labels)


class ChangeLabels(SourceView):
    """A source whose labels are changes since the prior image: -1 for improving, 0 for stable, 1
    for worsening.

    Args:
        source: samples with `extra["change"]`, such as those of MS-CXR-T.
        findings: label columns; samples without a label of change, such as prior images, have none.
    """

    def __init__(self, source: Source, findings: Sequence[str]) -> None:
        super().__init__(
            source, "\n".join([source.fingerprint, "change", *findings]).encode(), findings
        )

    def sample(self, position: int) -> Sample:
        """Return the sample at `position` with its changes as labels."""
        sample = self.source.sample(position)
        change = changes_of(sample)
        labels = {
            name: CHANGES.index(change[name]) - 1 for name in self.label_names if name in change
        }
        return dataclasses.replace(sample, labels=labels)


class OtherTexts(SourceView):
    """A source whose samples have no text, or the text of another sample, to measure what a model
    reads in the texts.

    Args:
        source: the samples.
        texts: "none", or "others" for the texts of the samples half of the source further on.
    """

    def __init__(self, source: Source, texts: Literal["none", "others"]) -> None:
        super().__init__(source, f"{source.fingerprint} {texts}".encode())
        self.texts = texts

    def sample(self, position: int) -> Sample:
        """Return the sample at `position` with its new text."""
        other = self.source.sample((position + len(self) // 2) % len(self))
        sections = {} if self.texts == "none" else other.sections
        return dataclasses.replace(self.source.sample(position), sections=sections)


def changes_of(sample: Sample) -> Mapping[str, str]:
    """Return finding -> one of `CHANGES` of a sample; empty without such labels."""
    change = sample.extra.get("change")
    return change if isinstance(change, Mapping) else {}


def select_samples(
    source: Source, views: Sequence[str], text: TextPolicy | None = None, min_characters: int = 1
) -> Source:
    """Return the source, or the subset of its samples with one of the views and a text.

    Args:
        source: the samples, of which the JSON is read once.
        views: such as PA and AP; empty for all.
        text: text policy that must return at least `min_characters`; None reads no texts.
        min_characters: shortest text, at least 1.

    Raises:
        ConfigError: no sample is left.
    """
    if not views and text is None:
        return source
    names = {view.upper() for view in views}
    rng = np.random.default_rng(0)
    positions = []
    for position in range(len(source)):
        sample = source.sample(position)
        has_view = not names or (sample.view or "").upper() in names
        if has_view and (
            text is None or len(text(sample.sections, rng).strip()) >= max(min_characters, 1)
        ):
            positions.append(position)
    if not positions:
        which = f"one of the views {', '.join(views)}" if views else "a text"
        message = (
            f"no sample of {getattr(source, 'folder', 'the files')} has {which}; choose "
            f"other views or texts"
        )
        raise ConfigError(message, "empty", field="views")
    return Subset(source, positions)


def label_fraction(patients: Sequence[str], fraction: float, seed: int) -> NDArray[np.int64]:
    """Return the positions, ascending, of the images of a fraction of the patients (for few-label
    experiments).

    Patients are ordered by a hash of (seed, patient) and the first round(fraction * patients) are
    taken, at least one. So the subsets of one seed are nested, all images of a patient stay
    together, and a patient's rank does not depend on the other patients.

    Args:
        patients: patient of each image.
        fraction: above 0, at most 1.
        seed: seed of the order.

    Raises:
        ConfigError: the fraction is out of range, or there are no images.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"expected a fraction in (0, 1], got {fraction:g}", "out_of_range", field="fraction"
        )
    if not patients:
        raise ConfigError("there are no images to take a fraction of", "empty", field="patients")
    order = sorted(
        set(patients),
        key=lambda patient: hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8).digest(),
    )
    subset = set(order[: max(1, round(fraction * len(order)))])
    return np.flatnonzero([patient in subset for patient in patients])


def no_text(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return empty (ids_BT, mask_BT) with T = 0: the tokenizer of a model without a text
    encoder.
    """
    return torch.empty(len(texts), 0, dtype=torch.int64), torch.empty(
        len(texts), 0, dtype=torch.bool
    )


# A source of pairs as pairs, images alone and texts alone, for training on data that are mostly
# unpaired.

_PAIR, _IMAGE, _TEXT = range(3)


class UnpairedSource(SourceView):
    """The pairs of some patients; the samples of all others are an image without a text and a text
    without an image.

    The text alone has the key of its pair with `-text`, and both keep the labels. Pairs come first,
    then the images, then the texts. Reads all samples once.

    Args:
        source: the pairs.
        paired_fraction: fraction of the patients whose samples stay pairs, from 0 to 1. The
            patients of a smaller fraction are among those of a larger one
            (`medvl.data.loading.sources.label_fraction`).
        seed: seed of the order of the patients.
        others: "separate" the samples of the other patients, or "drop" them, to see what they are
            worth.

    Raises ConfigError where the fraction is out of range, or nothing is left.
    """

    def __init__(
        self,
        source: ShardSource,
        paired_fraction: float,
        seed: int = 0,
        others: Literal["separate", "drop"] = "separate",
    ) -> None:
        if not 0 <= paired_fraction <= 1 or (paired_fraction == 0 and others == "drop"):
            message = (
                f"expected a fraction from 0 to 1, and pairs or unpaired samples, got "
                f"{paired_fraction:g}, {others}"
            )
            raise ConfigError(message, "out_of_range", field="paired_fraction")
        everything = np.arange(len(source))
        patients = [source.sample(position).patient for position in range(len(source))]
        paired = (
            label_fraction(patients, paired_fraction, seed) if paired_fraction else everything[:0]
        )
        alone = np.setdiff1d(everything, paired) if others == "separate" else everything[:0]
        self._positions = np.concatenate([paired, alone, alone])
        self._kinds = np.repeat([_PAIR, _IMAGE, _TEXT], [len(paired), len(alone), len(alone)])
        content = source.fingerprint.encode() + self._positions.astype("<i8").tobytes()
        super().__init__(source, content + self._kinds.astype("<i8").tobytes())
        self.manifest = source.manifest

    def __len__(self) -> int:
        return len(self._positions)

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`; an image alone has no sections. Raises ShardError."""
        sample = self.source.sample(int(self._positions[position]))
        if self._kinds[position] == _IMAGE:
            return dataclasses.replace(sample, sections={})
        return (
            dataclasses.replace(sample, key=f"{sample.key}-text")
            if self._kinds[position] == _TEXT
            else sample
        )

    def source_position(self, position: int) -> int:
        """Raises ImageError, `no_image`, for a text alone."""
        if self._kinds[position] == _TEXT:
            raise ImageError(
                f"{self.folder}: sample {position} has no image: it was separated", "no_image"
            )
        return int(self._positions[position])


class ConcatSource:
    """The samples of several folders of shards, one folder after another.

    Args:
        sources: the folders.
        weights: share of each in training, of any sum; None draws every sample once an epoch.

    Attributes:
        folder: all folders, for messages.
        label_names: label names of all folders, in order of first appearance.
        counts: samples of each folder.
        manifest: merged manifest that a checkpoint stores: shards and patients of all folders. With
            a folder in colour it is in colour, as loaders read all folders then.
        region_manifest: that of the first folder's regions; the others have the same detector.

    Raises:
        ConfigError: no folder is given, one is given twice, or their ids were hashed with different
            salts, so that patients shared with an evaluation set could not be detected; or the
            weights do not fit, or the folders have regions of different detectors.
    """

    def __init__(
        self,
        sources: Sequence[ShardSource | UnpairedSource],
        weights: Sequence[float] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        fingerprints = [source.fingerprint for source in self.sources]
        if not self.sources:
            raise ConfigError("expected one or more folders of shards, got none", "missing")
        if len(set(fingerprints)) < len(fingerprints):
            raise ConfigError(
                "the same folder of shards is given twice; give each once", "conflict"
            )
        self.manifest = _merge([source.manifest for source in self.sources])
        self.label_names = self.manifest.label_names
        self.counts = tuple(map(len, self.sources))
        self.weights = None if weights is None else tuple(weights)
        if self.weights is not None:
            _check_weights(self.weights, len(self.sources))
            fingerprints.append(f"weights {self.weights}")
        self.fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()
        self.folder = ", ".join(str(source.folder) for source in self.sources)
        self.region_manifest = self.sources[0].region_manifest
        check_one_detector([source.region_manifest for source in self.sources])
        self._ends = np.cumsum([len(source) for source in self.sources]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample(self, position: int) -> Sample:
        """Return the sample at `position`, without its pixels. Raises ShardError."""
        source, place = self._locate(position)
        return source.sample(place)

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.pixels(place, color)

    def image_bytes(self, position: int) -> bytes:
        """Return the encoded image. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.image_bytes(place)

    def volume(self, position: int, slices: slice | None = None) -> Volume:
        """Return the volume. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.volume(place, slices)

    def organs(self, position: int, slices: slice | None = None) -> np.ndarray | None:
        """Return the organs of the volume, None without masks. Raises ShardError."""
        source, place = self._locate(position)
        return source.organs(place, slices)

    def volume_bytes(self, position: int) -> int:
        """Return the stored bytes of the volume."""
        source, place = self._locate(position)
        return source.volume_bytes(place)

    def regions(self, position: int) -> Regions:
        """Return the regions of the image. Raises ImageError or ShardError."""
        source, place = self._locate(position)
        return source.regions(place)

    def _locate(self, position: int) -> tuple[ShardSource | UnpairedSource, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        number = bisect.bisect_right(self._ends, position)
        return self.sources[number], position - (self._ends[number - 1] if number else 0)


def _check_weights(weights: Sequence[float], folders: int) -> None:
    if len(weights) != folders:
        message = f"expected a weight for each of the {folders} folders, got {len(weights)}"
        raise ConfigError(message, "mismatch", field="weights")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"expected positive weights, got {tuple(weights)}", "out_of_range", field="weights"
        )


def _merge(manifests: Sequence[Manifest]) -> Manifest:
    if len({manifest.salt for manifest in manifests}) > 1:
        message = "the folders were hashed with different salts; convert them with one --salt-file"
        raise ConfigError(message, "mismatch", field="salt")
    return dataclasses.replace(
        manifests[0],
        corpus="+".join(manifest.corpus for manifest in manifests),
        samples=sum(manifest.samples for manifest in manifests),
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
        label_names=tuple(
            dict.fromkeys(name for manifest in manifests for name in manifest.label_names)
        ),
        options={**manifests[0].options, "color": any(manifest.color for manifest in manifests)},
        patients=tuple(
            sorted({patient for manifest in manifests for patient in manifest.patients})
        ),
        generators=_distinct(
            [generator for manifest in manifests for generator in manifest.generators]
        ),
    )


def _distinct(generators: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(each for place, each in enumerate(generators) if each not in generators[:place])
