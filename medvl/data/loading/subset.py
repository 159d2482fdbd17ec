"""Views of a source: some of its samples, its labels settled, and no text."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.loading.loader import Source
from medvl.errors import ConfigError
from medvl.schema import Sample


class Subset:
    """The samples of a source at some positions, in that order; `folder` is the source's, for messages."""

    def __init__(self, source: Source, positions: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.positions = source, np.asarray(positions, dtype=np.int64)
        self.label_names = source.label_names
        told = source.fingerprint.encode() + self.positions.astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(told).hexdigest()
        self.folder = getattr(source, "folder", "the files")

    def __len__(self) -> int:
        return len(self.positions)

    def sample(self, position: int) -> Sample:
        """As the source gives it."""
        return self.source.sample(int(self.positions[position]))

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """As the source gives them."""
        return self.source.pixels(int(self.positions[position]), color)


class LabelPolicyView:
    """A source whose labels are 1, 0 or absent, in columns of one's own choice.

    Args:
        source: the samples.
        names: the columns; a name that the source lacks is absent everywhere.
        settle: labels of 1, 0, -1 or NaN with their names -> 1, 0 or NaN, a row at a time: a rule for labels that are
            neither. It is given all columns of the source, and must be a function of a module or a method of a value,
            so that workers can be handed it.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[str],
        settle: Callable[[NDArray[np.float64], Sequence[str]], NDArray[np.float64]],
    ) -> None:
        self.source, self.label_names, self.settle = source, tuple(names), settle
        told = "\n".join([source.fingerprint, *self.label_names])
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()
        self.folder = getattr(source, "folder", "the files")

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, position: int) -> Sample:
        """As the source gives it, but for its labels."""
        sample, columns = self.source.sample(position), self.source.label_names
        table_1L = np.array([[sample.labels.get(name, np.nan) for name in columns]])
        row = dict(zip(columns, self.settle(table_1L, columns)[0].tolist(), strict=True))
        kept = {name: int(row[name]) for name in self.label_names if name in row and not np.isnan(row[name])}
        return dataclasses.replace(sample, labels=kept)

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """As the source gives them."""
        return self.source.pixels(position, color)


def label_fraction(patients: Sequence[str], fraction: float, seed: int) -> NDArray[np.int64]:
    """Positions, ascending, of the images of a share of the patients: who is labelled where labels are scarce.

    Patients stand in an order that a hash of (seed, patient) decides, and the first round(fraction x patients) of them
    are taken, at least one. So draws of one seed are nested, images of a patient stay together, and a patient's place
    does not depend on who else is there.

    Args:
        patients: of each image.
        fraction: above 0, at most 1.
        seed: of the order.

    Raises:
        ConfigError: the fraction is out of range or there is no image.
    """
    if not 0 < fraction <= 1 or not patients:
        raise ConfigError(f"a fraction of labels is above 0 and at most 1, of one image or more; got {fraction:g}")
    order = sorted(
        set(patients), key=lambda patient: hashlib.blake2b(f"{seed}/{patient}".encode(), digest_size=8).digest()
    )
    taken = set(order[: max(1, round(fraction * len(order)))])
    return np.flatnonzero([patient in taken for patient in patients])


def no_text(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(ids_BT, mask_BT) with T = 0: the tokenizer of a model that reads no text."""
    return torch.empty(len(texts), 0, dtype=torch.int64), torch.empty(len(texts), 0, dtype=torch.bool)
