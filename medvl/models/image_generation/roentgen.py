"""RoentGen: Stable Diffusion adapted to chest radiographs (Chambon et al., arXiv 2211.12737,
Nature BME 2024).
"""

import dataclasses

from medvl.models.image_generation.latent_diffusion import LatentDiffusion, LatentDiffusionConfig
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoentGenConfig(LatentDiffusionConfig):
    """Stable Diffusion 1.4's sizes with CLIP's text encoder trained beside the U-Net, the paper's
    best variant.

    Other variants of the paper: `train_text=False`; a domain's text encoder, frozen, with its own
    mask (`text_encoder="radbert", text_mask=True, train_text=False, max_tokens=128`); U-Net from
    random weights (`create_latent_diffusion(..., random_unet=True)`). The scale of the latents,
    0.18215, is that of the checkpoint of Stable Diffusion; with another autoencoder it is measured.
    The paper does not mention caption dropout. Without it, the unconditional branch of the guidance
    stays the photograph model's, as in the public code of RoentGen-v2; with 0.1, the default here,
    it learns radiographs.
    """

    text_encoder: str = "open_clip:ViT-L-14-quickgelu"
    text_mask: bool = False
    max_tokens: int = 77
    train_text: bool = True


@register_system("roentgen")
class RoentGen(LatentDiffusion):
    """Latent diffusion with Stable Diffusion's parts: autoencoder, U-Net, and all 77 states of
    CLIP's text encoder.

    Start from a local folder of Stable Diffusion 1.x (`medvl.export.load_stable_diffusion`); the
    weights that the authors trained are not public.
    """

    Config = RoentGenConfig
