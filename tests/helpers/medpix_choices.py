"""Questions with options of the real MedPix slices: modality, plane and region of the body."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

FORMS = {
    "modality": ("modality_type", "Which modality is this image?", {"CT": "CT", "MR": "MR"}),
    "plane": (
        "plane",
        "In which plane is this image?",
        {name: f"{name.lower()} plane" for name in ("Axial", "Coronal", "Sagittal")},
    ),
    "region": (
        "location_category",
        "Which region of the body does this image show?",
        {
            name: name.lower()
            for name in (
                *("Head", "Spine and Muscles", "Thorax", "Abdomen"),
                "Reproductive and Urinary System",
            )
        },
    ),
}
"""Type of question -> field of MedPix, question, and value -> option."""
SPLITS = {"train": "train", "val": "validation", "test": "test"}


def write_medpix_choices(real: Path, folder: Path) -> list[Path]:
    """Write Parquet files with image, question, options, letter, type and case; letters take turns.

    Images of VQA-RAD are left out.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS.values()}
    lines = (real / "medpix/captions.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        entry = json.loads(line)
        if not entry["also_in_vqa_rad"]:
            data = (real / "medpix" / entry["image"]).read_bytes()
            for row in _questions(entry, number):
                image = {"bytes": data, "path": None}
                rows[SPLITS[entry["split"]]].append({"image": image, **row})
    paths = []
    for split, of_split in rows.items():
        paths.append(folder / f"{split}-00000-of-00001.parquet")
        table = pyarrow.Table.from_pylist(of_split)
        pyarrow.parquet.write_table(table, paths[-1], row_group_size=50)
    return paths


def _questions(entry: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    for kind, (field, question, names) in FORMS.items():
        if entry.get(field) in names:
            options = list(names.values())
            turn = number % len(options)
            options = options[turn:] + options[:turn]
            letter = "ABCDE"[options.index(names[entry[field]])]
            yield {"question": question, "options": options, "answer": letter, "kind": kind,
                   "case": entry["case_id"]}  # fmt: skip
