"""Shards of phantom radiographs, written by all cores.

    python scripts/measure/phantom_shards.py FOLDER 6400 512

One core draws and stores about 100 images of 512 pixels per second and converts 540 to shards, so
16 cores that reach 0.78 of that would make 23,000 images (6,400 patients) in about 25 seconds; 16
virtual cores took 65 to 76.
"""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from medvl import phantom
from medvl.data import Deidentifier, ShardOptions, ShardRun, write_shards
from medvl.data.corpora.reports import mimic_cxr
from medvl.train.parallel.distributed import cpu_cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSize:
    """Number and size of the images."""

    patients: int
    """With 3.7 images each."""
    pixels: int
    workers: int
    """Prefetching processes of the loaders."""


FULL = DataSize(patients=6400, pixels=512, workers=16)
TINY = DataSize(patients=6, pixels=64, workers=1)
_SMALL = 64
"""Number of patients up to which one process is faster than the start of several."""


def write(folder: Path, patients: int, pixels: int) -> None:
    """Write shards of a corpus of JPEG files, all for training. The folder is complete or
    absent.
    """
    workers = 1 if patients <= _SMALL else cpu_cores()
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a call that was ended
    corpus = part / "corpus"
    phantom.write_mimic_cxr_jpg(
        corpus, patients=patients, size=pixels, split=(1.0, 0.0, 0.0), workers=workers
    )
    deid = Deidentifier(bytes(32))
    plan = mimic_cxr.MimicCXR(root=corpus, split="train").plan(deid)
    # A shard is the unit of work: all processes have several.
    options = ShardOptions(short_side=pixels, samples_per_shard=max(8, min(1000, patients // 16)))
    write_shards(plan, deid, ShardRun(out=part / "shards", workers=workers), options)
    (part / "shards").rename(folder)
    shutil.rmtree(part)


if __name__ == "__main__":
    os.nice(10)  # a model may be compiled meanwhile
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
