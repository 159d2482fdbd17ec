"""Image and text encoders, each with one interface for all backbones. This package imports no other
part of medvl.

    from medvl.encoders import create_image_encoder, create_text_encoder

    image_encoder = create_image_encoder("resnet50")
    features = image_encoder(image_BCHW)      # ImageFeatures: pooled_BD, patches_BPD, grid
    text_encoder = create_text_encoder("bioclinicalbert")
    features = text_encoder(ids_BT, mask_BT)  # TextFeatures: pooled_BD, tokens_BTD, mask_BT

timm, torchvision, open_clip, transformers and peft are imported by the encoders that need them.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.encoders.base import (
        add_lora as add_lora,
        checkpoint_activations as checkpoint_activations,
        freeze_batch_norm_statistics as freeze_batch_norm_statistics,
        freeze_layers as freeze_layers,
        merge_lora as merge_lora,
        parameter_groups as parameter_groups,
    )
    from medvl.encoders.image.encoder import ImageEncoder as ImageEncoder
    from medvl.encoders.image.factory import (
        create_image_encoder as create_image_encoder,
        list_image_encoders as list_image_encoders,
    )
    from medvl.encoders.image.pixelhop import pixelhop_arguments as pixelhop_arguments
    from medvl.encoders.pretrained import read_tensors as read_tensors
    from medvl.encoders.regions import RegionEncoder as RegionEncoder
    from medvl.encoders.text.encoder import TextEncoder as TextEncoder
    from medvl.encoders.text.factory import (
        create_text_encoder as create_text_encoder,
        list_text_encoders as list_text_encoders,
    )
    from medvl.encoders.volume.encoder import (
        VolumeEncoder as VolumeEncoder,
        create_volume_encoder as create_volume_encoder,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
