"""The doctor: measurements, limit and advice, and no changes to the run."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.shard_plans import make_plan
from helpers.volume_shards import volume_shards
from torch import nn

from medvl.cli import main as cli, recipes as doctor_module
from medvl.cli.recipes import doctor, load_recipe
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading import profile
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.profile import Stages, time_stages
from medvl.data.loading.sources import Subset, no_text
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.operations import Decode
from medvl.data.transforms.text import WholeText
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import ConfigError, ImageError
from medvl.schema import Batch, Losses
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.doctor.examine import (
    Examination,
    _volume_bytes,
    advice,
    describe,
    examine,
    first_rows,
    flops_per_sample,
    limit,
    matmul_flops,
    peak_memory,
    seconds_each,
    seconds_of,
)
from medvl.train.fault_tolerance import checkpoint
from medvl.train.optim.optimizer import Precision
from medvl.train.run import Run
from medvl.train.tasks.pretraining import DataLoaders

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What the doctor reads of a recipe's data."""

    workers: int = 0
    image: EvalTransform | ConVIRTAugmentation = dataclasses.field(default_factory=EvalTransform)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    optim: OptimConfig
    train: TrainConfig
    data: Data = Data()


def settings(run_dir: Path, **changes: Any) -> Settings:
    return Settings(optim=fakes.optim(), train=fakes.config(run_dir, **changes))


def found(**changes: Any) -> Examination:
    """A GPU that waits for nothing."""
    figures: dict[str, Any] = {
        "device": "H200", "precision": "bf16", "cores": 16, "threads": 8, "workers": 8,
        "pairs": 256, "parameters": 10**8, "gflop_per_pair": 90.0, "ceiling_tflops": 770.0,
        "model_rate": 2700.0, "loader_rate": 5000.0, "rate": 2600.0, "wait_share": 0.01,
        "transfer_seconds": 0.001, "real_tokens": 0.9, "first_batch_seconds": 1.0,
        "first_step_seconds": 50.0, "checkpoint_seconds": 0.5, "peak_gb": 100.0, "memory_gb": 141.0,
        "stages": Stages(disk=1e-5, decode=1e-3, augmentation=5e-4, text=1e-4),
    }  # fmt: skip
    return Examination(**{**figures, **changes})


FAST = {"precision": "bf16", "channels_last": True, "compile": True}
STARVED = {"loader_rate": 900.0, "rate": 880.0, "wait_share": 0.6}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, "compute"),
        ({"transfer_seconds": 0.02}, "transfer"),
        (STARVED, "decode"),
        (
            {**STARVED, "stages": Stages(disk=1e-2, decode=1e-3, augmentation=5e-4, text=1e-4)},
            "disk",
        ),
        (
            {**STARVED, "stages": Stages(disk=0, decode=1e-3, augmentation=5e-3, text=1e-4)},
            "augmentation",
        ),
        ({**STARVED, "stages": Stages(disk=0, decode=1e-3, augmentation=5e-4, text=1e-2)}, "text"),
        ({**STARVED, "stages": None}, "loading"),
        ({"device": "CPU", "memory_gb": None, "rate": 1500.0, "cores": 8}, "cores"),
        ({"device": "CPU", "memory_gb": None, "rate": 1500.0, "cores": 16}, "compute"),
        ({"device": "CPU", "memory_gb": None, "rate": 2690.0, "cores": 8}, "compute"),
    ],
)
def test_limit_follows_from_the_measurements(changes: dict[str, Any], part: str) -> None:
    assert limit(found(**changes)) == part


