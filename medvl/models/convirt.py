"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv 2010.00747, MLHC 2022)."""

from typing import Self

from medvl import losses
from medvl.data.tokenize import Tokenizer
from medvl.data.transforms import EvalTransform
from medvl.encoders import create_image_encoder, create_text_encoder, freeze_layers
from medvl.losses.distributed import gather
from medvl.models.configs import ConVIRTConfig
from medvl.models.dual import DualEncoder, projection_head
from medvl.schema import Batch, Losses


class ConVIRT(DualEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2 to 4)."""

    name = ConVIRTConfig.system
    Config = ConVIRTConfig

    @classmethod
    def build(cls, config: ConVIRTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder = create_image_encoder(config.image_encoder, pretrained=pretrained, image_size=config.image_size)
        text_encoder = create_text_encoder(
            config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, pool=config.text_pool
        )
        freeze_layers(text_encoder, config.frozen_text_layers)
        return cls(
            config,
            image_encoder,
            text_encoder,
            projection_head(image_encoder.feature_dim, config.projection_dim, config.hidden_dim),
            projection_head(text_encoder.feature_dim, config.projection_dim, config.hidden_dim),
            transform=EvalTransform(size=config.image_size, fit=config.fit),
            tokenizer=tokenizer,
        )

    def forward(self, batch: Batch) -> Losses:
        """Negatives are all other pairs of the global batch, of every rank, with gradient."""
        image_NE = gather(self.encode_image(batch.image_BCHW))
        text_NE = gather(self.encode_text(batch.ids_BT, batch.mask_BT))
        return Losses.sum(
            contrastive=losses.convirt(image_NE, text_NE, self.config.temperature, self.config.image_weight)
        )
