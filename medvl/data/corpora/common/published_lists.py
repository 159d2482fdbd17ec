"""Published lists of test images, such as CheXpert 5x200: to convert them alone, or to leave their
patients out of training.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.rows import cell_label
from medvl.data.corpora.common.tables import malformed, read_header, read_lines, read_table
from medvl.errors import ConfigError, CorpusError
from medvl.schema import FINDINGS, Sample

IMAGE_COLUMNS = ("Path", "path", "image_path", "imgpath", "dicom_id", "image_id")
"""Names of a column of image paths or ids."""
STUDY_COLUMNS = ("study_id", "StudyInstanceUid")
SPLIT = "test"
"""Split of the images of a list."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedList:
    """Images, or studies, and their labels where the list has any."""

    images: Mapping[str, Mapping[str, int]]
    studies: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    def find(self, image: str, study: str) -> Mapping[str, int] | None:
        """Return the labels of an image; None where neither it nor its study is listed."""
        labels = self.images.get(image)
        return self.studies.get(study) if labels is None else labels


def read_published_list(
    path: Path, folders: InputFolders, parse: Callable[[str], str]
) -> PublishedList:
    """Read a table with a column of images (or else of studies) and labels, or one image a line.

    Labels are the columns named as CheXpert's findings, 1, 0, -1 or blank. `parse` returns the id
    of an image from its path or id.

    Raises CorpusError when the file is missing, damaged or empty, or an image is listed with
    different labels.
    """
    header = read_header(path, folders)
    column = next((name for name in (*IMAGE_COLUMNS, *STUDY_COLUMNS) if name in header), None)
    entries: dict[str, dict[str, int]] = {}
    of_studies = column in STUDY_COLUMNS
    if column is None:
        entries = {_id(line, path, parse): {} for line in read_lines(path, folders) if line.strip()}
    else:
        names = [name for name in FINDINGS if name in header]
        for row in read_table(path, (column, *names), folders):
            name = row[column].strip() if of_studies else _id(row[column], path, parse)
            labels = _labels(row, names, path)
            if entries.setdefault(name, labels) != labels:
                raise malformed(path, "expected one set of labels for an image", column)
    if not entries:
        raise CorpusError(f"{path} lists no image", "empty")
    return PublishedList({}, entries) if of_studies else PublishedList(entries)


def _id(text: str, path: Path, parse: Callable[[str], str]) -> str:
    try:
        return parse(text.strip())
    except CorpusError as error:
        raise error.prefixed(f"{path}: ") from None


def _labels(row: Mapping[str, str], names: Iterable[str], path: Path) -> dict[str, int]:
    labels = {}
    for name in names:
        try:
            value = cell_label(row[name])
        except ValueError:
            raise malformed(path, f"expected 1, 0, -1 or blank for {name}", name) from None
        if value is not None:
            labels[name] = value
    return labels


class Place(NamedTuple):
    """Image, study and patient of a row, as the release names them."""

    image: str
    study: str
    patient: str


def list_folders(*lists: Path | None) -> list[Path]:
    """Return the folders of the lists that are given, from which they may be read."""
    return [path.parent for path in lists if path is not None]


class Selection:
    """Rows that a conversion keeps: those of one list, without the patients of another."""

    def __init__(
        self,
        only: Path | None,
        exclude: Path | None,
        folders: InputFolders,
        parse: Callable[[str], str],
        rows: Iterable[Place],
    ) -> None:
        """Read the lists.

        Args:
            only: list of the images to keep.
            exclude: list of images whose patients are left out.
            folders: folders of the lists.
            parse: see `read_published_list`.
            rows: all rows of the corpus; read where `exclude` is given.

        Raises CorpusError as `read_published_list`, and ConfigError where both lists are given.
        """
        if only is not None and exclude is not None:
            message = "give --only to convert a list, or --exclude to leave it out"
            raise ConfigError(message, "conflict", field="only")
        file = only or exclude
        self._listed = (
            PublishedList({}) if file is None else read_published_list(file, folders, parse)
        )
        self._has_only = only is not None
        self._seen = set[str]()
        self._patients = set[str]()
        if exclude is not None:
            find = self._listed.find
            self._patients = {row.patient for row in rows if find(row.image, row.study) is not None}

    def reason(self, place: Place) -> str | None:
        """Return why a row is left out, or None."""
        labels = self._listed.find(place.image, place.study)
        if labels is not None:
            self._seen.add(place.image if place.image in self._listed.images else place.study)
        if self._has_only:
            return "not_listed" if labels is None else None
        if place.patient not in self._patients:
            return None
        return "patient_of_listed_image" if labels is None else "listed_image"

    def apply(self, sample: Sample, place: Place) -> Sample:
        """Return the sample of a listed image, with the split and the labels of its list."""
        labels = self._listed.find(place.image, place.study) if self._has_only else None
        if labels is None:
            return sample
        return dataclasses.replace(sample, split=SPLIT, labels=labels or sample.labels)

    def count_missing(self, warnings: Counter[str]) -> None:
        """Count the entries of the list that have no row in the corpus."""
        entries = {*self._listed.images, *self._listed.studies}
        warnings["listed_without_row"] += len(entries - self._seen)
