"""Image encoder with one interface for all backbones: one vector per image and one per region.

    encoder = create_image_encoder("resnet50")
    features = encoder(image_BCHW)  # ImageFeatures: pooled_BD, patches_BPD, grid

Shape letters are those of `medvl.schema`; K is the number of patches that are kept.
"""

import bisect
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from medvl.encoders.base import Encoder
from medvl.encoders.image.adapter import Size, VisionBackbone, VisionOutput, speed_up_max_pooling
from medvl.errors import ConfigError
from medvl.schema import ImageFeatures

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in JPEG and in imaging libraries
_RANGE_FACTOR = 8
"""Floats this many times beyond the range of normalised pixels are not normalised."""
_SMALL = 128
"""Least side of images that are encoded without a check whether a CNN's strides leave something
of them.
"""
Pool = Literal["cls", "avg"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Validated arguments of `create_image_encoder`, which documents them."""

    name: str
    in_channels: int
    image_size: Size | None
    stretch: bool
    patch_level: int
    pool: Pool | None
    projection: bool
    mean: Sequence[float] | None
    std: Sequence[float] | None
    arguments: Mapping[str, Any]
    """Arguments of the library's constructor."""

    def __post_init__(self) -> None:
        if self.in_channels not in (1, 3):
            raise _out_of_range("in_channels", "1 (grey) or 3 (RGB)", self.in_channels)
        if self.patch_level >= 0:
            raise _out_of_range("patch_level", "negative (-1 is the last level)", self.patch_level)
        if self.pool not in (None, "cls", "avg"):
            raise ConfigError(
                f"pool must be 'cls', 'avg' or None, got {self.pool!r}",
                "unknown_name",
                field="pool",
            )
        if self.projection and self.pool is not None:
            raise ConfigError(
                "projection=True has its own pooling: leave pool out", "conflict", field="pool"
            )
        for field, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, 3):
                raise _out_of_range(field, "1 or 3 values", f"{len(values)}")
        if self.std is not None and min(self.std) <= 0:
            raise _out_of_range("std", "positive", tuple(self.std))


