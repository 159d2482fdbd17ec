"""Base of networks for volumes, and checks of their arguments."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from medvl.encoders.pretrained import KeyMap, fitting_keys
from medvl.errors import ConfigError

Sides = tuple[int, int, int]
Stem = Literal["patches", "convolutions"]
"""Input of a Transformer: a linear map of the voxels of each patch, as published, or
`ConvolutionStem`.
"""


class VolumeNetwork(nn.Module, abc.ABC):
    """Network that maps volumes to tokens.

    Attributes:
        patch_size: voxels along (z, y, x) from one patch to the next.
        width: D, dimension of tokens.
        max_scans: most scans of a study.
        maps: layers whose patches are returned.
        settings: arguments that create the same network, beside the size; JSON values only.
    """

    patch_size: Sides
    width: int
    max_scans: int = 1
    maps: int = 1
    settings: Mapping[str, Any] = {}

    @abc.abstractmethod
    def forward(self, image_BNDHW: Tensor) -> Tensor:
        """Return (B, 1 + P, D): the vector of each study, then its patches in the order of layers,
        n, d, h, w.
        """

    @abc.abstractmethod
    def parameter_layers(self) -> list[list[str]]:
        """Return the names of the parameters by depth, the stem first."""

    def fit_weights(
        self, tensors: Mapping[str, Tensor], source: str, *, rescale: bool
    ) -> dict[str, Tensor]:
        """Return tensors of a file by the names of this network, resized where they come from
        another one; `rescale` as in `create_volume_encoder`.

        Raises WeightsError naming `source` for a file of another network.
        """
        keys = KeyMap(layouts=((("", ""),),))
        names = self.state_dict()
        return fitting_keys(tensors, lambda candidate: keys.count_fitting(candidate, names))


class NetworkAdapter:
    """Access of `VolumeEncoder` to its network."""

    def layers(self, net: Any) -> list[list[str]]:
        """Return the names of the parameters by depth."""
        layers: list[list[str]] = net.parameter_layers()
        return layers


def three_sides(values: Sequence[int], field: str) -> Sides:
    """Return three numbers above 0. Raises ConfigError for others."""
    sides = tuple(int(value) for value in values)
    check_argument(
        len(sides) == 3 and min(sides) > 0, field, "three numbers (z, y, x) above 0", values
    )
    return sides[0], sides[1], sides[2]


def grid_of(size: Sides, patch: Sides) -> Sides:
    """Return the patches along each axis. Raises ConfigError where a side is no multiple."""
    if any(side % step or side < step for side, step in zip(size, patch, strict=True)):
        raise ConfigError(
            f"expected sides that are multiples of the patch {patch}, got {size}; crop or pad",
            "mismatch",
            field="size",
        )
    return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]


def patch_voxels(image_MDHW: Tensor, patch: Sides) -> Tensor:
    """Return (M, d, h, w, voxels): the voxels of each patch in the order z, y, x."""
    depth, height, width = patch
    cells = image_MDHW.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    cells = cells.unflatten(1, (-1, depth)).permute(0, 1, 3, 5, 2, 4, 6)
    return cells.flatten(4)


def check_width(width: int, heads: int) -> None:
    """Raise ConfigError for a width that positions or heads do not divide."""
    check_argument(heads > 0, "num_heads", "1 or more", heads)
    fits = width >= 6 and width % 2 == 0 and width % heads == 0
    check_argument(
        fits, "embed_dim", f"even, 6 or more, and a multiple of num_heads ({heads})", width
    )


def check_argument(is_right: bool, field: str, expected: str, value: object) -> None:
    """Raise ConfigError ("out_of_range") unless an argument is right."""
    if not is_right:
        raise ConfigError(
            f"expected {field} as {expected}, got {value}", "out_of_range", field=field
        )


class ConvolutionStem(nn.Module):
    """Convolutions of 3 x 3 x 3 with batch norm and ReLU, then a linear map, in place of a linear
    map of patches (Xiao et al., arXiv 2106.14881).

    Convolutions halve the axes until the output has one token for each patch, those with small
    patches last. Channels double up to `width`. In training, statistics are those of one rank.

    Args:
        patch: voxels of a patch along (z, y, x), powers of two.
        width: channels of the output.

    Raises ConfigError ("out_of_range") for another patch.
    """

    def __init__(self, patch: Sides, width: int) -> None:
        check_argument(
            all(side & (side - 1) == 0 for side in patch) and max(patch) > 1,
            "patch_size",
            'powers of two for stem "convolutions"',
            patch,
        )
        count = max(patch).bit_length() - 1
        layers: list[nn.Module] = []
        before = 1
        for stage in range(count, 0, -1):  # axes with small patches are halved last
            after = max(8, width >> (stage - 1))
            z, y, x = (2 if side >> stage - 1 > 1 else 1 for side in patch)
            layers += [
                nn.Conv3d(before, after, 3, (z, y, x), 1, bias=False),
                nn.BatchNorm3d(after),
                nn.ReLU(inplace=True),
            ]
            before = after
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.Conv3d(before, width, 1))

    def forward(self, image_MDHW: Tensor) -> Tensor:
        """Return (M, d, h, w, width)."""
        tokens_MXdhw: Tensor = self.layers(image_MDHW[:, None])
        return tokens_MXdhw.movedim(1, 4)
