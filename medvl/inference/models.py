"""Models for inference: loading, checks, batches of images."""

import dataclasses
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.dicom.reader import DicomHeader, DicomImage, decode_dicom_header
from medvl.data.images.read import ImageInput
from medvl.data.transforms.image import as_list
from medvl.errors import ConfigError, DicomError
from medvl.models.base import System
from medvl.models.card import CHEST_RADIOGRAPHS, CT_SCANS, ImageKind, image_kinds
from medvl.models.checkpoint import load
from medvl.models.checkpoint_folder import manifests_of
from medvl.models.volumes.base import VolumeDualEncoder
from medvl.schema import Batch

# Whether an image is of the kind that a model was trained on: modality and body part of its DICOM
# header.


@dataclasses.dataclass(frozen=True)
class Expected:
    """Images that a model was trained on."""

    kinds: tuple[ImageKind, ...] = (CHEST_RADIOGRAPHS,)
    recorded: bool = False
    """Whether the checkpoint records corpora that state the kind of all their images."""

    @classmethod
    def by(cls, model: nn.Module) -> "Expected":
        """Return the images that a model expects: chest radiographs, or CT scans of a model of
        volumes, where its checkpoint does not record the kind.
        """
        kinds = image_kinds(manifests_of(model))
        present_kinds = tuple(kind for kind in kinds if kind is not None)
        return (
            cls(present_kinds, recorded=len(present_kinds) == len(kinds))
            if present_kinds
            else cls((CT_SCANS if isinstance(model, VolumeDualEncoder) else CHEST_RADIOGRAPHS,))
        )

    @property
    def name(self) -> str:
        """The kinds, joined by "or"."""
        return " or ".join(kind.name for kind in self.kinds)

    def doubt(self, header: DicomHeader | None) -> str | None:
        """Return why an image is of another kind, such as "MR, HEAD"; None where the header does
        not show it.

        JPEG and PNG files have no such header, and DICOM files need not state the part of the body.
        """
        if header is None:
            return None
        parts = [
            kind.body_parts
            for kind in self.kinds
            if header.modality in kind.modalities or not kind.modalities
        ]
        if parts:
            return None if any(_is_of(header, each) for each in parts) else header.body_part
        of_part = any(_is_of(header, kind.body_parts) for kind in self.kinds)
        modality = header.modality or "no known modality"
        return modality if of_part else f"{modality}, {header.body_part}"


def _is_of(header: DicomHeader, body_parts: Sequence[str]) -> bool:
    return header.body_part is None or not body_parts or header.body_part in body_parts


_FIRST_FILES = 20
"""Entries of a folder among which the first DICOM file is looked for."""


def header_of(image: Any) -> DicomHeader | None:
    """Return the allow-listed header of a DICOM file, given by its path or bytes, or of the first
    of a folder; None for other images.
    """
    try:
        if isinstance(image, str | os.PathLike) and Path(image).is_dir():
            files = itertools.islice(sorted(Path(image).rglob("*")), _FIRST_FILES)
            return next(filter(None, map(header_of, filter(Path.is_file, files))), None)
        if isinstance(image, DicomImage):
            return image.header
        if isinstance(image, bytes | bytearray):
            return _header(BytesIO(image))
        if isinstance(image, str | os.PathLike) and Path(image).is_file():
            with Path(image).open("rb") as file:
                return _header(file)
    except (DicomError, OSError):  # reading the pixels reports it
        return None
    return None


def _header(file: BinaryIO) -> DicomHeader | None:
    is_dicom = starts_like_dicom(file.read(132))
    file.seek(0)
    return decode_dicom_header(file) if is_dicom else None


def warn_of_other_images(model: nn.Module, images: Iterable[Any]) -> None:
    """Issue a UserWarning if DICOM files are of another kind than the images that the model was
    trained on.
    """
    expected = Expected.by(model)
    message = describe_doubts([expected.doubt(header_of(image)) for image in images], expected)
    if message:
        warnings.warn(message, UserWarning, stacklevel=4)


def describe_doubts(doubts: Sequence[str | None], expected: Expected) -> str | None:
    """Return the warning about images, given the doubt of each; None if there is none."""
    kinds = Counter(doubt for doubt in doubts if doubt is not None)
    if not kinds:
        return None
    counts = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + (
        "; ..." if len(kinds) > 5 else ""
    )
    facts = (
        f"{kinds.total()} of {len(doubts)} images are no {expected.name} by their header ({counts})"
    )
    assumed = (
        ""
        if expected.recorded
        else "; the checkpoint does not record what all its training images show"
    )
    return (
        f"{facts}: a model trained on {expected.name} gives meaningless results for others{assumed}"
    )


