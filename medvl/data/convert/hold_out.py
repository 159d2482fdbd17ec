"""Patients who are judged on, left out of a corpus before it is converted."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.errors import SplitError

EXCLUDED = "held_out_patient"


def leave_out(plan: Plan, folders: Sequence[Path], deid: Deidentifier) -> Plan:
    """The plan without the patients of folders of shards, whose images it counts as excluded.

    Raises SplitError when a folder was hashed with another salt than the plan, so that its patients cannot be told.
    """
    held_out: set[str] = set()
    for folder in folders:
        manifest = Manifest.read(folder)
        if manifest.salt != deid.fingerprint:
            raise SplitError(
                f"{folder} is hashed with another salt, so its patients cannot be told: make both with one --salt-file"
            )
        held_out.update(manifest.patients)
    records = Records(record for record in plan.records if record.sample.patient not in held_out)
    left_out = Counter({EXCLUDED: len(plan.records) - len(records)})
    return dataclasses.replace(plan, records=records, excluded=plan.excluded + left_out)
