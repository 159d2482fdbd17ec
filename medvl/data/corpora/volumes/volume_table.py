"""Your own volumes: a table (CSV, JSON lines or Parquet) with one row per NIfTI file or folder of a
DICOM series. Columns and rules: `data_cards/table.md`; volumes: `data_cards/volumes.md`.
"""

import dataclasses
from typing import ClassVar

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.table import Table
from medvl.data.privacy import Deidentifier
from medvl.data.volumes.nifti import named_axes
from medvl.data.volumes.options import VolumeFile
from medvl.errors import ConfigError


@register_corpus("volumes")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeTable(Table):
    """Convert your own volumes: a table with one row per NIfTI file or folder of a DICOM series.

    The image column has their paths. Rows of one study are reconstructions of a scan and share
    their report.
    """

    has_volumes: ClassVar[bool] = True

    name: str = "volumes"
    """name of the corpus."""
    modality: str = "CT"
    """modality, CT or MR; series of another one are skipped, values of CT must be Hounsfield units.
    """
    orientation: str | None = None
    """directions of the axes of NIfTI files that state none, such as RAS; default: they are
    skipped.
    """

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of the table as `Table.plan`; no volume is opened."""
        if self.columns.image_column is None:
            raise ConfigError("give an image column", "missing", field="image_column")
        if self.modality not in ("CT", "MR"):
            raise ConfigError(
                f"expected modality CT or MR, got {self.modality!r}",
                "unknown_name",
                field="modality",
            )
        if self.orientation is not None:
            named_axes(self.orientation)
        plan = Table.plan(self, deid, access)
        file = VolumeFile(modality=self.modality, orientation=self.orientation)
        records = Records(
            dataclasses.replace(record, volume=None if record.sample.image is None else file)
            for record in plan.records
        )
        return dataclasses.replace(plan, records=records)
