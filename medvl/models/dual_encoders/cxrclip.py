"""CXR-CLIP: two views and two texts of a study, and labels as sentences (You et al., MICCAI
2023, arXiv 2310.13292).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.base import (
    BertDualConfig,
    DualEncoder,
    Positives,
    ScaleConfig,
)
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses

IMAGE_WEIGHT = 1.0
"""Weight of the contrast of the two views (lambda_I, section 2.3)."""
TEXT_WEIGHT = 0.5
"""Weight of the contrast of the two texts (lambda_T, section 2.3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CXRCLIPConfig(BertDualConfig, ScaleConfig):
    """Settings of the paper and the released code; `image_encoder` is "resnet50" or "swin_tiny"
    there.
    """

    image_pool: Literal["encoder", "first"] = "encoder"
    """An image's vector: the encoder's own, or its first patch, as the released code does it
    with Swin.
    """
    views: Literal["study", "augmented"] = "study"
    """The two views: two images of the study, drawn in each epoch, or of a study with one image the
    same one augmented again; or always the latter. With "study", the loader yields a study once,
    not once for each of its images.
    """
    max_scale: float | None = None
    positives: Positives = "own"
    max_tokens: int = 256
    former = (("image_weight", IMAGE_WEIGHT), ("text_weight", TEXT_WEIGHT))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.image_pool, ("encoder", "first"), "image_pool")
        check_choice(self.views, ("study", "augmented"), "views")


@register_system("cxrclip")
class CXRCLIP(DualEncoder):
    """Mean InfoNCE of each view with each text, of the views, and of the texts (section 2.3), with
    one learned scale.

    The second text is another draw of the text policy, such as another section or sentence; in the
    paper it is a back-translated report. A sample without a second text uses its text twice. Images
    that have labels only are included with the policy `medvl.data.TextOrLabels`.
    """

    Config = CXRCLIPConfig
    learns_scale = True

    def __init__(self, config: CXRCLIPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = Inputs(
            second_image=True, second_text=True, drawn_view=config.views == "study"
        )

    @classmethod
    def encoder_arguments(
        cls, config: CXRCLIPConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Take a text's last token, [SEP], as its vector; pixels of a Swin have a
        mean and deviation of 0.5, as published.
        """
        pixels = {"mean": 0.5, "std": 0.5} if "swin" in config.image_encoder else {}
        return pixels, {"pool": "eos"}

    @classmethod
    def make_heads(
        cls, config: CXRCLIPConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        first = config.image_pool == "first"
        image_width = image_encoder.patch_dim if first else image_encoder.feature_dim
        return {
            "image_head": nn.Linear(image_width, config.projection_dim),
            "text_head": nn.Linear(text_encoder.feature_dim, config.projection_dim),
        }

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        features = self.image_encoder(image_BCHW)
        vector_BD = (
            features.pooled_BD
            if self.config.image_pool == "encoder"
            else features.patches_BPD[:, 0]
        )
        projected_BE: Tensor = self.image_head(vector_BD)
        return projected_BE.float()

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Raises ConfigError for a batch without second views and texts."""
        second_BCHW = batch.second_image_BCHW
        ids_BT = batch.second_ids_BT
        mask_BT = batch.second_mask_BT
        if second_BCHW is None or ids_BT is None or mask_BT is None:
            message = (
                "expected a second image and text of each sample: open the loader with "
                "inputs=model.inputs"
            )
            raise ConfigError(message, "missing", field="second_image_BCHW")
        if self.config.views == "study" and batch.other_views_BVCHW is not None:
            assert batch.has_other_view_BV is not None, "loaders set it with the other views"
            has_other_B111 = batch.has_other_view_BV[:, 0, None, None, None]
            second_BCHW = torch.where(has_other_B111, batch.other_views_BVCHW[:, 0], second_BCHW)
        pairs = super().embed_pairs(batch)
        second_BE = self.encode_text(ids_BT, mask_BT)
        if batch.has_second_text_B is not None:
            second_BE = torch.where(
                batch.has_second_text_B[:, None], second_BE, pairs.texts.global_NE
            )
        others = {
            "second image": self.embed_images(second_BCHW),
            "second text": Embeddings(second_BE),
        }
        return dataclasses.replace(pairs, others=others)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        every = pairs.gather()
        scale = self.scale()
        images = every.images.global_NE, every.others["second image"].global_NE
        texts = every.texts.global_NE, every.others["second text"].global_NE

        def contrast(one_NE: Tensor, other_NE: Tensor) -> Tensor:
            return losses.clip(one_NE, other_NE, scale, groups=every.groups)

        across = torch.stack(
            [contrast(image_NE, text_NE) for image_NE in images for text_NE in texts]
        ).mean()
        return Losses.weighted(
            image_text=(across, 1.0),
            image_image=(contrast(*images), IMAGE_WEIGHT),
            text_text=(contrast(*texts), TEXT_WEIGHT),
        )