@pytest.mark.parametrize(
    ("changes", "train", "words"),
    [
        ({}, {}, ["--train.precision bf16", "--train.channels-last True", "--train.compile True"]),
        ({"peak_gb": 20.0}, FAST, ["--train.global-batch"]),
        (
            {"real_tokens": 0.4},
            FAST,
            ["60% of the token positions are padding: --train.packed-text True"],
        ),
        ({"real_tokens": 0.4}, {**FAST, "packed_text": True}, []),
        (
            {"real_tokens": 0.4, "device": "CPU", "memory_gb": None},
            {},
            ["60% of the token positions are padding: --train.packed-text True"],
        ),
        ({"peak_gb": 120.0}, FAST, []),
        (STARVED, {}, ["--data.workers 15: 16 cores, 8 workers", "medvl shards --short-side"]),
        (
            {**STARVED, "workers": 15},
            {},
            ["all 16 cores are used by 15 workers", "medvl shards --short-side"],
        ),
        (
            {**STARVED, "stages": Stages(disk=1, decode=0, augmentation=0, text=0)},
            {},
            ["local disk or in memory"],
        ),
        (
            {"device": "CPU", "memory_gb": None, "rate": 1500.0, "cores": 8},
            {},
            ["fewer --data.workers"],
        ),
        ({"device": "CPU", "memory_gb": None, "rate": 2690.0, "cores": 8}, {}, []),
    ],
)
def test_advice_names_options(
    changes: dict[str, Any], train: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    told = advice(found(**changes), settings(tmp_path, **train))
    assert len(told) == len(words)
    for line, word in zip(told, words, strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("on_device", "memory_gb", "lines"), [(False, 141.0, 2), (True, 141.0, 1), (False, None, 1)]
)
def test_advice_on_slow_augmentation(
    on_device: bool, memory_gb: float | None, lines: int, tmp_path: Path
) -> None:
    """The GPU can augment, where there is one that does not yet."""
    slow = {
        **STARVED,
        "workers": 15,
        "stages": Stages(disk=0, decode=1e-3, augmentation=5e-3, text=1e-4),
    }
    data = Data(image=ConVIRTAugmentation(on_device=on_device))
    chosen = dataclasses.replace(settings(tmp_path), data=data)
    told = [
        line
        for line in advice(found(**slow, memory_gb=memory_gb), chosen)
        if "--data.image" in line
    ]
    assert len(told) == lines
    assert told[-1].startswith("a weaker --data.image")


@pytest.mark.parametrize(
    ("decode", "memory_gb", "told"),
    [("full", 141.0, True), ("device", 141.0, False), ("full", None, False)],
)
def test_advice_on_slow_decoding(
    decode: Decode, memory_gb: float | None, told: bool, tmp_path: Path
) -> None:
    """The GPU can decode, where there is one that does not yet."""
    slow = {
        **STARVED,
        "workers": 15,
        "stages": Stages(disk=0, decode=1e-2, augmentation=0, text=1e-4),
    }
    data = Data(image=ConVIRTAugmentation(on_device=decode == "device", decode=decode))
    chosen = dataclasses.replace(settings(tmp_path), data=data)
    lines = advice(found(**slow, memory_gb=memory_gb), chosen)
    assert any("--data.image.decode device" in line for line in lines) == told
    assert lines[-1].startswith("smaller stored images")


def test_table_lists_all_measurements(tmp_path: Path) -> None:
    text = describe(found(), settings(tmp_path, precision="bf16", channels_last=True, compile=True))
    for value in ("2700.0 "
                  "pairs/s", "5000.0 "
                             "images/s", "2600.0 pairs/s, 0.96 of the slower", "1.0% of the time",
                  "31.6% of a measured 770 "
                  "TFLOP/s", "100.00 GB (GPU memory)", "90% of the positions", "1.0 s, 50.0 s",
                  "stops the run for 0.50 "
                  "s", "disk 0.01, decode 1.00, augmentation 0.50, text 0.10 ms",
                  "compute: the step itself", "no option would help"):  # fmt: skip
        assert value in text


def test_table_has_the_bytes_of_a_volume(tmp_path: Path) -> None:
    slow = {
        **STARVED,
        "workers": 15,
        "stages": Stages(disk=0, decode=1e-2, augmentation=0, text=1e-4),
        "volume_bytes": (9.1e6, 25.3e6),
    }
    text = describe(found(**slow), settings(tmp_path))
    assert "9.1 MB in its shard, 25.3 MB in a batch" in text
    assert "medvl shards --spacing and --size" in text
    assert "a volume" not in describe(found(), settings(tmp_path))


def test_bytes_of_volumes_are_those_of_their_members(tmp_path: Path) -> None:
    folder = volume_shards(tmp_path, 2, shape=(8, 16, 16))
    source = ShardSource(folder)
    opened = open_loader(
        Subset(source, [3, 1]),
        batch=2,
        image=VolumeTransform(size=(8, 16, 16)),
        text=WholeText(),
        tokenizer=no_text,
        train=False,
    )
    sizes = [len(source.image_bytes(row)) for row in (3, 1)]
    (batch,) = opened
    assert _volume_bytes(opened, batch) == (sum(sizes) / 2, 2 * 8 * 16 * 16)


class Products(nn.Module):
    """One product of matrices, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 5, bias=False)
        self.query = nn.Parameter(torch.randn(1, 1, 7, 4))

    def forward(self, batch: Batch) -> Losses:
        image_BD = batch.image_BCHW.flatten(1).float()
        query_BHTD = self.query.expand(len(batch), -1, -1, -1)
        attended = nn.functional.scaled_dot_product_attention(query_BHTD, query_BHTD, query_BHTD)
        return Losses.sum(both=self.linear(image_BD).sum() + attended.sum())


def test_flops_equal_the_formula(device: torch.device) -> None:
    """A product counts 2 n m k; its backward pass twice that, or once where its input wants no
    gradient.
    """
    model = Products().to(device)
    linear, attention = 2 * 36 * 5, 2 * (2 * 7 * 7 * 4)
    batch = fakes.make_batch(list(range(20))).to(device)
    counted = flops_per_sample(model, batch, Precision("fp32", device))
    assert counted == linear * 2 + attention * 3
    assert all(parameter.grad is None for parameter in model.parameters())


def test_first_rows_form_a_batch() -> None:
    batch = fakes.make_batch([3, 4, 5])
    few = first_rows(batch, 2)
    assert (few.keys, len(few.texts), few.studies) == (["s3", "s4"], 2, None)
    assert torch.equal(few.image_BCHW, batch.image_BCHW[:2])
    assert first_rows(batch, 8).keys == batch.keys
    shared = dataclasses.replace(
        batch, image_BCHW=batch.image_BCHW[:1], image_of_B=torch.zeros(3, dtype=torch.int64)
    )
    assert first_rows(shared, 2) is shared


def test_timers_count_calls_and_seconds() -> None:
    calls = Counter[int]()

    def nap(number: int) -> None:
        calls[number] += 1
        time.sleep(0.01)

    assert seconds_each(nap, CPU, 0.05) >= 0.01
    assert set(calls.values()) == {1}
    assert len(calls) >= 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_run_at_a_plausible_rate(
    precision: Literal["fp32", "bf16"], device: torch.device
) -> None:
    """A rate that was measured without waiting for the device would be far above the bound."""
    assert 1e8 < matmul_flops(device, Precision(precision, device), 0.0) < 5e15


def test_seconds_include_the_work_of_the_device(device: torch.device) -> None:
    """On a GPU, of CUDA's own events; the time until all products are queued would be a
    hundredth of theirs.
    """
    size = 4096 if device.type == "cuda" else 256
    left, out = torch.randn(size, size, device=device), torch.empty(size, size, device=device)

    def work(number: int = 0) -> None:
        for _ in range(20):
            torch.mm(left, left, out=out)

    def expected() -> float:
        if device.type == "cpu":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    work()
    least = 0.1 * min(expected() for _ in range(3))
    assert seconds_of(work, device) > least
    assert seconds_each(work, device, 0.0) > least


def test_peak_memory_counts_a_tensor_on_the_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.ones(2**24, device=device)
    assert peak_memory(device) >= held.numel() * held.element_size()


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    root = tmp_path_factory.mktemp("stages")
    options = ShardOptions(short_side=32, samples_per_shard=8, image_format="png")
    write_shards(
        make_plan(root / "images", 16),
        Deidentifier(b"0" * 32),
        ShardRun(out=root / "out", workers=1),
        options,
    )
    return open_loader(
        ShardSource(root / "out/train"), batch=4, image=EvalTransform(size=32), text=WholeText(),
        tokenizer=no_text, train=True,
    )  # fmt: skip


def test_each_loader_stage_is_timed(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, read, now = loader.samples, set[int](), [0.0]
    stored, transform, row, collate = (
        samples.source.image_bytes,
        samples.maker.views,
        samples.maker.row,
        loader.collate,
    )

    def image_bytes(position: int) -> bytes:
        now[0] += 0.003 if position in read else 0.023
        read.add(position)
        return stored(position)

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowed(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **named)

        return slowed

    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    monkeypatch.setattr(samples.source, "image_bytes", image_bytes)
    monkeypatch.setattr(samples.maker, "views", slow(transform, 0.006))
    monkeypatch.setattr(samples.maker, "row", slow(row, 0.009))
    monkeypatch.setattr(loader, "collate", slow(collate, 0.008))
    found = time_stages(loader, batch=4, batches=1)
    assert found.disk == pytest.approx(0.020)
    assert found.decode == pytest.approx(0.003)
    assert found.augmentation == pytest.approx(0.006)
    assert found.text == pytest.approx(0.009 + 0.008 / 4)
    assert found.total == pytest.approx(0.040)


def test_stage_timing_skips_unreadable_samples(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any) -> bytes:
        raise ImageError("the JPEG is truncated", "truncated")

    monkeypatch.setattr(loader.samples.source, "image_bytes", damaged)
    with raises(ImageError, "unreadable"):
        time_stages(loader, batch=2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_examination_leaves_the_run_unchanged(
    accumulate: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the device's name, its memory and its peak are measured as well."""
    monkeypatch.setattr(checkpoint, "model_files", fakes.FakeModelFiles)
    model = fakes.TwoTowers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state()
    changes = {"global_batch": 4 * accumulate, "accumulate": accumulate, "device": device.type}
    chosen = settings(tmp_path / "runs" / "mine", **changes)
    run = Run(
        recipe="fake",
        settings=chosen,
        model=model,
        data=DataLoaders(fakes.FakeLoader(20, 4), None, None, {}),
    )
    found = examine(run, seconds=0.05)
    assert list(tmp_path.iterdir()) == []
    assert all(
        torch.equal(before[name], tensor.cpu()) for name, tensor in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), generators)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    assert (found.device, found.pairs, found.workers, found.real_tokens) == (
        name,
        4 * accumulate,
        0,
        1.0,
    )
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    for name in ("model_rate", "loader_rate", "rate", "first_batch_seconds", "first_step_seconds",
                 "checkpoint_seconds", "peak_gb", "mfu", "efficiency"):  # fmt: skip
        assert getattr(found, name) > 0, name
    assert 0 <= found.wait_share < 1
    assert found.stages is None
    assert (found.memory_gb is None) == (device.type == "cpu")
    assert found.memory_gb is None or found.peak_gb < found.memory_gb < 1000


