"""MedCLIP: images and texts that need not be pairs, matched by their labels (Wang et al., EMNLP
2022).
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from medvl.common.config_io import check_choice, check_within
from medvl.encoders import freeze_batch_norm_statistics
from medvl.losses.pairs.contrastive import LabelSimilarity, label_similarity, soft_targets
from medvl.models.dual_encoders.bases.base import (
    BertDualConfig,
    DualEncoder,
    ScaleConfig,
)
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.registry import register_system
from medvl.schema import POSITIVE, Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedCLIPConfig(BertDualConfig, ScaleConfig):
    """Settings of the paper and the released code; `image_encoder` is "resnet50" or "swin_tiny"
    there.

    The mean over a text's tokens leaves out the padding, which the released code includes, so that
    its text vectors depend on the longest text of the batch.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    pixel_mean: float | None = 0.5862785803043838
    """Mean of the pixels, in 0..1; None keeps the image encoder's."""
    pixel_std: float | None = 0.27950088968644304
    text_layers: tuple[int, ...] = (1, 2, -1)
    """Hidden states that are averaged: 1 is the first layer, -1 the last."""
    label_similarity: LabelSimilarity = "cosine"
    """Similarity of the labels of an image and a text: "cosine" of the positive ones, as in the
    paper; "dot", the released code's product of 1 for positive, -1 for uncertain and 0 for all
    other labels, under which the targets of samples with several labels are nearly one-hot;
    "clamp", that product within [-1, 1].
    """
    min_scale: float | None = 1.0
    two_texts: bool = True
    """Average the loss over two draws of a sample's text; False for a text policy without
    randomness.
    """
    max_tokens: int = 77

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.label_similarity, get_args(LabelSimilarity), "label_similarity")
        check_within(self, "(0, inf)", "pixel_std")


@register_system("medclip")
class MedCLIP(DualEncoder):
    """Semantic matching: all images of the global batch against all its texts (section 3.3,
    equations 3 to 6).

    Targets are the softmax of the similarity of the labels of an image and a text
    (`Batch.labels_BL`), whether or not they belong together. Rows without an image, or without a
    text, count with the side that they have.

    The loss is the mean over a text and another one of the same sample (`Inputs.second_text`). The
    released code makes that one by random edits of the words; here it is a second draw of the
    recipe's text policy, if there is one.
    """

    Config = MedCLIPConfig
    learns_scale = True
    needs_pairs = False

    def __init__(self, config: MedCLIPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = Inputs(second_text=config.two_texts, labels=True)

    @classmethod
    def encoder_arguments(
        cls, config: MedCLIPConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"mean": config.pixel_mean, "std": config.pixel_std}, {
            "layers": config.text_layers,
            "pool": "mean",
        }

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Embed the rows of each side that exist; placeholders are not encoded."""
        texts = {
            "texts": self._embed(batch.has_text_B, self.embed_ids, batch.ids_BT, batch.mask_BT)
        }
        if batch.second_ids_BT is not None and batch.second_mask_BT is not None:
            flags = [
                each_B
                for each_B in (batch.has_text_B, batch.has_second_text_B)
                if each_B is not None
            ]
            has_B = torch.stack(flags).all(dim=0) if flags else None
            texts["second"] = self._embed(
                has_B, self.embed_ids, batch.second_ids_BT, batch.second_mask_BT
            )
        images = self._embed(batch.has_image_B, self.embed_images, batch.image_BCHW)
        return Pairs(images=images, texts=texts.pop("texts"), others=texts)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        pairs = pairs.gather()
        assert pairs.labels_BL is not None, "the base class adds the labels of the batch"
        images = pairs.images
        scale = self.scale()
        kind = self.config.label_similarity
        terms = []
        sides = (pairs.texts, *pairs.others.values())
        # as published
        label_BL = (pairs.labels_BL == POSITIVE).float() if kind == "cosine" else pairs.labels_BL
        for texts in sides:
            targets_NM = label_similarity(label_BL[images.pair_N], label_BL[texts.pair_N], kind)
            terms.append(soft_targets(images.global_NE, texts.global_NE, targets_NM, scale))
        count = sum(len(texts) > 0 for texts in sides)
        return Losses.sum(semantic_matching=torch.stack(terms).sum() / max(1, count))

    def _embed(self, has_B: Tensor | None, embed: Any, *inputs_B: Tensor) -> Embeddings:
        """Return the embeddings of the rows that exist, with their numbers.

        Where none exists, two placeholders are encoded for zero gradients, without which DDP would
        wait; they do not enter batch norms.
        """
        if has_B is None:
            row_B = torch.arange(len(inputs_B[0]), device=inputs_B[0].device)
            return dataclasses.replace(embed(*inputs_B), pair_N=row_B)
        row_K = has_B.nonzero().squeeze(1)
        encoded = row_K if len(row_K) else row_K.new_zeros(2)
        with contextlib.nullcontext() if len(row_K) else freeze_batch_norm_statistics(self):
            embeddings: Embeddings = embed(*(tensor[encoded] for tensor in inputs_B))
        return Embeddings(embeddings.global_NE[: len(row_K)], pair_N=row_K)
