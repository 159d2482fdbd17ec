"""Base class of image and text encoders."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from medvl.schema import ImageFeatures, TextFeatures

for _features in (
    ImageFeatures,
    TextFeatures,
):  # as outputs of `torch.export` and in the files of its programs
    torch.export.register_dataclass(
        _features, serialized_type_name=f"medvl.schema.{_features.__name__}"
    )


class Adapter(Protocol):
    """Access of an encoder to its library's module."""

    def layers(self, net: nn.Module) -> list[list[str]]:
        """Return the names of all parameters by depth, embeddings or stem first."""


class Encoder(nn.Module):
    """A library's module with the interface of medvl's encoders.

    Attributes:
        name: as given to `create_image_encoder` or `create_text_encoder`.
        backbone: the library's module, its parameters under the library's own names.
        trained_on: manifests of the shards that the loaded weights were trained on, as JSON
            objects; empty if unknown. They follow the encoder into other models and their
            checkpoints (`medvl.models.checkpoint`).
    """

    def __init__(self, name: str, backbone: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self.trained_on: tuple[Mapping[str, Any], ...] = ()
        self._layers = adapter.layers
        self._frozen_in_eval = False

    def parameter_layers(self) -> list[list[str]]:
        """Return the names of the backbone's parameters by depth: embeddings or stem, layers,
        then the rest.
        """
        return [[f"backbone.{name}" for name in group] for group in self._layers(self.backbone)]

    def train(self, mode: bool = True) -> Self:
        """Set the mode as `nn.Module.train` does, but leave frozen modules in eval mode after
        `keep_frozen_in_eval`.
        """
        super().train(mode)
        if mode and self._frozen_in_eval:
            for module in self.modules():
                parameters = list(module.parameters())
                if parameters and not any(parameter.requires_grad for parameter in parameters):
                    module.eval()
        return self

    def keep_frozen_in_eval(self, enabled: bool) -> None:
        """Set whether modules whose parameters are all frozen stay in eval mode during training."""
        self._frozen_in_eval = enabled
        self.train(self.training)

    def freeze(self) -> None:
        """Freeze all parameters, and keep the encoder in eval mode during training."""
        self.requires_grad_(False)
        self.keep_frozen_in_eval(True)

    def unfreeze(self) -> None:
        """Train all parameters, and let every module follow `train()`."""
        self.requires_grad_(True)
        self.keep_frozen_in_eval(False)

    @property
    def is_frozen(self) -> bool:
        """Whether the encoder has parameters and none of them is trained."""
        parameters = list(self.parameters())
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def meta_state(self) -> dict[str, Tensor]:
        """Return all parameters and buffers on the meta device, those of a module with several
        names under one.

        For `torch.func.functional_call`, which would replace such a module's tensors twice, and
        leave the first replacement in it.
        """
        return {
            name: torch.empty_like(tensor, device="meta")
            for prefix, module in self.named_modules()
            for name, tensor in (
                *module.named_parameters(prefix, recurse=False),
                *module.named_buffers(prefix, recurse=False),
            )
        }


def group_by_depth(
    names: Sequence[str],
    blocks: Sequence[str],
    *,
    top: Sequence[str] = (),
    stem: Sequence[str] = (),
) -> list[list[str]]:
    """Group parameter names by depth, for a model whose blocks have these name prefixes, in order.

    Names that start with one of `top` belong above the blocks, those that start with one of `stem`
    below them; any other name belongs to the same group as the name before it.
    """
    groups: list[list[str]] = [[] for _ in range(len(blocks) + 2)]
    depth = 0
    for name in names:
        block = next(
            (index for index, prefix in enumerate(blocks) if name.startswith(prefix)), None
        )
        if block is not None:
            depth = block + 1
        if name.startswith(tuple(top)):
            groups[-1].append(name)
        elif name.startswith(tuple(stem)):
            groups[0].append(name)
        else:
            groups[depth].append(name)
    return [group for group in groups if group]
