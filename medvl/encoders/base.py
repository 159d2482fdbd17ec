"""Base class of image and text encoders, and their fine-tuning."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medvl.errors import CheckpointError, ConfigError
from medvl.schema import ImageFeatures, TextFeatures

# as outputs of `torch.export` and in the files of its programs
for _features in (ImageFeatures, TextFeatures):
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


# Fine-tuning of encoders: frozen layers, layer-wise learning rates, weight decay groups, LoRA.

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_LORA_TARGETS = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("qkv",),
    ("c_fc", "c_proj"),
)
"""Default target layers: BERT-like models, newer Transformers, DistilBERT, timm, open_clip.

open_clip's `nn.MultiheadAttention` reads its weights without calling its layers, so an adapter
around them would never run: its feed-forward layers are adapted instead.
"""

LORA_SCALE = 2
"""Factor of the updates (alpha / rank) where a configuration sets their rank alone."""


def freeze_layers(
    encoder: Encoder,
    n: int | Literal["all"],
    *,
    embeddings: bool | None = None,
    eval_mode: bool = True,
) -> None:
    """Stop training the first layers of an encoder.

    Autograd records nothing in frozen first layers, so they keep no activations.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`.
        n: number of layers (Transformer) or stages (CNN) after the embeddings or the stem; 0 for
            none.
        embeddings: whether to freeze the embeddings or the stem. Default: True if any layer is
            frozen. ConVIRT freezes the embeddings and 6 layers, MedViLL the stem and the first
            stage of its ResNet (n=1).
        eval_mode: keep frozen modules in eval mode during training, so that frozen batch norms do
            not update their statistics and frozen dropout is off. False leaves them to `train()`,
            as most re-implementations of the published systems do.

    Raises:
        ConfigError: "out_of_range" if the encoder has fewer layers.
    """
    groups = encoder.parameter_layers()
    count = len(groups) - 1 if n == "all" else n
    if not 0 <= count <= len(groups) - 1:
        most = (
            f"it has {len(groups) - 1} with parameters; give a lower number "
            f"(frozen_text_layers or frozen_image_layers)"
        )
        raise ConfigError(
            f"cannot freeze {n} layers of {encoder.name}: {most}", "out_of_range", field="n"
        )
    frozen = groups[1 : count + 1]
    if embeddings or (embeddings is None and count > 0):
        frozen = [groups[0], *frozen]
    for group in frozen:
        for name in group:
            encoder.get_parameter(name).requires_grad_(False)
    if frozen:
        encoder.keep_frozen_in_eval(eval_mode)


def parameter_groups(
    module: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    layer_decay: float = 1.0,
    decay_embeddings: bool = True,
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimiser, with every trainable parameter in exactly one.

    Biases, the parameters of normalisation layers (by module type) and one-dimensional parameters
    get no weight decay.

    Args:
        module: a model; encoders anywhere inside it are recognised by their method
            `parameter_layers`.
        lr: learning rate of parameters outside an encoder's layers (heads).
        weight_decay: weight decay of all other parameters.
        layer_decay: an encoder's last layer has the rate `lr * layer_decay`, the one before `lr *
            layer_decay ** 2`, and so on down to its embeddings or stem.
        decay_embeddings: False exempts embedding tables and the parameters that the library's
            `no_weight_decay` names (tokens and position tables).

    Returns:
        Dictionaries with "name", "params", "lr" and "weight_decay", in the order of the module's
        parameters.

    Raises:
        ConfigError: "out_of_range" for `layer_decay`.
    """
    if not 0 < layer_decay <= 1:
        raise ConfigError(
            f"expected layer_decay in (0, 1], got {layer_decay}",
            "out_of_range",
            field="layer_decay",
        )
    heights = _layers_from_top(module)
    tables = set() if decay_embeddings else _embedding_tables(module)
    groups: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            decays = parameter.ndim > 1 and not isinstance(owner, _NORMS) and name not in tables
            height = heights.get(name, 0)
            key = f"{height} from the top, {'decay' if decays else 'no decay'}"
            rate = lr * layer_decay**height
            decay = weight_decay if decays else 0.0
            groups.setdefault(key, {"name": key, "params": [], "lr": rate, "weight_decay": decay})
            groups[key]["params"].append(parameter)
    return list(groups.values())


def _layers_from_top(module: nn.Module) -> dict[str, int]:
    """Return parameter name -> position of its layer counted from the top of its encoder, the
    last layer being 1.
    """
    heights: dict[str, int] = {}
    for prefix, child in module.named_modules():
        if hasattr(child, "parameter_layers"):
            groups: list[list[str]] = child.parameter_layers()
            for depth, group in enumerate(groups):
                for name in group:
                    heights[f"{prefix}.{name}" if prefix else name] = len(groups) - depth
    return heights


def _embedding_tables(module: nn.Module) -> set[str]:
    """Return the names of embedding tables and of the parameters that a library exempts from
    weight decay.
    """
    names: set[str] = set()
    for prefix, child in module.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(child, nn.Embedding):
            names.add(f"{start}weight")
        if callable(getattr(child, "no_weight_decay", None)):
            names |= {f"{start}{name}" for name in child.no_weight_decay()}
    return names


def add_lora(
    encoder: nn.Module,
    rank: int,
    alpha: int,
    targets: Sequence[str] | None = None,
    *,
    dropout: float = 0.0,
) -> list[str]:
    """Freeze an encoder and add trainable low-rank updates (LoRA, Hu et al., arXiv 2106.09685) to
    some of its layers, with peft. Layers that are frozen before (`freeze_layers`) get no update.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`; changed in place.
        rank: rank of the updates.
        alpha: the updates are scaled by alpha / rank.
        targets: last parts of the names of the layers to adapt. Default: the attention's query and
            value layers (or their joint layer); the feed-forward layers of open_clip's encoders.
        dropout: dropout rate before the updates.

    Returns:
        Names of the adapted layers. Call `merge_lora` before the encoder is saved.

    Raises:
        ConfigError: "unknown_name" if no trained layer has such a name, "conflict" if the encoder
            has LoRA updates already.
    """
    import peft

    names = [
        name
        for name, child in encoder.named_modules()
        if all(parameter.requires_grad for parameter in child.parameters(recurse=False))
    ]
    if has_lora(encoder):
        raise ConfigError("the encoder has LoRA updates already: call merge_lora first", "conflict")
    ends = {name.rpartition(".")[2] for name in names}
    layers = targets or next((family for family in _LORA_TARGETS if ends.issuperset(family)), None)
    if layers is None:
        raise ConfigError(
            "no layer has a default LoRA name: set targets", "unknown_name", field="targets"
        )
    trained = [name for name in names if name.rpartition(".")[2] in layers]
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=trained or list(layers)
    )
    try:
        peft.inject_adapter_in_model(config, encoder)
    except ValueError as error:
        raise ConfigError(
            f"LoRA cannot be added to {layers}: {error}", "unknown_name", field="targets"
        ) from error
    return [name for name, child in encoder.named_modules() if hasattr(child, "lora_A")]


def merge_lora(encoder: nn.Module) -> None:
    """Merge LoRA updates into the weights in place, which restores the encoder's parameter names
    and shapes.

    The weights stay frozen.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, child in list(encoder.named_modules()):
        if isinstance(child, BaseTunerLayer):
            child.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(encoder.get_submodule(parent), leaf, child.get_base_layer())


