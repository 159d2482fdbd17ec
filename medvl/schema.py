"""Data classes that all of medvl shares. Read this first.

A corpus yields `Sample`s; shards store them; the loader makes `Batch`es; encoders turn those into
`ImageFeatures` and `TextFeatures`; a model turns a batch into `Losses`. This module imports the
error types only, and torch only for types.

Shape letters, here and everywhere: B batch, T text tokens, W words, S sentences, P patches or
regions, D feature dim, E shared embedding dim, C channels, H and W height and width, L labels, N
and M counts of images and texts, O organs, V other images of a study.
"""

from __future__ import annotations  # torch is imported for the type checker only

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from medvl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCHEMA_VERSION = 2
"""Version of the shards' format; shards of another version are refused."""

FINDINGS = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Enlarged Cardiomediastinum",
    "Fracture",
    "Lung Lesion",
    "Lung Opacity",
    "No Finding",
    "Pleural Effusion",
    "Pleural Other",
    "Pneumonia",
    "Pneumothorax",
    "Support Devices",
)
"""The 14 CheXpert labels, in the alphabetical order of the MIMIC-CXR tables."""

CHANGES = ("improving", "stable", "worsening")
"""Classes of change since the prior image (MS-CXR-T), in the order of all arrays."""

COMPETITION_FINDINGS = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
"""The five labels of the CheXpert competition."""

ORGANS = ("lung", "heart", "esophagus", "aorta")
"""Organs of chest CTs that have masks and texts of their own, in the order of their numbers in
stored arrays, from 1; 0 is none.
"""

POSITIVE = 1
NEGATIVE = 0
UNCERTAIN = -1
"""Label values. A finding that a report does not mention has no entry at all (NaN in an array)."""

ConventionsName = Literal["chexpert", "doubtful", "indexed"]
"""Names of `medvl.data.CONVENTIONS`: what the labeler of reports takes as present and as
uncertain.
"""


class PackedPage(NamedTuple):
    """Place of an image in a compressed page of a Parquet file."""

    codec: str
    """Compression, as pyarrow names it: snappy, zstd, ..."""
    unpacked: int
    """Bytes of the page when it is unpacked."""
    start: int
    size: int
    """Bytes of the image in the unpacked page: `size` from `start`."""


@dataclasses.dataclass(frozen=True, slots=True)
class FilePart:
    """An encoded image inside a larger file: a member of a tar, or a cell of a Parquet file.

    `medvl.data.storage.tars` reads it.
    """

    file: str
    """Path or address of the file."""
    name: str
    """Member or row, for messages."""
    offset: int
    size: int
    """Bytes in the file: `size` from `offset`."""
    page: PackedPage | None = None
    """Where these bytes are a compressed page: the place of the image in it."""

    def __str__(self) -> str:
        return f"{self.file}, {self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One image with its text, one image without a text, or one text without an image;
    de-identified.

    `image` is the image file, or its part of a larger file, while a corpus is being converted and
    is never written; None: the sample has no image. All other fields are written to `{key}.json` of
    a shard.
    """

    key: str
    """Unique in its corpus; letters, digits, `-` and `_` only; carries no identifier (a salted
    hash).
    """
    corpus: str
    split: str
    patient: str
    """Salted hash of the patient id (of the article id for literature figures); splits are
    disjoint by it.
    """
    study: str
    """Salted hash of the study id: images of one study share their report."""
    image: Path | FilePart | None = None
    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Text by section, in the order of the report: findings, impression, ... or caption."""
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Label name -> 1, 0 or -1 (uncertain). A label that is not mentioned is absent."""
    view: str | None = None
    """PA, AP, LATERAL, ... as in the corpus, or None."""
    sex: str | None = None
    """F, M or None."""
    age: int | None = None
    """Age in years; 90 means 90 and above."""
    order: int | None = None
    """Position of the study among the patient's studies in the corpus, oldest first, from 0;
    None: unknown.
    """
    extra: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Fields of some corpora only (modality, plane, licence, boxes, questions; `prior`, the key of
    the image that this one is compared with); JSON values only.
    """


