"""Image encoders: pixels to one vector an image and one vector a region, for every kind of backbone alike.

    encoder = create_image_encoder("resnet50")
    features = encoder(image_BCHW)  # ImageFeatures: pooled_BD, patches_BPD, grid

Shape letters are those of `medvl.schema`; K counts the patches that are kept.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl.encoders.base import Encoder
from medvl.encoders.image.adapter import Size, Vision
from medvl.errors import ConfigError
from medvl.schema import ImageFeatures

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, what JPEG and every imaging library make grey with
Pool = Literal["cls", "avg"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """The arguments of `create_image_encoder` that decide the encoder, checked; their meaning stands there."""

    name: str
    in_channels: int
    image_size: Size | None
    patch_level: int
    pool: Pool | None
    projection: bool
    mean: Sequence[float] | None
    std: Sequence[float] | None
    arguments: Mapping[str, Any]
    """For the library's constructor."""

    def __post_init__(self) -> None:
        if self.in_channels not in (1, 3):
            raise ConfigError(f"in_channels is {self.in_channels}: images are grey (1) or RGB (3)")
        if self.patch_level >= 0:
            raise ConfigError(f"patch_level is {self.patch_level}: levels count from the end, -1 being the last")
        if self.pool not in (None, "cls", "avg"):
            raise ConfigError(f"pool is {self.pool!r}: known are 'cls', 'avg' and None, the model's own")
        if self.projection and self.pool is not None:
            raise ConfigError("projection=True gives the vector that the model itself pools: leave pool out")
        for field, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, 3):
                raise ConfigError(f"{field} has {len(values)} values: give one for grey or three for RGB")
        if self.std is not None and min(self.std) <= 0:
            raise ConfigError(f"std must be positive: {tuple(self.std)}")


