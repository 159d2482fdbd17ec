"""Patch embedding as a matrix product on a GPU: of vision Transformers, Swin and ConvNeXt.

Letters: those of `medvl.schema`; H' and W' are the patches of a column and of a row, K the numbers of a patch.
"""

import torch.nn.functional as F
from torch import Tensor, nn

_COLOURS = 3


class PatchConv2d(nn.Conv2d):
    """`nn.Conv2d` with a stride of its kernel: on a GPU, the product of patches and weight, equal up to rounding.

    cuDNN's convolution of three channels takes 10 % of a compiled step of ViT-B/32 on an H200. Elsewhere this is
    `nn.Conv2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) to (B, D, H', W')."""
        embedded: Tensor = self.multiply(input) if input.is_cuda else super().forward(input)
        return embedded

    def multiply(self, image_BCHW: Tensor) -> Tensor:
        """Return the product of the patches and the weight, (B, D, H', W')."""
        height, width = self.kernel_size
        rows, columns = image_BCHW.shape[2] // height, image_BCHW.shape[3] // width
        whole_BCHW = image_BCHW[:, :, : rows * height, : columns * width]
        patches = whole_BCHW.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches_BPK = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        embedded_BPD = F.linear(patches_BPK, self.weight.flatten(1), self.bias)
        return embedded_BPD.transpose(1, 2).unflatten(2, (rows, columns))


def speed_up_patch_embedding(net: nn.Module) -> None:
    """Make the patch embeddings of a backbone `PatchConv2d`, in place; parameters and their names stay."""
    for module in net.modules():
        if type(module) is nn.Conv2d and _embeds_patches(module):
            module.__class__ = PatchConv2d


def _embeds_patches(conv: nn.Conv2d) -> bool:
    """Return whether a convolution takes an image's separate patches."""
    separate = conv.stride == conv.kernel_size and conv.dilation == (1, 1) and conv.padding in ((0, 0), "valid")
    return separate and conv.in_channels <= _COLOURS and conv.groups == 1 and min(conv.kernel_size) > 1
