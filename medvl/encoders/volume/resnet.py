"""ResNet for volumes: torchvision's R3D-18 (Tran et al., arXiv 1711.11248) on one channel."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medvl.encoders.base import group_by_depth
from medvl.encoders.pretrained import KeyMap, fitting_keys
from medvl.encoders.volume.network import Sides, VolumeNetwork
from medvl.errors import WeightsError

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
        tensors = fitting_keys(tensors, lambda found: keys.count_fitting(found, names))
        mapped = keys.apply(tensors)[0]
        first = mapped.get(_STEM)
        if first is None or first.ndim != 5:
            raise WeightsError(
                f"{source} is no ResNet for volumes: expected {_STEM} (64, 3 or 1, 3, 7, 7)",
                "mismatch",
            )
        return mapped | {_STEM: first.sum(dim=1, keepdim=True)}
