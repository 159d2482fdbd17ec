"""Data: reading, de-identification, corpora, conversion to shards, and loaders of batches."""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.common.untrusted import InputFolders as InputFolders
    from medvl.data.annotations import (
        Phrase as Phrase,
        Question as Question,
        decode_runs as decode_runs,
        encode_runs as encode_runs,
        phrases_of as phrases_of,
        questions_of as questions_of,
    )
    from medvl.data.convert.merge import merge_parts as merge_parts
    from medvl.data.convert.options import (
        ShardOptions as ShardOptions,
        ShardRun as ShardRun,
        VolumeShardOptions as VolumeShardOptions,
    )
    from medvl.data.convert.pipeline import write_shards as write_shards
    from medvl.data.convert.plan import hold_out as hold_out
    from medvl.data.convert.record import ShardTask as ShardTask, build_shard as build_shard
    from medvl.data.convert.regions import (
        RegionDetector as RegionDetector,
        RegionOptions as RegionOptions,
        write_regions as write_regions,
    )
    from medvl.data.corpora.common.record_file import Records as Records
    from medvl.data.corpora.common.rows import RowCounts as RowCounts
    from medvl.data.corpora.common.tables import (
        Plan as Plan,
        Record as Record,
        read_record as read_record,
    )
    from medvl.data.corpora.registry import (
        Corpus as Corpus,
        FileAccess as FileAccess,
        corpus_class as corpus_class,
        list_corpora as list_corpora,
        register_corpus as register_corpus,
    )
    from medvl.data.dicom.reader import DicomImage as DicomImage, read_dicom as read_dicom
    from medvl.data.images.codecs import (
        decode_image as decode_image,
        encode_jpeg as encode_jpeg,
        encode_png as encode_png,
        resize_short_side as resize_short_side,
    )
    from medvl.data.images.generated import (
        GeneratedImage as GeneratedImage,
        GeneratedImages as GeneratedImages,
        GeneratedImagesWriter as GeneratedImagesWriter,
        Generation as Generation,
        pixel_hash as pixel_hash,
    )
    from medvl.data.images.read import (
        ImageInput as ImageInput,
        read_image as read_image,
        read_pixels as read_pixels,
    )
    from medvl.data.knowledge.finder import (
        EntityFinder as EntityFinder,
        EntityLinker as EntityLinker,
        LinkedEntities as LinkedEntities,
    )
    from medvl.data.knowledge.graph import (
        KnowledgeGraph as KnowledgeGraph,
        TransEConfig as TransEConfig,
        UMLSOptions as UMLSOptions,
        read_knowledge as read_knowledge,
        read_umls as read_umls,
        write_knowledge as write_knowledge,
    )
    from medvl.data.knowledge.transe import (
        load_embeddings as load_embeddings,
        save_embeddings as save_embeddings,
        train_transe as train_transe,
    )
    from medvl.data.loading.dense_targets import (
        DenseBatch as DenseBatch,
        DenseTargets as DenseTargets,
    )
    from medvl.data.loading.items import sample_rng as sample_rng
    from medvl.data.loading.loader import Loader as Loader, open_loader as open_loader
    from medvl.data.loading.sources import (
        ChangeLabels as ChangeLabels,
        ConcatSource as ConcatSource,
        FileSource as FileSource,
        LabelPolicyView as LabelPolicyView,
        OtherTexts as OtherTexts,
        Source as Source,
        Subset as Subset,
        UnpairedSource as UnpairedSource,
        changes_of as changes_of,
        label_fraction as label_fraction,
        no_text as no_text,
        select_samples as select_samples,
    )
    from medvl.data.loading.studies import (
        QuestionSource as QuestionSource,
        ScanSource as ScanSource,
    )
    from medvl.data.loading.text_loader import open_text_loader as open_text_loader
    from medvl.data.loading.webdataset_loader import (
        WebdatasetLoader as WebdatasetLoader,
        open_webdataset_loader as open_webdataset_loader,
    )
    from medvl.data.privacy import (
        Deidentifier as Deidentifier,
        default_salt_file as default_salt_file,
    )
    from medvl.data.reports.cleaning import swap_laterality as swap_laterality
    from medvl.data.reports.labeler import (
        CONVENTIONS as CONVENTIONS,
        Conventions as Conventions,
        label_report as label_report,
    )
    from medvl.data.reports.sections import (
        Report as Report,
        parse_report as parse_report,
        read_report as read_report,
    )
    from medvl.data.reports.sentences import (
        join_texts as join_texts,
        split_sentences as split_sentences,
    )
    from medvl.data.reports.statements import (
        mention_values as mention_values,
        statement as statement,
        statements_of as statements_of,
    )
    from medvl.data.shards.format import (
        Index as Index,
        Manifest as Manifest,
        read_samples as read_samples,
        sample_from_json as sample_from_json,
        sample_to_json as sample_to_json,
    )
    from medvl.data.shards.regions import RegionManifest as RegionManifest, Regions as Regions
    from medvl.data.shards.source import ShardSource as ShardSource
    from medvl.data.shards.upload import Upload as Upload, upload_shards as upload_shards
    from medvl.data.shards.verify import (
        Verification as Verification,
        check_against as check_against,
        verify_folder as verify_folder,
    )
    from medvl.data.splits import check_disjoint as check_disjoint, hash_split as hash_split
    from medvl.data.storage.cache import Cache as Cache
    from medvl.data.storage.location import RemotePath as RemotePath, locate as locate
    from medvl.data.storage.webdataset_tars import TarFields as TarFields
    from medvl.data.tokenizer.tokenizer import (
        EncodedPairs as EncodedPairs,
        EncodedWords as EncodedWords,
        Tokenizer as Tokenizer,
        load_tokenizer as load_tokenizer,
        train_wordpiece as train_wordpiece,
        train_words as train_words,
    )
    from medvl.data.transforms.image import (
        ConVIRTAugmentation as ConVIRTAugmentation,
        EvalTransform as EvalTransform,
        OriginalTransform as OriginalTransform,
        RandomCrop as RandomCrop,
    )
    from medvl.data.transforms.masked_text import (
        MaskedText as MaskedText,
        TextBatch as TextBatch,
        TextMasking as TextMasking,
        TextSequences as TextSequences,
    )
    from medvl.data.transforms.operations import augment_batch as augment_batch
    from medvl.data.transforms.text import (
        GroundedText as GroundedText,
        Paraphrases as Paraphrases,
        RandomSection as RandomSection,
        RandomSentence as RandomSentence,
        SectionOrStatement as SectionOrStatement,
        ShuffledSentences as ShuffledSentences,
        Statements as Statements,
        SwappedSentences as SwappedSentences,
        TextOrLabels as TextOrLabels,
        TextPair as TextPair,
        WholeText as WholeText,
    )
    from medvl.data.transforms.turning import LViTAugmentation as LViTAugmentation
    from medvl.data.volumes.codec import (
        decode_volume as decode_volume,
        encode_volume as encode_volume,
    )
    from medvl.data.volumes.dicom_series import read_dicom_series as read_dicom_series
    from medvl.data.volumes.nifti import read_nifti as read_nifti
    from medvl.data.volumes.options import (
        OrganOptions as OrganOptions,
        VolumeFile as VolumeFile,
        VolumeOptions as VolumeOptions,
    )
    from medvl.data.volumes.resampling import (
        apply_window as apply_window,
        crop_or_pad as crop_or_pad,
        resample_volume as resample_volume,
        rgb_slices as rgb_slices,
    )
    from medvl.data.volumes.transform import VolumeTransform as VolumeTransform
    from medvl.data.volumes.volume import (
        Volume as Volume,
        VolumeLimits as VolumeLimits,
        check_hounsfield as check_hounsfield,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