def has_lora(module: nn.Module) -> bool:
    """Return whether a part of a module has LoRA updates that are not merged."""
    return any(hasattr(child, "lora_A") for child in module.modules())


def merge_lora_weights(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights of a model whose LoRA updates are merged, by the names that they have
    without updates, from those of a model with `add_lora`; `scale` is its alpha / rank.

    Raises CheckpointError where the weights that updates belong to are missing.
    """
    merged: dict[str, Tensor] = {}
    updated = {name.partition(".lora_")[0] for name in tensors if ".lora_" in name}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        layer, _, leaf = plain.rpartition(".")
        down_RI = tensors.get(f"{layer}.lora_A.default.weight")
        if leaf == "weight" and down_RI is not None:
            update_OI = tensors[f"{layer}.lora_B.default.weight"].float() @ down_RI.float()
            tensor = (tensor.float() + scale * update_OI).to(tensor.dtype)
        merged[plain] = tensor
    if any(f"{layer}.weight" not in merged for layer in updated):
        message = "there are low-rank updates without the weights that they change"
        advice = "save the model of medvl.load, which has both, and take that checkpoint"
        raise CheckpointError(f"{message}; {advice}", "mismatch")
    return merged


@contextlib.contextmanager
def freeze_batch_norm_statistics(module: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch norms unchanged inside the context; outputs do not
    change.

    For training passes over images of a kind that inference does not have (masked images).
    """
    norms = [child for child in module.modules() if isinstance(child, _NormBase)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:  # with momentum 0 the running statistics do not change
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


# Activation checkpointing: recompute activations in the backward pass (Chen et al., arXiv
# 1604.06174).


def checkpoint_activations(encoder: Encoder) -> None:
    """Keep only the input of each layer, and recompute the layer in the backward pass.

    Values and gradients do not change, dropout included. A Transformer's activations take a small
    fraction of their memory, for a third more arithmetic. Nothing is saved in eval mode or in
    frozen layers, which keep no activations.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`; its library's own checkpointing is enabled.

    Raises:
        ConfigError: "unsupported" if the library cannot checkpoint this backbone, or if the
            backbone has batch norms, whose running statistics would count every batch twice.
    """
    net: Any = encoder.backbone
    if any(isinstance(module, _NormBase) for module in net.modules()):
        reason = (
            "whose running statistics would count every batch twice: its activations "
            "cannot be checkpointed"
        )
        raise ConfigError(f"{encoder.name} has batch norms, {reason}", "unsupported")
    try:
        if hasattr(net, "set_grad_checkpointing"):  # timm and open_clip
            net.set_grad_checkpointing(True)
            return
        # transformers; renamed in its later versions
        if getattr(net, "supports_gradient_checkpointing", False):
            enable = (
                getattr(net, "activation_checkpointing_enable", None)
                or net.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
            return
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{encoder.name} cannot checkpoint activations: {error}", "unsupported"
        ) from error
    raise ConfigError(f"{encoder.name} does not support activation checkpointing", "unsupported")