class ImageEncoder(Encoder):
    """A vision backbone with the interface of medvl; create it with `create_image_encoder`.

    `backbone` is the library's module, with the library's parameter names. Pixel statistics belong
    to the configuration and are not in the state dict.

    Attributes:
        name: as given to `create_image_encoder`.
        feature_dim, patch_dim: widths of `pooled_BD` and `patches_BPD`.
        image_size: (height, width) of the backbone's images; backbones with learnt positions accept
            no other size, unless the encoder stretches images to it.
        in_channels: 1 or 3.
        mean, std: statistics per channel of pixels in 0..1.
        config: arguments that create the same encoder with random weights, JSON values only.
    """

    def __init__(self, vision: VisionBackbone, options: ImageOptions) -> None:
        super().__init__(options.name, vision.net, vision.adapter)
        speed_up_max_pooling(vision.net)
        self._adapter = vision.adapter
        self._pool = options.pool
        self._level = options.patch_level
        self._stretch = options.stretch
        self._range_checked = False
        self.in_channels = options.in_channels
        self.image_size = options.image_size or vision.image_size
        self.mean = _per_channel(options.mean or vision.mean, self.in_channels)
        self.std = _per_channel(options.std or vision.std, self.in_channels)
        self.config = dataclasses.asdict(options) | dict(options.arguments)
        del self.config["arguments"]
        # absent as before the option, so that hashes of stored features stay valid
        if not options.stretch:
            del self.config["stretch"]
        self._sizes = json.dumps([self.config, vision.image_size], sort_keys=True, default=repr)
        self.register_buffer("_mean", torch.tensor(self.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(self.std).view(1, -1, 1, 1), persistent=False)
        self._mean: Tensor
        self._std: Tensor
        try:
            if self.image_size != vision.image_size and self._adapter.fixed_size:
                self._adapter.resize(self.backbone, self.image_size)
            has_stem = any(True for _ in self.backbone.parameters())
            # last, because resizing may run the model on an RGB image
            if self.in_channels == 1 and has_stem:
                self._adapter.take_grey(self.backbone)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise self._unfit_size(self.image_size, error) from error
        measured = self._checked_measure(self.image_size)
        self.feature_dim = measured.width
        self.patch_dim = measured.patch_width

    def forward(
        self,
        image_BCHW: Tensor,
        keep_BK: Tensor | None = None,
        *,
        normalized: bool = False,
        output_attention: bool = False,
    ) -> ImageFeatures:
        """Encode a batch of images.

        Args:
            image_BCHW: uint8 pixels, grey or RGB, which are scaled to 0..1, converted to
                `in_channels` and normalised; or floats that are normalised already, where only grey
                is expanded to three channels. The first batch of floats is refused if its values
                are those of pixels in 0..1 or 0..255.
            keep_BK: int64 indices of the patches to encode, without repetition in a row. The others
                are dropped after the position embeddings, before the first block (masked image
                modelling, patch dropout). Vision Transformers only. `patches_BPD` then has K
                patches in the order of `keep_BK`, and `grid` is None.
            normalized: the floats come from `normalize`, so their range is not checked.
            output_attention: compute `attention_BP`, the last layer's attention from the class
                token to the patches, averaged over heads, without dropout and without gradient.
                Vision Transformers of timm only.

        Raises:
            ConfigError: channels, size or dtype do not fit this encoder ("mismatch", "wrong_type"),
                floats are not normalised ("out_of_range"), or the backbone has no patches to drop,
                no class token or no attention of one ("unsupported").
        """
        prepared = self._prepare(image_BCHW, check=not normalized)
        attention_BP = None
        with self._selecting(keep_BK=keep_BK), self._usable_statistics(prepared):
            if output_attention:
                with self._adapter.record_attention(self.backbone) as recorded:
                    output = self._adapter.encode(self.backbone, prepared, self._level)
                (attention_BP,) = recorded
            else:
                output = self._adapter.encode(self.backbone, prepared, self._level)
        return self._pooled(output, attention_BP)

    def _pooled(self, output: VisionOutput, attention_BP: Tensor | None = None) -> ImageFeatures:
        pooled_BD = output.pooled_BD
        if self._pool == "avg":
            pooled_BD = output.patches_BPD.mean(dim=1)
        elif self._pool == "cls":
            if output.prefix_BND is None:
                raise ConfigError(
                    f"{self.name} has no class token: use pool 'avg'", "unsupported", field="pool"
                )
            pooled_BD = output.prefix_BND[:, 0]
        return ImageFeatures(pooled_BD, output.patches_BPD, output.grid, attention_BP)

    def embed(self, image_BCHW: Tensor) -> Tensor:
        """Return the class token and the patches (B, 1 + P, D) with their positions, the input of
        the first block.

        Single-stream models put other tokens beside them and call `encode_tokens`.

        Raises:
            ConfigError: as `forward`; "unsupported" unless this is a vision Transformer of timm.
        """
        prepared = self._prepare(image_BCHW, check=True)
        return self._adapter.embed(self.backbone, prepared)

    def encode_tokens(self, hidden_BTD: Tensor, mask_BT: Tensor | None) -> Sequence[Tensor]:
        """Return all states (B, T, D): before each block, the input first, and after the last
        block's norm.

        Args:
            hidden_BTD: output of `embed`, with or without other tokens.
            mask_BT: bool, True where a position may be attended to, at least one in each row; None:
                everywhere.

        Raises:
            ConfigError: "unsupported" unless this is a vision Transformer of timm.
        """
        attend_B1T = None if mask_BT is None else mask_BT[:, None]
        return self._adapter.encode_tokens(self.backbone, hidden_BTD, attend_B1T)

    def encode_patches(self, embedded_BKD: Tensor) -> ImageFeatures:
        """Encode vectors in place of an image's embedded patches, behind its class token: learned
        prompts (PTUnifier).

        `embedded_BKD` get no positions. Raises ConfigError ("unsupported") unless
        `can_drop_patches`.
        """
        # only the class token is used
        blank_1CHW = embedded_BKD.new_zeros(1, self.in_channels, *self.image_size)
        with self._selecting(replace_BKD=embedded_BKD):
            return self._pooled(self._adapter.encode(self.backbone, blank_1CHW, self._level))

    def record_patches(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Return a context whose list gets the embedded patches, with positions, of each forward
        pass, (B, P, D).

        Raises ConfigError ("unsupported") unless `can_drop_patches`.
        """
        recorded: list[Tensor] = []
        return self._selecting(recorded=recorded)

    def normalize(self, image_BCHW: Tensor) -> Tensor:
        """Return float pixels with `in_channels` channels, normalised as `forward` does it.

        For models that predict pixels (masked image modelling); images are not stretched.

        Raises:
            ConfigError: "mismatch", "wrong_type" or "out_of_range" for images that `forward`
                rejects.
        """
        return self._normalize(image_BCHW, check=True)

    def _normalize(self, image_BCHW: Tensor, check: bool) -> Tensor:
        channels = image_BCHW.shape[1] if image_BCHW.ndim == 4 else 0
        if channels not in (1, 3):
            raise ConfigError(
                f"expected images (B, 1 or 3, H, W), got {tuple(image_BCHW.shape)}", "mismatch"
            )
        if image_BCHW.is_floating_point():
            if channels == 3 and self.in_channels == 1:
                raise ConfigError(
                    f"{self.name} expects grey images: pass uint8 RGB or one channel", "mismatch"
                )
            if check and not self._range_checked and image_BCHW.numel():
                self._check_range(image_BCHW)
            return image_BCHW.expand(-1, self.in_channels, -1, -1)
        if image_BCHW.dtype != torch.uint8:
            raise ConfigError(
                f"expected uint8 pixels or normalised floats, got {image_BCHW.dtype}", "wrong_type"
            )
        image = image_BCHW.to(self._mean.dtype) / 255
        if channels == 3 and self.in_channels == 1:
            image = (image * image.new_tensor(_LUMINANCE).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
        return (image - self._mean) / self._std

    def _prepare(self, image_BCHW: Tensor, check: bool) -> Tensor:
        """Return the backbone's input: normalised, and stretched to `image_size` by an encoder
        that does so.
        """
        pixels_BCHW = self._normalize(image_BCHW, check)
        if self._stretch and tuple(pixels_BCHW.shape[2:]) != self.image_size:
            pixels_BCHW = F.interpolate(
                pixels_BCHW, self.image_size, mode="bilinear", align_corners=True
            )
        self._check_size(pixels_BCHW)
        return pixels_BCHW

    def _check_size(self, image_BCHW: Tensor) -> None:
        """Raise ConfigError ("mismatch") if the backbone does not accept images of this size."""
        size = (image_BCHW.shape[2], image_BCHW.shape[3])
        patch = self._adapter.patch_size
        if self._adapter.fixed_size:
            fits = size == self.image_size
            expected = f"of {self.image_size} pixels"
            advice = "create the encoder with this image_size"
        else:
            fits = size[0] % patch[0] == 0 and size[1] % patch[1] == 0
            expected = f"whose sides are multiples of {patch} pixels"
            advice = "create it with dynamic_img_pad=True"
        if not fits:
            message = f"{self.name} expects images {expected}, got {size}: resize them, or {advice}"
            raise ConfigError(message, "mismatch", field="image_size")
        if min(size) < min(_SMALL, *self.image_size) and not _is_traced(image_BCHW):
            self._checked_measure(size)

    def _checked_measure(self, size: Size) -> "_Measured":
        """Return the widths and the grid for an image size. Raises ConfigError for one that
        cannot be encoded.
        """
        try:
            return self._measure(size)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise self._unfit_size(size, error) from error

    def _unfit_size(self, size: Size, error: Exception) -> ConfigError:
        """Return the error for a size that the backbone cannot encode, with the least side of a
        CNN's images.
        """
        message = f"{self.name} cannot encode images of {size} pixels: {error}"
        is_cnn = not self._adapter.fixed_size and self._adapter.patch_size == (1, 1)
        if is_cnn and (least := self._least_side(min(size))) < _SMALL:
            message += f"; use an image_size of {least} or more"
        return ConfigError(message, "out_of_range", field="image_size")

    def _least_side(self, too_small: int) -> int:
        """Return the least side above `too_small` of square images that can be encoded; at least
        `_SMALL` for none.
        """

        def is_enough(side: int) -> bool:
            with contextlib.suppress(AssertionError, RuntimeError, ValueError):
                return bool(self._measure((side, side)))
            return False

        return bisect.bisect_left(range(_SMALL), True, lo=too_small + 1, key=is_enough)

    def _check_range(self, image_BCHW: Tensor) -> None:
        """Raise ConfigError if floats are pixels in 0..1 or 0..255. Only one batch: reading the
        range waits for a GPU.

        Normalised images have negative values, unless this encoder's `mean` is 0, and none far
        beyond white. Constant images are accepted, for models that are called once with a blank
        image.
        """
        if _is_traced(image_BCHW):
            return
        low, high = (float(value) for value in torch.aminmax(image_BCHW.detach()))
        black = min(-mean / std for mean, std in zip(self.mean, self.std, strict=True))
        white = max((1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        limit = _RANGE_FACTOR * max(-black, white)
        is_unit_range = 0 <= low < high <= 1 and black < 0
        if is_unit_range or max(-low, high) > limit:
            pixels = "(image * 255)" if is_unit_range else "image"
            message = (
                f"expected uint8 pixels, or floats from {black:.2f} (black) to {white:.2f} "
                f"(white), got floats "
                f"from {low:.4g} to {high:.4g}; pass pixels as {pixels}.round().to(torch.uint8)"
            )
            raise ConfigError(message, "out_of_range", field="image_BCHW")
        self._range_checked = True

    @property
    def can_drop_patches(self) -> bool:
        """Whether `forward` accepts `keep_BK`."""
        return self._adapter.keep is not None

    @property
    def has_attention(self) -> bool:
        """Whether `forward` accepts `output_attention`."""
        return self._adapter.has_attention

    def grid(self, height: int, width: int) -> Size:
        """Return the patch grid (h, w) of an image of this size."""
        return self._checked_measure((height, width)).grid

    @contextlib.contextmanager
    def _selecting(self, **attributes: Any) -> Iterator[Any]:
        """Set attributes of the `PatchSelection` within the context, which yields the last; None
        changes nothing.
        """
        if all(value is None for value in attributes.values()):
            yield
            return
        if self._adapter.keep is None:
            name = next(iter(attributes))
            raise ConfigError(
                f"{self.name} cannot drop patches: use a ViT", "unsupported", field=name
            )
        selection: Any = self.backbone.get_submodule(self._adapter.keep)
        for name, value in attributes.items():
            setattr(selection, name, value)
        try:
            yield value
        finally:
            for name in attributes:
                setattr(selection, name, None)

    @contextlib.contextmanager
    def _usable_statistics(self, image_BCHW: Tensor) -> Iterator[None]:
        """Use the running statistics of batch norms within the context for a single image that is
        very small.

        The last features of a CNN are then one value per channel, of which torch takes no
        statistics.
        """
        norms: list[nn.Module] = []
        height, width = image_BCHW.shape[2:]
        if self.training and len(image_BCHW) == 1 and self._measure((height, width)).single_values:
            norms = [
                norm for norm in self.modules() if isinstance(norm, _BatchNorm) and norm.training
            ]
        for norm in norms:
            norm.eval()
        try:
            yield
        finally:
            for norm in norms:
                norm.train()

    def _measure(self, size: Size) -> "_Measured":
        """Return the widths and the grid of the features for an image size, from a forward pass on
        the meta device.

        Encoders of one configuration share what was found.
        """
        key = self._sizes, size
        if key not in _MEASURED:
            values: list[int] = []  # of each channel of two images, in every batch norm
            hooks = [
                norm.register_forward_pre_hook(
                    lambda _, inputs: values.append(inputs[0][:, 0].numel())
                )
                for norm in self.modules()
                if isinstance(norm, _BatchNorm)
            ]
            image_BCHW = torch.empty(2, self.in_channels, *size, device="meta")
            try:
                with torch.no_grad(), _ShapesOfNorms():
                    features = torch.func.functional_call(
                        self, self.meta_state(), (image_BCHW,), tie_weights=False
                    )
            finally:
                for hook in hooks:
                    hook.remove()
            width = features.pooled_BD.shape[1]
            patches = features.patches_BPD
            _MEASURED[key] = _Measured(width, patches.shape[2], features.plane, 2 in values)
        return _MEASURED[key]


class _Measured(NamedTuple):
    width: int
    patch_width: int
    grid: Size
    single_values: bool
    """A batch norm reads one value per channel of an image."""


class _ShapesOfNorms(TorchFunctionMode):
    """Norms that return the shape alone: on the meta device, torch runs one as thirty operations
    in Python.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (F.batch_norm, F.layer_norm):
            return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))


_MEASURED: dict[tuple[str, Size], _Measured] = {}
"""Configuration of an encoder, and size of an image -> what was found for them."""


def _is_traced(image_BCHW: Tensor) -> bool:
    """Return whether a forward pass computes no values: it measures, compiles or traces the
    model.
    """
    return image_BCHW.is_meta or torch.compiler.is_compiling() or torch.jit.is_tracing()


def _out_of_range(field: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"{field} must be {expected}; got {value}", "out_of_range", field=field)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value per channel: a single value is repeated, three are averaged for grey."""
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (sum(map(float, values)) / len(values),) * channels
