"""Speed of a step: no waits, compilation, packing, patch dropout, activation checkpointing."""

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.train_fakes import ONE_RANK, one_rank
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import medvl
from medvl.errors import ConfigError
from medvl.models import DualEncoder
from medvl.schema import Batch, Inputs, Losses
from medvl.train.fault_tolerance import checkpoint, guards
from medvl.train.loop.step import Step, against_cuda_graphs, pad_texts, parallelize, prepare
from medvl.train.optim.optimizer import Precision
from medvl.train.parallel.distributed import RankInfo, machine_settings
from medvl.train.parallel.model import DDPModel, ParallelModel

VIT = {"layers": 2, "width": 64, "patch_size": 8}
TEXT = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOWERS = {
    "image_encoder": "open_clip:ViT-B-32",
    "image_arguments": VIT,
    "image_size": 32,
    "projection_dim": 16,
}
PAIRS, PATCHES = 4, 16
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "unique")
"""Operations whose result the host must have before it can go on: `.item()`, and shapes that
depend on values.
"""


def clip(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    text = {"text_encoder": "tiny_bert", "text_arguments": TEXT, "vocab_size": 40}
    return medvl.create_model("clip", **{**TOWERS, **text, **settings})


def make_batch(longest: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch(
        keys=[f"s{number}" for number in range(PAIRS)],
        image_BCHW=torch.randint(
            0, 256, (PAIRS, 1, 32, 32), generator=generator, dtype=torch.uint8
        ),
        ids_BT=torch.randint(5, 40, (PAIRS, longest), generator=generator),
        mask_BT=torch.arange(longest) < torch.tensor([7, 2, 5, 3])[:, None],
        labels_BL=torch.zeros(PAIRS, 1),
        texts=[""] * PAIRS,
    )


def step_of(
    model: nn.Module | ParallelModel,
    ranks: RankInfo = ONE_RANK,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Step:
    """With the fused optimiser of a GPU, which keeps its step counts beside its moments."""
    parallel = model if isinstance(model, ParallelModel) else DDPModel(model, ranks)
    model = parallel.trained
    groups = [{"params": list(model.parameters()), "lr_scale": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6, fused=True)
    options = {"seed": 0, "clip_norm": 1.0, "channels_last": True}
    return Step(parallel, optimizer, Precision(precision, ranks.device), **options)


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("packed", "patch_dropout", "expected"),
    [
        (False, 0.0, ["_local_scalar_dense"]),
        (False, 0.5, ["_local_scalar_dense"]),
        (True, 0.5, ["nonzero", "_local_scalar_dense"]),
    ],
)
def test_step_synchronises_once(packed: bool, patch_dropout: float, expected: list[str]) -> None:
    """Whether the gradient is finite decides about the update. Packed texts ask for their
    lengths before anything.
    """
    model = clip(patch_dropout=patch_dropout).train()
    if packed:
        model.text_encoder.pack()
    step = step_of(model)
    step(0, 1e-3, [make_batch()], 1)
    with Waits() as waits:
        result = step(1, 1e-3, [make_batch()], 1)
    assert result.updated
    assert waits.seen == expected


@pytest.mark.fault("N3")
@pytest.mark.parametrize(
    ("device", "backend", "packed", "precision", "near"),
    [
        ("cpu", "eager", True, "fp32", 1e-5),
        ("cpu", "eager", False, "bf16", 1e-2),
        pytest.param("cuda", "inductor", False, "fp32", 1e-4, marks=pytest.mark.gpu),
        pytest.param("cuda", "inductor", True, "bf16", 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_compiled_model_makes_the_same_steps_with_few_graphs(
    device: str,
    backend: str,
    packed: bool,
    precision: Literal["fp32", "bf16"],
    near: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend that runs eagerly keeps the test short on a CPU. The second length of text makes
    graphs for all that follow. A GPU's convolutions are in full float32, since the compiler may
    choose another layout and algorithm.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    graphs, ranks = CompileCounterWithBackend(backend), one_rank(torch.device(device))
    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **mode: compile_module(module, backend=graphs)
    )
    torch.compiler.reset()
    one_layer = {
        "image_arguments": {**VIT, "layers": 1},
        "text_arguments": {**TEXT, "num_hidden_layers": 1},
    }
    plain, compiled = clip(**one_layer), clip(**one_layer)
    step, compiled_step = (
        step_of(
            parallelize(model, fakes.config(Path("unused"), **options), ranks), ranks, precision
        )
        for model, options in (
            (plain, {"packed_text": packed}),
            (compiled, {"packed_text": packed, "compile": True}),
        )
    )
    counts = []
    for number, longest in enumerate((7, 12, 6, 20)):
        batch = make_batch(longest)
        ours, theirs = compiled_step(number, 1e-3, [batch], 1), step(number, 1e-3, [batch], 1)
        torch.testing.assert_close(ours.losses[0].total, theirs.losses[0].total, rtol=near, atol=0)
        counts.append(graphs.frame_count)
    assert counts[0] > 0
    assert counts[1] == counts[-1], "each length of text is compiled anew"
    if precision == "fp32":  # in 16 bits the rounding of tiny gradients makes updates of full size
        for (name, mine), other in zip(
            compiled.named_parameters(), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(
                mine, other, rtol=near, atol=near, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.fault("N3")
@pytest.mark.parametrize(("packed", "graphs"), [(False, 1), (True, 7)])
def test_compiled_model_is_compiled_once_for_texts_of_one_width(
    packed: bool, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded, encoders and loss are one graph; packed, the number of real tokens is dynamic from
    the first step on.
    """
    counter, compile_module = CompileCounterWithBackend("eager"), nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda module: compile_module(module, backend=counter)
    )
    torch.compiler.reset()
    model = clip(
        image_arguments={**VIT, "layers": 1}, text_arguments={**TEXT, "num_hidden_layers": 1}
    )
    config = fakes.config(Path("unused"), compile=True, packed_text=packed)
    step, plain, counts = step_of(parallelize(model, config, ONE_RANK)), make_batch(), []
    for number, length in enumerate((7, 5, 6)):
        mask_BT = torch.arange(7) < torch.tensor([length, 2, 5, 3])[:, None]
        step(
            number,
            1e-3,
            [dataclasses.replace(plain, mask_BT=mask_BT, keys=[f"{number}"] * PAIRS)],
            1,
        )
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2] <= graphs


@pytest.mark.fault("N3")
@pytest.mark.parametrize("packed", [False, True])
def test_filling_of_texts_and_rows_changes_no_loss_and_no_gradient(packed: bool) -> None:
    """A compiled model's texts of 45 tokens are padded to 48, and 101 packed ones fill 128 rows."""
    lengths_B1 = torch.tensor([45, 38, 16, 2])[:, None]
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(5, 40, (PAIRS, 45), generator=generator)
    batch = dataclasses.replace(make_batch(), ids_BT=ids_BT, mask_BT=torch.arange(45) < lengths_B1)
    outcomes = []
    for compiled in (False, True):
        model = clip().train()
        model.text_encoder.pack(packed and compiled)
        parallel = DDPModel(model, ONE_RANK)
        parallel.compiled = "kernels" if compiled else None
        placed = step_of(parallel).place(batch)
        assert placed.ids_BT.shape == placed.mask_BT.shape == (PAIRS, 48 if compiled else 45)
        losses = parallel.forward(placed)
        losses.total.backward()
        outcomes.append((losses.total, *(parameter.grad for parameter in model.parameters())))
    for ours, theirs in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_texts_of_compiled_models_have_few_lengths() -> None:
    sentence_BT = torch.zeros(PAIRS, 7, dtype=torch.int64)
    batch = dataclasses.replace(make_batch(), sentence_BT=sentence_BT)
    padded = pad_texts(batch, 77)
    assert padded.sentence_BT is not None
    assert padded.sentence_BT[0].tolist() == [0] * 7 + [-1]
    assert padded.mask_BT.sum() == batch.mask_BT.sum()
    assert pad_texts(padded, 77) is padded
    assert pad_texts(batch, 7) is batch
    lengths = [pad_texts(make_batch(longest), 77).ids_BT.shape[1] for longest in range(1, 78)]
    assert sorted({*lengths}) == [8, 16, 24, 32, 40, 48, 56, 64, 77]
    assert all(length >= longest for longest, length in enumerate(lengths, start=1))


def test_cuda_graphs_apply_to_one_gpu_and_models_of_fixed_shapes(caplog: Any) -> None:
    caplog.set_level("INFO")
    model = clip()
    parallelize(model, fakes.config(Path("unused"), compile=True), ONE_RANK)
    assert "the model is compiled, without CUDA graphs: they need a GPU" in caplog.text

    def reason(model: nn.Module, size: int = 1) -> str | None:
        ranks: Any = SimpleNamespace(device=torch.device("cuda"), size=size)
        parallel: Any = SimpleNamespace(trained=model, ranks=ranks)
        return against_cuda_graphs(parallel)

    assert reason(model) is None
    assert "exchange gradients" in (reason(model, 2) or "")
    assert "Regression has shapes that change" in (reason(fakes.Regression()) or "")
    model.inputs = Inputs(sentences=True)
    assert "clip has shapes that change" in (reason(model) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_cuda_graphs_make_the_same_steps(packed: bool) -> None:
    """Over two lengths of text, with the losses of all steps kept."""
    ranks, steps = one_rank(torch.device("cuda")), []
    for compile in (False, True):
        config = fakes.config(Path("unused"), compile=compile, packed_text=packed)
        steps.append(step_of(parallelize(clip(), config, ranks), ranks, "bf16"))
    assert steps[1].model.compiled == "graphs"
    batches = [make_batch(longest) for longest in (7, 7, 12, 7, 12, 7)]
    plain, graphs = (
        [step(number, 1e-3, [batch], 1).losses[0].total for number, batch in enumerate(batches)]
        for step in steps
    )
    torch.testing.assert_close(torch.stack(graphs), torch.stack(plain), rtol=2e-2, atol=0)


def kept_patches(model: DualEncoder) -> list[Tensor]:
    """What the vision Transformer is told to keep, of each forward pass from now on."""
    seen: list[Tensor] = []
    model.image_encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    return seen


def test_patches_are_dropped_in_training_only() -> None:
    model, plain, batch = clip(patch_dropout=0.75), clip(), make_batch()
    model.load_state_dict(plain.state_dict())
    seen = kept_patches(model)
    with torch.no_grad():
        torch.manual_seed(1)
        trained = model.train().encode_image(batch.image_BCHW)
        assert seen[0].shape == (PAIRS, PATCHES // 4)
        assert all(
            len(set(row)) == len(row) and set(row) <= set(range(PATCHES))
            for row in seen[0].tolist()
        )
        assert len({tuple(row) for row in seen[0].tolist()}) > 1  # each image loses others
        for mode in (plain.train(), plain.eval()):
            assert torch.equal(
                model.eval().encode_image(batch.image_BCHW), mode.encode_image(batch.image_BCHW)
            )
    assert seen[1] is seen[2] is None
    assert not torch.equal(trained, plain.encode_image(batch.image_BCHW))


def test_patches_are_dropped_uniformly() -> None:
    model, image_BCHW = clip(patch_dropout=0.5).train(), make_batch().image_BCHW
    torch.manual_seed(0)
    seen = [model._draw_patches(image_BCHW) for _ in range(100)]
    count_P = torch.bincount(torch.cat(seen).flatten(), minlength=PATCHES)
    assert count_P.sum() == 100 * PAIRS * PATCHES / 2
    assert (count_P - 200).abs().max() < 50  # five standard deviations of a binomial of 400 draws


def test_dropped_patches_follow_from_the_step_number() -> None:
    """So a run that was interrupted leaves out what it would have left out."""
    whole, resumed = clip(patch_dropout=0.5).train(), clip(patch_dropout=0.5).train()
    seen, seen_again = kept_patches(whole), kept_patches(resumed)
    step, step_again = step_of(whole), step_of(resumed)
    for number in range(3):
        step(number, 1e-3, [make_batch()], 1)
    torch.manual_seed(77)
    step_again(2, 1e-3, [make_batch()], 1)
    assert torch.equal(seen[2], seen_again[0])
    assert not torch.equal(seen[1], seen[2])


def test_patch_dropout_refuses_unsupported_encoders() -> None:
    with pytest.raises(ConfigError, match="patch_dropout must be"):
        clip(patch_dropout=1.0)
    with pytest.raises(ConfigError, match="resnet_tiny"):
        clip(image_encoder="resnet_tiny", image_arguments={}, patch_dropout=0.5)


def test_packing_and_checkpointing_keep_the_values(tmp_path: Path) -> None:
    weights = []
    for settings in ({}, {"packed_text": True, "checkpoint_activations": True}):
        model = clip()
        prepare(model, fakes.config(tmp_path, **settings), ONE_RANK.device)
        assert model.training
        step = step_of(model)
        for number in range(2):
            step(number, 1e-3, [make_batch()], 1)
        weights.append(
            torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        )
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-4)


def test_prepare_refuses_settings_that_do_not_apply(tmp_path: Path) -> None:
    with raises(ConfigError, "unsupported", "packed_text"):
        prepare(fakes.Regression(), fakes.config(tmp_path, packed_text=True), ONE_RANK.device)
    with raises(ConfigError, "unsupported", "checkpoint_activations"):
        prepare(
            fakes.Regression(), fakes.config(tmp_path, checkpoint_activations=True), ONE_RANK.device
        )


class Watching(fakes.Regression):
    """Notes in each step how many objects the collector passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_over: list[int] = []

    def forward(self, batch: Batch) -> Losses:
        self.passed_over.append(gc.get_freeze_count() if gc.isenabled() else 0)
        return super().forward(batch)


def test_garbage_collector_skips_objects_from_before_the_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)
    monkeypatch.setattr(guards, "gc", gc)  # other tests leave it as it is: see conftest.py
    gc.unfreeze()
    model = Watching()
    fakes.train(
        model, fakes.FakeLoader(12, 4), optim=fakes.optim(), config=fakes.config(tmp_path, epochs=1)
    )
    assert len(model.passed_over) == 3
    assert min(model.passed_over) > 10_000
    assert gc.get_freeze_count() == 0
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("name", ["convirt", "gloria"])
def test_attention_dropout_defaults_to_the_encoder(name: str) -> None:
    towers: dict[str, Any] = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "frozen_text_layers": 0,
    }

    def shares(**settings: Any) -> set[float]:
        layers = medvl.create_model(name, **towers, **settings).text_encoder.backbone.encoder.layer
        return {layer.attention.self.dropout.p for layer in layers}

    assert shares() == {0.1}
    assert shares(attention_dropout=0.0) == {0.0}
    assert shares(attention_dropout=0.25) == {0.25}
    with raises(ConfigError, "out_of_range", "attention_dropout"):
        medvl.create_model(name, **towers, attention_dropout=1.0)


@pytest.mark.parametrize(
    ("device", "precision", "deterministic", "during"),
    [
        ("cuda", "bf16", False, ("high", True)),
        ("cuda", "fp32", False, ("highest", True)),
        ("cuda", "fp16", True, ("high", False)),
        ("cpu", "bf16", False, ("highest", False)),
    ],
)
def test_machine_settings_set_gpu_precision_and_benchmarking(
    device: str, precision: str, deterministic: bool, during: tuple[str, bool]
) -> None:
    """TensorFloat32 beside 16 bits, cuDNN's trials unless results are to be repeatable;
    afterwards as it was.
    """

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    before = settings()
    ranks = RankInfo(rank=0, size=1, local_size=1, device=torch.device(device))
    with machine_settings(ranks, None, deterministic, precision):
        assert settings() == during
    assert settings() == before == ("highest", False)
