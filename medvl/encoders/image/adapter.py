"""Adapters from the vision models of timm, torchvision and open_clip to `ImageEncoder`.

An adapter turns the output of one kind of model into `VisionOutput`: one vector per image as the
library pools it, and local vectors in row-major order over their grid. Adapters hold no tensors:
the library's module keeps its parameter names, so that published files fit it.

Shape letters are those of `medvl.schema`; N is the number of tokens before the patches (class
token, registers).
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders.presets import IMAGENET_MEAN, IMAGENET_STD
from medvl.errors import ConfigError

Size = tuple[int, int]


class VisionOutput(NamedTuple):
    """Output of an adapter."""

    pooled_BD: Tensor
    """The library's own pooling."""
    prefix_BND: Tensor | None
    """Class token first; None if the model has none or does not return it."""
    patches_BPD: Tensor
    grid: Size | None
    """None if only some patches were kept."""


class PatchSelection(nn.Module):
    """Module that keeps or replaces patches, in place of a vision Transformer's patch dropout.

    It runs between the position embeddings and the first block. Its attributes are set for one
    forward pass only; it has no state.

    Attributes:
        keep_BK: the patches to keep; None keeps all.
        replace_BKD: vectors that replace the patches of one image, whose prefix they all get; None:
            keep them.
        recorded: a list that gets the embedded patches of each forward pass (B, P, D), before they
            are dropped.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.keep_BK: Tensor | None = None
        self.replace_BKD: Tensor | None = None
        self.recorded: list[Tensor] | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the tokens behind the prefix do not form a complete grid of patches."""
        return self.keep_BK is not None or self.replace_BKD is not None

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Map (B, N + P, D) to (B, N + K, D)."""
        prefix_BND = tokens_BTD[:, : self.prefix]
        patches_BPD = tokens_BTD[:, self.prefix :]
        if self.recorded is not None:
            self.recorded.append(patches_BPD)
        if self.replace_BKD is not None:
            prefix_BND = prefix_BND.expand(len(self.replace_BKD), -1, -1)
            return torch.cat([prefix_BND, self.replace_BKD.to(prefix_BND.dtype)], dim=1)
        if self.keep_BK is None:
            return tokens_BTD
        index_BKD = self.keep_BK[:, :, None].expand(-1, -1, patches_BPD.shape[2])
        return torch.cat([prefix_BND, patches_BPD.gather(1, index_BKD)], dim=1)


class VisionAdapter(abc.ABC):
    """Adapter for one kind of model of one library."""

    fixed_size: bool = False
    """Whether the model accepts only the size that it was built or resized for."""
    patch_size: Size = (1, 1)
    """Height and width of images must be multiples of these, unless the size is fixed."""
    keep: str | None = None
    """Name of the model's `PatchSelection` submodule; None if the model needs all patches."""
    has_attention: bool = False
    """Whether the model has a class token whose attention `record_attention` records."""

    @abc.abstractmethod
    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode normalised pixels; `level` counts the stages from the end, -1 being the last.

        Raises:
            ConfigError: "out_of_range" if the model has no such level.
        """

    @abc.abstractmethod
    def layers(self, net: Any) -> list[list[str]]:
        """Return the names of all parameters by depth, stem or embeddings first."""

    def record_attention(self, net: Any) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Return a context whose list gets, from each forward pass, the class token's attention to
        the patches, (B, P).

        Raises:
            ConfigError: "unsupported" unless `has_attention`.
        """
        message = (
            f"{type(net).__name__} has no attention of a class token: use a vision "
            f"Transformer of timm"
        )
        raise ConfigError(message, "unsupported", field="output_attention")

    def embed(self, net: Any, image_BCHW: Tensor) -> Tensor:
        """Return the input of the first block, (B, N + P, D).

        Raises:
            ConfigError: "unsupported" unless the model is a vision Transformer of timm.
        """
        raise _no_blocks(net)

    def encode_tokens(
        self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the states before each block and after the final norm; `attend_BQT` is True where
        a query may attend.

        Raises:
            ConfigError: as `embed`.
        """
        raise _no_blocks(net)

    def take_grey(self, net: Any) -> None:
        """Make the first convolution take one channel, by summing its weights over RGB.

        Raises:
            ConfigError: "unsupported" without such a convolution.
        """
        for module in net.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels == 3 and module.groups == 1:
                module.weight = nn.Parameter(module.weight.detach().sum(dim=1, keepdim=True))
                module.in_channels = 1
                return
        raise ConfigError(
            f"{type(net).__name__} needs 3 channels: it has no RGB stem",
            "unsupported",
            field="in_channels",
        )

    def resize(self, net: Any, size: Size) -> None:
        """Change a model's input size in place, interpolating its position embeddings.

        Raises:
            ConfigError: "unsupported" if this kind of model cannot be resized.
        """
        raise ConfigError(
            f"{type(net).__name__} cannot be resized", "unsupported", field="image_size"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VisionBackbone:
    """A library's model with the metadata that `ImageEncoder` needs."""

    net: nn.Module
    adapter: VisionAdapter
    image_size: Size
    ignored_heads: Sequence[str] = ()
    """Prefixes of classifier keys in published files, which the model does not have."""
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    block_prefix: str | None = None
    """Prefix of the names of numbered blocks, for models that may be built with fewer blocks
    than published.
    """
    note: str = ""
    """Hint for the error if `pretrained=True` and no weights are pinned."""
    rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    """Function from the tensors of a published file to those by the model's names; None: the names
    are the same.
    """
    url: str | None = None
    """URL of the library's default weights, whose file name contains the hash of its content."""


def flatten_map(map_BDHW: Tensor) -> tuple[Tensor, Size]:
    """Return a feature map (B, D, H, W) as (B, H * W, D) in row-major order, and (H, W)."""
    height, width = map_BDHW.shape[2:]
    return map_BDHW.flatten(2).transpose(1, 2), (height, width)


def check_level(level: int, levels: int, name: str) -> None:
    """Raise ConfigError ("out_of_range") unless -levels <= level <= -1."""
    if not -levels <= level <= -1:
        allowed = (
            "-1, because it has one grid of patches" if levels == 1 else f"between {-levels} and -1"
        )
        raise ConfigError(
            f"patch_level of {name} must be {allowed}; got {level}",
            "out_of_range",
            field="patch_level",
        )


def _no_blocks(net: Any) -> ConfigError:
    message = f"{type(net).__name__} does not encode other tokens; use a vision Transformer of timm"
    return ConfigError(message, "unsupported", field="image_encoder")


# Max pooling of a backbone on the CPU in torch's faster memory format.
#
# Letters: those of `medvl.schema`; H' and W' are the size of the pooled map.


class InferenceMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` whose inference on the CPU runs in channels-last format: equal values, about
    three times as fast.

    torch's kernel for contiguous maps is not vectorised
    (`aten/src/ATen/native/cpu/MaxPoolKernel.cpp`). With gradients, on other devices, and where the
    model is exported or compiled, this is `nn.MaxPool2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C, H', W'), contiguous where the input is."""
        is_plain = input.device.type == "cpu" and input.ndim == 4 and input.is_contiguous()
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
        if torch.is_grad_enabled() or self.return_indices or traced or not is_plain:
            pooled: Tensor = super().forward(input)
            return pooled
        by_pixel: Tensor = super().forward(input.contiguous(memory_format=torch.channels_last))
        return by_pixel.contiguous()


def speed_up_max_pooling(net: nn.Module) -> None:
    """Replace the max pooling layers of a backbone by `InferenceMaxPool2d`, in place."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if type(child) is nn.MaxPool2d:
                setattr(module, name, _like(child))


