"""From a corpus on disk to batches: reading, de-identification, corpora, splits, shards, loader."""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.data.dicom.reader import DicomImage as DicomImage
    from medvl.data.dicom.reader import read_dicom as read_dicom
    from medvl.data.loading.loader import open_loader as open_loader
    from medvl.data.privacy.deidentify import Deidentifier as Deidentifier
    from medvl.data.reports.labeler import label_report as label_report
    from medvl.data.reports.sections import Report as Report
    from medvl.data.reports.sections import parse_report as parse_report
    from medvl.data.tokenizer.tokenizer import load_tokenizer as load_tokenizer
    from medvl.data.tokenizer.tokenizer import train_wordpiece as train_wordpiece

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".dicom.reader": ["DicomImage", "read_dicom"],
        ".loading.loader": ["open_loader"],
        ".privacy.deidentify": ["Deidentifier"],
        ".reports.labeler": ["label_report"],
        ".reports.sections": ["Report", "parse_report"],
        ".tokenizer.tokenizer": ["load_tokenizer", "train_wordpiece"],
    },
)