class FindsEntities(Protocol):
    """A dictionary of entities."""

    def find(self, text: str) -> Sequence[tuple[int, int, int]]:
        """Return (start, end, entity) of the mentions in a text: characters, and the entity's
        number.
        """


class WritesPrompts(Protocol):
    """Writer of what is known about a study before its report
    (`medvl.models.report_generators.base.Prompt`).
    """

    @property
    def reads_prior(self) -> bool:
        """Whether the prior report is read."""

    def __call__(
        self, sections: Mapping[str, str], prior: Mapping[str, str] | None
    ) -> Sequence[int]:
        """Return the ids of a prompt, of the sections of a sample and of its prior report."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Optional parts of a batch that a system needs; a loader makes exactly the parts that are
    set.
    """

    second_image: bool = False
    """A second view: the same image under another random augmentation."""
    second_text: bool = False
    """A second text of the sample: another random choice, or the second of a
    `medvl.data.TextPair`.
    """
    mirrored_text: bool = False
    """The sample's text with left and right exchanged."""
    denied_text: bool = False
    """The sample's text with its findings denied (`medvl.data.reports.denials`), and the findings
    of its report.
    """
    sentences: bool = False
    """The sentence of each token."""
    positions: bool = False
    """The place of each labelled finding that the sample's text names
    (`medvl.data.reports.statements`).
    """
    statements: bool = False
    """All statements of the sample: several short texts, from a policy such as
    `medvl.data.Statements`.
    """
    boxed_phrases: bool = False
    """Phrases of the image, and the cells of the augmented image that their boxes cover
    (`medvl.data.loading.items`).
    """
    prior_image: bool = False
    """The patient's previous image, from sources that have the order of a patient's studies
    (`Sample.order`).
    """
    other_views: int = 0
    """Maximum number of other images of the same study. Above 0, the loader yields each study once
    (`medvl.data.loading.studies`).
    """
    drawn_view: bool = False
    """One other image as an augmentation: in training, image and other image are two of the study,
    drawn in each epoch.
    """
    labels: bool = False
    """Labels: sources without them are refused."""
    regions: bool = False
    """Region features and boxes that `medvl regions` wrote beside the shards, in place of
    pixels.
    """
    region_classes: bool = False
    """The distribution over the detector's classes, with `regions`."""
    entities: FindsEntities | None = None
    """Finder of a knowledge graph's entities in texts (`medvl.data.EntityFinder`); None: the
    system needs none.
    """

    organs: bool = False
    """The text of each organ (`Batch.organ_ids_BOT`)."""
    prompt: WritesPrompts | None = None
    """Writer of prompts (`Batch.prompt_ids_BT`); None: the system needs none."""

    @property
    def for_writing(self) -> Inputs:
        """Return the parts that reports are written from, without what training alone needs."""
        prior_image = self.prior_image and self.prompt is not None
        return Inputs(
            regions=self.regions,
            other_views=self.other_views,
            prior_image=prior_image,
            prompt=self.prompt,
        )

    @property
    def by_study(self) -> bool:
        """Whether a row of a batch is a study, with several of its images."""
        return self.study_images > 1

    @property
    def study_images(self) -> int:
        """Maximum number of images of a row, without priors."""
        return 1 + max(self.other_views, int(self.drawn_view))


class EncodedImages(NamedTuple):
    """JPEG files of a batch, and the parts of them that are its images
    (`ConVIRTAugmentation.decode`).
    """

    file_N: Tensor
    """uint8: bytes of M files, one after another. It stays in the host's memory, where decoders
    read it.
    """
    end_M: Tensor
    """int64: end of each file."""
    keys: list[str]
    """Key of the sample of each file."""
    part_Q8: Tensor
    """int64, one row for each image: its file; its row in the batch and its number among the
    images of a sample, as in `Batch.augmentation_BVK`; left, top, right and bottom of the crop in
    pixels, which may extend beyond the file's image; 1 if it is mirrored.
    """


