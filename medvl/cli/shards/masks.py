"""`medvl shards` for the corpora of text-guided segmentation and of figure classification."""

import dataclasses
from pathlib import Path
from typing import Literal

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert_corpus

Splits = Literal["official", "repaired", "by-article"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTSplits:
    """Patients and splits of the corpora of LViT."""

    patients: Literal["image", "file"] = "image"
    """image treats every image as a patient, as the published splits do; file takes the patient (of MosMedData+ the
    study) in the file name, where it has one."""
    splits: Splits = "official"
    """official refuses splits that share a patient; repaired leaves images of shared patients out of the training
    splits; by-article draws new splits, by patient."""


def qata(root: Path, shared: Flat[ConversionOptions], *, division: Flat[LViTSplits] = LViTSplits()) -> str:
    """Convert QaTa-COV19: radiographs with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/, or with Train Set/ and Test Set/.
        shared: output, resources and storage format.
        division: patients and splits.
    """
    return _convert("qata", root, shared, division)


def mosmed(root: Path, shared: Flat[ConversionOptions], *, division: Flat[LViTSplits] = LViTSplits()) -> str:
    """Convert MosMedData+: slices of chest CT with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        shared: output, resources and storage format.
        division: patients and splits.
    """
    return _convert("mosmed", root, shared, division)


def monuseg(
    root: Path, shared: Flat[ConversionOptions], *, division: Flat[LViTSplits] = LViTSplits(patients="file")
) -> str:
    """Convert MoNuSeg: tissue with masks of nuclei and LViT's texts; use --color.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        shared: output, resources and storage format.
        division: patients (from the TCGA barcodes in the file names) and splits.
    """
    return _convert("monuseg", root, shared, division)


def melinda(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    level: Literal["i_meth", "p_meth", "i_meth_label", "p_meth_label"] = "i_meth_label",
    splits: Splits = "official",
) -> str:
    """Convert MELINDA: figures with captions and the methods of their experiments.

    Args:
        root: folder with train.csv, dev.csv, test.csv and melinda_images/.
        shared: output, resources and storage format.
        level: column whose classes are the labels.
        splits: as in roco.
    """
    from medvl.data.corpora.figures import melinda as corpus

    return convert_corpus(corpus, root, shared, level=level, splits=splits)


def _convert(name: str, root: Path, shared: ConversionOptions, division: LViTSplits) -> str:
    from medvl.data.corpora.boxes_and_masks import lvit_layout as corpus

    settings = {"name": name, "patients": division.patients, "splits": division.splits}
    return convert_corpus(corpus, root, shared.textless(), **settings)
