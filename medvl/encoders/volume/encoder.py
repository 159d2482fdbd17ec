"""Volume encoder: one vector per study and one per patch of its volume.

encoder = create_volume_encoder("vit", size=(112, 336, 336), patch_size=(8, 24, 24))
features = encoder(image_BCDHW)  # of int16 Hounsfield units
features.patches_BPD             # in row-major order over features.grid, (14, 14, 14)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.encoders.base import Encoder
from medvl.encoders.pretrained import (
    KeyMap,
    Pretrained,
    fitting_keys,
    load_strictly,
    read_source,
    unused_blocks,
    with_set,
)
from medvl.encoders.volume.hierarchical_vit import (
    LEVELS,
    HierarchicalViT,
    HierarchicalViTAdapter,
    Level,
    Sides,
    inflate,
    resize_positions,
)
from medvl.errors import ConfigError, WeightsError
from medvl.schema import ImageFeatures

_AXES = "(z, y, x)"
_HEADS = (
    "head.",
    "fc_norm.",
    "mask_token",
    "decoder_",
    "visual.head.",
    "text.",
    "logit_scale",
    "logit_bias",
)
"""Key prefixes outside the encoder: classifiers, decoders of masked autoencoders, text encoders."""


class VolumeEncoder(Encoder):
    """A network for volumes with the interface of medvl; create it with `create_volume_encoder`.

    Attributes:
        size: voxels along (z, y, x).
        patch_size: voxels of a patch along (z, y, x).
        grid: patches along (z, y, x) of a volume of `size`.
        window: values that become 0 and 1.
        feature_dim, patch_dim: widths of `pooled_BD` and `patches_BPD`.
        config: arguments that create the same encoder with random weights, JSON values only.
    """

    def __init__(self, name: str, net: HierarchicalViT, config: dict[str, Any]) -> None:
        super().__init__(name, net, HierarchicalViTAdapter())
        self.config = config
        self.size: Sides = tuple(config["size"])
        self.patch_size: Sides = tuple(config["patch_size"])
        self.grid = _grid(self.size, self.patch_size)
        self.window: tuple[float, float] = tuple(config["window"])
        self.feature_dim: int = config["embed_dim"]
        self.patch_dim: int = config["embed_dim"]

    def forward(self, image_BCDHW: Tensor) -> ImageFeatures:
        """Encode a batch of volumes.

        Args:
            image_BCDHW: (B, 1, D, H, W), or (B, N, D, H, W) for N scans of a study. int16 or
                floats: Hounsfield units, which are clipped to the window; uint8: 0 is its lower
                end, 255 its upper. The sides are multiples of `patch_size`; positions are
                interpolated to another size than `size`.

        Returns:
            Patches in the order of scans, z, y, x; `grid` counts those of all scans along z.

        Raises:
            ConfigError: "mismatch" for another shape or too many scans; "wrong_type".
        """
        if image_BCDHW.ndim != 5:
            raise ConfigError(
                f"expected volumes (B, C, D, H, W), got {tuple(image_BCDHW.shape)}", "mismatch"
            )
        sides = image_BCDHW.shape[2:]
        grid = _grid((sides[0], sides[1], sides[2]), self.patch_size)
        scans = image_BCDHW.shape[1]
        if scans != 1 and scans > self.config["max_scans"]:
            raise ConfigError(
                f"expected 1 to {max(1, self.config['max_scans'])} scans, got {scans}; create the "
                "encoder with a larger max_scans",
                "mismatch",
                field="max_scans",
            )
        tokens_BTD = self.backbone(self._normalize(image_BCDHW))
        return ImageFeatures(
            tokens_BTD[:, 0], tokens_BTD[:, 1:], (scans * grid[0], grid[1], grid[2])
        )

    def _normalize(self, image_BCDHW: Tensor) -> Tensor:
        if image_BCDHW.dtype == torch.uint8:
            share = image_BCDHW.float() / 255
        elif image_BCDHW.dtype == torch.int16 or image_BCDHW.is_floating_point():
            low, high = self.window
            share = ((image_BCDHW.float() - low) / (high - low)).clamp(0, 1)
        else:
            raise ConfigError(
                f"expected int16, uint8 or floats, got {image_BCDHW.dtype}", "wrong_type"
            )
        return (share - self.config["mean"]) / self.config["std"]


def create_volume_encoder(
    name: str,
    *,
    size: Sequence[int],
    patch_size: Sequence[int],
    embed_dim: int = 768,
    depth: int = 12,
    num_heads: int = 12,
    window: tuple[float, float] = (-1150.0, 350.0),
    attention: Sequence[Level] | None = None,
    mean: float = 0.449,
    std: float = 0.226,
    drop_path_rate: float = 0.0,
    max_scans: int = 0,
    pretrained: Pretrained = False,
    weights: str | None = None,
    rescale: bool = False,
) -> VolumeEncoder:
    """Create a volume encoder. Defaults are those of HLIP for chest CT.

    Args:
        name: "vit", the hierarchical vision Transformer of HLIP.
        size: voxels along (z, y, x).
        patch_size: voxels of a patch along (z, y, x).
        embed_dim: width, even and a multiple of `num_heads`.
        depth: number of layers.
        num_heads: attention heads.
        window: Hounsfield units that become 0 and 1; values beyond are clipped.
        attention: for each layer "slice", "scan" or "study": the tokens that attend to each other.
            Default: every third layer "study", the others "slice". With one scan, "scan" and
            "study" are the same.
        mean, std: statistics of values in 0..1.
        drop_path_rate: rate of stochastic depth in the last layer.
        max_scans: rows of the table of scan positions, for studies of several scans; in training,
            each step draws which rows scans have. 0: no table. HLIP's files for CT have 1.
        pretrained: file, folder or address of weights (`medvl.encoders.pretrained`): of this
            encoder, of HLIP, or of a vision Transformer for RGB images in timm's layout (MAE),
            which is inflated. False: random ones, from torch's global generator.
        weights: name of a set of weights in the file, where it has several.
        rescale: keep the response of an inflated encoder to a constant image when its filters are
            enlarged; HLIP does not.

    Raises:
        ConfigError: "unknown_name", "out_of_range" or "mismatch" for an argument.
        WeightsError: the weights are not available, or do not fit ("mismatch").
    """
    check_choice(name, ("vit",), "name")
    sides = _three(size, "size")
    patch = _three(patch_size, "patch_size")
    levels = _levels(attention, depth)
    low, high = window
    _check(low < high, "window", "a lower end below the upper", window)
    _check(std > 0, "std", "a value above 0", std)
    _check(0 <= drop_path_rate < 1, "drop_path_rate", "a rate in [0, 1)", drop_path_rate)
    _check(max_scans >= 0, "max_scans", "0 or more", max_scans)
    _check(num_heads > 0, "num_heads", "1 or more", num_heads)
    fits = embed_dim >= 6 and embed_dim % 2 == 0 and embed_dim % num_heads == 0
    _check(
        fits, "embed_dim", f"even, 6 or more, and a multiple of num_heads ({num_heads})", embed_dim
    )
    grid = _grid(sides, patch)
    net = HierarchicalViT(grid, patch, embed_dim, levels, num_heads, drop_path_rate, max_scans)
    config = {
        "name": name,
        "size": list(sides),
        "patch_size": list(patch),
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
        "window": [float(low), float(high)],
        "attention": list(levels),
        "mean": mean,
        "std": std,
        "drop_path_rate": drop_path_rate,
        "max_scans": max_scans,
    }
    encoder = VolumeEncoder(name, net, config)
    if pretrained is not False:
        _load(encoder, with_set(pretrained, weights), rescale=rescale)
    return encoder


def _load(encoder: VolumeEncoder, pretrained: Pretrained, *, rescale: bool) -> None:
    net: Any = encoder.backbone
    source, tensors = read_source(encoder.name, pretrained, None)
    names = net.state_dict()
    keys = KeyMap(
        layouts=(
            (("visual.trunk.", ""),),
            (("", ""),),
        ),
        ignored_keys=_HEADS,
        ignored_names=unused_blocks("blocks.", names),
    )
    expected = {**names, "pos_embed": None}
    tensors = fitting_keys(tensors, lambda found: keys.count_fitting(found, expected))
    mapped = keys.apply(tensors)[0]
    if "pos_embed" in mapped:
        lacking = [key for key in ("cls_token", "patch_embed.proj.weight") if key not in mapped]
        if lacking or mapped["patch_embed.proj.weight"].ndim != 4:
            raise WeightsError(
                f"{source} is no vision Transformer for images in timm's layout: expected a "
                "cls_token, a pos_embed and filters (D, 3, h, w)",
                "mismatch",
            )
        mapped = inflate(mapped, encoder.patch_size, encoder.grid, rescale=rescale)
    elif "spatial_posemb" in mapped and mapped["spatial_posemb"].ndim == 5:
        mapped["spatial_posemb"] = resize_positions(mapped["spatial_posemb"], encoder.grid)
    if net.sequential_posemb is not None:
        mapped.setdefault("sequential_posemb", net.sequential_posemb)
    load_strictly(net, mapped, KeyMap(layouts=((("", ""),),)), source)


def _levels(attention: Sequence[Level] | None, depth: int) -> tuple[Level, ...]:
    _check(depth > 0, "depth", "1 or more", depth)
    if attention is None:
        return tuple("study" if layer % 3 == 2 else "slice" for layer in range(depth))
    for level in attention:
        check_choice(level, LEVELS, "attention")
    if len(attention) != depth:
        raise ConfigError(
            f"expected a level of attention for each of {depth} layers, got {len(attention)}",
            "mismatch",
            field="attention",
        )
    return tuple(attention)


def _three(values: Sequence[int], field: str) -> Sides:
    sides = tuple(int(value) for value in values)
    _check(len(sides) == 3 and min(sides) > 0, field, f"three numbers {_AXES} above 0", values)
    return sides[0], sides[1], sides[2]


def _grid(size: Sides, patch: Sides) -> Sides:
    if any(side % step or side < step for side, step in zip(size, patch, strict=True)):
        raise ConfigError(
            f"expected sides that are multiples of patch_size {patch}, got {size}; crop or pad",
            "mismatch",
            field="size",
        )
    return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]


def _check(is_right: bool, field: str, expected: str, value: object) -> None:
    if not is_right:
        raise ConfigError(
            f"expected {field} as {expected}, got {value}", "out_of_range", field=field
        )
