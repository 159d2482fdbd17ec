"""Configs: ranges, JSON round trip, command line."""

import dataclasses
import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common.config_io import differences
from medvl.errors import ConfigError
from medvl.train import (
    Constant,
    Cosine,
    Linear,
    OptimConfig,
    Plateau,
    TrainConfig,
    choose,
    from_dict,
    to_dict,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFake:
    train: str
    sizes: tuple[int, ...] = (224, 224)
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeFake:
    data: DataFake
    optim: OptimConfig
    train: TrainConfig


PAPER = RecipeFake(
    data=DataFake(train="shards/train", weights={"a": 0.5}),
    optim=OptimConfig(lr=1e-4, schedule=Plateau(factor=0.5, patience=12)),
    train=TrainConfig(run_dir=Path("runs/paper"), epochs=200, global_batch=32, validate_every=100),
)
TINY = dataclasses.replace(
    PAPER, train=TrainConfig(run_dir=Path("runs/tiny"), steps=5, global_batch=8)
)
PRESETS = {"paper": PAPER, "tiny": TINY}


@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    "schedule", [Constant(), Linear(min_lr=1e-6), Cosine(warmup_steps=7), Plateau(patience=3)]
)
def test_json_round_trip_keeps_every_value_and_type(schedule: object) -> None:
    recipe = dataclasses.replace(
        PAPER, optim=OptimConfig(betas=(0.5, 0.75), clip_norm=1.0, schedule=schedule)
    )
    again = from_dict(RecipeFake, json.loads(json.dumps(to_dict(recipe))))
    assert again == recipe
    assert isinstance(again.train.run_dir, Path)
    assert isinstance(again.optim.betas, tuple)


def test_to_dict_leaves_fields_out() -> None:
    whole = to_dict(PAPER)
    assert to_dict(PAPER, leave_out=("optim", "train")) == {
        name: value for name, value in whole.items() if name not in ("optim", "train")
    }


def test_from_dict_converts_integers_to_floats() -> None:
    lr = from_dict(OptimConfig, {"lr": 1}).lr
    assert lr == 1.0
    assert isinstance(lr, float)


@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    ("data", "code", "field", "names"),
    [
        ({"learning_rate": 1.0}, "unknown_name", "learning_rate", "OptimConfig"),
        ({"weight_decy": 1.0}, "unknown_name", "weight_decy", "did you mean 'weight_decay'"),
        ({"lr": "1e-4"}, "wrong_type", "lr", "got '1e-4'"),
        ({"lr": True}, "wrong_type", "lr", "got True"),
        ({"clip_norm": "a"}, "wrong_type", "clip_norm", "expected type float"),
        ({"optimizer": "adamW"}, "unknown_name", "optimizer", "'adamw'"),
        ({"betas": [0.9]}, "wrong_type", "betas", "expected 2 entries, got 1"),
        ({"betas": 0.9}, "wrong_type", "betas", "a list"),
        ({"betas": [0.9, "b"]}, "wrong_type", "betas.1", "got 'b'"),
        ({"schedule": {"kind": "Cosin"}}, "unknown_name", "schedule", "did you mean 'Cosine'"),
        (
            {"schedule": {"kind": "Cosine", "warmup": 1}},
            "unknown_name",
            "schedule.warmup",
            "'warmup_steps'",
        ),
        ({"schedule": {"kind": "Cosine", "min_lr": -1}}, "out_of_range", "schedule.min_lr", ""),
        (
            {"schedule": 3},
            "wrong_type",
            "schedule",
            "Constant, Linear, Cosine, CosineRestarts, Plateau, StepDecay, got 3",
        ),
    ],
)
def test_from_dict_names_the_invalid_field(
    data: dict[str, object], code: str, field: str, names: str
) -> None:
    with raises(ConfigError, code, field, names=names):
        from_dict(OptimConfig, data)


