"""Volume encoder: one vector per study and one per patch of its volume.

encoder = create_volume_encoder("vit", size=(112, 336, 336), patch_size=(8, 24, 24))
features = encoder(image_BCDHW)  # of int16 Hounsfield units
features.patches_BPD             # in row-major order over features.grid, (14, 14, 14)

Its smallest network, torchvision's R3D-18 on one channel, is in this file.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.config_io import check_choice
from medvl.encoders.base import Encoder, group_by_depth
from medvl.encoders.pretrained import (
    KeyMap,
    Pretrained,
    fitting_keys,
    load_strictly,
    read_source,
    with_set,
)
from medvl.encoders.volume.ctvit import CTViT
from medvl.encoders.volume.hierarchical_vit import HierarchicalViT
from medvl.encoders.volume.network import (
    NetworkAdapter,
    Sides,
    VolumeNetwork,
    check_argument,
    grid_of,
    three_sides,
)
from medvl.encoders.volume.primus import Primus
from medvl.errors import ConfigError, WeightsError
from medvl.schema import ImageFeatures

_STEM = "stem.0.weight"
_STAGES = ("layer1", "layer2", "layer3", "layer4")


class ResNet3D(VolumeNetwork):
    """Residual network with convolutions over (z, y, x); the vector of a volume is the mean of its
    patches.

    Its parameters have torchvision's names. The filters of the first layer are those for RGB summed
    over colours, so that a grey volume has the response of three equal channels.
    """

    patch_size: Sides = (8, 16, 16)
    width = 512

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.video import r3d_18

        video: Any = r3d_18()
        first = video.stem[0]
        video.stem[0] = nn.Conv3d(
            1,
            first.out_channels,
            first.kernel_size,
            first.stride,
            first.padding,
            bias=False,
        )
        with torch.no_grad():
            video.stem[0].weight.copy_(first.weight.sum(dim=1, keepdim=True))
        self.stem = video.stem
        for stage in _STAGES:
            setattr(self, stage, getattr(video, stage))

    def forward(self, image_BNDHW: Tensor) -> Tensor:
        features_BDdhw = self.stem(image_BNDHW)
        for stage in _STAGES:
            features_BDdhw = getattr(self, stage)(features_BDdhw)
        patches_BPD = features_BDdhw.flatten(2).transpose(1, 2)
        return torch.cat([patches_BPD.mean(dim=1, keepdim=True), patches_BPD], dim=1)

    def parameter_layers(self) -> list[list[str]]:
        return group_by_depth(
            [name for name, _ in self.named_parameters()],
            [f"{stage}." for stage in _STAGES],
            stem=("stem.",),
        )

    def fit_weights(
        self, tensors: Mapping[str, Tensor], source: str, *, rescale: bool
    ) -> dict[str, Tensor]:
        keys = KeyMap(layouts=((("", ""),),), ignored_keys=("fc.",))
        names = self.state_dict()
        tensors = fitting_keys(tensors, lambda candidate: keys.count_fitting(candidate, names))
        mapped = keys.apply(tensors)[0]
        first = mapped.get(_STEM)
        if first is None or first.ndim != 5:
            raise WeightsError(
                f"{source} is no ResNet for volumes: expected {_STEM} (64, 3 or 1, 3, 7, 7)",
                "mismatch",
            )
        return mapped | {_STEM: first.sum(dim=1, keepdim=True)}


_NETWORKS: Mapping[str, type[VolumeNetwork]] = {
    "ctvit": CTViT,
    "primus": Primus,
    "resnet18_3d": ResNet3D,
    "vit": HierarchicalViT,
}


class VolumeEncoder(Encoder):
    """A network for volumes with the interface of medvl; create it with `create_volume_encoder`.

    Attributes:
        size: voxels along (z, y, x).
        patch_size: voxels of a patch along (z, y, x).
        grid: patches along (z, y, x) of a volume of `size`.
        window: values that become 0 and 1.
        max_scans: most scans of a study.
        maps: layers whose patches are returned, one after another.
        feature_dim, patch_dim: widths of `pooled_BD` and `patches_BPD`.
        config: arguments that create the same encoder with random weights, JSON values only.
    """

    def __init__(self, name: str, net: VolumeNetwork, config: dict[str, Any]) -> None:
        super().__init__(name, net, NetworkAdapter())
        self.config = config
        self.size: Sides = tuple(config["size"])
        self.patch_size: Sides = net.patch_size
        self.grid = grid_of(self.size, self.patch_size)
        self.window: tuple[float, float] = tuple(config["window"])
        self.feature_dim: int = net.width
        self.patch_dim: int = net.width
        self.max_scans = net.max_scans
        self.maps = net.maps

    def forward(self, image_BCDHW: Tensor) -> ImageFeatures:
        """Encode a batch of volumes.

        Args:
            image_BCDHW: (B, 1, D, H, W), or (B, N, D, H, W) for N scans of a study: Hounsfield
                units in int16 or floats, which are clipped to the window. The sides are multiples
                of `patch_size`; positions are interpolated to another size than `size`.

        Returns:
            Patches in the order of layers, scans, z, y, x; `grid` counts those of all layers and
            scans along z.

        Raises:
            ConfigError: "mismatch" for another shape or too many scans; "wrong_type".
        """
        if image_BCDHW.ndim != 5:
            raise ConfigError(
                f"expected volumes (B, C, D, H, W), got {tuple(image_BCDHW.shape)}", "mismatch"
            )
        sides = image_BCDHW.shape[2:]
        grid = grid_of((sides[0], sides[1], sides[2]), self.patch_size)
        scans = image_BCDHW.shape[1]
        if scans > self.max_scans:
            raise ConfigError(
                f'expected 1 to {self.max_scans} scans, got {scans}; create an encoder "vit" '
                "with a larger max_scans",
                "mismatch",
                field="max_scans",
            )
        tokens_BTD = self.backbone(self._normalize(image_BCDHW))
        return ImageFeatures(
            tokens_BTD[:, 0],
            tokens_BTD[:, 1:],
            (self.maps * scans * grid[0], grid[1], grid[2]),
        )

    def _normalize(self, image_BCDHW: Tensor) -> Tensor:
        if image_BCDHW.dtype != torch.int16 and not image_BCDHW.is_floating_point():
            raise ConfigError(
                f"expected Hounsfield units in int16 or floats, got {image_BCDHW.dtype}",
                "wrong_type",
            )
        low, high = self.window
        share = ((image_BCDHW.float() - low) / (high - low)).clamp(0, 1)
        return (share - self.config["mean"]) / self.config["std"]


def create_volume_encoder(
    name: str,
    *,
    size: Sequence[int],
    window: tuple[float, float] = (-1150.0, 350.0),
    mean: float = 0.449,
    std: float = 0.226,
    pretrained: Pretrained = False,
    weights: str | None = None,
    rescale: bool = False,
    **arguments: Any,
) -> VolumeEncoder:
    """Create a volume encoder. Defaults are those of HLIP for chest CT.

    Args:
        name: "vit", the hierarchical vision Transformer of HLIP; "ctvit", that of CT-CLIP;
            "primus", that of COLIPRI; "resnet18_3d", torchvision's R3D-18, with patches of
            8 x 16 x 16 voxels.
        size: voxels along (z, y, x).
        window: Hounsfield units that become 0 and 1; values beyond are clipped.
        mean, std: statistics of values in 0..1.
        pretrained: file, folder or address of weights (`medvl.encoders.pretrained`). For "vit": of
            this encoder, of HLIP, or of a vision Transformer for RGB images in timm's layout (MAE),
            which is inflated. For "resnet18_3d": of this encoder, or torchvision's for videos.
            False: random ones, from torch's global generator.
        weights: name of a set of weights in the file, where it has several.
        rescale: keep the response of an inflated encoder to a constant image when its filters are
            enlarged; HLIP does not.
        arguments: those of the network: of "vit", `patch_size`, `embed_dim`, `depth`, `num_heads`,
            `attention`, `drop_path_rate`, `max_scans`, `dropout`, `layers` and `stem`
            (`medvl.encoders.volume.hierarchical_vit.HierarchicalViT`); of "ctvit", those of
            `medvl.encoders.volume.ctvit.CTViT`; of "primus", those of
            `medvl.encoders.volume.primus.Primus`.

    Raises:
        ConfigError: "unknown_name", "missing", "out_of_range" or "mismatch" for an argument.
        WeightsError: the weights are not available, or do not fit ("mismatch").
    """
    check_choice(name, _NETWORKS, "name")
    sides = three_sides(size, "size")
    low, high = window
    check_argument(low < high, "window", "a lower end below the upper", window)
    check_argument(std > 0, "std", "a value above 0", std)
    make: Any = _NETWORKS[name]
    net: VolumeNetwork = make(*_sized(make, sides), **_network_arguments(name, make, arguments))
    config = {
        "name": name,
        "size": list(sides),
        "window": [float(low), float(high)],
        "mean": mean,
        "std": std,
        **net.settings,
    }
    encoder = VolumeEncoder(name, net, config)
    if pretrained is not False:
        source, tensors = read_source(name, with_set(pretrained, weights), None)
        mapped = net.fit_weights(tensors, source, rescale=rescale)
        load_strictly(net, mapped, KeyMap(layouts=((("", ""),),)), source)
    return encoder


def _sized(make: Any, sides: Sides) -> tuple[Sides, ...]:
    """Return the positional argument of networks whose parameters depend on the size."""
    return (sides,) if "size" in inspect.signature(make).parameters else ()


def _network_arguments(name: str, make: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments of a network. Raises ConfigError for others than it has, and for missing
    ones.
    """
    known = {
        field: parameter
        for field, parameter in inspect.signature(make).parameters.items()
        if field != "size"
    }
    for field in arguments:
        if field not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(
                f"{name} has no argument {field}: {have}", "unknown_name", field=field
            )
    for field, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and field not in arguments:
            raise ConfigError(f"{name} needs {field}", "missing", field=field)
    return arguments
