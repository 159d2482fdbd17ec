"""Base of dual-encoders of volumes and texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from medvl.data.volumes.transform import VolumeTransform
from medvl.encoders import TextEncoder, VolumeEncoder, create_text_encoder, create_volume_encoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.base import BertTextConfig, DualEncoder, merge_arguments
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeDualConfig(BertTextConfig):
    """Settings that every dual-encoder of volumes has.

    Volume encoders have no published weights that `pretrained` finds: `image_weights` names a file,
    of volumes or of a vision Transformer for images, which is inflated.
    """

    image_encoder: str = "vit"
    image_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `medvl.encoders.create_volume_encoder` beside name, size and weights."""
    volume_size: tuple[int, int, int] = (112, 336, 336)
    """Voxels along (z, y, x). Shards have the spacing that the model is trained with."""

    def transform(self) -> VolumeTransform:
        """Return the cut of a volume for inference."""
        return VolumeTransform(size=self.volume_size)


class VolumeDualEncoder(DualEncoder):
    """Dual-encoder that reads `Batch.image_BCDHW`, int16 Hounsfield units.

    What takes images elsewhere takes volumes (B, 1, D, H, W): `encode_image`, `embed_images` and
    `similarity`.
    """

    image_encoder: Any
    zero_shot_prompts = "statements"
    trains_pooled: ClassVar[bool] = True
    """Whether training reaches the encoder's own vector of a volume."""

    @classmethod
    def make_encoders(
        cls, config: Any, image: Mapping[str, Any], text: Mapping[str, Any]
    ) -> tuple[VolumeEncoder, TextEncoder]:
        given = {key: value for key, value in image.items() if key != "pretrained"}
        arguments = merge_arguments(
            "image_arguments", {"size": config.volume_size, **given}, config
        )
        encoder = create_volume_encoder(config.image_encoder, **arguments)
        return encoder, create_text_encoder(
            config.text_encoder, **merge_arguments("text_arguments", text, config)
        )

    @classmethod
    def make_transform(cls, config: Any) -> Any:
        """Return the cut of a volume for inference."""
        return config.transform()

    def unnormalized_image(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, E) float32: `encode_image` before the normalisation."""
        projected_BE: Tensor = self.image_head(self.image_encoder(image_BCDHW).pooled_BD)
        return projected_BE.float()

    def normalize_regions(self, regions_BPE: Tensor) -> Tensor:
        """Return patches of `embed_regions` as a heat map compares them with the unit vector of a
        text: of unit length.
        """
        return F.normalize(regions_BPE, dim=2)

    def embed_pairs(self, batch: Batch) -> Pairs:
        texts = self.embed_ids(*self.text_inputs(batch))
        return Pairs(images=self.embed_images(volumes_of(batch)), texts=texts)


def volumes_of(batch: Batch) -> Tensor:
    """Return the volumes of a batch. Raises ConfigError for a batch of images."""
    if batch.image_BCDHW is None:
        raise ConfigError(
            "expected volumes (Batch.image_BCDHW), got images; give shards of volumes",
            "missing",
            field="image_BCDHW",
        )
    return batch.image_BCDHW
