"""`medvl shards` for the corpora of text-guided segmentation and of figure classification."""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.cli.shards.corpora import Flat, convert_corpus
from medvl.data.convert.options import ShardOptions, ShardRun

Splits = Literal["official", "repaired", "by-article"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTSplits:
    """How the corpora of LViT are divided."""

    patients: Literal["image", "file"] = "image"
    """image treats every image as a patient, as the published splits do; file takes the patient (of MosMedData+ the
    study) in the file name, where it has one."""
    splits: Splits = "official"
    """official refuses splits that share a patient; repaired leaves images of shared patients out of the training
    splits; by-article draws new splits, by patient."""


def qata(
    root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, division: Flat[LViTSplits] = LViTSplits()
) -> str:
    """Convert QaTa-COV19: radiographs with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/, or with Train Set/ and Test Set/.
        run: output folder, budget, workers.
        options: storage format of the images.
        division: patients and splits.
    """
    return _convert("qata", root, run, options, division)


def mosmed(
    root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, division: Flat[LViTSplits] = LViTSplits()
) -> str:
    """Convert MosMedData+: slices of chest CT with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        run: output folder, budget, workers.
        options: storage format of the images.
        division: patients and splits.
    """
    return _convert("mosmed", root, run, options, division)


def monuseg(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    division: Flat[LViTSplits] = LViTSplits(patients="file"),
) -> str:
    """Convert MoNuSeg: tissue with masks of nuclei and LViT's texts; use --color.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        run: output folder, budget, workers.
        options: storage format of the images.
        division: patients, which are those of TCGA in the file names, and splits.
    """
    return _convert("monuseg", root, run, options, division)


def melinda(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    level: Literal["i_meth", "p_meth", "i_meth_label", "p_meth_label"] = "i_meth_label",
    splits: Splits = "official",
) -> str:
    """Convert MELINDA: figures with captions and the methods of their experiments.

    Args:
        root: folder with train.csv, dev.csv, test.csv and melinda_images/.
        run: output folder, budget, workers.
        options: storage format of the images.
        level: column whose classes are the labels.
        splits: as in roco.
    """
    from medvl.data.corpora.figures import melinda as corpus

    return convert_corpus(corpus, root, run, options, level=level, splits=splits)


def _convert(name: str, root: Path, run: ShardRun, options: ShardOptions, division: LViTSplits) -> str:
    from medvl.data.corpora.boxes_and_masks import lvit_layout as corpus

    kept = dataclasses.replace(options, keep_textless=True)
    return convert_corpus(corpus, root, run, kept, name=name, patients=division.patients, splits=division.splits)
