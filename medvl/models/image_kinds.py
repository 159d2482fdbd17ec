"""Kinds of images that a model was trained on, by the corpora that its checkpoint records."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from medvl.models.weights import generator_manifests


@dataclasses.dataclass(frozen=True)
class ImageKind:
    """Images of one kind, and the DICOM files that are of it."""

    name: str
    """Plural noun phrase."""
    modalities: tuple[str, ...] = ()
    """DICOM modalities; empty: any."""
    body_parts: tuple[str, ...] = ()
    """Values of Body Part Examined; empty: any."""


_CHEST = ("CHEST", "PORT CHEST", "THORAX", "LUNG", "HEART")
CHEST_RADIOGRAPHS = ImageKind("chest radiographs", ("CR", "DX", "RG"), _CHEST)
_CHEST_CT = ImageKind("chest CT", ("CT",), _CHEST)
_HISTOLOGY = ImageKind("histology", ("SM", "GM"))
_SEVERAL = ImageKind("images of several modalities")
_CORPORA = {
    **dict.fromkeys(
        (
            *(
                "chestxdet10",
                "chexpert",
                "covidx",
                "medvill-jsonl",
                "mimic-cxr",
                "ms-cxr",
                "ms-cxr-t",
            ),
            *("nih-cxr14", "object-cxr", "openi", "padchest", "qata", "r2gen-annotation", "rsna"),
            *("siim", "vindr-cxr"),
        ),
        CHEST_RADIOGRAPHS,
    ),
    "mosmed": _CHEST_CT,
    **dict.fromkeys(("monuseg", "path-vqa"), _HISTOLOGY),
    **dict.fromkeys(
        (
            *("m3ae-arrow", "medicat", "melinda", "roco", "roco-non-radiology", "rocov2"),
            *("slake", "vqa-med", "vqa-rad"),
        ),
        _SEVERAL,
    ),
}


def image_kind(corpus: Any) -> ImageKind | None:
    """Return the kind of the images of a corpus of medvl; None for others, whose manifests do
    not state it.
    """
    return _CORPORA.get(corpus) if isinstance(corpus, str) else None


def image_kinds(manifests: Iterable[Mapping[str, Any]]) -> tuple[ImageKind | None, ...]:
    """Return the kinds of the images of training data, each once; None stands for corpora that do
    not state it.

    Synthetic images are of the kinds of their generators' training data. Corpora of texts alone do
    not count.
    """
    used = [each for each in manifests if _has_images(each)]
    stated = [each for each in used if not each.get("generators")]
    return tuple(
        dict.fromkeys(
            image_kind(each.get("corpus")) for each in [*stated, *generator_manifests(used)]
        )
    )


def _has_images(manifest: Mapping[str, Any]) -> bool:
    samples = manifest.get("samples")
    return samples is None or (manifest.get("warnings") or {}).get("no_image", 0) < samples
