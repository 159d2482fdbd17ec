"""`medvl shards` for corpora of images with labels, boxes or masks and without text."""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.cli.shards import Flat, convert, deidentifier, split_shares
from medvl.data.convert.options import ShardOptions, ShardRun

_SHARES = ("train=0.7", "validate=0.15", "test=0.15")


def rsna(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    patients: Literal["mapping", "image"] = "mapping",
    splits: tuple[str, ...] = _SHARES,
) -> str:
    """Make shards of the RSNA pneumonia challenge: labels and boxes.

    Args:
        root: folder of the release: its tables, stage_2_train_images/, and RSNA's mapping to NIH ChestX-ray14.
        run: where to.
        options: how images are stored.
        patients: mapping takes NIH's patients; image takes every image for a patient, as published splits do, and
            lets patients stand in two splits.
        splits: shares of the splits, by patient.
    """
    from medvl.data.corpora import rsna as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, patients=patients, fractions=split_shares(splits))
    return convert(plan, deid, run, _textless(options))


def siim(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, splits: tuple[str, ...] = _SHARES) -> str:
    """Make shards of the SIIM-ACR pneumothorax challenge: labels and masks.

    Args:
        root: folder that holds stage_2_train.csv or train-rle.csv, and the DICOM files.
        run: where to.
        options: how images are stored.
        splits: shares of the splits, by image: the release names no patients.
    """
    from medvl.data.corpora import siim as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, fractions=split_shares(splits))
    return convert(plan, deid, run, _textless(options))


def ms_cxr(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    images: Path | None = None,
    splits: Literal["test", "release"] = "test",
) -> str:
    """Make shards of MS-CXR: phrases with boxes, for `medvl eval grounding`.

    Args:
        root: folder of the release, which holds its table.
        run: where to; the salt of your MIMIC-CXR shards, so that patients who were trained on are found.
        options: how images are stored.
        images: folder that holds files/ of MIMIC-CXR-JPG or MIMIC-CXR, if not root.
        splits: test makes a test set of all images; release takes the table's own column.
    """
    from medvl.data.corpora import ms_cxr as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, images=images, splits=splits)
    return convert(plan, deid, run, _textless(options))


def nih_cxr14(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, validate_share: float = 0.125) -> str:
    """Make shards of NIH ChestX-ray14, with the official test split: labels and boxes.

    Args:
        root: folder that holds Data_Entry_2017.csv, the two lists, and images/ or images_001/ to images_012/.
        run: where to.
        options: how images are stored.
        validate_share: of the patients of the official training list, who validate.
    """
    from medvl.data.corpora import nih_cxr14 as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, validate_share=validate_share)
    return convert(plan, deid, run, _textless(options))


def covidx(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    version: str | None = None,
    validate_share: float = 0.1,
) -> str:
    """Make shards of COVIDx CXR, with its official splits.

    Args:
        root: folder that holds the lists, train/ and test/.
        run: where to.
        options: how images are stored.
        version: of the lists, such as COVIDx_CXR-3A for train_COVIDx_CXR-3A.txt; default train.txt.
        validate_share: of the training patients, who validate where there is no list for that.
    """
    from medvl.data.corpora import covidx as corpus

    deid = deidentifier(run.salt_file)
    plan = corpus.plan(root, deid, version=version, validate_share=validate_share)
    return convert(plan, deid, run, _textless(options))


def _textless(options: ShardOptions) -> ShardOptions:
    return dataclasses.replace(options, keep_textless=True)