def test_from_dict_names_a_missing_field_by_its_path() -> None:
    with raises(ConfigError, "missing", "train.run_dir"):
        from_dict(
            RecipeFake,
            {"data": {"train": "x"}, "optim": {}, "train": {"global_batch": 4, "steps": 1}},
        )


def test_from_dict_accepts_python_values() -> None:
    assert from_dict(OptimConfig, {"betas": (0.5, 0.75), "schedule": Cosine()}).schedule == Cosine()


class OldFake(DataFake):
    former = (("depth", 0.5), ("mode", "a"))


class OlderFake(OldFake):
    former = (("depth", 1),)


def test_a_former_field_may_hold_the_constant_that_replaced_it() -> None:
    """A class has the former fields of its bases as well, and may give another constant."""
    assert from_dict(OldFake, {"train": "x", "depth": 0.5, "mode": "a"}) == OldFake(train="x")
    assert from_dict(OlderFake, {"train": "x", "depth": 1, "mode": "a"}) == OlderFake(train="x")
    with raises(ConfigError, "unsupported", "depth", names="expected 0.5, got 1"):
        from_dict(OldFake, {"train": "x", "depth": 1})
    with raises(ConfigError, "unsupported", "mode"):
        from_dict(OlderFake, {"train": "x", "mode": "b"})
    with raises(ConfigError, "unknown_name", "width"):
        from_dict(OldFake, {"train": "x", "width": 1})


def test_to_dict_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="set"):
        to_dict(dataclasses.replace(PAPER.data, weights={"a": {1, 2}}))


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"lr": 0.0}, "out_of_range", "lr"),
        ({"lr": float("nan")}, "out_of_range", "lr"),
        ({"betas": (0.9, 1.0)}, "out_of_range", "betas"),
        ({"layer_decay": 1.5}, "out_of_range", "layer_decay"),
        ({"clip_norm": -1.0}, "out_of_range", "clip_norm"),
        ({"optimizer": "lion"}, "unknown_name", "optimizer"),
        ({"lr": 1e-4, "schedule": Cosine(min_lr=1e-3)}, "conflict", "schedule.min_lr"),
    ],
)
def test_optim_config_refuses_invalid_values(
    fields: dict[str, object], code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        OptimConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({}, "missing", "epochs"),
        ({"steps": 0}, "out_of_range", "steps"),
        ({"steps": 1, "global_batch": 6, "accumulate": 4}, "conflict", "accumulate"),
        ({"steps": 1, "keep_last": 0}, "out_of_range", "keep_last"),
        ({"steps": 1, "validate_every": 0}, "out_of_range", "validate_every"),
        ({"steps": 1, "precision": "fp8"}, "unknown_name", "precision"),
        ({"steps": 1, "nonfinite_budget": -1}, "out_of_range", "nonfinite_budget"),
    ],
)
def test_train_config_refuses_invalid_values(
    fields: dict[str, object], code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        TrainConfig(**{"run_dir": Path("runs/x"), "global_batch": 8, **fields})


def test_micro_batch_is_the_global_batch_divided_by_accumulate() -> None:
    assert TrainConfig(run_dir=Path("r"), steps=1, global_batch=32, accumulate=4).micro_batch == 8


def test_differences_names_changed_added_and_removed_leaves() -> None:
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}
    assert differences(old, new) == [("a.c", 2, 4), ("d", 3, None), ("e", None, 5)]


