"""Batches of items, and the limit on samples that are left out."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from medvl.data.loading.items import NO_IMAGE, Item, OrganText, SkippedSample, stack_phrases
from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.sentences import sentence_spans
from medvl.data.shards.regions import Regions
from medvl.data.tokenizer.tokenizer import Tokenizer, pad_rows as pad_ids, row_mask
from medvl.data.transforms.operations import join_files, stack_samples
from medvl.errors import BudgetError, ConfigError, ShardError
from medvl.schema import ORGANS, Batch, FindsEntities, Inputs

if TYPE_CHECKING:
    from medvl.data.knowledge.finder import EntityLinker
    from medvl.data.loading.dense_targets import DenseTargets

# Samples that are left out of their batch, and the limit on their number.

_log = logging.getLogger(__name__)

NO_TEXT = "no_text"
"""Reason for skipping a sample without the text that is read. It does not count as unreadable."""
NOT_WHERE = "where_not_met"
"""Reason for leaving out a sample that does not meet a condition. It does not count as unreadable.
"""
_READABLE = (NO_IMAGE, NO_TEXT, NOT_WHERE)


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
        encoded = dict(zip(names, samples, strict=True))
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
            encoded=join_files([(item.key, item.encoded) for item in encoded.values()]),
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
            self._add_other_views(batch, items)

    def _add_other_views(self, batch: Batch, items: Sequence[Item]) -> None:
        """Add the other images of studies, or what is stored of them."""
        if self.inputs.regions:
            stored = [[each.features_PD for each in item.other_regions] for item in items]
            batch.other_regions_BVPD, batch.has_other_view_BV = stack_groups(stored)
            return
        others_BVHWC, batch.has_other_view_BV = stack_groups(
            [item.other_views_HWC for item in items]
        )
        if others_BVHWC is not None:
            batch.other_views_BVCHW = others_BVHWC.permute(0, 1, 4, 2, 3).contiguous()


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


def stack_groups(
    groups: Sequence[Sequence[np.ndarray]],
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return (B, V, ...) with zeros up to the size of the largest group of arrays, and (B, V) bool:
    which are there. None where all groups are empty.
    """
    present = [array for group in groups for array in group]
    if not present:
        return None, None
    sizes = torch.tensor([len(group) for group in groups])
    there_BV = torch.arange(int(sizes.max())) < sizes[:, None]
    arrays_N = torch.from_numpy(np.stack(present))
    padded_BV = arrays_N.new_zeros(*there_BV.shape, *arrays_N.shape[1:])
    padded_BV[there_BV] = arrays_N
    return padded_BV, there_BV


def add_organ_texts(
    batch: Batch,
    rows: Sequence[Sequence[OrganText]],
    tokenizer: Callable[[Sequence[str]], tuple[Tensor, Tensor]],
) -> None:
    """Add the tokens of the texts of each sample's organs, and which are normal."""
    texts = [each.text for row in rows for each in row]
    ids_NT, mask_NT = tokenizer(texts)
    has_text_N = torch.tensor([bool(text) for text in texts])
    sides = (len(rows), len(ORGANS))
    batch.organ_ids_BOT = ids_NT.unflatten(0, sides)
    batch.organ_mask_BOT = (mask_NT & has_text_N[:, None]).unflatten(0, sides)
    batch.organ_normal_BO = torch.tensor([[each.normal for each in row] for row in rows])


Fields = tuple[str, str, str]
"""Fields of a batch: ids, mask, and whether the exchange alters the text."""
_MIRRORED: Fields = ("mirrored_ids_BT", "mirrored_mask_BT", "has_mirror_B")
_DENIED: Fields = ("denied_ids_BT", "denied_mask_BT", "has_denial_B")


def alter_texts(texts: Sequence[str], inputs: Inputs) -> dict[Fields, list[str]]:
    """Return the altered texts that a system needs, by their fields of the batch."""
    altered = {}
    if inputs.mirrored_text:
        altered[_MIRRORED] = [swap_laterality(text) for text in texts]
    if inputs.denied_text:
        # Few systems read denials, so that most runs import no labeler.
        from medvl.data.reports.denials import turn_findings

        altered[_DENIED] = [turn_findings(text).text for text in texts]
    return altered


def add_altered(
    batch: Batch, altered: Mapping[Fields, Sequence[str]], ids_NT: Tensor, mask_NT: Tensor
) -> None:
    """Add altered texts to a batch, of which `ids_NT` and `mask_NT` are the tokens, one kind after
    another.
    """
    rows = len(batch)
    for kind, (fields, texts) in enumerate(altered.items()):
        part = slice(kind * rows, (kind + 1) * rows)
        differs = [own != other for own, other in zip(batch.texts, texts, strict=True)]
        values = (ids_NT[part], mask_NT[part], torch.tensor(differs))
        for field, value in zip(fields, values, strict=True):
            setattr(batch, field, value)
        if fields == _DENIED:
            from medvl.data.reports.denials import turn_findings

            turned = [turn_findings(text).turned for text in batch.texts]
            batch.turned_BL = torch.tensor(turned, dtype=torch.int8)
