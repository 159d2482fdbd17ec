"""`medvl shards` for corpora with labels, boxes or masks and no text."""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.cli.shards.corpora import Flat, convert_corpus, split_fractions
from medvl.data.convert.options import ShardOptions, ShardRun

_FRACTIONS = ("train=0.7", "validate=0.15", "test=0.15")


def rsna(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    patients: Literal["mapping", "image"] = "mapping",
    splits: tuple[str, ...] = _FRACTIONS,
) -> str:
    """Convert the RSNA pneumonia challenge: labels and boxes.

    Args:
        root: folder of the release: its tables, stage_2_train_images/, and RSNA's mapping to NIH ChestX-ray14.
        run: output folder, budget, workers.
        options: storage format of the images.
        patients: mapping uses the patients of NIH ChestX-ray14; image treats every image as a patient, as published
            splits do, so that a patient may be in two splits.
        splits: fractions of the splits, by patient.
    """
    from medvl.data.corpora.boxes_and_masks import rsna as corpus

    return convert_corpus(corpus, root, run, _textless(options), patients=patients, fractions=split_fractions(splits))


def siim(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, splits: tuple[str, ...] = _FRACTIONS) -> str:
    """Convert the SIIM-ACR pneumothorax challenge: labels and masks.

    Args:
        root: folder with stage_2_train.csv or train-rle.csv, and the DICOM files.
        run: output folder, budget, workers.
        options: storage format of the images.
        splits: fractions of the splits, by image: the release has no patient ids.
    """
    from medvl.data.corpora.boxes_and_masks import siim as corpus

    return convert_corpus(corpus, root, run, _textless(options), fractions=split_fractions(splits))


def ms_cxr(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    images: Path | None = None,
    splits: Literal["test", "release"] = "test",
) -> str:
    """Convert MS-CXR: phrases with boxes, for `medvl eval grounding`.

    Args:
        root: folder of the release with its table.
        run: output folder, budget, workers; use the salt of your MIMIC-CXR shards, so that training patients are
            recognized.
        options: storage format of the images.
        images: folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root.
        splits: test puts all images into one test split; release uses the table's column.
    """
    from medvl.data.corpora.boxes_and_masks import ms_cxr as corpus

    return convert_corpus(corpus, root, run, _textless(options), images=images, splits=splits)


def ms_cxr_t(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, images: Path | None = None) -> str:
    """Convert MS-CXR-T: image pairs and the change of findings, for `medvl eval change`.

    Args:
        root: folder of the release with its table of image pairs.
        run: output folder, budget, workers; use the salt of your MIMIC-CXR shards, so that training patients are
            recognized.
        options: storage format of the images.
        images: folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root.
    """
    from medvl.data.corpora.labels import ms_cxr_t as corpus

    return convert_corpus(corpus, root, run, _textless(options), images=images)


def nih_cxr14(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, validate_share: float = 0.125) -> str:
    """Convert NIH ChestX-ray14, with the official test split: labels and boxes.

    Args:
        root: folder with Data_Entry_2017.csv, the two lists, and images/ or images_001/ to images_012/.
        run: output folder, budget, workers.
        options: storage format of the images.
        validate_share: fraction of the patients of the official training list for validation.
    """
    from medvl.data.corpora.labels import nih_cxr14 as corpus

    return convert_corpus(corpus, root, run, _textless(options), validate_share=validate_share)


def covidx(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    version: str | None = None,
    validate_share: float = 0.1,
) -> str:
    """Convert COVIDx CXR, with its official splits.

    Args:
        root: folder with the lists, train/ and test/.
        run: output folder, budget, workers.
        options: storage format of the images.
        version: version of the lists, such as COVIDx_CXR-3A for train_COVIDx_CXR-3A.txt; default train.txt.
        validate_share: fraction of the training patients for validation, where the release has no list for it.
    """
    from medvl.data.corpora.labels import covidx as corpus

    return convert_corpus(corpus, root, run, _textless(options), version=version, validate_share=validate_share)


def vindr_cxr(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    agreement: int = 2,
    boxes: Literal["merged", "all"] = "merged",
    validate_share: float = 0.1,
) -> str:
    """Convert VinDr-CXR, with the official test split: labels and boxes.

    Args:
        root: folder of the release: annotations/, train/ and test/.
        run: output folder, budget, workers.
        options: storage format of the images.
        agreement: how many of the three radiologists of a training image have to name a label.
        boxes: merged replaces the radiologists' boxes of one object by their mean; all keeps each of them.
        validate_share: fraction of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import vindr_cxr as corpus

    textless = _textless(options)
    return convert_corpus(corpus, root, run, textless, agreement=agreement, boxes=boxes, validate_share=validate_share)


def chestxdet10(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, validate_share: float = 0.1) -> str:
    """Convert ChestX-Det10, with the official test split: boxes of ten findings.

    Args:
        root: folder with train.json, test.json, train_data/ and test_data/.
        run: output folder, budget, workers.
        options: storage format of the images.
        validate_share: fraction of the patients of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import chestxdet10 as corpus

    return convert_corpus(corpus, root, run, _textless(options), validate_share=validate_share)


def object_cxr(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, validate_share: float = 0.2) -> str:
    """Convert Object-CXR, with the images of dev.csv as test split: boxes of foreign objects.

    Args:
        root: folder with train.csv, dev.csv, train/ and dev/.
        run: output folder, budget, workers.
        options: storage format of the images.
        validate_share: fraction of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import object_cxr as corpus

    return convert_corpus(corpus, root, run, _textless(options), validate_share=validate_share)


def _textless(options: ShardOptions) -> ShardOptions:
    return dataclasses.replace(options, keep_textless=True)
