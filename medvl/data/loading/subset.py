"""Views of a source: a subset of its samples, other label columns or texts; the tokenizer of a model without text."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.loading.sources import Source, region_manifest_of
from medvl.data.shards.regions import Regions
from medvl.data.transforms.text import TextPolicy
from medvl.errors import ConfigError
from medvl.schema import CHANGES, Sample


class SourceView:
    """Base class of views of a source, by default of the same samples in the same order.

    Args:
        source: the samples.
        content: what determines the view, for its fingerprint.
        label_names: label columns; None for those of the source.
    """

    def __init__(self, source: Source, content: bytes, label_names: Sequence[str] | None = None) -> None:
        self.source, self.label_names = source, tuple(source.label_names if label_names is None else label_names)
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

    def regions(self, position: int) -> Regions:
        """Return the regions at `position`, of a source that has them."""
        source: Any = self.source
        regions: Regions = source.regions(self.source_position(position))
        return regions


class Subset(SourceView):
    """The samples of a source at some positions, in that order."""

    def __init__(self, source: Source, positions: Sequence[int] | NDArray[np.int64]) -> None:
        self.positions = np.asarray(positions, dtype=np.int64)
        super().__init__(source, source.fingerprint.encode() + self.positions.astype("<i8").tobytes())

    def __len__(self) -> int:
        return len(self.positions)

    def source_position(self, position: int) -> int:
        """See the base class."""
        return int(self.positions[position])


class LabelPolicyView(SourceView):
    """A source whose labels are mapped to 1, 0 or absent, in chosen columns.

    Args:
        source: the samples.
        names: label columns; a name that the source lacks is absent everywhere.
        settle: maps labels (1, 0, -1 or NaN) and their names to 1, 0 or NaN, one row at a time. It gets all columns of
            the source and must be picklable (a module-level function or a bound method) for the loader's workers.
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
        sample, columns = self.source.sample(position), self.source.label_names
        table_1L = np.array([[sample.labels.get(name, np.nan) for name in columns]])
        row = dict(zip(columns, self.settle(table_1L, columns)[0].tolist(), strict=True))
        kept = {name: int(row[name]) for name in self.label_names if name in row and not np.isnan(row[name])}
        return dataclasses.replace(sample, labels=kept)


class ChangeLabels(SourceView):
    """A source whose labels are changes since the prior image: -1 for improving, 0 for stable, 1 for worsening.

    Args:
        source: samples with `extra["change"]`, such as those of MS-CXR-T.
        findings: label columns; samples without a label of change, such as prior images, have none.
    """

    def __init__(self, source: Source, findings: Sequence[str]) -> None:
        super().__init__(source, "\n".join([source.fingerprint, "change", *findings]).encode(), findings)

    def sample(self, position: int) -> Sample:
        """Return the sample at `position` with its changes as labels."""
        sample = self.source.sample(position)
        change = changes_of(sample)
        labels = {name: CHANGES.index(change[name]) - 1 for name in self.label_names if name in change}
        return dataclasses.replace(sample, labels=labels)


class OtherTexts(SourceView):
    """A source whose samples have no text, or the text of another sample, to measure what a model reads in the texts.

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
    wanted, rng = {view.upper() for view in views}, np.random.default_rng(0)
    kept = []
    for position in range(len(source)):
        sample = source.sample(position)
        has_view = not wanted or (sample.view or "").upper() in wanted
        if has_view and (text is None or len(text(sample.sections, rng).strip()) >= max(min_characters, 1)):
            kept.append(position)
    if not kept:
        which = f"one of the views {', '.join(views)}" if views else "a text"
        message = f"no sample of {getattr(source, 'folder', 'the files')} has {which}; choose other views or texts"
        raise ConfigError(message, "empty", field="views")
    return Subset(source, kept)


def label_fraction(patients: Sequence[str], fraction: float, seed: int) -> NDArray[np.int64]:
    """Return the positions, ascending, of the images of a fraction of the patients (for few-label experiments).

    Patients are ordered by a hash of (seed, patient) and the first round(fraction * patients) are taken, at least one.
    So the subsets of one seed are nested, all images of a patient stay together, and a patient's rank does not depend
    on the other patients.

    Args:
        patients: patient of each image.
        fraction: above 0, at most 1.
        seed: seed of the order.

    Raises:
        ConfigError: the fraction is out of range, or there are no images.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"expected a fraction in (0, 1], got {fraction:g}", "out_of_range", field="fraction")
    if not patients:
        raise ConfigError("there are no images to take a fraction of", "empty", field="patients")
    order = sorted(
        set(patients), key=lambda patient: hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8).digest()
    )
    taken = set(order[: max(1, round(fraction * len(order)))])
    return np.flatnonzero([patient in taken for patient in patients])


def no_text(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return empty (ids_BT, mask_BT) with T = 0: the tokenizer of a model without a text encoder."""
    return torch.empty(len(texts), 0, dtype=torch.int64), torch.empty(len(texts), 0, dtype=torch.bool)
