"""Image and text encoders, each with one interface for all backbones. This package imports no other
part of medvl.

    from medvl.encoders import create_image_encoder, create_text_encoder

    image_encoder = create_image_encoder("resnet50")
    features = image_encoder(image_BCHW)      # ImageFeatures: pooled_BD, patches_BPD, grid
    text_encoder = create_text_encoder("bioclinicalbert")
    features = text_encoder(ids_BT, mask_BT)  # TextFeatures: pooled_BD, tokens_BTD, mask_BT

timm, torchvision, open_clip, transformers and peft are imported by the encoders that need them.
"""

from medvl.encoders.finetuning import (
    add_lora,
    checkpoint_activations,
    freeze_batch_norm_statistics,
    freeze_layers,
    merge_lora,
    parameter_groups,
)
from medvl.encoders.image.encoder import ImageEncoder
from medvl.encoders.image.factory import create_image_encoder, list_image_encoders
from medvl.encoders.image.pixelhop import pixelhop_arguments
from medvl.encoders.pretrained import read_tensors
from medvl.encoders.regions import RegionEncoder
from medvl.encoders.text.encoder import TextEncoder
from medvl.encoders.text.factory import create_text_encoder, list_text_encoders

__all__ = [
    "ImageEncoder",
    "RegionEncoder",
    "TextEncoder",
    "add_lora",
    "checkpoint_activations",
    "create_image_encoder",
    "create_text_encoder",
    "freeze_batch_norm_statistics",
    "freeze_layers",
    "list_image_encoders",
    "list_text_encoders",
    "merge_lora",
    "parameter_groups",
    "pixelhop_arguments",
    "read_tensors",
]
