"""PixelHop++ (Chen et al., arXiv 2002.03141): features by successive channel-wise Saab transforms,
without gradients.

A Saab transform (Kuo et al., arXiv 1810.02786) of the K pixels of a window is orthonormal: one
constant DC kernel, and the K - 1 principal components of the window without its mean as AC kernels.
A bias keeps all responses positive. The channel-wise transform applies one Saab transform to each
channel of the unit before, so that channels form a tree. The energy of a node is its share of the
variance of its window times its parent's energy: nodes above `cutoff` are transformed further,
weaker ones are leaves, those below `discard` are dropped. Between the units the maps are pooled by
maximum.

BERTHop (arXiv 2108.04938) turns the channels of PixelHop++ into visual tokens by PCA. Its
repository has no PixelHop++: it reads features that another project computed. Window 5 and three
units are PixelHop++'s; thresholds, the number of tokens, their width and how maps of different
units become tokens of one width are choices of this file: the Q nodes of all units with the highest
energy, averaged to `cells` x `cells`, one PCA for each.

Kernels are buffers: nothing of the encoder is trained. `medvl fit-pixelhop` fits it to shards
(`pixelhop_fit`).

K pixels of a window, N nodes of a unit, Q tokens, D their width, G cells; the other letters as in
`medvl.schema`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.untrusted import parse_json
from medvl.encoders.image.adapter import (
    Size,
    VisionAdapter,
    VisionBackbone,
    VisionOutput,
    check_level,
)
from medvl.errors import ConfigError, WeightsError

CONFIG = "config.json"
"""File of a fitted encoder's arguments, beside `model.safetensors`."""
POOL = 2
"""Window and stride of the maximum pooling between units."""


