"""What stands where a vision Transformer embeds its patches. Nothing heavy is imported before one is built."""

from typing import Any


def residual_stem(*, img_size: Any, patch_size: int, in_chans: int, embed_dim: int, **options: Any) -> Any:
    """timm's `HybridEmbed` over three stages of `resnet_tiny`: a token for every 16 x 16 pixels.

    Convolutions below a Transformer learn from far fewer images than patches of raw pixels do (Dosovitskiy et al.,
    arXiv 2010.11929, the hybrids of figure 5; Xiao et al., arXiv 2106.14881). A token then knows its neighbourhood:
    what a masked autoencoder hides is hidden from the Transformer, not from the convolutions of visible patches.

    `patch_size` counts cells of the last stage. timm calls this as it calls its own embeddings.
    """
    from timm.layers import BatchNormAct2d, HybridEmbed, create_conv2d
    from timm.models.resnetv2 import ResNetV2

    backbone = ResNetV2(
        layers=[1, 1, 1],
        channels=(32, 64, 128),
        stem_chs=32,
        in_chans=in_chans,
        num_classes=0,
        global_pool="",
        basic=True,
        conv_layer=create_conv2d,
        norm_layer=BatchNormAct2d,
    )
    return HybridEmbed(
        backbone, img_size=img_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, **options
    )