@dataclasses.dataclass(kw_only=True, slots=True)
class Batch:
    """A batch as loaders yield it and models take it."""

    keys: list[str]
    image_BCHW: Tensor
    """uint8 grey (C = 1) or RGB (C = 3); the encoder scales, normalises and expands it on the
    device. Without pixels where the batch has volumes or regions.
    """
    ids_BT: Tensor
    """int64 token ids, padded to the longest text of this batch."""
    mask_BT: Tensor
    """bool, True on real tokens."""
    labels_BL: Tensor
    """float32: 1, 0, -1 (uncertain) or NaN (not mentioned), columns as in the manifest."""
    texts: list[str]
    """The texts behind `ids_BT`."""
    image_BCDHW: Tensor | None = None
    """int16 Hounsfield units of volumes (C = 1): z to the head, y to the back, x to the patient's
    left (`medvl.data.VolumeTransform`). The encoder applies its window.
    """
    organ_mask_BDHW: Tensor | None = None
    """uint8 organ of each voxel of `image_BCDHW`: its number in `ORGANS` from 1, or 0
    (`VolumeTransform.organs`).
    """
    slices_BNCHW: Tensor | None = None
    """uint8 axial slices of volumes in RGB, from feet to head, for encoders of images (`slices` of
    `medvl.data.open_loader`).
    """
    organ_ids_BOT: Tensor | None = None
    """int64 token ids of the text of each organ, in the order of `ORGANS` (`Inputs.organs`).
    """
    organ_mask_BOT: Tensor | None = None
    """bool, True on real tokens of `organ_ids_BOT`; an organ without any has no text."""
    organ_normal_BO: Tensor | None = None
    """bool: whether the report states that the organ is normal, or nothing about it."""
    studies: list[str] | None = None
    """`Sample.study` of each row: rows of one study share their report. None: unknown."""
    image_of_B: Tensor | None = None
    """int64: index of each row's image in `image_BCHW`, which then has fewer images than the batch
    has rows. None: one image per row. Questions about one image share it, so that it is decoded and
    encoded once.
    """
    has_image_B: Tensor | None = None
    """bool: False where a sample has no image and its pixels are a placeholder. None: every sample
    has one. With `image_of_B`, one value per image.
    """
    has_text_B: Tensor | None = None
    """bool: False where a sample has no text, whatever its tokens are. None: every sample has
    one.
    """
    regions_BPD: Tensor | None = None
    """float16 or float32, as stored: precomputed region features of a detector (`Inputs.regions`),
    for models that take them in place of pixels; a row of zeros is padding. Or the class token and
    the patches of a frozen image encoder (`DualEncoder.reads_features`).
    """
    region_boxes_BP4: Tensor | None = None
    """float32: left, top, right and bottom of each region as shares of the image, in 0..1; zeros
    for padding.
    """
    region_classes_BPK: Tensor | None = None
    """float32: the detector's distribution over its K classes for each region
    (`Inputs.region_classes`); zeros for padding. Its maximum is the confidence of a region, its
    argmax the object's id.
    """

    mean_counts_K: Tensor | None = None
    """float32: for models with `loss_counts`, the mean counts of an update's batches over
    micro-batches and ranks, set by the training step; None: losses are means over this batch
    alone.
    """

    second_image_BCHW: Tensor | None = None
    """uint8: another random augmentation of the same images (`Inputs.second_image`)."""
    second_ids_BT: Tensor | None = None
    """int64 token ids of another random choice of text (`Inputs.second_text`)."""
    second_mask_BT: Tensor | None = None
    """bool, True on real tokens of `second_ids_BT`."""
    has_second_text_B: Tensor | None = None
    """bool: False where a sample has no second text, whatever its tokens are
    (`medvl.data.TextPair`).
    """
    mirrored_ids_BT: Tensor | None = None
    """int64 token ids of the texts with left and right exchanged, padded like `ids_BT`
    (`Inputs.mirrored_text`).
    """
    mirrored_mask_BT: Tensor | None = None
    """bool, True on real tokens of `mirrored_ids_BT`."""
    has_mirror_B: Tensor | None = None
    """bool: False where a text names no side, so that its mirror is the text itself."""
    denied_ids_BT: Tensor | None = None
    """int64 token ids of the texts with their findings denied, padded like `ids_BT`
    (`Inputs.denied_text`).
    """
    denied_mask_BT: Tensor | None = None
    """bool, True on real tokens of `denied_ids_BT`."""
    has_denial_B: Tensor | None = None
    """bool: False where a text names no finding, so that its denial is the text itself."""
    turned_BL: Tensor | None = None
    """int8, one column for each of `FINDINGS`: 1 where the text affirms a finding and the denied
    text denies it, -1 the reverse, 0 otherwise.
    """
    found_BL: Tensor | None = None
    """int8: values of `FINDINGS` in the whole report: 1, 0 (or not mentioned), -1 (uncertain)."""
    sentence_BT: Tensor | None = None
    """int64: number of each token's sentence, from 0; -1 outside of sentences
    (`Inputs.sentences`).
    """
    position_BL: Tensor | None = None
    """int64: class of the place of the finding in each label column (`Inputs.positions`), with the
    sides of the image; -1 where the text names none.
    """
    statement_ids_BST: Tensor | None = None
    """int64 token ids of the sample's statements (`Inputs.statements`), padded to the most and
    the longest of them.
    """
    statement_mask_BST: Tensor | None = None
    """bool, True on real tokens of `statement_ids_BST`; a statement without any is padding."""
    phrases: list[list[str]] | None = None
    """Phrases of each image (`Inputs.boxed_phrases`)."""
    phrase_cover_BSHW: Tensor | None = None
    """uint8: share of each cell of the image that the boxes of each of `phrases` cover, 255 for
    all of it; zeros for a phrase without boxes, and for padding.
    """
    entity_BN: Tensor | None = None
    """int64: entities that each text mentions, in the order of the text; -1 is padding
    (`Inputs.entities`).
    """
    mention_BT: Tensor | None = None
    """int64: for each token the column of `entity_BN` whose mention it is part of; -1 for none."""
    image_entity_BN: Tensor | None = None
    """int64: distinct entities that all texts of the sample mention; -1 is padding. N differs
    from the text's.
    """
    prior_BCHW: Tensor | None = None
    """uint8: the patient's previous image (`Inputs.prior_image`), one for each of `image_BCHW`."""
    has_prior_B: Tensor | None = None
    """bool: False where a sample has no previous image and its pixels are a placeholder."""
    other_views_BVCHW: Tensor | None = None
    """uint8: other images of the same study (`Inputs.other_views` or `Inputs.drawn_view`), padded
    to the most of them in the batch. None: all studies have one image.
    """
    other_regions_BVPD: Tensor | None = None
    """Stored features of the other images in place of `other_views_BVCHW` (`regions_BPD`)."""
    has_other_view_BV: Tensor | None = None
    """bool: False where a study has fewer images and these pixels are a placeholder."""
    prompt_ids_BT: Tensor | None = None
    """int64 token ids of what is known about each study before its report, with one image marker a
    row (`Inputs.prompt`). None: images alone.
    """
    prompt_mask_BT: Tensor | None = None
    """bool, True on real tokens of `prompt_ids_BT`."""
    sampled_ids_NT: Tensor | None = None
    """int64: texts that the model sampled, those of a row side by side, to train on rewards; set
    by the training step.
    """
    sampled_mask_NT: Tensor | None = None
    """bool, True on real tokens of `sampled_ids_NT`, the closing one included."""
    advantage_N: Tensor | None = None
    """float32: how much better each sampled text is than what it is compared with."""
    reward_K: Tensor | None = None
    """float32: means of a batch of sampled texts: their reward, that of greedy texts (0 without
    any), tokens, and the share that ended.
    """
    encoded: EncodedImages | None = None
    """Images that the device decodes (`medvl.data.augment_batch`), black until then; None: all are
    decoded.
    """
    augmentation_BVK: Tensor | None = None
    """float32: parameters of the augmentation that is left to the device, for each image of each
    sample (`medvl.data.transforms.operations`); None: the images are augmented. With
    `image_of_B`, one row per image.
    """

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def pixels(self) -> Tensor:
        """The images, or the volumes where the batch has these."""
        return self.image_BCHW if self.image_BCDHW is None else self.image_BCDHW

    @property
    def embedded(self) -> tuple[Tensor, ...]:
        """Arguments of a dual-encoder's `embed_images`: the images, or the volumes and their
        organs.
        """
        if self.organ_mask_BDHW is None:
            return (self.pixels,)
        return self.pixels, self.organ_mask_BDHW

    def rows(self, index: Sequence[int]) -> Batch:
        """Return some rows. Raises ValueError for a batch in which rows share images, or that has
        images for the device to decode.
        """
        if self.image_of_B is not None:
            raise ValueError("expected one image for each row, got image_of_B")
        if self.encoded is not None:
            raise ValueError("expected decoded images: call augment_batch first")
        indices = list(index)
        return dataclasses.replace(
            dataclasses.replace(self, mean_counts_K=None)._map(lambda tensor: tensor[indices]),
            mean_counts_K=self.mean_counts_K,  # of an update, not of rows
            keys=[self.keys[row] for row in indices],
            texts=[self.texts[row] for row in indices],
            studies=None if self.studies is None else [self.studies[row] for row in indices],
            phrases=None if self.phrases is None else [self.phrases[row] for row in indices],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the same batch with its tensors in page-locked memory; torch's DataLoader calls
        this.
        """
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {
            name: value
            for name, value in values.items()
            if not (value is None or isinstance(value, list | EncodedImages))
        }
        moved: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items()}
        return dataclasses.replace(self, **moved)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Output of an `ImageEncoder`."""

    pooled_BD: Tensor
    patches_BPD: Tensor | None
    """Local features in row-major order over `grid`; None where the encoder has none."""
    grid: tuple[int, int] | tuple[int, int, int] | None
    """(h, w) with h * w = P; of volumes (d, h, w) with d * h * w = P."""
    attention_BP: Tensor | None = None
    """Attention of the last layer from the class token to the patches, averaged over heads; None
    unless requested.
    """

    @property
    def plane(self) -> tuple[int, int] | None:
        """The grid (h, w) of an image.

        Raises ConfigError ("unsupported") for the grid of a volume.
        """
        if self.grid is not None and len(self.grid) != 2:
            raise ConfigError(
                "expected features of images with a grid (h, w), got those of volumes; use an "
                "image encoder",
                "unsupported",
                field="image_encoder",
            )
        return self.grid


@dataclasses.dataclass(frozen=True, slots=True)
class TextFeatures:
    """Output of a `TextEncoder`."""

    pooled_BD: Tensor
    tokens_BTD: Tensor
    mask_BT: Tensor
    """bool, True on real tokens; needed for pooling `tokens_BTD`."""
    attention_BT: Tensor | None = None
    """Attention of the last layer from the first token to all tokens, averaged over heads; None
    unless requested.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Embeddings:
    """Images or texts in the shared space of a dual-encoder, as `similarity` takes them; encode
    once, compare often.
    """

    global_NE: Tensor
    """L2-normalised, unless the system's similarity is not built on cosines (MutualInfo)."""
    local_NPE: Tensor | None = None
    """Regions or words, for models whose similarity has a local term."""
    mask_NP: Tensor | None = None
    """bool, True on real words or regions; None: all are."""
    weight_NP: Tensor | None = None
    """float32 weights of words or regions, for losses that use them."""
    pair_N: Tensor | None = None
    """int64: the pair that each row belongs to, where pairs have unequal numbers of rows. None:
    row i is of pair i.
    """
    group_N: Tensor | None = None
    """int64: equal for rows with equal texts, on every rank; None where the loss does not need
    it.
    """

    def __len__(self) -> int:
        return len(self.global_NE)


@dataclasses.dataclass(frozen=True, slots=True)
class Losses:
    """Output of `model(batch)`: the scalar to minimise and its terms."""

    total: Tensor
    terms: Mapping[str, Tensor]

    @classmethod
    def sum(cls, **terms: Tensor) -> Losses:
        """Return the plain sum of named terms."""
        if not terms:
            raise ValueError("Losses.sum needs at least one term")
        return cls(total=functools.reduce(operator.add, terms.values()), terms=terms)

    @classmethod
    def weighted(cls, **terms: tuple[Tensor, float]) -> Losses:
        """Return the weighted sum of named (value, weight) terms; `terms` keep the unweighted
        values.
        """
        if not terms:
            raise ValueError("Losses.weighted needs at least one term")
        total = functools.reduce(operator.add, (weight * value for value, weight in terms.values()))
        return cls(total=total, terms={name: value for name, (value, _) in terms.items()})
