"""Shards of easily classified images, for the tests of probes and classifiers."""

import dataclasses
from pathlib import Path

import cv2
import numpy as np

from helpers.eval_fakes import make_source
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier

NAMES = ("Edema", "Fracture")


def make_shards(folder: Path, *, texts: bool = False) -> Path:
    """Write shards of 60 patients with one image each (32 train, 14 validate, 14 test).

    Bright images are labelled Edema; a quarter of the Fracture labels is uncertain and a quarter
    missing.
    """
    rng = np.random.default_rng(0)
    records = []
    deid = Deidentifier(b"0123456789abcdef")
    for number in range(60):
        bright = number % 2
        path = folder / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.normal(size=(40, 40)) * 10
        cv2.imwrite(str(path), np.clip(60 + 120 * bright + noise, 0, 255).astype(np.uint8))
        sample = make_source(
            np.array([[bright, [1, 0, -1, np.nan][number % 4]]]), NAMES, prefix="p"
        ).samples[0]
        patient = deid.patient(number)
        split = "train" if number < 32 else "validate" if number < 46 else "test"
        named = dataclasses.replace(
            sample,
            key=f"k-{number:03d}",
            split=split,
            patient=patient,
            image=path,
            study=f"s{number}",
            sections={"caption": f"Image {number} is {'bright' if bright else 'dark'}."}
            if texts
            else {},
        )
        records.append(Record(named))
    plan = Plan("bright", records, NAMES, RowCounts())
    run = ShardRun(out=folder / "shards", workers=1)
    write_shards(plan, deid, run, ShardOptions(short_side=32, keep_textless=True))
    return folder / "shards"
