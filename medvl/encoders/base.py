"""What image and text encoders share: a library's module, its layers by depth, and the rest of what is frozen."""

from typing import Protocol, Self

from torch import nn


class Adapter(Protocol):
    """How an encoder talks to its library's module."""

    def layers(self, net: nn.Module) -> list[list[str]]:
        """Names of all parameters by depth, embeddings or stem first."""


class Encoder(nn.Module):
    """A library's module behind a contract.

    Attributes:
        name: as given when the encoder was made.
        backbone: the library's module, its parameters under the library's own names.
    """

    def __init__(self, name: str, backbone: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self._layers = adapter.layers
        self._frozen_rests = False

    def parameter_layers(self) -> list[list[str]]:
        """Names of the backbone's parameters by depth: embeddings or stem, the layers, what lies above them."""
        return [[f"backbone.{name}" for name in group] for group in self._layers(self.backbone)]

    def train(self, mode: bool = True) -> Self:
        """As in torch; what is frozen stays in eval mode where `keep_frozen_in_eval` said so."""
        super().train(mode)
        if mode and self._frozen_rests:
            for module in self.modules():
                parameters = list(module.parameters())
                if parameters and not any(parameter.requires_grad for parameter in parameters):
                    module.eval()
        return self

    def keep_frozen_in_eval(self, rests: bool) -> None:
        """Whether modules that have parameters, none of them trained, stay in eval mode from now on."""
        self._frozen_rests = rests
        self.train(self.training)
