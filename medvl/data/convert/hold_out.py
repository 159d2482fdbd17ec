"""Removal of evaluation patients from a corpus before conversion."""

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


def hold_out(plan: Plan, folders: Sequence[Path], deid: Deidentifier) -> Plan:
    """Return the plan without the patients of some folders of shards; their images are counted as excluded.

    Raises SplitError when a folder was hashed with another salt than the plan, so that patients cannot be compared.
    """
    held_out: set[str] = set()
    for folder in folders:
        manifest = Manifest.read(folder)
        if manifest.salt != deid.fingerprint:
            message = f"{folder} was hashed with another salt; convert both with one --salt-file"
            raise SplitError(message, "mismatch", field="salt")
        held_out.update(manifest.patients)
    records = Records(record for record in plan.records if record.sample.patient not in held_out)
    excluded = Counter({EXCLUDED: len(plan.records) - len(records)})
    return dataclasses.replace(plan, records=records, rows=plan.rows.excluding(excluded))
