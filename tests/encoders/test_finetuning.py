"""Frozen layers, layer-wise learning rates, weight decay groups, LoRA, and the imports of the
package.
"""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.tiny_towers import TINY_BERT
from torch import Tensor, nn

import medvl
from medvl.encoders import (
    add_lora,
    create_image_encoder,
    create_text_encoder,
    freeze_layers,
    merge_lora,
    parameter_groups,
)
from medvl.errors import ConfigError

TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
TINY_VIT = {"embed_dim": 32, "depth": 3, "num_heads": 2, "image_size": 64}
TINY_CLIP = {"width": 64, "layers": 3, "embed_dim": 16, "image_size": 64}
DEEP_BERT = TINY_BERT | {"num_hidden_layers": 8}


def bert(name: str = "bioclinicalbert", **options: Any) -> Any:
    torch.manual_seed(0)
    return create_text_encoder(name, **{**DEEP_BERT, **options})


def resnet(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder("resnet50", **{**TINY_RESNET, **options})


def text_batch() -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(5, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    return ids_BT, torch.arange(12) < torch.tensor([12, 7, 9, 3])[:, None]


def image_batch(side: int = 64) -> Tensor:
    return torch.randint(
        0, 256, (4, 1, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def trainable_names(encoder: Any) -> set[str]:
    return {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}


def test_convirt_freezes_embeddings_and_six_layers() -> None:
    encoder = bert()
    freeze_layers(encoder, 6)
    left = {name.split(".")[3] for name in trainable_names(encoder)}
    assert left == {"6", "7"}
    assert not any("embeddings" in name for name in trainable_names(encoder))


@pytest.mark.parametrize(
    ("n", "embeddings", "frozen_embeddings", "frozen_layers"),
    [
        (0, None, False, 0),
        (0, True, True, 0),
        (2, None, True, 2),
        (2, False, False, 2),
        ("all", None, True, 8),
    ],
)
def test_freeze_layers_freezes_the_first_layers(
    n: Any, embeddings: bool | None, frozen_embeddings: bool, frozen_layers: int
) -> None:
    encoder = bert()
    freeze_layers(encoder, n, embeddings=embeddings)
    names = trainable_names(encoder)
    assert any("embeddings" in name for name in names) is not frozen_embeddings
    assert {int(name.split(".")[3]) for name in names if ".layer." in name} == set(
        range(frozen_layers, 8)
    )


def test_frozen_layers_save_no_activations() -> None:
    """Count the values that autograd saves for the backward pass."""

    def saved(encoder: Any) -> int:
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encoder(*text_batch()).pooled_BD.sum()
        return count

    full, half, none = (bert() for _ in range(3))
    freeze_layers(half, 6)
    freeze_layers(none, "all")
    assert saved(half) < 0.3 * saved(full)
    assert saved(none) == 0


def test_optimizer_changes_unfrozen_weights_only() -> None:
    encoder = bert()
    freeze_layers(encoder, 6)
    before = {name: parameter.clone() for name, parameter in encoder.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(encoder, lr=1e-2, weight_decay=0.1))
    (encoder(*text_batch()).pooled_BD ** 2).sum().backward()
    optimizer.step()
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, before[name]) is not parameter.requires_grad, name


def test_frozen_batch_norms_keep_their_statistics() -> None:
    """Only frozen stages stay in eval mode, also after a later `train()`."""
    encoder = resnet()
    freeze_layers(encoder, 2)
    encoder.eval()
    encoder.train()
    before = {name: buffer.clone() for name, buffer in encoder.named_buffers() if "running" in name}
    encoder(image_batch())
    for name, buffer in encoder.named_buffers():
        if "running" in name:
            frozen = not any(stage in name for stage in ("layer3", "layer4"))
            assert torch.equal(buffer, before[name]) is frozen, name
    assert encoder.training
    assert encoder.backbone.layer4.training
    assert not encoder.backbone.layer1.training


def test_eval_mode_false_leaves_frozen_layers_in_train_mode() -> None:
    encoder = resnet()
    freeze_layers(encoder, 2, eval_mode=False)
    before = encoder.backbone.bn1.running_mean.clone()
    encoder(image_batch())
    assert not torch.equal(encoder.backbone.bn1.running_mean, before)


def test_frozen_dropout_is_off() -> None:
    encoder = bert(hidden_dropout_prob=0.5)
    freeze_layers(encoder, 6)
    ids_BT, mask_BT = text_batch()
    states = [encoder.encode(encoder.embed(ids_BT, mask_BT), mask_BT) for _ in range(2)]
    assert torch.equal(states[0][6], states[1][6])
    assert not torch.equal(states[0][7], states[1][7])


def test_a_frozen_encoder_trains_nothing_and_keeps_its_statistics() -> None:
    encoder = resnet()
    encoder.freeze()
    encoder.train()
    before = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    encoder(image_batch())
    assert all(torch.equal(buffer, before[name]) for name, buffer in encoder.named_buffers())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_an_unfrozen_encoder_trains_everything() -> None:
    encoder = resnet()
    assert not encoder.is_frozen
    freeze_layers(encoder, "all")
    assert encoder.is_frozen
    encoder.unfreeze()
    encoder.train()
    assert not encoder.is_frozen
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert all(module.training for module in encoder.modules())


@pytest.mark.parametrize(("layers", "trained"), [(0, 5), (2, 2), (-1, 0)])
def test_dual_encoders_freeze_stem_and_stages_of_their_image_encoder(
    layers: int, trained: int
) -> None:
    model = medvl.create_model(
        "convirt",
        image_encoder="resnet50",
        image_arguments=TINY_RESNET,
        image_size=64,
        text_encoder="bert",
        text_arguments=TINY_BERT,
        frozen_text_layers=0,
        frozen_image_layers=layers,
    ).train()
    groups = model.image_encoder.parameter_layers()
    with_gradient = [
        any(model.image_encoder.get_parameter(name).requires_grad for name in group)
        for group in groups
    ]
    assert with_gradient == [False] * (5 - trained) + [True] * trained
    norms = [each for each in model.image_encoder.modules() if isinstance(each, nn.BatchNorm2d)]
    assert any(each.training for each in norms) == (trained > 0)
    assert all(parameter.requires_grad for parameter in model.image_head.parameters())


def test_a_dual_encoder_with_fewer_stages_than_are_to_be_frozen_is_refused() -> None:
    for layers, field in ((-2, "frozen_image_layers"), (9, "n")):
        with raises(ConfigError, "out_of_range", field):
            medvl.create_model(
                "convirt",
                image_encoder="resnet50",
                image_arguments=TINY_RESNET,
                text_encoder="bert",
                text_arguments=TINY_BERT,
                frozen_text_layers=0,
                frozen_image_layers=layers,
            )


def test_medvill_freezes_stem_and_first_stage() -> None:
    encoder = resnet()
    freeze_layers(encoder, 1)
    assert {name.split(".")[1] for name in trainable_names(encoder)} == {
        "layer2",
        "layer3",
        "layer4",
    }


def test_freezing_too_many_layers_raises() -> None:
    with raises(ConfigError, "out_of_range", "n", names="bioclinicalbert"):
        freeze_layers(bert(), 9)
    with raises(ConfigError, "out_of_range", "n"):
        freeze_layers(bert(), -1)
    with raises(
        ConfigError, "out_of_range", "n", names="bioalbert"
    ):  # all twelve layers share their parameters
        freeze_layers(bert("bioalbert", embedding_size=16), 6)


class Model(nn.Module):
    """Two encoders and a head, as in a dual-encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = resnet()
        self.text_encoder = bert(num_hidden_layers=2)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16))
        self.logit_scale = nn.Parameter(torch.tensor(2.6))


def test_models_without_a_grouping_have_their_stages_as_layers() -> None:
    encoder = create_image_encoder("timm:poolformer_s12")
    layers = encoder.parameter_layers()
    assert [group[0].split(".")[1:3] for group in layers[1:5]] == [
        ["stages", str(index)] for index in range(4)
    ]
    assert sorted(name for group in layers for name in group) == sorted(
        dict(encoder.named_parameters())
    )
    assert len(layers) == 6


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = Model()
    freeze_layers(model.text_encoder, 1)
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=0.5)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    }
    torch.optim.AdamW(groups)


def group_of(groups: list[dict[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    return next(group for group in groups if any(member is parameter for member in group["params"]))


def test_biases_and_norms_are_not_decayed() -> None:
    model = Model()
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    text = model.text_encoder.backbone
    free = [
        model.head[0].bias,
        model.head[1].weight,
        model.logit_scale,
        model.image_encoder.backbone.bn1.weight,
        text.embeddings.LayerNorm.weight,
    ]
    decayed = [
        model.head[0].weight,
        model.image_encoder.backbone.conv1.weight,
        text.embeddings.word_embeddings.weight,
    ]
    assert all(group_of(groups, parameter)["weight_decay"] == 0.0 for parameter in free)
    assert all(group_of(groups, parameter)["weight_decay"] == 0.1 for parameter in decayed)
    without = parameter_groups(model, lr=1e-3, weight_decay=0.1, decay_embeddings=False)
    assert group_of(without, text.embeddings.word_embeddings.weight)["weight_decay"] == 0.0
    assert group_of(without, model.head[0].weight)["weight_decay"] == 0.1


def test_norms_are_recognised_by_type_not_by_name() -> None:
    odd = nn.Module()
    odd.norm_but_linear = nn.Linear(4, 4)
    odd.plain = nn.LayerNorm((2, 4))  # two dimensions
    groups = parameter_groups(odd, lr=1.0, weight_decay=0.1)
    assert group_of(groups, odd.norm_but_linear.weight)["weight_decay"] == 0.1
    assert group_of(groups, odd.plain.weight)["weight_decay"] == 0.0


def test_transformer_positions_and_tokens_count_as_embeddings() -> None:
    for name, sizes, tables in (
        ("vit_b16", TINY_VIT, ("pos_embed", "cls_token")),
        ("clip_vit_b16", TINY_CLIP, ("positional_embedding",)),
    ):
        encoder = create_image_encoder(name, **sizes)
        groups = parameter_groups(encoder, lr=1.0, weight_decay=0.1, decay_embeddings=False)
        for table in tables:
            assert group_of(groups, getattr(encoder.backbone, table))["weight_decay"] == 0.0


def test_learning_rates_decrease_towards_the_input() -> None:
    model = Model()
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=0.5)
    text, image = model.text_encoder.backbone, model.image_encoder.backbone
    rates = {
        model.head[0].weight: 1.0,
        text.encoder.layer[1].output.dense.weight: 0.5,
        text.encoder.layer[0].output.dense.weight: 0.25,
        text.embeddings.word_embeddings.weight: 0.125,
        image.layer4[0].conv1.weight: 0.5,
        image.layer1[0].conv1.weight: 0.5**4,
        image.conv1.weight: 0.5**5,
    }
    for parameter, factor in rates.items():
        assert group_of(groups, parameter)["lr"] == pytest.approx(1e-3 * factor)
    with raises(ConfigError, "out_of_range", "layer_decay"):
        parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=1.5)


LORA: dict[str, tuple[Any, Any]] = {
    "bert": (lambda: bert(num_hidden_layers=2), text_batch),
    "clip_text": (
        lambda: create_text_encoder(
            "clip_text",
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            projection=True,
        ),
        text_batch,
    ),
    "vit_b16": (lambda: create_image_encoder("vit_b16", **TINY_VIT), lambda: (image_batch(),)),
    "clip_vit_b16": (
        lambda: create_image_encoder("clip_vit_b16", **TINY_CLIP),
        lambda: (image_batch(),),
    ),
    "swin_tiny": (
        lambda: create_image_encoder(
            "swin_tiny", image_size=64, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)
        ),
        lambda: (image_batch(),),
    ),
}


@pytest.mark.parametrize("name", LORA)
def test_lora_updates_learn_and_merge(name: str) -> None:
    """Updates start at zero and all learn; merging keeps the output and restores the names."""
    make, batch = LORA[name]
    torch.manual_seed(0)
    encoder = make().eval()
    names, before = list(encoder.state_dict()), encoder(*batch()).pooled_BD
    torch.manual_seed(1)
    adapted = add_lora(encoder, rank=4, alpha=8)
    assert adapted
    torch.testing.assert_close(encoder(*batch()).pooled_BD, before)
    learning = {
        key: parameter for key, parameter in encoder.named_parameters() if parameter.requires_grad
    }
    assert len(learning) == 2 * len(adapted)
    with torch.no_grad():
        for parameter in learning.values():
            parameter += 0.1 * torch.randn_like(parameter)
    features = encoder(*batch())
    (features.pooled_BD * torch.randn_like(features.pooled_BD)).sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in learning.values()
    )
    assert not torch.allclose(features.pooled_BD, before, atol=1e-3)
    with raises(ConfigError, "conflict"):
        add_lora(encoder, rank=4, alpha=8)
    merge_lora(encoder)
    assert list(encoder.state_dict()) == names
    torch.testing.assert_close(
        encoder(*batch()).pooled_BD, features.pooled_BD, rtol=1e-4, atol=1e-5
    )


def test_lora_targets_select_layers() -> None:
    encoder = bert(num_hidden_layers=2)
    adapted = add_lora(encoder, rank=2, alpha=4, targets=["dense"])
    assert len(adapted) == 6
    with raises(ConfigError, "unknown_name", "targets"):
        add_lora(resnet(), rank=2, alpha=4)
    with raises(ConfigError, "unknown_name", "targets", names="nothing_like_it"):
        add_lora(resnet(), rank=2, alpha=4, targets=["nothing_like_it"])


def test_package_imports_no_other_part_of_medvl() -> None:
    """A fresh interpreter imports no heavy library and no other room of medvl, in far under a
    second.
    """
    program = """
        import sys, time
        import torch
        started = time.perf_counter()
        import medvl.encoders
        seconds = time.perf_counter() - started
        heavy = {"timm", "torchvision", "open_clip", "transformers", "peft", "huggingface_hub", "webdataset", "pydicom",
                 "albumentations", "cv2", "tokenizers", "safetensors"}
        print(sorted(heavy & set(sys.modules)))
        print(sorted(name for name in sys.modules if name.startswith("medvl.") and name.count(".") == 1))
        print(seconds < 1.5)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    heavy, rooms, quick = result.stdout.split("\n")[:3]
    assert heavy == "[]"
    assert rooms == str(["medvl.common", "medvl.encoders"])
    assert quick == "True"