def _like(pool: nn.MaxPool2d) -> InferenceMaxPool2d:
    sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation
    return InferenceMaxPool2d(*sizes, return_indices=pool.return_indices, ceil_mode=pool.ceil_mode)


# Patch embedding as a matrix product on a GPU: of vision Transformers, Swin and ConvNeXt.
#
# Letters: those of `medvl.schema`; H' and W' are the patches of a column and of a row, K the
# numbers of a patch.

_COLOURS = 3


class PatchConv2d(nn.Conv2d):
    """`nn.Conv2d` with a stride of its kernel: on a GPU, the product of patches and weight, equal
    up to rounding.

    cuDNN's convolution of three channels takes 10 % of a compiled step of ViT-B/32 on an H200.
    Elsewhere this is `nn.Conv2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) to (B, D, H', W')."""
        embedded: Tensor = self.multiply(input) if input.is_cuda else super().forward(input)
        return embedded

    def multiply(self, image_BCHW: Tensor) -> Tensor:
        """Return the product of the patches and the weight, (B, D, H', W')."""
        height, width = self.kernel_size
        rows = image_BCHW.shape[2] // height
        columns = image_BCHW.shape[3] // width
        whole_BCHW = image_BCHW[:, :, : rows * height, : columns * width]
        patches = whole_BCHW.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches_BPK = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        embedded_BPD = F.linear(patches_BPK, self.weight.flatten(1), self.bias)
        return embedded_BPD.transpose(1, 2).unflatten(2, (rows, columns))


def speed_up_patch_embedding(net: nn.Module) -> None:
    """Make the patch embeddings of a backbone `PatchConv2d`, in place; parameters and their
    names stay.
    """
    for module in net.modules():
        if type(module) is nn.Conv2d and _embeds_patches(module):
            module.__class__ = PatchConv2d


def _embeds_patches(conv: nn.Conv2d) -> bool:
    """Return whether a convolution takes an image's separate patches."""
    separate = (
        conv.stride == conv.kernel_size
        and conv.dilation == (1, 1)
        and conv.padding in ((0, 0), "valid")
    )
    return (
        separate and conv.in_channels <= _COLOURS and conv.groups == 1 and min(conv.kernel_size) > 1
    )