def test_doctor_refuses_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = Run(
        recipe="fake",
        settings=settings(tmp_path),
        model=nn.Linear(1, 1),
        data=DataLoaders(None, None, None, {}),
    )
    with raises(ConfigError, "unsupported"):
        examine(run)


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_examined(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, chosen = load_recipe(path, ["tiny", "--train.seed", "7"])
    assert chosen == dataclasses.replace(
        module.tiny, train=dataclasses.replace(module.tiny.train, seed=7)
    )
    with raises(ConfigError, "not_found", "data.train"):
        doctor([str(path), "tiny"])


def test_options_may_follow_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loaded: list[tuple[Path, list[str]]] = []

    def load(path: Path, arguments: list[str]) -> None:
        loaded.append((path, arguments))
        raise ConfigError("stop here", "unsupported")

    monkeypatch.setattr(doctor_module, "load_recipe", load)
    monkeypatch.chdir(tmp_path)
    Path("r.py").touch()
    for arguments in (
        ["r.py", "tiny", "--seconds", "3", "--data.train", "DIR", "--out", "o.json"],
        ["--seconds", "3", "r.py", "tiny", "--data.train", "DIR"],
    ):
        with raises(ConfigError, "unsupported"):
            doctor(arguments)
    assert loaded == [(Path("r.py"), ["tiny", "--data.train", "DIR"])] * 2
    with pytest.raises(SystemExit):
        doctor(["r.py", "tiny", "--seconds", "soon"])
    assert "--seconds: invalid float" in capsys.readouterr().err
    with raises(ConfigError, "unsupported"):
        doctor(["r.py", "tiny", "--help"])
    assert loaded[-1][1] == ["tiny", "--help"]


def test_doctor_refuses_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_recipe(tmp_path / "none.py", [])
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_recipe(Path(__file__).with_suffix(".toml"), [])
    (tmp_path / "other.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="is not a recipe"):
        load_recipe(tmp_path / "other.py", [])


def test_doctor_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "RECIPE [PRESET] [settings of the recipe ...]" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", str(tmp_path / "none.py"), "tiny"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"medvl: {tmp_path / 'none.py'} is not a file")
    cli.main(["--help"])
    assert "  recipes, train, doctor  " in capsys.readouterr().out
