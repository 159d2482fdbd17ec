"""`scripts/benchmark.py` at tiny sizes on a CPU: every line works, records, limits, profiles, tables
and the rows of PERFORMANCE.md; and `scripts/gpu_tests.py`.
"""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import forked

ROOT = Path(__file__).parents[1]
pytest.importorskip("open_clip_train")


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Iterator[None]:
    """The folder of the scripts, from which they import each other, on the path of this module's
    tests alone.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def command() -> ModuleType:
    import benchmark

    return benchmark


def records_in(folder: Path) -> dict[str, Any]:
    path = folder / "all.json"
    return json.loads(path.read_text()) if path.exists() else {}


UNMEASURED = {"engines"}
"""Lines whose peer a dry run leaves out: Ray."""


def dry_run(command: ModuleType, folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the records of a dry run, in which no line may fail."""
    arguments = [*names, "--dry-run", "--details", "--out", str(folder / "all.json")]
    assert command.main(arguments) == 0
    assert list(records_in(folder)) == names
    return records_in(folder)


def profiles(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the profiles of the rows that have one: in a dry run the first contender."""
    return [row["profile"] for row in rows if row["profile"] is not None]


class ForkedServer:
    """`medvl serve` as a fork, in place of a `subprocess.Popen` that imports its libraries."""

    def __init__(self, command: list[str], stderr: int, text: bool) -> None:
        assert (stderr, text) == (subprocess.PIPE, True)
        self._folder = tempfile.TemporaryDirectory()
        pipe = Path(self._folder.name, "stderr")
        self._process, self.stderr = forked.start_with_pipe(command, pipe, cwd=ROOT)

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float) -> None:
        self.stderr.read()
        self.stderr.close()
        self._process.join(timeout)
        self._folder.cleanup()


# Twenty lines, each of which builds models or data and measures a step.
@pytest.mark.slow
def test_every_line_of_a_cpu_works(
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each line has a figure for each of its rows in PERFORMANCE.md."""
    from lines import serve

    processes = SimpleNamespace(Popen=ForkedServer, PIPE=subprocess.PIPE)
    monkeypatch.setattr(serve, "subprocess", processes)
    lines = {name: line for name, line in command.read_lines().items() if line.device == "cpu"}
    records = dry_run(command, tmp_path, list(lines))
    rows = capsys.readouterr().out
    for name, line in lines.items():
        figures = records[name]["report"]["figures"]
        assert all(figure >= 0 for figure in figures.values()), name
        assert figures, name
        for row in line.rows:
            (found,) = [text for text in rows.splitlines() if text.startswith(f"| {row.title} |")]
            assert found.endswith(f"| `{line.command}` |")
            assert ("not measured" in found) == (name in UNMEASURED), found


# Fourteen lines, each of which builds and profiles the models of its contenders.
@pytest.mark.slow
def test_every_line_of_a_gpu_works(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but `clip-b16`, whose code is that of `clip-b32`, and the sweep over systems."""
    every = command.read_lines()
    left_out = ("clip-b16", "systems")
    names = [name for name in every if every[name].device == "gpu" and name not in left_out]
    assert len(names) == 14
    records = dry_run(command, tmp_path, names)
    table = capsys.readouterr().out
    assert "not available: torchvision" in table or records["nvjpeg"]["report"] is not None
    for name in set(names) - {"nvjpeg"}:
        rows = records[name]["report"]["rows"]
        assert all(row["error"] is None and row["rate"] > 0 for row in rows), name
        assert f"`python scripts/benchmark.py {name}`" in table
        for row in rows:
            if row["ms"] is not None:
                assert row["ms_p10"] <= row["ms"] <= row["ms_p90"]
        for profile in profiles(rows):
            assert profile["kernels"]
            assert sum(profile["shares"].values()) == pytest.approx(1)
    for name in ("convirt", "clip-b32", "convirt-lengths", "bert", "m3ae", "medvill"):
        steps = [row for row in records[name]["report"]["rows"] if row["ms"] is not None]
        assert all(row["mfu"] > 0 for row in steps), name
        assert profiles(steps), name
        assert all(profile["shares"]["matrix products"] > 0 for profile in profiles(steps)), name
    assert "Tiny sizes" in table


def fake_line(name: str, function: Callable[[Any], Any], seconds: float = 1.0) -> Any:
    from measure.line import Line, TableRow

    rows = (
        TableRow(title=f"{name}, rate", ours="{pairs/s:.0f} pairs/s", target="5 pairs/s"),
        TableRow(title=f"{name}, time", peer="other: {rows[0].ms:.1f} ms", ours="{ms:.1f} ms"),
    )
    return Line(
        name=name, device="gpu", measures="a test", unit="pairs/s", rows=rows, seconds=seconds,
        function=function,
    )  # fmt: skip


def fake_lines(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the lines by one that works, one that fails at first, and one that this machine
    cannot measure.
    """
    from measure.line import Row, SkipLine, report

    calls = {"good": 0, "bad": 0, "absent": 0}

    def good(bench: Any) -> Any:
        calls["good"] += 1
        return report([Row(contender="medvl", rate=6.0)], {"pairs/s": 6.0, "ms": None}, "a note")

    def bad(bench: Any) -> Any:
        calls["bad"] += 1
        if calls["bad"] == 1:
            raise RuntimeError("out of\nmemory")
        return report(
            [
                Row(
                    contender="medvl",
                    error="RuntimeError: no kernel" if calls["bad"] == 2 else None,
                )
            ],
            {},
        )

    def absent(bench: Any) -> Any:
        calls["absent"] += 1
        raise SkipLine("no such unit")

    use_lines(
        command, monkeypatch, fake_line("bad", bad), fake_line("good", good),
        fake_line("absent", absent),
    )  # fmt: skip
    return calls


def use_lines(command: ModuleType, monkeypatch: pytest.MonkeyPatch, *lines: Any) -> None:
    monkeypatch.setattr(command, "read_lines", lambda: {line.name: line for line in lines})


def test_failures_are_recorded_and_repeated(
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = fake_lines(command, monkeypatch)
    arguments = ["--dry-run", "--out", str(tmp_path / "all.json")]
    assert command.main(arguments) == 1
    first = capsys.readouterr().out
    assert calls == {"good": 1, "bad": 1, "absent": 1}
    assert "failed: RuntimeError: out of memory" in first
    assert "| good, rate | 5 pairs/s |  | 6 pairs/s | `python scripts/benchmark.py good` |" in first
    assert "| good, time |  |  | not measured" in first
    assert "not available: no such unit" in first
    assert command.main(arguments) == 1, "a line whose contenders all fail has failed"
    capsys.readouterr()
    assert records_in(tmp_path)["bad"]["error"].endswith("RuntimeError: no kernel")
    assert calls == {"good": 1, "bad": 2, "absent": 1}
    assert command.main(arguments) == 0
    third = capsys.readouterr().out
    assert calls == {"good": 1, "bad": 3, "absent": 1}
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == third
    assert calls == {"good": 1, "bad": 3, "absent": 1}


def test_a_line_without_time_is_left_out(
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = fake_lines(command, monkeypatch)
    arguments = ["--dry-run", "--out", str(tmp_path / "all.json"), "--minutes", "0"]
    assert command.main(arguments) == 0
    assert set(calls.values()) == {0}
    assert capsys.readouterr().out.count("not measured: about 0 s needed, 0 s left") == 3
    assert not records_in(tmp_path)


def test_the_time_limit_ends_a_line(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The contenders of a line record their errors, but do not take the end of the time for one."""
    from measure.timing import Contender, measure_in_turns, repeat

    def endless(bench: Any) -> Any:
        run = repeat(lambda number: time.sleep(60))
        return measure_in_turns(bench, [Contender(name="slow", build=lambda: run, samples=1)])

    use_lines(command, monkeypatch, fake_line("endless", endless))
    started = time.monotonic()
    assert command.main(["--dry-run", "--minutes", "0.02"]) == 0
    assert time.monotonic() - started < 50
    assert "the time limit was reached within this line" in capsys.readouterr().out


PAGE = """# Performance

## On a CPU

| Line | Target | Peer | medvl | Command |
|---|---|---|---|---|
| one* | 2 s | old | 1.0 s | `python scripts/benchmark.py one` |
| other | | | 7 s | `python scripts/soak.py` |

## On a GPU

| Line | Target | Peer | medvl | Command |
|---|---|---|---|---|
| one | | | 3 s | `python scripts/benchmark.py gpu-one` |

Not measured: `new`, `later`.
"""


def test_only_measured_rows_are_written(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is replaced where its title stands, and a new one is added; all other text stays."""
    from measure.line import Line, Row, TableRow, report

    row = TableRow(title="one", target="2 s", peer="{rows[0].ms:.0f} ms", ours="{s:.1f} s")
    broken = TableRow(title="other", ours="{absent:.1f} s")
    new = TableRow(title="`new`: a line", ours="{s:.1f} s")

    def measure(bench: Any) -> Any:
        return report([Row(contender="peer", ms=4000.0)], {"s": 0.5})

    shared: dict[str, Any] = {"measures": "a test", "unit": "s", "seconds": 0.0}
    shared |= {"device": "cpu", "function": measure}
    lines = [
        Line(name="one", rows=(row, broken), **shared), Line(name="new", rows=(new,), **shared),
        Line(name="third", rows=(dataclasses.replace(row, title="third"),), **shared),
    ]  # fmt: skip
    use_lines(command, monkeypatch, *lines)
    (page := tmp_path / "PERFORMANCE.md").write_text(PAGE)
    monkeypatch.setattr(command, "PAGE", page)
    kept = ["--kept", str(tmp_path / "kept")]
    assert command.main(["one", "new", *kept]) == 0
    assert page.read_text() == PAGE, "nothing is written without --write"
    assert command.main(["one", "new", "--write", *kept]) == 0
    expected = PAGE.replace(
        "| one* | 2 s | old | 1.0 s |", "| one | 2 s | 4000 ms | 0.5 s |"
    ).replace(
        "soak.py` |\n",
        "soak.py` |\n| `new`: a line | | | 0.5 s | `python scripts/benchmark.py new` |\n",
    )
    assert page.read_text() == expected.replace(
        "Not measured: `new`, `later`", "Not measured: `later`"
    )
    with pytest.raises(SystemExit, match="dry run are no measurements"):
        command.main(["one", "--write", "--dry-run"])


def test_a_machine_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from measure.records import context_of

    monkeypatch.setenv("PATH", str(tmp_path))
    assert context_of(torch.device("cpu"), 1.0, True)["commit"] == "unknown"


def test_tiny_and_full_sizes_are_not_mixed(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lines(command, monkeypatch)
    command.main(["--dry-run", "--out", str(tmp_path / "all.json")])
    with pytest.raises(SystemExit, match="is of a dry run; give another --out"):
        command.main(["--out", str(tmp_path / "all.json")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_measurement_needs_a_gpu(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_lines(command, monkeypatch)
    assert command.main([]) == 0
    assert capsys.readouterr().out.count("not measured: it needs a GPU") == 3
    with pytest.raises(SystemExit, match="no GPU was found"):
        command.main(["good"])


def test_document_has_every_line(command: ModuleType) -> None:
    """Every row is in its table with its command, or its line is named as not measured."""
    text = (ROOT / "PERFORMANCE.md").read_text(encoding="utf-8").replace("* |", " |")
    cpu, gpu = text.split("## On a GPU")
    for line in command.read_lines().values():
        section = cpu if line.device == "cpu" else gpu
        for row in line.rows:
            written = f"\n| {row.title} | {row.target} |".replace("|  |", "| |") in section
            assert written or f"`{line.name}`" in gpu.split("Not measured:")[1], row.title
        assert f"`{line.name}`" in text or line.command in text, line.name
    named = set(re.findall(r"scripts/benchmark\.py ([a-z][\w-]*)", text))
    assert named <= set(command.read_lines())


def test_unknown_lines_get_the_names_near_them(command: ModuleType) -> None:
    with pytest.raises(SystemExit, match="got 'convert'; did you mean convirt"):
        command.main(["convert"])
    with pytest.raises(SystemExit, match="--list prints all lines"):
        command.main(["zzz*"])


def test_lines_are_listed(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "info-nce*"]) == 0
    listed = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1:3] for line in listed] == [
        [" `info-nce-cpu` ", " cpu "],
        [" `info-nce` ", " gpu "],
    ]


def test_profile_of_known_kernels() -> None:
    from measure.profiling import Span, busy_time, kind_of, summarize

    spans = [
        Span("nvjet_tst_128x256", 0, 60, 60),
        Span("triton_poi_fused_add", 50, 70, 20),
        Span("nvjet_tst_128x256", 80, 100, 20),
        Span("Memcpy DtoD", 100, 100, 0),
    ]
    found = summarize(spans, steps=2)
    assert busy_time(spans) == 90
    assert found["idle"] == pytest.approx(0.1)
    assert found["kernel_ms"] == pytest.approx(0.05)
    assert found["shares"]["matrix products"] == pytest.approx(0.8)
    assert [(each["name"], each["calls"], each["ms"]) for each in found["kernels"]] == [
        ("nvjet_tst_128x256", 1.0, pytest.approx(0.04)),
        ("triton_poi_fused_add", 0.5, pytest.approx(0.01)),
    ]
    assert summarize([], steps=1)["kernels"] == []
    kinds = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimiser",
        "sm90_xmma_dgrad_implicit_gemm": "matrix products",
        "triton_tem_fused_mm": "matrix products",
        "cudnn::bn_fw_tr_1C11_kernel_NCHW": "normalisation and element-wise",
        "Memcpy HtoD (Pinned -> Device)": "copies",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_profile_on_a_cpu_counts_the_own_time_of_operators() -> None:
    """A product with a bias calls other operators, so that it is none of the innermost ones."""
    from measure.profiling import profile_steps

    layer, inputs_BE = torch.nn.Linear(256, 256), torch.randn(256, 256)
    found = profile_steps(
        lambda steps: [layer(inputs_BE) for _ in range(steps)], 20, torch.device("cpu")
    )
    assert found["shares"]["matrix products"] > 0.3
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert 0 <= found["idle"] < 1


def full_bench(folder: Path) -> Any:
    """Return a bench that measures with full sizes on the CPU."""
    from measure.bench import Bench

    from medvl.train.parallel.distributed import RankInfo

    ranks = RankInfo(rank=0, size=1, local_size=1, device=torch.device("cpu"))
    return Bench(
        ranks=ranks,
        dry_run=False,
        folder=folder,
        kept=folder,
        end=time.monotonic() + 60,
        ceiling_tflops=1e-9,
    )


def test_slow_steps_are_repeated_less_often(tmp_path: Path) -> None:
    from measure import timing

    counts = {"fast": 0, "slow": 0}

    def build(name: str) -> Any:
        def work(number: int) -> None:
            counts[name] += 1
            time.sleep(0.3 if name == "slow" else 0.0)

        return timing.repeat(work)

    contenders = [
        timing.Contender(name=name, build=lambda name=name: build(name), samples=1)
        for name in counts
    ]
    fast, slow = timing.measure_in_turns(
        full_bench(tmp_path), contenders, steps=12, rounds=1, profiled=1
    )
    assert counts == {"fast": 4 + 12 + 1, "slow": 4 + 4 + 1}
    assert slow.ms > 300 > fast.ms


def test_large_batches_are_halved_on_a_small_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = full_bench(tmp_path)
    for memory, size in ((141e9, 1024), (85e9, 512)):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, memory=memory: SimpleNamespace(total_memory=memory),
        )
        assert bench.large_batch(1024, 4) == size
    assert dataclasses.replace(bench, dry_run=True).large_batch(1024, 4) == 4


class FakeGPU:
    """Stand-in for `torch.cuda`, with a clock that work advances, and memory that it takes and
    gives back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms, self.held, self.peak, self.is_idle = 0.0, 0, 0, True
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: None) -> None:
                self.at = gpu.ms

            def elapsed_time(self, other: "Event") -> float:
                assert gpu.is_idle, "times are read after the device was waited for"
                return other.at - self.at

        def wait(device: torch.device) -> None:
            self.is_idle = True

        def reset(device: torch.device) -> None:
            assert self.is_idle, "work before the timed steps would count"
            self.peak = self.held

        functions: dict[str, Any] = {
            "Event": Event,
            "synchronize": wait,
            "current_stream": lambda device: None,
            "memory_allocated": lambda device: self.held,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": reset,
            "empty_cache": lambda: None,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def work(self, ms: float, taken: int) -> None:
        self.is_idle, self.ms, self.peak = False, self.ms + ms, max(self.peak, self.held + taken)


def test_times_and_memory_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events; the memory of a contender is its own, also while the models of others are held."""
    from measure import timing

    gpu, full = FakeGPU(monkeypatch), full_bench(tmp_path)
    bench = dataclasses.replace(
        full, ranks=dataclasses.replace(full.ranks, device=torch.device("cuda", 0))
    )
    monkeypatch.setattr(timing, "profile_steps", lambda run, steps, device: {"steps": steps})
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # twice for each step of each contender

    def build(ms: float, model: int, step: int) -> Any:
        gpu.held += model
        return timing.repeat(lambda number: gpu.work(ms + number % 2, step))

    def too_large(*sizes: float) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def contender(name: str, *sizes: Any, make: Any = build, shares: str | None = None) -> Any:
        return timing.Contender(name=name, build=lambda: make(*sizes), samples=1000, shares=shares)

    contenders = [
        contender("ours", 10.0, 4_000, 500),
        contender("too large", make=too_large),
        contender("theirs", 20.0, 9_000, 1_500),
        contender("the same model", 20.0, 0, 100, shares="theirs"),
    ]
    ours, failed, theirs, same = timing.measure_in_turns(bench, contenders, steps=10)
    assert (ours.ms, ours.ms_p10, ours.ms_p90) == (10.5, 10.0, 11.0)
    assert ours.rate == pytest.approx(1000 * 1000 / 10.5)
    assert [round(row.gb * 1e9) for row in (ours, theirs, same)] == [4_500, 10_500, 9_100]
    assert failed.error == "OutOfMemoryError: CUDA out of memory"
    assert failed.ms is None
    assert theirs.profile == {"steps": 2}


def test_shards_are_written_once(tmp_path: Path) -> None:
    bench = dataclasses.replace(full_bench(tmp_path), dry_run=True)
    (train := tmp_path / "shards-6-64" / "train").mkdir(parents=True)
    assert bench.data() == train
    assert not list(train.iterdir())


def test_only_two_steps_of_a_trainer_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the other contenders: a wait in each step would leave the device idle between steps."""
    from lines import clip

    calls: list[str] = []
    monkeypatch.setattr(clip, "synchronize", lambda device: calls.append("wait"))

    def trainer(batches: Any, steps: int, mark: Callable[[], None]) -> None:
        for _ in range(steps):
            mark()
            calls.append("step")
        mark()

    theirs: Any = SimpleNamespace(
        trainer=trainer, world=SimpleNamespace(device=torch.device("cpu"))
    )
    options: Any = SimpleNamespace(steps=3, batch=4)
    assert clip.trainer_rate(theirs, [], options) > 0
    assert calls == ["step", "wait", "step", "step", "step", "wait"]


GPU_TESTS = """
import time
import pytest

@pytest.mark.gpu
def test_one():
    pass

def test_not_marked():
    raise SystemExit

@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_other(number):
    time.sleep(60 if number == SLEEPS else 0)
    assert number == 1, "wrong\\nnumber"
"""


def test_tests_end_at_the_time_limit_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a test that hangs, which is killed; then one test in each call, until all have an
    outcome.
    """
    import gpu_tests

    (root := tmp_path / "root").mkdir()
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    (tests := root / "tests").mkdir()
    (tests / "test_plain.py").write_text("raise ValueError('is not collected')")

    def call(sleeps: int, seconds: float, closing: float) -> tuple[int, dict[str, str]]:
        (tests / "test_marked.py").write_text(GPU_TESTS.replace("SLEEPS", str(sleeps)))
        monkeypatch.setattr(gpu_tests, "_CLOSING", closing)
        status = gpu_tests.run(root, tmp_path, seconds)
        found = gpu_tests.read(tmp_path / "tests.jsonl").items()
        return status, {name.split("::")[1]: entry["outcome"] for name, entry in found}

    started = time.monotonic()
    assert call(1, 8, 0)[1] == {
        "test_one": "passed",
        "test_other[1]": "started",
        "test_other[2]": "left",
    }
    assert time.monotonic() - started < 30
    assert "1 started" in capsys.readouterr().out
    status, outcomes = call(0, 60, 120)
    assert status == 1
    assert outcomes == {"test_one": "passed", "test_other[1]": "started", "test_other[2]": "failed"}
    assert (
        "failed: tests/test_marked.py::test_other[2]: AssertionError: wrong"
        in capsys.readouterr().out
    )
    assert call(0, 60, 0)[1]["test_other[1]"] == "passed"


def test_contenders_are_measured_in_turns(tmp_path: Path) -> None:
    from measure.timing import Contender, Flops, measure_in_turns, repeat

    order: list[str] = []

    def build(name: str) -> Any:
        step = itertools.count()

        def work(number: int) -> None:
            order.append(name)
            torch.ones(8).sum()
            if name == "broken" and next(step) == 4:
                raise ValueError("a step failed")

        return repeat(work)

    bench, flops = full_bench(tmp_path), Flops()
    flops.per_sample = 2.0
    contenders = [
        Contender(name=name, build=lambda name=name: build(name), samples=4, flops=flops, warm_up=1)
        for name in ("one", "broken", "two")
    ]
    one, broken, two = measure_in_turns(bench, contenders, steps=2, rounds=2, profiled=1)
    assert broken.error == "ValueError: a step failed"
    assert broken.rate is None
    for row in (one, two):
        assert row.error is None
        assert row.rate is not None
        assert row.ms is not None
        assert row.rate == pytest.approx(4000 / row.ms)
        assert row.mfu == pytest.approx(row.rate * 2 / 1e12 / 1e-9)
        assert row.profile is not None
    timed = [name for name, _ in itertools.groupby(order[9:])]
    assert timed == ["one", "broken", "two", "one", "two", "one", "two"]
