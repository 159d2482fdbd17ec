"""`medvl shards` for corpora with labels, boxes or masks and no text."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

from medvl.cli.shards.corpora import (
    ConversionOptions,
    Flat,
    convert,
    convert_corpus,
    split_fractions,
)
from medvl.data.storage.webdataset_tars import TarFields
from medvl.schema import ConventionsName

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
        root: folder of the release: its tables, stage_2_train_images/, and RSNA's mapping to NIH
            ChestX-ray14.
        shared: output, resources and storage format.
        patients: mapping uses the patients of NIH ChestX-ray14; image treats every image as a
            patient, as published splits do, so that a patient may be in two splits.
        splits: fractions of the splits, by patient.
    """
    from medvl.data.corpora.boxes_and_masks import rsna as corpus

    return convert_corpus(
        corpus, root, shared.textless(), patients=patients, fractions=split_fractions(splits)
    )


def siim(
    root: Path, shared: Flat[ConversionOptions], *, splits: tuple[str, ...] = _FRACTIONS
) -> str:
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
        root: folder with Data_Entry_2017.csv, the two lists, and images/ or images_001/ to
            images_012/.
        shared: output, resources and storage format.
        validate_share: fraction of the patients of the official training list for validation.
    """
    from medvl.data.corpora.labels import nih_cxr14 as corpus

    return convert_corpus(corpus, root, shared.textless(), validate_share=validate_share)


def covidx(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    version: str | None = None,
    validate_share: float = 0.1,
) -> str:
    """Convert COVIDx CXR, with its official splits.

    Args:
        root: folder with the lists, train/ and test/.
        shared: output, resources and storage format.
        version: version of the lists, such as COVIDx_CXR-3A for train_COVIDx_CXR-3A.txt; default
            train.txt.
        validate_share: fraction of the training patients for validation, where the release has no
            list for it.
    """
    from medvl.data.corpora.labels import covidx as corpus

    return convert_corpus(
        corpus, root, shared.textless(), version=version, validate_share=validate_share
    )


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
        boxes: merged replaces the radiologists' boxes of one object by their mean; all keeps each
            of them.
        validate_share: fraction of the official training images for validation.
    """
    from medvl.data.corpora.boxes_and_masks import vindr_cxr as corpus

    shared = shared.textless()
    return convert_corpus(
        corpus, root, shared, agreement=agreement, boxes=boxes, validate_share=validate_share
    )


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


# `medvl shards` for the corpora of text-guided segmentation and of figure classification.

