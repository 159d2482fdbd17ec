"""Folders of shards of small phantom chest CTs."""

import csv
from pathlib import Path

from medvl.data.convert.options import ShardRun, VolumeShardOptions
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.phantom import write_volumes
from medvl.phantom.population.volumes import CT_FINDINGS
from medvl.schema import Sample

SHAPE = (16, 32, 32)
DEID = Deidentifier(b"0" * 32)


def volume_shards(
    root: Path,
    patients: int = 3,
    *,
    shape: tuple[int, int, int] = SHAPE,
    reconstructions: int = 2,
    split: str = "train",
    options: VolumeOptions | None = None,
    seed: int = 0,
) -> Path:
    """Return the folder of shards of one scan of each patient, with reports and labels."""
    write_volumes(root, patients=patients, shape=shape, reconstructions=reconstructions, seed=seed)
    with (root / "volumes.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = [
        Record(
            Sample(
                key=f"{row['study']}-{row['reconstruction']}",
                corpus="lab",
                split=split,
                patient=f"{split}-{row['patient']}",
                study=f"{split}-{row['study']}",
                image=root / row["path"],
                sections={"findings": row["findings"], "impression": row["impression"]},
                labels={name: int(row[name]) for name in CT_FINDINGS},
                extra={
                    "reconstruction": int(row["reconstruction"]),
                    "boxes_mm": row["boxes_mm"],
                },
            ),
            volume=VolumeFile(),
        )
        for row in rows
    ]
    plan = Plan("lab", Records(records), tuple(CT_FINDINGS), RowCounts())
    run = ShardRun(out=root / "shards", workers=1)
    stored = VolumeShardOptions(samples_per_shard=4, volume=options or VolumeOptions())
    write_shards(plan, DEID, run, stored)
    return root / "shards" / split