def test_command_line_selects_and_changes_a_preset() -> None:
    assert choose(PRESETS, []) == PAPER
    assert choose(PRESETS, ["tiny"]) == TINY
    changed = choose(
        PRESETS, ["tiny", "--optim.lr", "3e-4", "--data.train", "elsewhere", "--train.seed", "5"]
    )
    assert (changed.optim.lr, changed.data.train, changed.train.seed) == (3e-4, "elsewhere", 5)
    assert changed.optim.schedule == TINY.optim.schedule
    assert choose(PRESETS, ["--train.validate-every", "epoch"]).train.validate_every == "epoch"
    assert choose(PRESETS, ["--optim.schedule.patience", "3"]).optim.schedule == Plateau(
        factor=0.5, patience=3
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["huge"], "no preset 'huge': known: paper, tiny"),
        (["tin"], "no preset 'tin': did you mean 'tiny'?"),
        (["--optim.lrr", "1"], "--optim.lrr"),
        (["--optim.lr", "fast"], "--optim.lr"),
        (["--optim.lr", "-1"], "lr must be above 0"),
        (["--train.run-dir"], "--train.run-dir"),
    ],
)
def test_wrong_command_line_exits_with_status_2_and_names_the_flag(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        choose(PRESETS, arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_train_config_flags_are_stable() -> None:
    """A flag is a promise to everyone who has it in a script: adding or renaming one is decided
    here.
    """
    assert [field.name for field in dataclasses.fields(TrainConfig)] == [
        *(
            "run_dir",
            "epochs",
            "steps",
            "scale_below",
            "global_batch",
            "accumulate",
            "grad_cache",
            "seed",
        ),
        *(
            "precision",
            "device",
            "channels_last",
            "compile",
            "packed_text",
            "checkpoint_activations",
        ),
        *(
            "deterministic",
            "shard_weights",
            "sharded_checkpoints",
            "find_unused_parameters",
            "num_threads",
        ),
        *("validate_every", "best_metric", "best_mode", "early_stop_patience"),
        *(
            "checkpoint_every",
            "keep_last",
            "resume",
            "nonfinite_budget",
            "spike_factor",
            "rollbacks",
        ),
        *("log_every", "tensorboard", "wandb"),
    ]
    assert [field.name for field in dataclasses.fields(OptimConfig)] == [
        *("optimizer", "lr", "betas", "eps", "amsgrad", "momentum", "weight_decay", "layer_decay"),
        *("clip_norm", "clip_value", "schedule"),
    ]


@pytest.mark.parametrize(
    ("steps", "warmup", "every"), [(1000, 100, 250), (999, 99, 249), (42, 4, 10), (3, 0, 1)]
)
def test_short_runs_scale_what_counts_steps(
    steps: int, warmup: int, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "medvl")
    train = TrainConfig(
        run_dir=Path("r"), epochs=1, global_batch=4, scale_below=1000, validate_every=250
    )
    optim, scaled = train.scaled(OptimConfig(schedule=Cosine(warmup_steps=100, min_lr=1e-6)), steps)
    assert optim.schedule == Cosine(warmup_steps=warmup, min_lr=1e-6)
    assert (scaled.validate_every, scaled.checkpoint_every) == (every, "epoch")
    told = (
        f"{steps} steps are fewer than --train.scale-below 1000: --optim.schedule.warmup-steps 100 "
        f"is {warmup}, --train.validate-every 250 is {every}; None takes them as given"
    )
    assert caplog.messages == ([told] if steps < 1000 else [])
    longer = dataclasses.replace(train, scale_below=None)
    assert longer.scaled(OptimConfig(), steps) == (OptimConfig(), longer)


_QUICKSTART = 5_371
"""Pairs of `medvl phantom quickstart`."""


def test_presets_are_as_before_on_the_quickstart() -> None:
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.py")):
        for name, preset in runpy.run_path(str(path))["PRESETS"].items():
            below, train = preset.train.scale_below, preset.train
            data = str(getattr(preset.data, "train", ""))
            if data == "shards/ours/train":  # of any size
                continue
            assert below is None or data == "quickstart/shards/train", (path.stem, name)
            steps = train.total_steps(_QUICKSTART // train.global_batch)
            assert below is None or below <= steps, (path.stem, name, steps)


def test_configs_and_command_line_do_not_import_torch() -> None:
    code = (
        "import sys; from medvl.train import TrainConfig, OptimConfig, choose, to_dict; "
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
