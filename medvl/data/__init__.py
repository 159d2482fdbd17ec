"""From a corpus on disk to batches: reading, de-identification, corpora, splits, shards, loader."""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.data.convert.options import ShardOptions as ShardOptions
    from medvl.data.convert.options import ShardRun as ShardRun
    from medvl.data.convert.pipeline import write_shards as write_shards
    from medvl.data.corpora.common.tables import Plan as Plan
    from medvl.data.corpora.common.tables import Record as Record
    from medvl.data.dicom.reader import DicomImage as DicomImage
    from medvl.data.dicom.reader import read_dicom as read_dicom
    from medvl.data.loading.loader import Loader as Loader
    from medvl.data.loading.loader import open_loader as open_loader
    from medvl.data.privacy.deidentify import Deidentifier as Deidentifier
    from medvl.data.reports.labeler import label_report as label_report
    from medvl.data.reports.sections import Report as Report
    from medvl.data.reports.sections import parse_report as parse_report
    from medvl.data.shards.format import Manifest as Manifest
    from medvl.data.shards.source import ShardSource as ShardSource
    from medvl.data.shards.verify import verify_folder as verify_folder
    from medvl.data.splits import check_disjoint as check_disjoint
    from medvl.data.splits import hash_split as hash_split
    from medvl.data.tokenizer.tokenizer import load_tokenizer as load_tokenizer
    from medvl.data.tokenizer.tokenizer import train_wordpiece as train_wordpiece
    from medvl.data.transforms.image import ConVIRTAugmentation as ConVIRTAugmentation
    from medvl.data.transforms.image import EvalTransform as EvalTransform
    from medvl.data.transforms.image import RandomCrop as RandomCrop
    from medvl.data.transforms.text import RandomSection as RandomSection
    from medvl.data.transforms.text import RandomSentence as RandomSentence
    from medvl.data.transforms.text import WholeText as WholeText

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".convert.options": ["ShardOptions", "ShardRun"],
        ".convert.pipeline": ["write_shards"],
        ".corpora.common.tables": ["Plan", "Record"],
        ".dicom.reader": ["DicomImage", "read_dicom"],
        ".loading.loader": ["Loader", "open_loader"],
        ".privacy.deidentify": ["Deidentifier"],
        ".reports.labeler": ["label_report"],
        ".reports.sections": ["Report", "parse_report"],
        ".shards.format": ["Manifest"],
        ".shards.source": ["ShardSource"],
        ".shards.verify": ["verify_folder"],
        ".splits": ["check_disjoint", "hash_split"],
        ".tokenizer.tokenizer": ["load_tokenizer", "train_wordpiece"],
        ".transforms.image": ["ConVIRTAugmentation", "EvalTransform", "RandomCrop"],
        ".transforms.text": ["RandomSection", "RandomSentence", "WholeText"],
    },
)
