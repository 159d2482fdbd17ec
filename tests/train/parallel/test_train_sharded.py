"""FSDP: sharded runs on two ranks equal DDP runs, also across checkpoints."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import contrastive_systems, train_fakes as fakes
from helpers.albef_ranks import quiet
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, tiny_model, tiny_tokenizer
from helpers.two_ranks import on_two_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import medvl
from medvl.errors import ConfigError, TrainingError
from medvl.losses.pairs.image_text import MomentumQueue
from medvl.models.downstream.vqa.decoder import DecoderConfig
from medvl.models.downstream.vqa.model import VQA
from medvl.schema import Batch, Losses
from medvl.train import TrainResult, rank_and_world
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.optim.optimizer import trainable
from medvl.train.parallel.distributed import RankInfo, join, shared_buffers
from medvl.train.parallel.model import DDPModel, FSDPModel, repeated_blocks

# Two ranks train seven models with and without shards, once for all tests.
pytestmark = pytest.mark.slow

SAMPLES, MICRO = 24, 8
"""Three micro-batches an epoch: an update of two and one of one."""
CLIP = 0.5
OPTIONS: dict[str, Any] = {
    "precision": "bf16",
    "packed_text": True,
    "checkpoint_activations": True,
    "epochs": 1,
}
TEXT = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {"layers": 2, "width": 64, "patch_size": 16}
ANSWERS = ("left", "right")
TOWERS = {"text_encoder": "tiny_bert", "vocab_size": 40, "image_size": 32, "projection_dim": 16}


def clip() -> nn.Module:
    """No batch norm and no dropout: the same on any number of ranks."""
    torch.manual_seed(0)
    image = {"image_encoder": "open_clip:ViT-B-32", "image_arguments": VIT}
    return medvl.create_model("clip", **TOWERS, **image, text_arguments=TEXT)


def convirt() -> nn.Module:
    """Batch norms, a frozen text layer, dropout."""
    torch.manual_seed(0)
    return medvl.create_model(
        "convirt", **TOWERS, image_encoder="resnet_tiny", frozen_text_layers=1
    )


def medvill() -> nn.Module:
    """A fusion-encoder whose word head is tied to the table of word embeddings."""
    return tiny_model("medvill", tiny_tokenizer())


def mgca() -> nn.Module:
    """The text encoder's attention, from weights of its last layer; prototypes that are
    normalised in place.
    """
    text = {**TEXT, "attention_probs_dropout_prob": 0.1}
    sizes = {"vocab_size": None, "image_size": 32, "encoder_size": None, "text_arguments": text}
    return contrastive_systems.mgca(**sizes, freeze_prototypes_steps=1)


def albef() -> nn.Module:
    """A moving average of its weights and a queue."""
    return tiny_model("albef", tiny_tokenizer(), dropout=0.0, text_arguments=quiet(), momentum=0.5)


def vqa() -> nn.Module:
    """A decoder of answers, whose layers are called for the questions beside their forward pass,
    and its average.
    """
    decoder = {
        "layers": 2,
        "heads": 2,
        "intermediate": 16,
        "dropout": 0.0,
        "alpha": 0.4,
        "ramp_steps": 0,
    }
    return VQA.on(medvill(), ANSWERS, head="ranking", decoder=DecoderConfig(**decoder))


def r2gen() -> nn.Module:
    """A report generator, whose decoder calls parts of its layers before their forward pass."""
    sizes = {
        "width": 16,
        "layers": 2,
        "heads": 2,
        "intermediate": 24,
        "memory_heads": 4,
        "max_tokens": 20,
    }
    image = {
        "image_encoder": "timm:test_vit",
        "image_arguments": {"depth": 1},
        "image_size": 64,
        "views": 1,
    }
    torch.manual_seed(0)
    return medvl.create_model(
        "r2gen", tokenizer=tiny_tokenizer(), dropout=0.0, cell_dropout=0.0, **sizes, **image
    )


def pairs(positions: list[int], epoch: int) -> Batch:
    """Samples of the dual-encoders: tokens and pixels follow from position and epoch."""
    images, ids = [], []
    for position in positions:
        generator = torch.Generator().manual_seed(1000 * epoch + position)
        images.append(torch.randint(0, 256, (1, 32, 32), generator=generator, dtype=torch.uint8))
        ids.append(torch.randint(5, 40, (6,), generator=generator))
    return batch_of(
        positions,
        torch.stack(images),
        torch.stack(ids),
        torch.arange(6) < torch.tensor(positions)[:, None] % 5 + 2,
    )


def reports(positions: list[int], epoch: int) -> Batch:
    """Samples of the fusion-encoder, with words for its tokenizer."""
    generator = torch.Generator().manual_seed(1000 * epoch + positions[0])
    image_BCHW = torch.randint(
        0, 256, (len(positions), 1, 64, 64), generator=generator, dtype=torch.uint8
    )
    return batch_of(
        positions,
        image_BCHW,
        *tiny_tokenizer()([TEXTS[position % len(TEXTS)] for position in positions]),
    )


def questions(positions: list[int], epoch: int) -> Batch:
    """Samples of the fusion-encoder with an answer."""
    batch = reports(positions, epoch)
    return dataclasses.replace(
        batch, labels_BL=torch.eye(len(ANSWERS))[[position % 2 for position in positions]]
    )


def batch_of(positions: list[int], image_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Batch:
    return Batch(
        keys=[f"s{position}" for position in positions],
        image_BCHW=image_BCHW,
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.zeros(len(positions), 0),
        texts=[""] * len(positions),
    )


Make = Callable[[list[int], int], Batch]
MODELS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "mgca": (mgca, pairs),
    "clip": (clip, pairs),
    "convirt": (convirt, pairs),
    "medvill": (medvill, reports),
    "albef": (albef, reports),
    "vqa": (vqa, questions),
    "r2gen": (r2gen, reports),
}
EPOCHS = {"clip": 2, "convirt": 2}
"""Passes of the models that train on after a validation and a save. The others make one: the
gathered weights and states of these do not depend on the model.
"""


class Loader(fakes.FakeLoader):
    """The order of the fake one, samples of another kind."""

    def __init__(self, make: Make) -> None:
        super().__init__(SAMPLES, MICRO, *rank_and_world())
        self.make = make

    def change(self, batch: Batch) -> Batch:
        return self.make([int(key.removeprefix("s")) for key in batch.keys], self.epoch)


def run(run_dir: Path, name: str, model: nn.Module | None = None, **settings: Any) -> TrainResult:
    """A run of some epochs, with accumulation, clipping, weight decay and validation, on however
    many ranks.
    """
    rank, world = rank_and_world()
    build, make = MODELS[name]

    def score(model: nn.Module) -> dict[str, float]:
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        return {"score": float(model(make([2000, 2001], 0)).total)}

    return fakes.train(
        model or build(),
        Loader(make),
        optim=fakes.optim(
            lr=1e-3, eps=1e-6, weight_decay=0.1, clip_norm=CLIP, clip_value=0.3 * CLIP, amsgrad=True
        ),
        config=fakes.config(
            run_dir, **{"global_batch": 2 * MICRO, "accumulate": 2, "log_every": 1, **settings}
        ),
        valid_loader=[
            make([1000, 1001, 1002, 1003], 0),
            make([1004, 1005], 0),
            make([1006, 1007], 0),
        ][rank::world],
        evals=[score],
    )


class Sick(fakes.TwoTowers):
    """Its loss is infinite in one step on rank 1, with a finite gradient."""

    calls = 0

    def forward(self, batch: Batch) -> Losses:
        found = super().forward(batch)
        self.calls += self.training
        bad = rank_and_world()[0] == 1 and self.training and self.calls == 5
        return Losses(total=found.total + torch.inf if bad else found.total, terms=found.terms)


def check_sick(folder: Path) -> Any:
    model = Sick()
    with fakes.fake_files():
        result = fakes.train(
            model,
            fakes.FakeLoader(20, 4, *rank_and_world()),
            optim=fakes.optim(),
            config=fakes.config(folder / "sick", shard_weights=True),
        )
    return {
        "skipped": result.skipped,
        "weights": model.image.weight.tolist(),
        "scale": model.logit_scale.item(),
    }


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of this rank's part of tensors."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def check_bytes(ranks: RankInfo) -> Any:
    """Of parameters and of the optimiser's state, here and in all."""
    model = FSDPModel(medvill().train(), ranks)
    step = fakes.step_of(model, ranks=ranks)
    positions = [4 * ranks.rank + number for number in range(4)]
    assert step(0, 1e-3, [reports(positions, 0)], 1).updated
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    return {
        "parameters": bytes_of(trainable(step.optimizer)),
        "all_parameters": bytes_of(list(model.whole.parameters())),
        "optimizer": bytes_of(moments),
    }


