"""Building a batch from stored samples: the parts that all loaders share."""

import dataclasses
import functools
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from medvl.data.loading.altered_texts import add_altered, alter_texts, report_findings
from medvl.data.loading.boxed_phrases import BoxedPhrase, boxed_phrases, stack_phrases
from medvl.data.loading.organ_texts import OrganText, add_organ_texts, organ_texts
from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.sentences import sentence_spans
from medvl.data.shards.format import label_row
from medvl.data.shards.regions import Regions
from medvl.data.tokenizer.tokenizer import Tokenizer, pad_rows as pad_ids, row_mask
from medvl.data.transforms.device import stack_samples, stack_views
from medvl.data.transforms.image import BuiltTransform, ImageTransform, ReadsTexts, Transformed
from medvl.data.transforms.text import (
    REPORT_SECTIONS,
    SamplePolicy,
    Statements,
    TextPair,
    TextPolicy,
    choose_sections,
)
from medvl.data.transforms.turning import mirror_labels, texts_and_names
from medvl.data.volumes.transform import CutVolume, VolumeTransform
from medvl.errors import BudgetError, ConfigError, ShardError
from medvl.schema import Batch, FindsEntities, Inputs, Sample

if TYPE_CHECKING:
    from medvl.data.knowledge.finder import EntityLinker
    from medvl.data.loading.dense_targets import DenseTargets

# Samples that are left out of their batch, and the limit on their number.

_log = logging.getLogger(__name__)

