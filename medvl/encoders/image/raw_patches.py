"""The pixels of square patches as local features, without parameters.

`patches:32` is the image source of ViLT (Kim et al., arXiv 2102.03334): the projection that follows it in a
fusion-encoder is ViLT's patch embedding, a convolution with the patch's side as kernel and stride.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from medvl.encoders.image.adapter import PatchSelection, VisionAdapter, VisionBackbone, VisionOutput, check_level
from medvl.errors import ConfigError

_STATISTICS = (0.5, 0.5, 0.5)
"""Mean and standard deviation of ViLT: pixels from -1 to 1."""


class RawPatches(nn.Module):
    """Cut images into patches; the numbers of a patch are in the order channel, row, column.

    A linear layer on them equals a convolution whose weight is `linear.weight.view(D, C, side, side)`.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.patch_drop = PatchSelection(prefix=0)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, C * side * side). Raises ConfigError ("mismatch") unless whole patches cover the image."""
        height, width = image_BCHW.shape[2:]
        if height % self.side or width % self.side:
            message = f"image_size must be a multiple of {self.side}, the side of a patch; got {(height, width)}"
            raise ConfigError(message, "mismatch", field="image_size")
        cells = image_BCHW.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side))
        kept: Tensor = self.patch_drop(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        return kept


class RawPatchesAdapter(VisionAdapter):
    """Adapter whose pooled vector is the mean patch."""

    keep = "patch_drop"

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """See the base class; there is one level."""
        check_level(level, 1, "patches")
        patches_BPD = net(image_BCHW)
        grid = (image_BCHW.shape[2] // net.side, image_BCHW.shape[3] // net.side)
        whole = net.patch_drop.keep_BK is None
        return VisionOutput(patches_BPD.mean(dim=1), None, patches_BPD, grid if whole else None)

    def layers(self, net: Any) -> list[list[str]]:
        """Return no layer: there are no parameters."""
        return []


def build_raw_patches(side: str, arguments: Mapping[str, Any]) -> VisionBackbone:
    """Build the source of `patches:SIDE`.

    Raises:
        ConfigError: "wrong_type" unless SIDE is a positive integer; "out_of_range" for any argument.
    """
    if not side.isdigit() or int(side) < 1:
        message = f"expected patches:SIDE with the side in pixels, as in patches:32; got 'patches:{side}'"
        raise ConfigError(message, "wrong_type", field="name")
    if arguments:
        raise ConfigError(f"patches:{side} takes no arguments, got {dict(arguments)}", "out_of_range")
    size = 224 // int(side) * int(side) or int(side)
    return VisionBackbone(
        net=RawPatches(int(side)),
        adapter=RawPatchesAdapter(),
        image_size=(size, size),
        mean=_STATISTICS,
        std=_STATISTICS,
    )
