"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv 2010.00747, MLHC 2022)."""

from typing import Self

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder, create_text_encoder, freeze_layers
from medvl.models.dual_encoders.base import ContrastiveEncoder, Pairs, gather_global, groups_of, projection_head
from medvl.models.dual_encoders.configs import ConVIRTConfig, attention_arguments
from medvl.schema import Batch, Embeddings, Losses


class ConVIRT(ContrastiveEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2 to 4)."""

    name = ConVIRTConfig.system
    Config = ConVIRTConfig

    @classmethod
    def build(cls, config: ConVIRTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder = create_image_encoder(config.image_encoder, pretrained=pretrained, image_size=config.image_size)
        text_encoder = create_text_encoder(
            config.text_encoder,
            pretrained=pretrained,
            vocab_size=config.vocab_size,
            pool=config.text_pool,
            **attention_arguments(config.attention_dropout),
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

    def encode_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        texts = Embeddings(self.encode_text(batch.ids_BT, batch.mask_BT))  # first: packed texts wait for the device
        images = Embeddings(self.encode_image(batch.image_BCHW))
        return Pairs(images, texts, groups_of(batch, self.config.positives))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        image_NE, text_NE, groups = gather_global(pairs)
        config = self.config
        return Losses.sum(
            contrastive=losses.convirt(image_NE, text_NE, config.temperature, config.image_weight, groups=groups)
        )
