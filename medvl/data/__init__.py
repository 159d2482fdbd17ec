"""Data: reading, de-identification, corpora, conversion to shards, and loaders of batches."""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.data.annotations.mask_rle import decode_runs as decode_runs
    from medvl.data.annotations.mask_rle import encode_runs as encode_runs
    from medvl.data.annotations.phrases import Phrase as Phrase
    from medvl.data.annotations.phrases import phrases_of as phrases_of
    from medvl.data.annotations.questions import Question as Question
    from medvl.data.annotations.questions import questions_of as questions_of
    from medvl.data.convert.hold_out import hold_out as hold_out
    from medvl.data.convert.merge import merge_parts as merge_parts
    from medvl.data.convert.options import ShardOptions as ShardOptions
    from medvl.data.convert.options import ShardRun as ShardRun
    from medvl.data.convert.pipeline import ShardTask as ShardTask
    from medvl.data.convert.pipeline import build_shard as build_shard
    from medvl.data.convert.pipeline import write_shards as write_shards
    from medvl.data.corpora.common.record_file import Records as Records
    from medvl.data.corpora.common.tables import Plan as Plan
    from medvl.data.corpora.common.tables import Record as Record
    from medvl.data.corpora.common.tables import read_record as read_record
    from medvl.data.dicom.reader import DicomImage as DicomImage
    from medvl.data.dicom.reader import read_dicom as read_dicom
    from medvl.data.images.codecs import decode_image as decode_image
    from medvl.data.images.codecs import encode_jpeg as encode_jpeg
    from medvl.data.images.codecs import encode_png as encode_png
    from medvl.data.images.codecs import resize_short_side as resize_short_side
    from medvl.data.images.read import read_pixels as read_pixels
    from medvl.data.loading.collate import sample_rng as sample_rng
    from medvl.data.loading.concat import ConcatSource as ConcatSource
    from medvl.data.loading.dense_targets import DenseBatch as DenseBatch
    from medvl.data.loading.dense_targets import DenseTargets as DenseTargets
    from medvl.data.loading.dense_targets import DenseTargetTable as DenseTargetTable
    from medvl.data.loading.loader import Loader as Loader
    from medvl.data.loading.loader import open_loader as open_loader
    from medvl.data.loading.sources import FileSource as FileSource
    from medvl.data.loading.sources import Source as Source
    from medvl.data.loading.streaming import RemoteLoader as RemoteLoader
    from medvl.data.loading.streaming import open_remote_loader as open_remote_loader
    from medvl.data.loading.subset import LabelPolicyView as LabelPolicyView
    from medvl.data.loading.subset import Subset as Subset
    from medvl.data.loading.subset import label_fraction as label_fraction
    from medvl.data.loading.subset import no_text as no_text
    from medvl.data.loading.vqa_source import QuestionSource as QuestionSource
    from medvl.data.privacy.deidentify import Deidentifier as Deidentifier
    from medvl.data.privacy.deidentify import default_salt_file as default_salt_file
    from medvl.data.reports.labeler import label_report as label_report
    from medvl.data.reports.sections import Report as Report
    from medvl.data.reports.sections import parse_report as parse_report
    from medvl.data.reports.sections import read_report as read_report
    from medvl.data.shards.format import Index as Index
    from medvl.data.shards.format import Manifest as Manifest
    from medvl.data.shards.format import sample_from_json as sample_from_json
    from medvl.data.shards.format import sample_to_json as sample_to_json
    from medvl.data.shards.source import ShardSource as ShardSource
    from medvl.data.shards.tar_reader import read_samples as read_samples
    from medvl.data.shards.verify import Verification as Verification
    from medvl.data.shards.verify import check_against as check_against
    from medvl.data.shards.verify import verify_folder as verify_folder
    from medvl.data.splits import check_disjoint as check_disjoint
    from medvl.data.splits import hash_split as hash_split
    from medvl.data.tokenizer.tokenizer import Tokenizer as Tokenizer
    from medvl.data.tokenizer.tokenizer import load_tokenizer as load_tokenizer
    from medvl.data.tokenizer.tokenizer import train_wordpiece as train_wordpiece
    from medvl.data.transforms.image import ConVIRTAugmentation as ConVIRTAugmentation
    from medvl.data.transforms.image import EvalTransform as EvalTransform
    from medvl.data.transforms.image import RandomCrop as RandomCrop
    from medvl.data.transforms.mlm_masking import MaskedText as MaskedText
    from medvl.data.transforms.mlm_masking import TextMasking as TextMasking
    from medvl.data.transforms.text import RandomSection as RandomSection
    from medvl.data.transforms.text import RandomSentence as RandomSentence
    from medvl.data.transforms.text import WholeText as WholeText

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".annotations.mask_rle": ["decode_runs", "encode_runs"],
        ".annotations.phrases": ["Phrase", "phrases_of"],
        ".annotations.questions": ["Question", "questions_of"],
        ".convert.hold_out": ["hold_out"],
        ".convert.merge": ["merge_parts"],
        ".convert.options": ["ShardOptions", "ShardRun"],
        ".convert.pipeline": ["ShardTask", "build_shard", "write_shards"],
        ".corpora.common.record_file": ["Records"],
        ".corpora.common.tables": ["Plan", "Record", "read_record"],
        ".dicom.reader": ["DicomImage", "read_dicom"],
        ".images.codecs": ["decode_image", "encode_jpeg", "encode_png", "resize_short_side"],
        ".images.read": ["read_pixels"],
        ".loading.collate": ["sample_rng"],
        ".loading.concat": ["ConcatSource"],
        ".loading.dense_targets": ["DenseBatch", "DenseTargetTable", "DenseTargets"],
        ".loading.loader": ["Loader", "open_loader"],
        ".loading.sources": ["FileSource", "Source"],
        ".loading.streaming": ["RemoteLoader", "open_remote_loader"],
        ".loading.subset": ["LabelPolicyView", "Subset", "label_fraction", "no_text"],
        ".loading.vqa_source": ["QuestionSource"],
        ".privacy.deidentify": ["Deidentifier", "default_salt_file"],
        ".reports.labeler": ["label_report"],
        ".reports.sections": ["Report", "parse_report", "read_report"],
        ".shards.format": ["Index", "Manifest", "sample_from_json", "sample_to_json"],
        ".shards.source": ["ShardSource"],
        ".shards.tar_reader": ["read_samples"],
        ".shards.verify": ["Verification", "check_against", "verify_folder"],
        ".splits": ["check_disjoint", "hash_split"],
        ".tokenizer.tokenizer": ["Tokenizer", "load_tokenizer", "train_wordpiece"],
        ".transforms.image": ["ConVIRTAugmentation", "EvalTransform", "RandomCrop"],
        ".transforms.mlm_masking": ["MaskedText", "TextMasking"],
        ".transforms.text": ["RandomSection", "RandomSentence", "WholeText"],
    },
)