NO_IMAGE = "no_image"
"""Reason for skipping a sample without an image, also the code of ImageError. It does not count
as unreadable.
"""
NO_TEXT = "no_text"
"""Reason for skipping a sample without the text that is read. It does not count as unreadable."""
NOT_WHERE = "where_not_met"
"""Reason for leaving out a sample that does not meet a condition. It does not count as unreadable.
"""
_READABLE = (NO_IMAGE, NO_TEXT, NOT_WHERE)


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that is left out of its batch: an unreadable one, or one without an image or a
    text that is needed.
    """

    key: str
    reason: str


class SkipBudget:
    """Counter of skipped samples by reason, with an upper limit on the unreadable ones.

    The limit is on different samples: one that is unreadable in every epoch or validation counts
    once. A resumed run counts from zero.

    Args:
        where: folder or address of the data, for messages.
        max_skipped: below 1 a fraction of all samples, else a number.
        samples: number of all samples.

    Attributes:
        reasons: number of skips by reason, in which a sample counts in every pass that leaves it
            out.
    """

    def __init__(self, where: str, max_skipped: float, samples: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._unreadable: dict[str, str] = {}  # reason by key
        self._where = where
        self._budget = int(max_skipped if max_skipped >= 1 else max_skipped * samples)

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Count skipped samples, and log each unreadable one once. Raises BudgetError with more
        than the limit.
        """
        for sample in skipped:
            self.reasons[sample.reason] += 1
            if sample.reason not in _READABLE and sample.key not in self._unreadable:
                self._unreadable[sample.key] = sample.reason
                _log.warning("skipped sample %s: %s", sample.key, sample.reason)
        if len(self._unreadable) > self._budget:
            reasons = Counter(self._unreadable.values())
            detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            state = (
                f"{len(self._unreadable)} unreadable samples ({detail}), over the budget of "
                f"{self._budget}"
            )
            message = f"{self._where}: {state}; run `medvl verify` to list the damage"
            raise BudgetError(message, "budget", field="max_skipped")

    def check_empty_batch(self, skipped: Sequence[SkippedSample]) -> None:
        """Raise ShardError for a batch without a readable sample, unless all of its samples lack
        an image or a text.
        """
        if all(sample.reason in _READABLE for sample in skipped):
            return
        raise ShardError(
            f"{self._where}: no sample of a batch can be read (first: {skipped[0].key}, "
            f"{skipped[0].reason}); "
            "run `medvl verify` to list the damage",
            "empty",
        )


Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""Function from texts to (ids_BT, mask_BT): a `Tokenizer`, or `no_text` for models without a
text encoder.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of a batch."""

    key: str
    study: str
    image_HWC: np.ndarray
    text: str
    labels_L: np.ndarray
    image_key: str | None = None
    """Equal for items that share one image. None: the item has its own image."""
    second_image_HWC: np.ndarray | None = None
    second_text: str | None = None
    prior_image_HWC: np.ndarray | None = None
    """None: the sample has no previous image, or the system needs none."""
    other_view_HWC: np.ndarray | None = None
    """None: the study has no other image, or the system needs none."""
    has_image: bool = True
    """False: the sample has no image, and its pixels are a placeholder."""
    entities: tuple[int, ...] = ()
    """Distinct entities in all sections, where the system needs them."""
    regions: Regions | None = None
    """None: the system reads pixels, or the sample has no image."""
    target: Any = None
    """Target that `DenseTargets` made; None without it."""
    positions: tuple[int, ...] = ()
    """Class of the position of each label's finding, where the system needs it."""
    statements: tuple[str, ...] = ()
    """All statements, where the system needs them."""
    augmentation_VK: np.ndarray | None = None
    """Parameters of the augmentation that is left to the device; None: the images are augmented."""
    prompt: tuple[int, ...] = ()
    """Ids of the prompt, where the system needs it."""
    volume: CutVolume | None = None
    """None: the loader reads no volumes."""
    slices_NCHW: np.ndarray | None = None
    """uint8 RGB slices of a volume; None: the loader reads no slices, or one, as an image."""
    phrases: tuple[BoxedPhrase, ...] = ()
    """Where the system needs them."""
    findings: tuple[int, ...] = ()
    """Values of the findings of the report, where the system reads denied texts."""
    organs: tuple[OrganText, ...] = ()
    """Likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Views:
    """The augmented images of one sample, or placeholders."""

    image: Transformed
    second: Transformed | None = None
    prior: Transformed | None = None
    other: Transformed | None = None
    has_image: bool = True
    regions: Regions | None = None
    prior_sections: Mapping[str, str] | None = None
    """Sections of the prior report, where the system reads it."""
    volume: CutVolume | None = None
    slices_NCHW: np.ndarray | None = None
    phrases: tuple[BoxedPhrase, ...] = ()


NO_PIXELS = Transformed(np.zeros((0, 0, 1), np.uint8))
"""Image of samples whose regions, volumes or slices are read."""


def sample_rng(seed: int, epoch: int, key: str, purpose: str) -> np.random.Generator:
    """Return the random generator of one sample in one epoch; each purpose has an independent
    one.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class ItemMaker:
    """Image augmentation and text selection for a sample. All randomness comes from (seed, epoch,
    key).

    Second views and texts have generators of their own, so that they leave the first ones as they
    are.
    """

    def __init__(
        self,
        image: ImageTransform | VolumeTransform,
        text: TextPolicy,
        label_names: Sequence[str],
        seed: int,
        inputs: Inputs | None = None,
        targets: "DenseTargets | None" = None,
    ) -> None:
        self.image = image
        self.text = text
        self.targets = targets
        self.label_names = tuple(label_names)
        self.seed = seed
        self.inputs = inputs or Inputs()
        if self.inputs.mirrored_text and getattr(image, "flip", "off") == "plain":
            message = (
                "mirrored texts need images that agree with their text: use image.flip "
                "'swap_text' or 'off'"
            )
            raise ConfigError(message, "conflict", field="image.flip")
        made = targets is not None or self.inputs.boxed_phrases
        if made and getattr(image, "on_device", False):
            message = "boxes are moved with the augmented image: leave image.on_device unset"
            raise ConfigError(message, "conflict", field="image.on_device")
        # checked once: isinstance of a protocol takes as long as a tenth of the augmentation
        self._for_texts = image.for_texts if isinstance(image, ReadsTexts) else None
        self._of_sample = text.of_sample if isinstance(text, SamplePolicy) else None
        self._transforms: dict[
            str, BuiltTransform
        ] = {}  # built in the process that uses them: they do not pickle
        self._blank: Transformed | None = None

    def __call__(self, sample: Sample, pixels: np.ndarray, epoch: int) -> Item:
        """Return the item of one sample. `pixels` are uint8, (H, W) or (H, W, 3)."""
        return self.row(sample, self.views(sample.key, pixels, epoch, sample=sample), epoch)

    def rng(self, epoch: int, key: str, purpose: str) -> np.random.Generator:
        """Return the random generator of one sample in one epoch (`sample_rng`)."""
        return sample_rng(self.seed, epoch, key, purpose)

    def views(
        self,
        key: str,
        pixels: np.ndarray,
        epoch: int,
        prior: np.ndarray | None = None,
        sample: Sample | None = None,
        other: np.ndarray | None = None,
    ) -> Views:
        """Return the augmented images.

        `key` seeds the augmentation, `prior` are the pixels of the previous image, `other` those of
        another image of the study, and `sample` has the texts and names for transforms that flip an
        image only where these allow it (`medvl.data.transforms.turning.texts_and_names`).
        """
        transform = self._transform(sample)
        image = transform(pixels, self.rng(epoch, key, "image"))

        def augment(pixels: np.ndarray | None, purpose: str) -> Transformed | None:
            """Return another augmentation, flipped like `image` where the text names sides."""
            if pixels is None:
                return None
            rng = self.rng(epoch, key, purpose)
            while True:
                augmented = transform(pixels, rng)
                if self.image.flip != "swap_text" or augmented.flipped == image.flipped:
                    return augmented

        second = augment(pixels if self.inputs.second_image else None, "second image")
        phrases: tuple[BoxedPhrase, ...] = ()
        if sample is not None and self.inputs.boxed_phrases:
            rngs = functools.partial(self.rng, epoch, key)
            phrases = boxed_phrases(sample, pixels, transform, rngs)
        others = augment(prior, "prior image"), augment(other, "other view")
        return Views(image, second, *others, phrases=phrases)

    def placeholder(self, color: bool) -> Views:
        """Return black images of the transform's size, for a sample without an image."""
        if self._blank is None:
            pixels = np.zeros((16, 16, 3) if color else (16, 16), np.uint8)
            example = self._transform()(pixels, sample_rng(self.seed, 0, "", "placeholder"))
            self._blank = Transformed(
                np.zeros_like(example.image_HWC), deferred_K=example.deferred_K
            )
        return Views(
            self._blank, self._blank if self.inputs.second_image else None, has_image=False
        )

    def _transform(self, sample: Sample | None = None) -> BuiltTransform:
        image = self.image
        assert not isinstance(image, VolumeTransform), "volumes are cut, not transformed"
        name = ""
        if self._for_texts is not None:
            image = self._for_texts(() if sample is None else texts_and_names(sample))
            name = "" if image is self.image else repr(image)
        if name not in self._transforms:
            self._transforms[name] = image.build()
        return self._transforms[name]

    def row(self, sample: Sample, views: Views, epoch: int, image_key: str | None = None) -> Item:
        """Return the item of one sample and its augmented images. Items with one `image_key`
        share the image.
        """
        if isinstance(self.text, Statements):
            sample = self.text.relabelled(sample)
        labelled = mirror_labels(sample) if self._is_mirrored(views) else sample
        return Item(
            sample.key,
            sample.study,
            views.image.image_HWC,
            self._text(sample, views, epoch, "text"),
            label_row(labelled.labels, self.label_names),
            image_key,
            None if views.second is None else views.second.image_HWC,
            self._text(sample, views, epoch, "second text") if self.inputs.second_text else None,
            None if views.prior is None else views.prior.image_HWC,
            None if views.other is None else views.other.image_HWC,
            views.has_image,
            self._entities(sample, views),
            views.regions,
            None if self.targets is None else self.targets(labelled, views.image),
            self._positions(sample, views) if self.inputs.positions else (),
            self._statements(sample, views, epoch) if self.inputs.statements else (),
            stack_views(views.image, views.second, views.prior, views.other),
            self._prompt(sample, views),
            views.volume,
            views.slices_NCHW,
            tuple(each._replace(text=self._as_image(each.text, views)) for each in views.phrases),
            report_findings(sample) if self.inputs.denied_text else (),
            organ_texts(sample, self.text, functools.partial(self.rng, epoch, sample.key))
            if self.inputs.organs
            else (),
        )

    def _prompt(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the ids of the sample's prompt; left and right as in the augmented image."""
        if self.inputs.prompt is None:
            return ()
        own, prior = (
            None
            if sections is None
            else {name: self._as_image(text, views) for name, text in sections.items()}
            for sections in (sample.sections, views.prior_sections)
        )
        return tuple(self.inputs.prompt(own or {}, prior))

    def _positions(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the class of the position of each label's finding; left and right as in the
        augmented image.
        """
        # Few systems read positions, so that most runs import no labeler.
        from medvl.data.reports.labeler import conventions_named
        from medvl.data.reports.statements import mirrored_positions, positions_of

        named = self.text.conventions if isinstance(self.text, Statements) else "chexpert"
        rules = conventions_named(named)
        text = "\n\n".join(choose_sections(sample.sections, REPORT_SECTIONS))
        positions = positions_of(text, self.label_names, rules)
        return tuple(mirrored_positions(positions) if self._is_mirrored(views) else positions)

    def _statements(self, sample: Sample, views: Views, epoch: int) -> tuple[str, ...]:
        """Return all statements; under a policy without statements, the sample's text is its
        only one.
        """
        if not isinstance(self.text, Statements):
            text = self._text(sample, views, epoch, "text")
            return (text,) if text.strip() else ()
        rng = sample_rng(self.seed, epoch, sample.key, "statements")
        return tuple(
            self._as_image(text, views) for text in self.text.all_of(self._sections(sample), rng)
        )

    def _sections(self, sample: Sample) -> Mapping[str, str]:
        return sample.sections if self._of_sample is None else self._of_sample(sample)

    def _entities(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the distinct entities of all sections, whichever of them is the item's text."""
        finder = self.inputs.entities
        if finder is None:
            return ()
        texts = [self._as_image(text, views) for text in sample.sections.values()]
        return tuple(dict.fromkeys(entity for text in texts for _, _, entity in finder.find(text)))

    def _text(self, sample: Sample, views: Views, epoch: int, purpose: str) -> str:
        rng = sample_rng(self.seed, epoch, sample.key, purpose)
        if purpose == "second text" and isinstance(self.text, TextPair):
            first = self.text(sample.sections, sample_rng(self.seed, epoch, sample.key, "text"))
            text = self.text.other(sample.sections, first, rng)
        else:
            text = self.text(self._sections(sample), rng)
        return self._as_image(text, views)

    def _as_image(self, text: str, views: Views) -> str:
        """Return a text, with left and right exchanged if the image is flipped and `flip` is
        swap_text.
        """
        return swap_laterality(text) if self._is_mirrored(views) else text

    def _is_mirrored(self, views: Views) -> bool:
        """Return whether left and right are exchanged in texts and names."""
        return views.image.flipped and self.image.flip == "swap_text"


def _entity_linker(finder: FindsEntities, tokenizer: Tokenize) -> "EntityLinker":
    from medvl.data.knowledge.finder import EntityLinker

    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError("entities need a Tokenizer; give one", "wrong_type", field="tokenizer")
    return EntityLinker(finder, tokenizer)


class Collate:
    """Stack items into a batch and tokenize their texts, padded to the longest text of the batch.

    Raises ConfigError where sentences or entities are needed and `tokenizer` is not a `Tokenizer`.
    """

    def __init__(
        self,
        tokenizer: Tokenize,
        inputs: Inputs | None = None,
        targets: "DenseTargets | None" = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.inputs = inputs or Inputs()
        self.targets = targets
        if self.inputs.sentences and not isinstance(tokenizer, Tokenizer):
            raise ConfigError(
                "sentences need a Tokenizer; give one", "wrong_type", field="tokenizer"
            )
        finder = self.inputs.entities
        self._linker = None if finder is None else _entity_linker(finder, tokenizer)

    def __call__(
        self, items: Sequence[Item | SkippedSample]
    ) -> tuple[Batch | None, list[SkippedSample]]:
        samples = [item for item in items if isinstance(item, Item)]
        skipped = [item for item in items if isinstance(item, SkippedSample)]
        if not samples:
            return None, skipped
        texts = [item.text for item in samples]
        altered = alter_texts(texts, self.inputs)
        # One call pads all kinds of texts to the same length.
        ids_BT, mask_BT = self.tokenizer([*texts, *itertools.chain(*altered.values())])
        rows = len(texts)
        has_text_B = torch.tensor([bool(text.strip()) for text in texts])
        names = [
            str(row) if item.image_key is None else f"shared {item.image_key}"
            for row, item in enumerate(samples)
        ]
        images = dict(zip(names, (item.image_HWC for item in samples), strict=True))
        image_row = {name: row for row, name in enumerate(images)}
        has_image = dict(zip(names, (item.has_image for item in samples), strict=True))
        regions = dict(zip(names, (item.regions for item in samples), strict=True))
        parameters = dict(zip(names, (item.augmentation_VK for item in samples), strict=True))
        batch = Batch(
            keys=[item.key for item in samples],
            image_BCHW=stack(list(images.values())),
            image_of_B=torch.tensor([image_row[name] for name in names])
            if len(images) < len(samples)
            else None,
            ids_BT=ids_BT[:rows],
            mask_BT=mask_BT[:rows],
            labels_BL=torch.from_numpy(np.stack([item.labels_L for item in samples])),
            texts=texts,
            studies=[item.study for item in samples],
            has_image_B=None if all(has_image.values()) else torch.tensor(list(has_image.values())),
            has_text_B=None if has_text_B.all() else has_text_B,
            augmentation_BVK=stack_samples(list(parameters.values())),
        )
        add_altered(batch, altered, ids_BT[rows:], mask_BT[rows:])
        self._add_inputs(batch, samples)
        if self.inputs.prior_image:
            priors = dict(zip(names, (item.prior_image_HWC for item in samples), strict=True))
            batch.prior_BCHW, batch.has_prior_B = stack_some(
                list(priors.values()), samples[0].image_HWC
            )
        if self.inputs.regions:
            self._add_regions(batch, list(regions.values()))
        self._add_volumes(batch, samples)
        if self.targets is not None:
            batch = self.targets.add_to(batch, [item.target for item in samples])
        return batch, skipped

    def _add_volumes(self, batch: Batch, items: Sequence[Item]) -> None:
        """Add volumes with their organs, or slices."""
        volumes = [item.volume for item in items if item.volume is not None]
        if volumes:
            batch.image_BCDHW = torch.from_numpy(np.stack([each.hu_DHW for each in volumes]))[
                :, None
            ]
        organs = [each.organs_DHW for each in volumes if each.organs_DHW is not None]
        if organs:
            batch.organ_mask_BDHW = torch.from_numpy(np.stack(organs))
        slices = [item.slices_NCHW for item in items if item.slices_NCHW is not None]
        if slices:
            batch.slices_BNCHW = torch.from_numpy(np.stack(slices))

    def _add_regions(self, batch: Batch, regions: Sequence[Regions | None]) -> None:
        """Add the regions of the batch's images, padded with zeros to the largest number of
        them.
        """
        boxes, features = (
            [None if each is None else getattr(each, name) for each in regions]
            for name in ("boxes_P4", "features_PD")
        )
        batch.regions_BPD = pad_rows(features, as_stored=True)
        batch.region_boxes_BP4 = pad_rows(boxes)
        if self.inputs.region_classes:
            batch.region_classes_BPK = pad_rows(
                [None if each is None else each.classes_PK for each in regions]
            )

    def _add_inputs(self, batch: Batch, items: Sequence[Item]) -> None:
        """Add the optional parts that the system needs."""
        if self.inputs.second_image:
            batch.second_image_BCHW = stack([_not_none(item.second_image_HWC) for item in items])
        if self.inputs.second_text:
            texts = [item.second_text or "" for item in items]
            batch.second_ids_BT, batch.second_mask_BT = self.tokenizer(texts)
            batch.has_second_text_B = torch.tensor([bool(text.strip()) for text in texts])
        if self.inputs.sentences:
            assert isinstance(self.tokenizer, Tokenizer)
            batch.sentence_BT = self.tokenizer.sentence_ids(
                batch.texts, [sentence_spans(text) for text in batch.texts]
            )
        if self.inputs.positions:
            batch.position_BL = torch.tensor([item.positions for item in items])
        if self.inputs.statements:
            texts = [text for item in items for text in item.statements]
            sizes = [len(item.statements) for item in items]
            batch.statement_ids_BST, batch.statement_mask_BST = grouped(
                self.tokenizer(texts or [""]), sizes
            )
        if self.inputs.denied_text:
            batch.found_BL = torch.tensor([item.findings for item in items], dtype=torch.int8)
        if self.inputs.organs:
            add_organ_texts(batch, [item.organs for item in items], self.tokenizer)
        if self.inputs.boxed_phrases:
            batch.phrases, batch.phrase_cover_BSHW = stack_phrases([item.phrases for item in items])
        if self._linker is not None:
            from medvl.data.knowledge.finder import pad_entities

            batch.entity_BN, batch.mention_BT = self._linker(batch.ids_BT, batch.mask_BT)
            batch.image_entity_BN = pad_entities([item.entities for item in items])
        if self.inputs.prompt is not None:
            prompts = [item.prompt for item in items]
            batch.prompt_ids_BT = pad_ids(prompts, 0)
            batch.prompt_mask_BT = row_mask(prompts)
        if self.inputs.by_study:
            others = [item.other_view_HWC for item in items]
            batch.other_view_BCHW, batch.has_other_view_B = stack_some(others, items[0].image_HWC)


def _not_none(image_HWC: np.ndarray | None) -> np.ndarray:
    assert image_HWC is not None, "the ItemMaker and Collate of a loader have the same inputs"
    return image_HWC


def stack(images: Sequence[np.ndarray]) -> Tensor:
    """Return (B, C, H, W) from images (H, W, C)."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def pad_rows(arrays: Sequence[np.ndarray | None], *, as_stored: bool = False) -> Tensor:
    """Return (B, P, D) from arrays (P, D) of unequal length, zeros for None; P is 0 if all are
    None.

    In float32, or with `as_stored` in the widest type of the arrays.
    """
    present = [array for array in arrays if array is not None]
    rows = max(map(len, present), default=0)
    columns = present[0].shape[1] if present else 0
    dtype = np.result_type(*present) if present and as_stored else np.dtype(np.float32)
    padded = np.zeros((len(arrays), rows, columns), dtype)
    for row, array in enumerate(arrays):
        if array is not None:
            padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def grouped(tokens: tuple[Tensor, Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ids and mask (B, S, T) of texts in rows of the given sizes, one after another; S is
    at least 1.
    """
    ids_NT, mask_NT = tokens
    real_BS = torch.arange(max(1, *sizes)) < torch.tensor(sizes)[:, None]
    ids_BST, mask_BST = (x_NT.new_zeros(*real_BS.shape, x_NT.shape[1]) for x_NT in tokens)
    ids_BST[real_BS], mask_BST[real_BS] = ids_NT[: sum(sizes)], mask_NT[: sum(sizes)]
    return ids_BST, mask_BST


def stack_some(images: Sequence[np.ndarray | None], like_HWC: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return (B, C, H, W) with black images for those that are missing, and (B,) bool: which are
    there.
    """
    blank_HWC = np.zeros_like(like_HWC)
    there_B = torch.tensor([image is not None for image in images])
    return stack([blank_HWC if image is None else image for image in images]), there_B