class SaabUnit(nn.Module):
    """The channel-wise Saab transforms of one unit, as far as their nodes are kept.

    Args:
        nodes: N, kept nodes of all transforms together.
        window: side of the window, odd; borders are reflected.
    """

    parent_N: Tensor
    kernel_N1HW: Tensor
    bias_N: Tensor
    energy_N: Tensor

    def __init__(self, nodes: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("parent_N", torch.zeros(nodes, dtype=torch.int64))
        self.register_buffer("kernel_N1HW", torch.randn(nodes, 1, window, window) / window)
        self.register_buffer("bias_N", torch.zeros(nodes))
        self.register_buffer("energy_N", torch.zeros(nodes))

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """(B, N, H, W): the responses of all nodes."""
        padded = F.pad(map_BCHW, (self.window // 2,) * 4, mode="reflect")
        return F.conv2d(
            padded[:, self.parent_N], self.kernel_N1HW, self.bias_N, groups=len(self.parent_N)
        )


class PixelHop(nn.Module):
    """Fitted PixelHop++ with the projection to tokens; build it with
    `create_image_encoder("pixelhop", ...)`.

    Args:
        nodes: kept nodes of each unit.
        intermediate: number of these nodes that the next unit transforms; they come first. The last
            unit has 0.
        tokens: Q.
        token_dim: D.
        cells: side of the grid to which a node's map is averaged before PCA.
        window: side of the windows.

    Raises ValueError if these do not fit each other.
    """

    node_Q: Tensor
    mean_QG: Tensor
    components_QGD: Tensor

    def __init__(
        self,
        nodes: Sequence[int] = (9, 24, 48),
        intermediate: Sequence[int] = (4, 8, 0),
        tokens: int = 15,
        token_dim: int = 64,
        cells: int = 16,
        window: int = 5,
    ) -> None:
        super().__init__()
        if not (
            len(nodes) == len(intermediate)
            and all(b <= a for a, b in zip(nodes, intermediate, strict=True))
        ):
            raise ValueError(
                f"expected intermediate nodes among the nodes of each unit, got {intermediate} "
                f"of {nodes}"
            )
        if window % 2 == 0 or not 0 < tokens <= sum(nodes) or not 0 < token_dim <= cells**2:
            raise ValueError(
                "expected an odd window, tokens up to the number of nodes, token_dim up to cells^2"
            )
        self.intermediate = tuple(intermediate)
        self.cells = cells
        self.units = nn.ModuleList(SaabUnit(count, window) for count in nodes)
        self.register_buffer("node_Q", torch.arange(tokens))
        self.register_buffer("mean_QG", torch.zeros(tokens, cells**2))
        self.register_buffer("components_QGD", torch.randn(tokens, cells**2, token_dim) / cells)

    def maps(self, image_BCHW: Tensor) -> Iterator[Tensor]:
        """Yield the responses (B, N, H, W) of each unit; RGB images are averaged to grey."""
        map_BCHW = image_BCHW.mean(dim=1, keepdim=True)
        for unit, kept in zip(self.units, self.intermediate, strict=True):
            response_BNHW = unit(map_BCHW)
            yield response_BNHW
            map_BCHW = F.max_pool2d(response_BNHW[:, :kept], POOL) if kept else response_BNHW[:, :0]

    def cell_features(self, image_BCHW: Tensor) -> Tensor:
        """(B, nodes of all units, G): the averaged maps of every node."""
        pooled = [
            F.adaptive_avg_pool2d(map_BNHW, self.cells).flatten(2)
            for map_BNHW in self.maps(image_BCHW)
        ]
        return torch.cat(pooled, dim=1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, Q, D): the tokens, computed in float32 also under autocast: the bias is larger
        than most responses.
        """
        with torch.autocast("cpu" if image_BCHW.is_meta else image_BCHW.device.type, enabled=False):
            chosen_BQG = self.cell_features(image_BCHW.float())[:, self.node_Q] - self.mean_QG
            return torch.einsum("bqg,qgd->bqd", chosen_BQG, self.components_QGD)


class PixelHopAdapter(VisionAdapter):
    """Adapter whose patches are tokens of frequencies, without a grid; the pooled vector has all
    of them.
    """

    fixed_size = True

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Return the only level."""
        check_level(level, 1, "pixelhop")
        tokens_BQD = net(image_BCHW)
        return VisionOutput(tokens_BQD.flatten(1), None, tokens_BQD, None)

    def layers(self, net: Any) -> list[list[str]]:
        """Return no layer: there are no parameters."""
        return []

    def resize(self, net: Any, size: Size) -> None:
        """Accept any size; the kernels were fitted at one, which the command prints."""


def build_pixelhop(arguments: Mapping[str, Any]) -> VisionBackbone:
    """Build an encoder with random kernels from torch's global generator, for weights that `medvl
    fit-pixelhop` wrote.

    Raises:
        ConfigError: "out_of_range" for unknown arguments, or sizes that do not fit each other.
    """
    try:
        net = PixelHop(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"pixelhop cannot be built with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    return VisionBackbone(
        net=net,
        adapter=PixelHopAdapter(),
        image_size=(224, 224),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        note="run medvl fit-pixelhop",
    )


def pixelhop_arguments(folder: Path | str) -> dict[str, Any]:
    """Return the arguments of `create_image_encoder` for a folder of `save_pixelhop`, without its
    name and image size.

    A system gets them as `image_arguments`, and the folder as `image_weights`.

    Raises WeightsError ("not_found", "malformed") if the folder has no such configuration.
    """
    path = Path(folder) / CONFIG
    try:
        config = parse_json(path.read_bytes())["encoder"]
        names = ("nodes", "intermediate", "tokens", "token_dim", "cells", "window", "mean", "std")
        return {
            name: tuple(value) if isinstance(value := config[name], list) else value
            for name in names
        }
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist: run medvl fit-pixelhop", "not_found", field="folder"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is not the configuration of a fitted pixelhop ({type(error).__name__})"
        raise WeightsError(message, "malformed", field="folder") from error
