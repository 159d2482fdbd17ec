"""M3AE: multi-modal masked autoencoders (Chen et al., arXiv 2209.07098, MICCAI 2022)."""

import dataclasses

import torch
from torch import Tensor

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder, freeze_batch_norm_statistics
from medvl.errors import ConfigError
from medvl.losses.mim import PatchMask, blank, mask_patches, patchify, standardize
from medvl.models.fusion_encoders.config import M3AEConfig
from medvl.models.fusion_encoders.corruption import Draw
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.models.fusion_encoders.layers.heads import PixelDecoder
from medvl.models.fusion_encoders.layers.inputs import ImageSource
from medvl.models.fusion_encoders.streams import DualStreamModel, Predictions
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

# P patches, K kept ones, C numbers in a patch; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class M3AEPredictions(Predictions):
    """With the pixels of the samples that have an image."""

    pixels_BPC: Tensor
    """Of all patches, each in units of its own mean and deviation."""
    true_BPC: Tensor
    """What the encoder is given: normalised, not standardised."""
    masked_BP: Tensor
    """bool: the patches that were taken out."""


@register_system("m3ae")
class M3AE(DualStreamModel):
    """Dual-stream pretraining by masked words, masked patches and image-text matching.

    The published step runs the whole model three times. This one encodes every input once: the whole image serves
    words and pairs, the whole text serves patches and pairs, the pixel decoder's branch ends where the decoder reads,
    and words are predicted at masked positions only. The losses are the same, but for negatives, which are other
    images of the batch instead of images decoded for the purpose.

    A convolutional encoder has no tokens to leave out. It is given images with the mean in the hidden patches, a patch
    being a cell of its last grid, and what it says of those cells goes no further. This is not in the paper.

    Beside that, the modality embedding learns at the fusion-encoder's rate, where its name escapes the rule of the
    released code; and what that code holds and never uses is not here: of its 391.6 million parameters, 25.3 are CLIP's
    text embeddings and 0.6 RoBERTa's pooler.
    """

    Config = M3AEConfig

    image_encoder: ImageEncoder

    def __init__(
        self,
        config: M3AEConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        if not isinstance(image_encoder, ImageEncoder):
            raise ConfigError("m3ae hides patches of images: precomputed regions have none")
        self.grid = image_encoder.grid(*image_encoder.image_size)
        self.patch = image_encoder.image_size[0] // self.grid[0]
        if image_encoder.image_size != (self.patch * self.grid[0], self.patch * self.grid[1]):
            raise ConfigError(
                f"images of {image_encoder.image_size} pixels do not divide into {config.image_encoder}'s grid of "
                f"{self.grid}: take an image_size that does"
            )
        self.mim_head = PixelDecoder(
            config.width,
            self.grid,
            self.patch**2 * image_encoder.in_channels,
            width=config.decoder_width,
            layers=config.decoder_layers,
            heads=config.decoder_heads,
        )

    def draw(self, batch: Batch) -> Draw:
        """Patches are drawn as well."""
        patches = mask_patches(
            len(batch),
            self.grid[0] * self.grid[1],
            self.config.mask_ratio,
            torch.default_generator,
            batch.image_BCHW.device,
        )
        return dataclasses.replace(super().draw(batch), patches=patches)

    def predict(self, batch: Batch, draw: Draw) -> M3AEPredictions:
        """One pass over each input."""
        image = self.image_tokens(batch.image_BCHW, batch.has_image_B)
        masked, clean = self.texts(batch, draw)
        said = self.predict_words_and_pairs(masked, clean, image, draw)
        pixels_BPC, true_BPC, masked_BP = self.predict_pixels(batch, clean, draw)
        return M3AEPredictions(
            words_NV=said.words_NV,
            matched_M2=said.matched_M2,
            pixels_BPC=pixels_BPC,
            true_BPC=true_BPC,
            masked_BP=masked_BP,
        )

    def predict_pixels(self, batch: Batch, text: Tokens, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """The three fields of `M3AEPredictions`, of all samples that have an image."""
        assert draw.patches is not None
        patches, image_BCHW = draw.patches, batch.image_BCHW
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            patches = PatchMask(*(getattr(patches, field.name)[index_K] for field in dataclasses.fields(patches)))
            text, image_BCHW = text.rows(index_K), image_BCHW[index_K]
        if len(image_BCHW) == 0:  # a vision Transformer cannot encode it: one image of which nothing is hidden instead
            blank_BPC = text.states_BND.new_zeros(1, patches.masked_BP.shape[1], self.mim_head.pixels.out_features)
            return blank_BPC, blank_BPC, patches.masked_BP.new_zeros(blank_BPC.shape[:2])
        visible = self.visible_tokens(image_BCHW, patches)
        _, stream = self.fusion.streams(text, visible, self.config.mim_layer)
        true_BPC = patchify(self.image_encoder.normalize(image_BCHW), self.patch)
        return self.mim_head(stream.states_BND, patches), true_BPC, patches.masked_BP

    def visible_tokens(self, image_BCHW: Tensor, patches: PatchMask) -> Tokens:
        """The image's token and those of the kept patches, which know nothing of the others."""
        if self.image_encoder.can_drop_patches:
            return self.image_tokens(image_BCHW, keep_BK=patches.kept_BK)
        with freeze_batch_norm_statistics(self.image_encoder):  # they are those of whole images
            blanked = blank(self.image_encoder.normalize(image_BCHW), patches.masked_BP, self.patch)
            states_BND = self.image_tokens(blanked).states_BND
        return Tokens(torch.cat([states_BND[:, :1], patches.keep(states_BND[:, 1:])], dim=1), None)

    def judge(self, said: Predictions, draw: Draw) -> Losses:
        """Three losses, of equal weight in the paper."""
        assert isinstance(said, M3AEPredictions)
        others = super().judge(said, draw)
        mim = losses.mim(said.pixels_BPC, standardize(said.true_BPC), said.masked_BP)
        return Losses(total=others.total + self.config.mim_weight * mim, terms={**others.terms, "mim": mim})
