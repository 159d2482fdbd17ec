"""How `ImageEncoder` talks to the vision models of timm, torchvision and open_clip.

Every library has its own idea of a feature map. An adapter turns the output of one kind of model into `Parts`: one
vector an image as the library pools it, and the local vectors in row-major order over their grid. Adapters hold no
tensors: the library's module stays as it is, with its own parameter names, so that published files fit it.

Shape letters are those of `medvl.schema`; N counts the tokens before the patches (class, registers).
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medvl.encoders.presets import IMAGENET_MEAN, IMAGENET_STD
from medvl.errors import ConfigError

Size = tuple[int, int]


class Parts(NamedTuple):
    """What an adapter reads off a model."""

    pooled_BD: Tensor
    """As the library pools."""
    prefix_BND: Tensor | None
    """Class token first; None where there is none or the library does not show it."""
    patches_BPD: Tensor
    grid: Size | None
    """None when only some patches were kept."""


class KeepPatches(nn.Module):
    """Stands where a vision Transformer drops patches, between the position embeddings and the first block.

    `keep_BK` is set around one forward pass only; None keeps all. Holds no tensors of the model's state.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.keep_BK: Tensor | None = None

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """(B, N + P, D) to (B, N + K, D)."""
        if self.keep_BK is None:
            return tokens_BTD
        prefix_BND, patches_BPD = tokens_BTD[:, : self.prefix], tokens_BTD[:, self.prefix :]
        index_BKD = self.keep_BK[:, :, None].expand(-1, -1, patches_BPD.shape[2])
        return torch.cat([prefix_BND, patches_BPD.gather(1, index_BKD)], dim=1)


class VisionAdapter(abc.ABC):
    """One kind of model of one library."""

    fixed_size: bool = False
    """Whether only the size that the model was built or resized for can be encoded."""
    keep: str | None = None
    """Name of the model's `KeepPatches`; None where a model needs all patches."""

    @abc.abstractmethod
    def parts(self, net: Any, image_BCHW: Tensor, level: int) -> Parts:
        """Encode normalised pixels; `level` counts the stages from the end, -1 being the last.

        Raises ConfigError when the model has no such level.
        """

    @abc.abstractmethod
    def layers(self, net: Any) -> list[list[str]]:
        """Names of all parameters by depth: the stem or the embeddings first."""

    def resize(self, net: Any, size: Size) -> None:
        """Prepare a model for another input size; what is learnt of positions is interpolated.

        Raises ConfigError when this kind of model cannot.
        """
        raise ConfigError(f"{type(net).__name__} cannot be set to another image size after it was built")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """A model as its library builds it, and what `ImageEncoder` must know of it."""

    net: nn.Module
    adapter: VisionAdapter
    image_size: Size
    heads: Sequence[str] = ()
    """Beginnings of keys in published files that this model has no place for: classifiers."""
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    blocks: str | None = None
    """Beginning of the names of numbered blocks, where a model may be built with fewer than the published one."""
    note: str = ""
    """What to say when `pretrained=True` and nothing is pinned."""
    url: str | None = None
    """The library's default weights, where the file's name carries the hash of its content."""


def unfold(map_BDHW: Tensor) -> tuple[Tensor, Size]:
    """(B, D, H, W) to (B, H * W, D) in row-major order, and (H, W)."""
    height, width = map_BDHW.shape[2:]
    return map_BDHW.flatten(2).transpose(1, 2), (height, width)


def check_level(level: int, levels: int, name: str) -> None:
    """Raises ConfigError unless -levels <= level <= -1."""
    if levels == 1 and level != -1:
        raise ConfigError(f"{name} has one grid of patches: patch_level can be -1 only, not {level}")
    if not -levels <= level <= -1:
        raise ConfigError(f"{name} has {levels} levels of local features: patch_level is {level}, not -1 to {-levels}")


def by_depth(
    names: Sequence[str], blocks: Sequence[str], *, top: Sequence[str] = (), stem: Sequence[str] = ()
) -> list[list[str]]:
    """Parameter names by depth, for a model whose blocks have these name beginnings, in order.

    What starts with one of `top` lies above the blocks, what starts with one of `stem` below them; any other name
    stands where the names around it stand.
    """
    groups: list[list[str]] = [[] for _ in range(len(blocks) + 2)]
    depth = 0
    for name in names:
        found = next((index for index, block in enumerate(blocks) if name.startswith(block)), None)
        if found is not None:
            depth = found + 1
        if any(name.startswith(beginning) for beginning in top):
            groups[-1].append(name)
        elif any(name.startswith(beginning) for beginning in stem):
            groups[0].append(name)
        else:
            groups[depth].append(name)
    return [group for group in groups if group]
