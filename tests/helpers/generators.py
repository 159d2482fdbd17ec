"""Image generators at sizes that train in milliseconds."""

from typing import Any

import torch

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.models import (
    AutoencoderConfig,
    AutoencoderSizes,
    LatentDiffusion,
    LatentDiffusionConfig,
    UNetSizes,
)
from medvl.schema import Batch

TEXTS = [
    "Image 1 is bright.",
    "Image 2 is dark.",
    "Image 3 is bright.",
    "Image 4 is very dark and it is the last.",
]
SIZES = AutoencoderSizes(
    image_channels=1, channels=(8, 8, 16), layers=1, latent_channels=4, groups=4, attention=False
)
AUTOENCODER = AutoencoderConfig(image_size=32, fit="squash", sizes=SIZES)
DIFFUSION = LatentDiffusionConfig(
    image_size=32,
    fit="squash",
    autoencoder=SIZES,
    unet=UNetSizes(
        channels=(16, 16), cross_attention=(True, False), layers=1, heads=2, text_width=24, groups=4
    ),
    latent_scale=1.0,
    text_encoder="tiny_bert",
    text_arguments={
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    max_tokens=16,
    target="v",
)


def tiny_words() -> Tokenizer:
    return train_wordpiece(TEXTS * 4, vocab_size=80, max_tokens=16)


def tiny_generator(
    tokenizer: Tokenizer | None, config: Any = DIFFUSION, **settings: Any
) -> LatentDiffusion:
    torch.manual_seed(0)
    model = medvl.create_model(config, tokenizer=tokenizer, **settings)
    assert isinstance(model, LatentDiffusion)
    return model


def tiny_batch(tokenizer: Tokenizer, **fields: Any) -> Batch:
    """Return four grey images with their texts."""
    ids_BT, mask_BT = tokenizer(TEXTS)
    image_BCHW = torch.randint(
        0, 256, (4, 1, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return Batch(
        keys=list("abcd"),
        image_BCHW=image_BCHW,
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.empty(4, 0),
        texts=TEXTS,
        **fields,
    )