def describe_doubt(header: DicomHeader | None, models: Mapping[str, Expected]) -> str | None:
    """Return the warning about one image for models by their title; None if there is none.

    Titles are named where the image is of the kind of some models and not of others.
    """
    titles: dict[tuple[str, str], list[str]] = {}
    for title, expected in models.items():
        doubt = expected.doubt(header)
        if doubt is not None:
            titles.setdefault((doubt, expected.name), []).append(title)
    sentences = []
    for (doubt, kind), named in titles.items():
        before = "" if len(named) == len(models) else f"{', '.join(named)}: "
        sentences.append(
            f"{before}The header says {doubt}; models for {kind} give meaningless results here."
        )
    assumed = [title for named in titles.values() for title in named if not models[title].recorded]
    if assumed:
        reason = "Assumed, because the checkpoint does not record its training images"
        sentences.append(f"{reason}: {', '.join(assumed)}.")
    return " ".join(sentences) or None


BATCH = 32
AnyImage = TypeVar("AnyImage", bound=ImageInput)
Images = list[AnyImage] | tuple[AnyImage, ...]
"""Several images."""


def open_model(model: System | Path | str) -> System:
    """Return the model, or load it (`medvl.load`). Raises CheckpointError as `load`, ConfigError
    for regions.
    """
    system = model if isinstance(model, System) else load(model)
    if system.inputs.regions:
        message = (
            f"{system.name} reads the regions of a detector instead of pixels; evaluate "
            f"it on shards with regions"
        )
        raise ConfigError(message, "unsupported", field="model")
    return system


def refuse(model: System, task: str, able: str) -> ConfigError:
    """Return the error for a model that cannot do a task, naming those that can."""
    return ConfigError(f"a {model.name} cannot {task}; {able}", "unsupported", field="model")


def batches(model: System, images: Any, size: int = BATCH) -> Iterator[Tensor]:
    """Yield the images as the model takes them, on its device, `size` at a time. Raises as
    `EvalTransform`.

    Warns (UserWarning) of DICOM files that are of another kind than the model's training images by
    their header.
    """
    items = as_list(images)
    if not len(items):
        raise ConfigError("expected at least one image, got an empty list", "empty", field="images")
    if isinstance(items, Sequence):
        warn_of_other_images(model, items)
    for start in range(0, len(items), size):
        yield model.transform(items[start : start + size]).to(model.device)


def make_batch(model: System, image_BCHW: Tensor, texts: Sequence[str] | None = None) -> Batch:
    """Return a batch of images with a text each; without texts, with none. Raises ConfigError
    without a tokenizer.
    """
    if texts is not None:
        return model.make_batch(image_BCHW, texts, *model.tokenize(texts))
    no_ids_BT = torch.empty(len(image_BCHW), 0, dtype=torch.int64)
    return model.make_batch(image_BCHW, [""] * len(image_BCHW), no_ids_BT, no_ids_BT.bool())


def study_batches(
    model: System, studies: Sequence[Sequence[Any]], size: int = BATCH
) -> Iterator[Batch]:
    """Yield studies as batches, `size` at a time: the first image of each, and as many others as
    the model reads. Raises as `EvalTransform`, ConfigError for a study without an image.
    """
    if not studies or not all(map(len, studies)):
        message = "expected one or more images of each study, got none"
        raise ConfigError(message, "empty", field="studies")
    warn_of_other_images(model, (image for study in studies for image in study))
    limit = model.inputs.study_images
    for start in range(0, len(studies), size):
        groups = [list(study)[:limit] for study in studies[start : start + size]]
        images_NCHW = model.transform([image for group in groups for image in group])
        images = images_NCHW.to(model.device).split([len(group) for group in groups])
        batch = make_batch(model, torch.stack([group[0] for group in images]))
        others = torch.tensor([len(group) - 1 for group in groups], device=model.device)
        if others.any():
            batch.other_views_BVCHW = pad_sequence([group[1:] for group in images], True)
            views_V = torch.arange(batch.other_views_BVCHW.shape[1], device=model.device)
            batch.has_other_view_BV = views_V < others[:, None]
        yield batch


def texts_for(images: Any, texts: str | Sequence[str], field: str) -> tuple[list[Any], list[str]]:
    """Return images and texts of equal number: one of either is repeated. Raises ConfigError for
    other numbers.
    """
    items = list(as_list(images))
    each = [texts] if isinstance(texts, str) else list(texts)
    items = items * len(each) if len(items) == 1 else items
    each = each * len(items) if len(each) == 1 else each
    if len(items) != len(each):
        message = (
            f"expected one {field} or as many as images, got {len(each)} for {len(items)} images"
        )
        raise ConfigError(message, "mismatch", field=field)
    return items, each


def is_single(images: Any) -> bool:
    """Return whether `images` is one image, not a list of them."""
    return as_list(images) is not images and not (hasattr(images, "ndim") and images.ndim == 4)