def check_refusals(ranks: RankInfo) -> Any:
    """Error for a batch that cannot be sharded."""
    found = {}
    model = FSDPModel(medvill(), ranks)
    batch = reports([0, 1], 0)
    batch.has_image_B, batch.has_text_B = torch.tensor([True, False]), torch.tensor([False, False])
    try:
        model.check(batch)
    except TrainingError as error:
        found["batch"] = [
            error.code,
            error.field,
            f"of rank {ranks.rank} has a text (s0, s1)" in str(error),
        ]
    return found


def check_lacking(ranks: RankInfo) -> Any:
    """Gradient norms of a batch that lacks a text on rank 1, without shards and with."""
    norms = []
    for sharded in (False, True):
        model = medvill().train()
        step = fakes.step_of(
            FSDPModel(model, ranks) if sharded else DDPModel(model, ranks), ranks=ranks
        )
        batch = reports([0, 1, 2, 3], 0)
        if ranks.rank == 1:
            batch.has_text_B = torch.tensor([True, False, True, True])
        norms.append(float(step(0, 1e-3, [batch], 1).grad_norm))
    return norms


def train_all(folder: Path) -> None:
    """Do everything that two ranks do: train into folders of a folder, and write there what this
    rank found.
    """
    for name in MODELS:
        epochs = EPOCHS.get(name, 1)
        run(folder / f"{name} ddp", name, epochs=epochs)
        run(folder / f"{name} sharded", name, epochs=epochs, shard_weights=True)
    run(folder / "options ddp", "clip", **OPTIONS)
    run(folder / "options sharded", "clip", **OPTIONS, shard_weights=True)
    # Other backends trace the backward pass as well, which takes longer than all of these runs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager")
        )
        run(folder / "clip compiled", "clip", epochs=2, shard_weights=True, compile=True)
    if rank_and_world()[0] == 0:
        for copy in ("sharded, then ddp", "sharded, then alone", "sharded, then sharded"):
            shutil.copytree(folder / "clip sharded", folder / copy, symlinks=True)
    dist.barrier()
    run(folder / "sharded, then ddp", "clip", epochs=3)
    run(folder / "alone, then sharded", "clip", epochs=3, shard_weights=True)
    run(folder / "sharded, then sharded", "clip", epochs=3, shard_weights=True)
    model = clip()
    run(folder / "undisturbed", "clip", model, epochs=3, shard_weights=True)
    saved = fakes.weights(folder / "undisturbed")
    found: dict[str, Any] = {"sick": check_sick(folder)}
    found["kept"] = all(
        torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items()
    )
    with join("cpu") as ranks:
        found |= {
            "bytes": check_bytes(ranks),
            "refusals": check_refusals(ranks),
            "lacking": check_lacking(ranks),
        }
    (folder / f"{rank_and_world()[0]}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of torchrun for all that two ranks do, and what one process does before and
    after.
    """
    target = tmp_path_factory.mktemp("sharded")
    run(target / "alone", "clip", epochs=3)
    run(
        target / "alone, then sharded", "clip", epochs=2, shard_weights=True
    )  # one rank has nothing to share
    on_two_ranks(train_all, target, timeout=900)
    run(target / "sharded, then alone", "clip", epochs=3)
    return target


def found(folder: Path, name: str) -> list[Any]:
    """What each rank found."""
    return [json.loads((folder / f"{rank}.json").read_text())[name] for rank in (0, 1)]


def optimizer_state(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "last" / checkpoint.OPTIMIZER)


def assert_same_run(ours: Path, theirs: Path, near: float = 1e-4) -> None:
    """The same curve, validations included, and the same checkpoint to rounding.

    Adam divides a gradient by its size, so that the rounding of single tiny ones moves weights by a
    share of the rate.
    """
    for our, their in zip(fakes.records(ours), fakes.records(theirs), strict=True):
        assert our.pop("kind") == their.pop("kind")
        assert our == pytest.approx(their, rel=near)
    for files in (fakes.weights, optimizer_state):
        found, expected = files(ours), files(theirs)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=10 * near, atol=near), name


def test_attention_of_a_sharded_text_encoder_is_that_of_the_whole(folder: Path) -> None:
    """MGCA's curve; its batch norms of few samples multiply differences of rounding, so that
    weights are not compared.
    """
    ours, theirs = (fakes.records(folder / f"mgca {kind}") for kind in ("sharded", "ddp"))
    assert ours
    for our, their in zip(ours, theirs, strict=True):
        assert our.pop("kind") == their.pop("kind")
        assert our == pytest.approx(their, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mgca"])
def test_sharded_run_equals_the_ddp_run(name: str, folder: Path) -> None:
    """With accumulation, clipping, weight decay, running statistics, a frozen layer, a tied
    head, validation.
    """
    assert_same_run(folder / f"{name} sharded", folder / f"{name} ddp")
    (_, *rest) = fakes.records(folder / f"{name} sharded", "train")
    assert len(rest) == 2 * EPOCHS.get(name, 1) - 1
    assert all(row["grad_norm"] > CLIP for row in rest)  # so clipping was put to the test


def test_sharding_works_with_packed_text_checkpointing_and_16_bits(folder: Path) -> None:
    assert_same_run(folder / "options sharded", folder / "options ddp", near=2e-3)


def test_compiled_blocks_of_a_sharded_model_make_the_same_run(folder: Path) -> None:
    assert_same_run(folder / "clip compiled", folder / "clip sharded")


@pytest.mark.parametrize(
    "name", ["sharded, then ddp", "sharded, then alone", "alone, then sharded", "undisturbed"]
)
def test_resume_with_or_without_shards_on_any_number_of_ranks(name: str, folder: Path) -> None:
    assert_same_run(folder / name, folder / "alone")


def test_resume_of_a_sharded_run_is_exact(folder: Path) -> None:
    interrupted, undisturbed = folder / "sharded, then sharded", folder / "undisturbed"
    assert fakes.weights_hash(interrupted) == fakes.weights_hash(undisturbed)
    assert fakes.records(interrupted) == fakes.records(undisturbed)


def test_sharded_run_returns_the_weights_in_the_given_model(folder: Path) -> None:
    assert found(folder, "kept") == [True, True]


@pytest.mark.fault("F14")
def test_infinite_loss_on_one_rank_is_skipped_on_both(folder: Path) -> None:
    first, second = found(folder, "sick")
    assert first["skipped"] == second["skipped"] == 1
    assert first == second
    assert torch.tensor(first["weights"]).isfinite().all()


def test_each_of_two_ranks_holds_half_of_the_state(folder: Path) -> None:
    """To a row of each matrix; the scalars and step counts of Adam are on both."""
    parts = found(folder, "bytes")
    for part in parts:
        assert part["parameters"] == pytest.approx(part["all_parameters"] / 2, rel=0.01)
        assert part["optimizer"] == pytest.approx(2 * part["parameters"], rel=0.01)
    assert sum(part["parameters"] for part in parts) == pytest.approx(
        parts[0]["all_parameters"], rel=1e-3
    )


def test_missing_text_on_one_rank_does_not_block_the_others(folder: Path) -> None:
    first, second = found(folder, "lacking")
    for without, sharded in (first, second):
        assert sharded == pytest.approx(without, rel=1e-5)


def test_sharding_refuses_unsupported_batches(folder: Path) -> None:
    assert found(folder, "refusals") == [{"batch": ["empty", "shard_weights", True]}] * 2


@pytest.mark.parametrize(
    ("field", "value"), [("grad_cache", 2), ("precision", "fp16"), ("find_unused_parameters", True)]
)
def test_train_config_refuses_settings_that_cannot_be_sharded(
    field: str, value: Any, tmp_path: Path
) -> None:
    with raises(ConfigError, "conflict", field):
        TrainConfig(run_dir=tmp_path, steps=1, global_batch=4, shard_weights=True, **{field: value})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "clip",
            [
                "image_encoder.backbone.transformer.resblocks.",
                "text_encoder.backbone.encoder.layer.",
            ],
        ),
        ("convirt", ["image_encoder.backbone.stages.", "text_encoder.backbone.encoder.layer."]),
        ("medvill", ["image_encoder.backbone.stages.", "text_encoder.backbone.encoder.layer."]),
    ],
)
def test_repeated_blocks_are_layers_and_residual_blocks(name: str, expected: list[str]) -> None:
    model = MODELS[name][0]()
    names = {module: path for path, module in model.named_modules()}
    blocks = [names[block] for block in repeated_blocks(model)]
    assert len(set(blocks)) == len(blocks) >= 4
    assert {
        next(start for start in expected if block.startswith(start)) for block in blocks
    } == set(expected)
    assert not any(block.startswith(f"{other}.") for block in blocks for other in blocks)


def test_shared_buffers_exclude_momentum_queues() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), MomentumQueue(size=4, dim=2))
    assert [id(buffer) for buffer in shared_buffers(model)] == [
        id(buffer) for buffer in model[0].buffers()
    ]
