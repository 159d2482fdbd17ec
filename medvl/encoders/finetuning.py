"""What of an encoder is trained, and how fast: freezing, rates by depth, weight decay, LoRA."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medvl.encoders.base import Encoder
from medvl.errors import ConfigError

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_LORA_TARGETS = (("query", "value"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("qkv",), ("c_fc", "c_proj"))
"""By family: BERT and its kin, newer Transformers, DistilBERT, timm, open_clip.

open_clip's attention is `nn.MultiheadAttention`, which reads its weights without calling its layers, so that an
adapter around them would never run: there the feed-forward layers are adapted.
"""


def freeze_layers(
    encoder: Encoder, n: int | Literal["all"], *, embeddings: bool | None = None, eval_mode: bool = True
) -> None:
    """Stop training the first layers of an encoder.

    No gradient is taken of a frozen beginning and none of its activations are kept, because autograd records nothing
    where neither the input nor a parameter asks for a gradient.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`.
        n: how many layers (of a Transformer) or stages (of a CNN) above the embeddings or the stem; 0 for none.
        embeddings: whether the embeddings or the stem are frozen. Default: if any layer is. ConVIRT freezes the
            embeddings and 6 layers, MedViLL the stem and the first stage of its ResNet (n=1).
        eval_mode: frozen parts stay in eval mode while the rest trains, so that the statistics of frozen batch norms
            do not move and frozen dropout is off. False leaves them to `train()`, as most re-implementations of the
            published systems do.

    Raises:
        ConfigError: the encoder has fewer layers.
    """
    groups = encoder.parameter_layers()
    count = len(groups) - 1 if n == "all" else n
    if not 0 <= count <= len(groups) - 1:
        raise ConfigError(
            f"{encoder.name} has {len(groups) - 1} layers of parameters of its own above its embeddings or stem: "
            f"{n} cannot be frozen"
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
    """Groups for a torch optimiser: every trained parameter once, with its rate and its decay.

    Biases, the parameters of norms (told by the module's type) and everything with one dimension are not decayed.

    Args:
        module: a model; encoders anywhere inside it are found by their `parameter_layers`.
        lr: rate of what is no part of an encoder's layers (heads).
        weight_decay: of all that is decayed.
        layer_decay: an encoder's last layer learns at `lr * layer_decay`, the one below at `lr * layer_decay ** 2`,
            down to its embeddings or stem.
        decay_embeddings: False exempts embedding tables, and what the library's `no_weight_decay` names (tokens and
            tables of positions).

    Returns:
        Dictionaries with "name", "params", "lr" and "weight_decay", in an order that only the module decides.

    Raises:
        ConfigError: `layer_decay` is out of range.
    """
    if not 0 < layer_decay <= 1:
        raise ConfigError(f"layer_decay is {layer_decay}: it must be above 0 and at most 1")
    heights = _heights(module)
    tables = set() if decay_embeddings else _tables(module)
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
            rate, decay = lr * layer_decay**height, weight_decay if decays else 0.0
            groups.setdefault(key, {"name": key, "params": [], "lr": rate, "weight_decay": decay})
            groups[key]["params"].append(parameter)
    return list(groups.values())


def _heights(module: nn.Module) -> dict[str, int]:
    """Parameter name -> how many layers from the top of its encoder it stands, the last layer being 1."""
    heights: dict[str, int] = {}
    for prefix, child in module.named_modules():
        if hasattr(child, "parameter_layers"):
            groups: list[list[str]] = child.parameter_layers()
            for depth, group in enumerate(groups):
                for name in group:
                    heights[f"{prefix}.{name}" if prefix else name] = len(groups) - depth
    return heights


def _tables(module: nn.Module) -> set[str]:
    names: set[str] = set()
    for prefix, child in module.named_modules():
        start = f"{prefix}." if prefix else ""
        if isinstance(child, nn.Embedding):
            names.add(f"{start}weight")
        if callable(getattr(child, "no_weight_decay", None)):
            names |= {f"{start}{name}" for name in child.no_weight_decay()}
    return names


def add_lora(
    encoder: nn.Module, rank: int, alpha: int, targets: Sequence[str] | None = None, *, dropout: float = 0.0
) -> list[str]:
    """Freeze an encoder and give some of its layers low-rank updates to train, through peft.

    Args:
        encoder: an `ImageEncoder` or a `TextEncoder`; changed in place.
        rank: of the updates.
        alpha: the updates are scaled by alpha / rank.
        targets: last parts of the names of the layers to adapt. Default: the attention's query and value layers, or
            their common one; the feed-forward layers of open_clip's towers.
        dropout: before the updates.

    Returns:
        Names of the adapted layers. `merge_lora` folds the updates in, and must be called before the encoder is saved.

    Raises:
        ConfigError: no layer is called so, or the encoder has updates already.
    """
    import peft

    names = [name for name, _ in encoder.named_modules()]
    if any(".lora_A" in name for name in names):
        raise ConfigError("this encoder has LoRA updates already: merge_lora first")
    ends = {name.rpartition(".")[2] for name in names}
    chosen = targets or next((family for family in _LORA_TARGETS if ends.issuperset(family)), None)
    if chosen is None:
        raise ConfigError("this encoder has none of the layers that are adapted by default: name them in targets")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(chosen))
    try:
        peft.inject_adapter_in_model(config, encoder)
    except ValueError as error:
        raise ConfigError(f"LoRA cannot be added to {', '.join(chosen)}: {error}") from error
    return [name for name, child in encoder.named_modules() if hasattr(child, "lora_A")]


def merge_lora(encoder: nn.Module) -> None:
    """Fold LoRA updates into the weights, in place: names and shapes are again those of the encoder without them.

    The weights stay frozen as `add_lora` left them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, child in list(encoder.named_modules()):
        if isinstance(child, BaseTunerLayer):
            child.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(encoder.get_submodule(parent), leaf, child.get_base_layer())


@contextlib.contextmanager
def freeze_batch_norm_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norms inside normalise as they would, but do not take this batch into their running statistics: for passes
    over images that inference never sees."""
    norms = [child for child in module.modules() if isinstance(child, _NormBase)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:  # with momentum 0 the running statistics are left alone
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