class ImageEncoder(Encoder):
    """A vision backbone behind one contract; make it with `create_image_encoder`.

    The library's module is `backbone`, its parameters under the library's own names. Pixel statistics belong to the
    configuration and are not in the state dict.

    Attributes:
        name: as given to `create_image_encoder`.
        feature_dim, patch_dim: widths of `pooled_BD` and `patches_BPD`.
        image_size: (height, width) that the encoder is meant for; backbones with learnt positions take no other.
        in_channels: 1 or 3.
        mean, std: per channel, of pixels in 0..1.
        config: arguments that make the same encoder again at random weights, JSON values only.
    """

    def __init__(self, vision: Vision, options: ImageOptions) -> None:
        super().__init__(options.name, vision.net, vision.adapter)
        self._adapter = vision.adapter
        self._pool = options.pool
        self._level = options.patch_level
        self._measured: dict[Size, tuple[int, int, Size]] = {}
        self.in_channels = options.in_channels
        self.image_size = options.image_size or vision.image_size
        self.mean = _per_channel(options.mean or vision.mean, self.in_channels)
        self.std = _per_channel(options.std or vision.std, self.in_channels)
        self.config = dataclasses.asdict(options) | dict(options.arguments)
        del self.config["arguments"]
        self.register_buffer("_mean", torch.tensor(self.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(self.std).view(1, -1, 1, 1), persistent=False)
        self._mean: Tensor
        self._std: Tensor
        if self.image_size != vision.image_size and self._adapter.fixed_size:
            self._adapter.resize(self.backbone, self.image_size)
        if self.in_channels == 1:  # last: a model that is resized may try itself on an RGB image
            _grey_stem(self.backbone)
        self.feature_dim, self.patch_dim, _ = self._measure(self.image_size)

    def forward(self, image_BCHW: Tensor, keep_BK: Tensor | None = None) -> ImageFeatures:
        """Encode a batch of images.

        Args:
            image_BCHW: uint8 pixels, grey or RGB, which are scaled to 0..1, brought to `in_channels` and normalised
                here; or floats that are normalised already, of which only grey is expanded to three channels.
            keep_BK: int64 indices of the patches to encode, each row without repetition; the others are left out
                after the position embeddings, before the first block (masked image modelling, patch dropout). Vision
                Transformers only. `patches_BPD` then has K patches in the order of `keep_BK`, and `grid` is None.

        Raises:
            ConfigError: channels, size or dtype do not go with this encoder.
        """
        prepared = self.normalize(image_BCHW)
        size = (prepared.shape[2], prepared.shape[3])
        if self._adapter.fixed_size and size != self.image_size:
            raise ConfigError(
                f"{self.name} takes images of {self.image_size} pixels, not {size}: "
                "resize them, or create the encoder with image_size"
            )
        if keep_BK is None:
            parts = self._adapter.parts(self.backbone, prepared, self._level)
        else:
            slot = self._keep_slot()
            slot.keep_BK = keep_BK
            try:
                parts = self._adapter.parts(self.backbone, prepared, self._level)
            finally:
                slot.keep_BK = None
        pooled_BD = parts.pooled_BD
        if self._pool == "avg":
            pooled_BD = parts.patches_BPD.mean(dim=1)
        elif self._pool == "cls":
            if parts.prefix_BND is None:
                raise ConfigError(f"{self.name} has no class token to pool: pool='avg', or None for its own way")
            pooled_BD = parts.prefix_BND[:, 0]
        return ImageFeatures(pooled_BD=pooled_BD, patches_BPD=parts.patches_BPD, grid=parts.grid)

    def normalize(self, image_BCHW: Tensor) -> Tensor:
        """What `forward` does to its input first: float pixels of `in_channels` channels, normalised.

        For models that resize inside (GLoRIA), or whose targets are pixels (masked image modelling). Raises ConfigError
        on other shapes, channels and types than `forward` takes.
        """
        channels = image_BCHW.shape[1] if image_BCHW.ndim == 4 else 0
        if channels not in (1, 3):
            raise ConfigError(f"images must be (B, 1, H, W) or (B, 3, H, W), not {tuple(image_BCHW.shape)}")
        if image_BCHW.is_floating_point():
            if channels == 3 and self.in_channels == 1:
                raise ConfigError(f"{self.name} takes grey images: give uint8 RGB to have it reduced, or one channel")
            return image_BCHW.expand(-1, self.in_channels, -1, -1)
        if image_BCHW.dtype != torch.uint8:
            raise ConfigError(f"pixels are uint8, or floats that are normalised already, not {image_BCHW.dtype}")
        image = image_BCHW.to(self._mean.dtype) / 255
        if channels == 3 and self.in_channels == 1:
            image = (image * image.new_tensor(_LUMINANCE).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
        return (image - self._mean) / self._std

    @property
    def can_drop_patches(self) -> bool:
        """Whether `forward` takes `keep_BK`."""
        return self._adapter.keep is not None

    def grid(self, height: int, width: int) -> Size:
        """(h, w) of the patches of an image of that size."""
        return self._measure((height, width))[2]

    def _keep_slot(self) -> Any:
        if self._adapter.keep is None:
            raise ConfigError(f"{self.name} needs all patches: keep_BK is for vision Transformers")
        return self.backbone.get_submodule(self._adapter.keep)

    def _measure(self, size: Size) -> tuple[int, int, Size]:
        """Widths and grid at an image size, from a pass on the meta device: shapes only, no arithmetic, no memory."""
        if size not in self._measured:
            state = [*self.named_parameters(), *self.named_buffers()]
            meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state}
            image_BCHW = torch.empty(2, self.in_channels, *size, device="meta")
            with torch.no_grad():
                features = torch.func.functional_call(self, meta, (image_BCHW,))
            width, patches = features.pooled_BD.shape[1], features.patches_BPD
            self._measured[size] = (width, patches.shape[2], features.grid)
        return self._measured[size]


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value a channel: a single one is repeated, three are averaged for grey."""
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (sum(map(float, values)) / len(values),) * channels


def _grey_stem(net: nn.Module) -> None:
    """Replace the first convolution by one that takes a single channel: the sum of its weights over RGB."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == 3 and module.groups == 1:
            module.weight = nn.Parameter(module.weight.detach().sum(dim=1, keepdim=True))
            module.in_channels = 1
            return
    raise ConfigError(f"{type(net).__name__} has no convolution over RGB that could be made grey")
