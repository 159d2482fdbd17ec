"""Shared by all tests: no network, one thread a process, the folder of real data where there is one."""

import os
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)  # children import helpers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import cv2
import pytest
import torch
from helpers.mimic_files import IMAGES, LABELS, REPORTS, textured, write_csv_gz

from medvl.data.privacy.deidentify import (
    Deidentifier,  # importing medvl puts in the torchvision hook, before timm or transformers
)
from medvl.schema import FINDINGS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that MEDVL_REAL_DATA names; tests that ask for it are skipped without it."""
    folder = os.environ.get("MEDVL_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEDVL_REAL_DATA names no folder")
    return Path(folder)


@pytest.fixture
def mimic_root(tmp_path: Path) -> Path:
    """A MIMIC-CXR-JPG of three patients in the exact layout, with the reports beside the studies."""
    root = tmp_path / "mimic-cxr"
    for number, (subject, study, dicom_id, _, _) in enumerate(IMAGES):
        folder = root / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{dicom_id}.jpg"), textured(number, 90 + number, 120))
        folder.with_suffix(".txt").write_text(REPORTS[subject, study])
    write_csv_gz(
        root / "mimic-cxr-2.0.0-metadata.csv.gz",
        ["dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition", "Rows", "Columns"],
        [[dicom, subject, study, "CHEST (PA, LAT)", view, "90", "120"] for subject, study, dicom, view, _ in IMAGES],
    )
    write_csv_gz(
        root / "mimic-cxr-2.0.0-split.csv.gz",
        ["dicom_id", "study_id", "subject_id", "split"],
        [[dicom, study, subject, split] for subject, study, dicom, _, split in IMAGES],
    )
    for labeler in ("chexpert", "negbio"):
        write_csv_gz(
            root / f"mimic-cxr-2.0.0-{labeler}.csv.gz",
            ["subject_id", "study_id", *FINDINGS],
            [[subject, study, *(LABELS[study].get(name, "") for name in FINDINGS)] for subject, study in REPORTS],
        )
    return root


SALT = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="session", autouse=True)
def _one_salt(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The salt of every command that a test runs: a drawn one would split and order the same few patients anew in
    each run of the tests, and now and then leave a split empty."""
    path = tmp_path_factory.mktemp("salt") / "salt"
    path.write_text(SALT.hex() + "\n")
    os.environ["MEDVL_SALT_FILE"] = str(path)


@pytest.fixture
def deid() -> Deidentifier:
    return Deidentifier(SALT)
