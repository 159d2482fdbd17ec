"""`medvl shards` for corpora with labels, boxes or masks and no text."""

from pathlib import Path
from typing import Literal

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert_corpus, split_fractions

_FRACTIONS = ("train=0.7", "validate=0.15", "test=0.15")


def rsna(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    patients: Literal["mapping", "image"] = "mapping",
    splits: tuple[str, ...] = _FRACTIONS,
) -> str:
    """Convert the RSNA pneumonia challenge: labels and boxes.

    Args:
        root: folder of the release: its tables, stage_2_train_images/, and RSNA's mapping to NIH ChestX-ray14.
        shared: output, resources and storage format.
        patients: mapping uses the patients of NIH ChestX-ray14; image treats every image as a patient, as published
            splits do, so that a patient may be in two splits.
        splits: fractions of the splits, by patient.
    """
    from medvl.data.corpora.boxes_and_masks import rsna as corpus

    return convert_corpus(corpus, root, shared.textless(), patients=patients, fractions=split_fractions(splits))


def siim(root: Path, shared: Flat[ConversionOptions], *, splits: tuple[str, ...] = _FRACTIONS) -> str:
    """Convert the SIIM-ACR pneumothorax challenge: labels and masks.

    Args:
        root: folder with stage_2_train.csv or train-rle.csv, and the DICOM files.
        shared: output, resources and storage format.
        splits: fractions of the splits, by image: the release has no patient ids.
    """
    from medvl.data.corpora.boxes_and_masks import siim as corpus

    return convert_corpus(corpus, root, shared.textless(), fractions=split_fractions(splits))


def ms_cxr(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    images: Path | None = None,
    splits: Literal["test", "release"] = "test",
) -> str:
    """Convert MS-CXR: phrases with boxes, for `medvl eval grounding`.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.

    Args:
        root: folder of the release with its table.
        shared: output, resources and storage format.
        images: folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root.
        splits: test puts all images into one test split; release uses the table's column.
    """
    from medvl.data.corpora.boxes_and_masks import ms_cxr as corpus

    return convert_corpus(corpus, root, shared.textless(), images=images, splits=splits)


def ms_cxr_t(root: Path, shared: Flat[ConversionOptions], *, images: Path | None = None) -> str:
    """Convert MS-CXR-T: image pairs and the change of findings, for `medvl eval change`.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.

    Args:
        root: folder of the release with its table of image pairs.
        shared: output, resources and storage format.
        images: folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root.
    """
    from medvl.data.corpora.labels import ms_cxr_t as corpus

    return convert_corpus(corpus, root, shared.textless(), images=images)


def nih_cxr14(root: Path, shared: Flat[ConversionOptions], *, validate_share: float = 0.125) -> str:
    """Convert NIH ChestX-ray14, with the official test split: labels and boxes.

    Args:
        root: folder with Data_Entry_2017.csv, the two lists, and images/ or images_001/ to images_012/.
        shared: output, resources and storage format.
        validate_share: fraction of the patients of the official training list for validation.
    """
    from medvl.data.corpora.labels import nih_cxr14 as corpus

    return convert_corpus(corpus, root, shared.textless(), validate_share=validate_share)


def covidx(
    root: Path, shared: Flat[ConversionOptions], *, version: str | None = None, validate_share: float = 0.1
) -> str:
    """Convert COVIDx CXR, with its official splits.

    Args:
        root: folder with the lists, train/ and test/.
        shared: output, resources and storage format.
        version: version of the lists, such as COVIDx_CXR-3A for train_COVIDx_CXR-3A.txt; default train.txt.
        validate_share: fraction of the training patients for validation, where the release has no list for it.
    """
    from medvl.data.corpora.labels import covidx as corpus

    return convert_corpus(corpus, root, shared.textless(), version=version, validate_share=validate_share)


def vindr_cxr(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    agreement: int = 2,
    boxes: Literal["merged", "all"] = "merged",
    validate_share: float = 0.1,
) -> str:
    """Convert VinDr-CXR, with the official test split: labels and boxes.

    Args:
        root: folder of the release: annotations/, train/ and test/.
        shared: output, resources and storage format.
        agreement: how many of the three radiologists of a training image have to name a label.
        boxes: merged replaces the radiologists' boxes of one object by their mean; all keeps each of them.
        validate_share: fraction of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import vindr_cxr as corpus

    shared = shared.textless()
    return convert_corpus(corpus, root, shared, agreement=agreement, boxes=boxes, validate_share=validate_share)


def chestxdet10(root: Path, shared: Flat[ConversionOptions], *, validate_share: float = 0.1) -> str:
    """Convert ChestX-Det10, with the official test split: boxes of ten findings.

    Args:
        root: folder with train.json, test.json, train_data/ and test_data/.
        shared: output, resources and storage format.
        validate_share: fraction of the patients of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import chestxdet10 as corpus

    return convert_corpus(corpus, root, shared.textless(), validate_share=validate_share)


def object_cxr(root: Path, shared: Flat[ConversionOptions], *, validate_share: float = 0.2) -> str:
    """Convert Object-CXR, with the images of dev.csv as test split: boxes of foreign objects.

    Args:
        root: folder with train.csv, dev.csv, train/ and dev/.
        shared: output, resources and storage format.
        validate_share: fraction of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import object_cxr as corpus

    return convert_corpus(corpus, root, shared.textless(), validate_share=validate_share)
