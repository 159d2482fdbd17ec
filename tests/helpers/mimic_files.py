"""A tiny MIMIC-CXR in the published layout."""

import gzip
from pathlib import Path

import cv2
import numpy as np

REPORTS = {
    ("10000032", "50414267"): (
        "                                 FINAL REPORT\n EXAMINATION:  CHEST (PA AND LAT)\n\n "
        "INDICATION:  ___F with cough  // ?pna\n\n"
        " FINDINGS: \n \n There is a small left pleural effusion. The heart is mildly\n "
        "enlarged. No pneumothorax.\n\n"
        " IMPRESSION: \n \n Small left pleural effusion.\n"
    ),
    ("10000032", "53189527"): (
        "                                 WET READ: ___ ___ ___ 5:20 PM\n  No acute process.\n"
        " ______________________________________________________________________________\n"
        "                                 FINAL REPORT\n IMPRESSION:  No acute cardiopulmonary "
        "process.\n"
    ),
    ("10000764", "57375967"): (
        "                                 FINAL REPORT\n CHEST, SINGLE VIEW ON ___\n\n HISTORY "
        "not given.\n\n"
        " There is dense consolidation in the right lower lobe.  Recommend follow-up.\n"
    ),
    (
        "11000001",
        "51000001",
    ): "                                 FINAL REPORT\n FINDINGS: Moderate pulmonary edema.\n",
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
    lines = [
        ",".join(f'"{field}"' if "," in field else field for field in row)
        for row in [header, *rows]
    ]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def textured(seed: int, height: int, width: int) -> np.ndarray:
    """Return a grey image that is different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