Splits = Literal["official", "repaired", "by-article"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTSplits:
    """Patients and splits of the corpora of LViT."""

    patients: Literal["image", "file"] = "image"
    """image treats every image as a patient, as the published splits do; file takes the patient (of
    MosMedData+ the study) in the file name, where it has one.
    """
    splits: Splits = "official"
    """official refuses splits that share a patient; repaired leaves images of shared patients out
    of the training splits; by-article draws new splits, by patient.
    """


def qata(
    root: Path, shared: Flat[ConversionOptions], *, division: Flat[LViTSplits] = LViTSplits()
) -> str:
    """Convert QaTa-COV19: radiographs with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/, or with Train Set/ and Test
            Set/.
        shared: output, resources and storage format.
        division: patients and splits.
    """
    return _convert_masks("qata", root, shared, division)


def mosmed(
    root: Path, shared: Flat[ConversionOptions], *, division: Flat[LViTSplits] = LViTSplits()
) -> str:
    """Convert MosMedData+: slices of chest CT with masks of infections and LViT's texts.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        shared: output, resources and storage format.
        division: patients and splits.
    """
    return _convert_masks("mosmed", root, shared, division)


def monuseg(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    division: Flat[LViTSplits] = LViTSplits(patients="file"),
) -> str:
    """Convert MoNuSeg: tissue with masks of nuclei and LViT's texts; use --color.

    Args:
        root: folder with Train_Folder/, Val_Folder/ and Test_Folder/.
        shared: output, resources and storage format.
        division: patients (from the TCGA barcodes in the file names) and splits.
    """
    return _convert_masks("monuseg", root, shared, division)


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


def _convert_masks(name: str, root: Path, shared: ConversionOptions, division: LViTSplits) -> str:
    from medvl.data.corpora.boxes_and_masks import lvit_layout as corpus

    settings = {"name": name, "patients": division.patients, "splits": division.splits}
    return convert_corpus(corpus, root, shared.textless(), **settings)


# `medvl shards` for VQA corpora: a sample is an image with its list of questions.


def vqa_rad(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    split: Literal["official", "image-disjoint"] = "official",
) -> str:
    """Convert VQA-RAD, from the original release or from MEVF's split files.

    Args:
        root: folder of the questions (VQA_RAD Dataset Public.json, or trainset.json and
            testset.json) and the images.
        shared: output, resources and storage format.
        split: official divides the questions, so that every test image is also in train; the output
            is one folder "mixed", and each question has its own split. image-disjoint divides the
            images by a fixed hash.
    """
    from medvl.data.corpora.questions import vqa_rad as corpus

    return _convert_questions(corpus, root, shared, split=split)


def slake(
    root: Path, shared: Flat[ConversionOptions], *, language: Literal["en", "zh"] = "en"
) -> str:
    """Convert SLAKE, with the questions of one language.

    Args:
        root: folder of train.json, validate.json, test.json and imgs/.
        shared: output, resources and storage format.
        language: language of the questions.
    """
    from medvl.data.corpora.questions import slake as corpus

    return _convert_questions(corpus, root, shared, language=language)


def vqa_med(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    categories: tuple[Literal["modality", "plane", "organ", "abnormality"], ...] = (
        "modality",
        "plane",
        "organ",
        "abnormality",
    ),
) -> str:
    """Convert ImageCLEF VQA-Med 2019.

    Args:
        root: folder that contains the unpacked archives.
        shared: output, resources and storage format.
        categories: keep only the questions of these; modality plane organ, as M3AE does.
    """
    from medvl.data.corpora.questions import vqa_med as corpus

    return _convert_questions(corpus, root, shared, categories=categories)


def path_vqa(root: Path, shared: Flat[ConversionOptions]) -> str:
    """Convert PathVQA, always in colour, for the stains of pathology.

    Args:
        root: folder of qas/ and images/.
        shared: output, resources and storage format.
    """
    from medvl.data.corpora.questions import path_vqa as corpus

    return _convert_questions(corpus, root, shared.replace(color=True))


def _convert_questions(
    corpus: ModuleType, root: Path, shared: ConversionOptions, **choices: Any
) -> str:
    from medvl.data.annotations import questions_of

    deid = shared.deidentifier()
    plan = corpus.plan(root, deid, **choices, follow_links=shared.options.follow_links)
    summary = convert(plan, deid, shared.textless())
    counts = Counter(
        question.split for record in plan.records for question in questions_of(record.sample)
    )
    return "\n".join(
        [", ".join(f"{count} questions in {split}" for split, count in counts.items()), summary]
    )


# `medvl shards webdataset`: convert tars of other projects to shards.


def webdataset(
    tars: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TAR ...")],
    shared: Flat[ConversionOptions],
    fields: Flat[TarFields],
    *,
    name: str = "webdataset",
    group: str | None = None,
    splits: tuple[str, ...] = ("train=0.98", "validate=0.01", "test=0.01"),
) -> str:
    """Convert webdataset tars without a manifest (PMC-OA, BIOMEDICA, open_clip's): .jpg .txt .json
    of each sample.

    The images are unpacked into the private folder first, and removed from it at the end.

    Args:
        tars: paths or addresses of the tars, with webdataset's braces: 'pmc/{00000..00042}.tar'.
        shared: output, resources and storage format.
        fields: names of the members.
        name: name of the corpus.
        group: member or field of the JSON that names the patient or article, such as json:pmcid.
            Splits are disjoint by it; without it, each sample is a group of its own, and shared
            patients or articles cannot be noticed.
        splits: fractions of the splits.
    """
    from medvl.data.convert.conversion import PrivateFolder
    from medvl.data.corpora import webdataset_tars as corpus

    deid = shared.deidentifier()
    unpacked = PrivateFolder(shared.run.local_out).create() / "images"
    plan = corpus.plan(
        tars,
        deid,
        unpacked,
        name=name,
        fields=fields,
        group=group,
        fractions=split_fractions(splits),
    )
    lines = [convert(plan, deid, shared)]
    shutil.rmtree(unpacked)
    if group is None:
        lines.append(
            "No --group was given: patients or articles shared by splits, or with other shards, "
            "are not noticed."
        )
    return "\n".join(lines)


# `medvl shards generated`: convert a folder of `medvl generate` to shards, for training.


def generated(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    source: tuple[Path, ...] = (),
    name: str = "generated",
    split: str = "train",
    conventions: ConventionsName = "chexpert",
) -> str:
    """Convert generated images to shards for training, with the generator's hash and training data
    in the manifest.

    Evaluations refuse such shards as test data, and treat a model that is trained on them as
    trained on the generator's training data too.

    Args:
        root: folder of medvl generate.
        shared: output, resources and storage format.
        source: folders of the shards whose texts are the prompts, for their patients.
        name: name of the corpus.
        split: name of the split.
        conventions: what counts as positive and as uncertain in a prompt.
    """
    from medvl.data.convert.generated import plan

    deid = shared.deidentifier()
    return convert(
        plan(root, deid, sources=source, name=name, split=split, conventions=conventions),
        deid,
        shared,
    )
