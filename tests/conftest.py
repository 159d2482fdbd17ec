"""Shared by all tests: no network, one thread a process, the folder of real data where there is one."""

import gzip
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import cv2
import numpy as np
import pytest
import torch

from medvl.data.deid import Deidentifier  # importing medvl puts in the torchvision hook, before timm or transformers
from medvl.schema import FINDINGS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that MEDVL_REAL_DATA names; tests that ask for it are skipped without it."""
    folder = os.environ.get("MEDVL_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEDVL_REAL_DATA names no folder")
    return Path(folder)


REPORTS = {
    ("10000032", "50414267"): (
        "                                 FINAL REPORT\n EXAMINATION:  CHEST (PA AND LAT)\n\n INDICATION:  ___F with cough  // ?pna\n\n"
        " FINDINGS: \n \n There is a small left pleural effusion. The heart is mildly\n enlarged. No pneumothorax.\n\n"
        " IMPRESSION: \n \n Small left pleural effusion.\n"
    ),
    ("10000032", "53189527"): (
        "                                 WET READ: ___ ___ ___ 5:20 PM\n  No acute process.\n"
        " ______________________________________________________________________________\n"
        "                                 FINAL REPORT\n IMPRESSION:  No acute cardiopulmonary process.\n"
    ),
    ("10000764", "57375967"): (
        "                                 FINAL REPORT\n CHEST, SINGLE VIEW ON ___\n\n HISTORY not given.\n\n"
        " There is dense consolidation in the right lower lobe.  Recommend follow-up.\n"
    ),
    ("11000001", "51000001"): "                                 FINAL REPORT\n FINDINGS: Moderate pulmonary edema.\n",
}
IMAGES = [  # subject, study, dicom_id, ViewPosition, split
    ("10000032", "50414267", "02aa804e-bde0afdd-112c0b34-7bc16630-4e384014", "PA", "train"),
    ("10000032", "50414267", "174413ec-4ec4c1f7-34ea26b7-c5f994f8-79ef1962", "LATERAL", "train"),
    ("10000032", "53189527", "2a2277a9-b0ded155-c0de8eb9-c124d10e-82c5caab", "PA", "train"),
    ("10000764", "57375967", "096052b7-d256dc40-453a102b-fa7d01c6-1b22c6b4", "AP", "test"),
    ("11000001", "51000001", "b79e55c3-735ce5ac-64412506-cdc9ea79-f1af521f", "", "validate"),
]
LABELS = {
    "50414267": {"Pleural Effusion": "1.0", "Cardiomegaly": "1.0", "Pneumothorax": "0.0"},
    "53189527": {"No Finding": "1.0"},
    "57375967": {"Consolidation": "-1.0"},
    "51000001": {"Edema": "1.0"},
}


def write_csv_gz(path: Path, header: list[str], rows: list[list[str]]) -> None:
    lines = [",".join(f'"{field}"' if "," in field else field for field in row) for row in [header, *rows]]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def textured(seed: int, height: int, width: int) -> np.ndarray:
    """A grey image that no other seed gives."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


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
