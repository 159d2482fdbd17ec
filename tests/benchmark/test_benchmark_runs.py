"""A benchmark of a few steps from data to pages: resumed, free the second time, with failures
and an outside system.
"""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import forked
from helpers.errors import raises

from medvl.benchmark import (
    Plan,
    Store,
    estimate,
    execute,
    execute_locally,
    plan_runs,
    read_benchmark,
    tasks,
    write_slurm,
)
from medvl.benchmark.config import EvaluationConfig
from medvl.benchmark.estimate import _EvaluationHours, check_data, describe_plan, estimate_run
from medvl.benchmark.execute import prepare_run
from medvl.benchmark.pages.rows import measure_systems
from medvl.benchmark.pages.tables import measured_cell
from medvl.benchmark.pages.write import print_site, write_site
from medvl.benchmark.plan import make_corpus
from medvl.benchmark.ranks import Measured
from medvl.benchmark.store import Cost
from medvl.cli import main as cli
from medvl.common.files import RunLock
from medvl.common.process import peak_resident_bytes
from medvl.data import ShardSource
from medvl.data.loading.studies import StudySource
from medvl.data.shards.format import Manifest
from medvl.errors import ConfigError, CorpusError, EvaluationError, SplitError
from medvl.eval import Results, Setup, load_prompts, read_results, write_results
from medvl.eval.retrieval.evaluation import Retrieval
from medvl.eval.zero_shot_classification.evaluation import ZeroShot
from medvl.models import ConVIRT, ConVIRTConfig, create_model, register_system, registry, save
from medvl.schema import COMPETITION_FINDINGS

COST = Cost(
    parameters=7, resumed=False, wall_seconds=2.0, cpu_seconds=3.0, steps=2, pairs_per_second=8.0,
    train_seconds=1.0, peak_memory_gb=0.5, device="CPU", terms=("contrastive",),
)  # fmt: skip
FILE = """
name = "two"
systems = ["convirt", "outside", "broken"]
tasks = ["zero-shot", "retrieval", "grounding"]
[budget]
steps = 2
batch = 8
workers = 0
[evaluation]
resamples = 20
[[variants]]
name = "broken"
system = "convirt"
settings = { init_from = "no/checkpoint" }
[settings.dual.model]
image_encoder = "resnet_tiny"
text_encoder = "tiny_bert"
image_size = 64
[[corpora]]
name = "phantom"
root = "ROOT"
phrases = "nothing/test"
[[corpora.make]]
creates = "shards/test/manifest.json"
run = [
    "phantom mimic-cxr --out {root}/mimic-cxr --patients 20 --size 64 --frontal-only --workers 1",
    "shards mimic-cxr --root {root}/mimic-cxr --out {root}/shards --views PA AP --short-side 64 --workers 1",
]
[[corpora.make]]
creates = "vocab/tokenizer.json"
run = ["vocab --data {root}/shards/train --out {root}/vocab --size 400"]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a benchmark whose data exist, without the phrases."""
    folder = tmp_path_factory.mktemp("benchmark")
    path = folder / "two.toml"
    path.write_text(FILE.replace("ROOT", str(folder / "data")))
    [corpus] = read_benchmark(path).corpora
    located = plan_runs(read_benchmark(path, {"systems": ["convirt"]}), folder).runs[0].corpus
    with raises(CorpusError, "not_found", "corpora.phrases"):
        make_corpus(located, run=lambda arguments: cli.main(list(arguments)))
    assert (corpus.root, located.phrases) == (
        str(folder / "data"),
        str(folder / "data/nothing/test"),
    )
    return path


@pytest.fixture(scope="module", autouse=True)
def outside() -> Iterator[None]:
    """A system of another package, registered by name."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OutsideConfig(ConVIRTConfig):
        """Configuration of another package."""

    @register_system("outside")
    class Outside(ConVIRT):
        """System of another package."""

        Config = OutsideConfig

    yield
    del registry.SYSTEMS.imported["outside"]


@pytest.fixture(scope="module")
def benchmark(file: Path) -> tuple[Plan, Store, list[str]]:
    """A benchmark that was interrupted once within its evaluations, and then finished."""
    lines: list[str] = []
    out = file.parent / "out"
    plan, store = plan_runs(read_benchmark(file), out), Store(out)
    store.write_runs(plan)
    patch = pytest.MonkeyPatch()

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    patch.setattr(Retrieval, "evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        execute_locally(plan, store, jobs=0, report=lines.append)
    patch.undo()
    first = store.folder(plan.runs[0])
    assert [store.state(run) for run in plan.runs] == ["to do", "to do", "to do"]
    kept = {path: path.stat().st_mtime_ns for path in first.rglob("[!.]*") if path.is_file()}
    assert {"cost.json", "results.json"} <= {path.name for path in kept}
    execute_locally(plan, store, jobs=0, report=lines.append)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    return plan, store, lines


# The first test waits for the benchmark of this module, which trains and evaluates three runs.
@pytest.mark.slow
def test_a_killed_benchmark_goes_on_and_failures_are_shown(
    benchmark: tuple[Plan, Store, list[str]],
) -> None:
    plan, store, lines = benchmark
    assert [run.name for run in plan.runs] == ["convirt", "outside", "broken"]
    packed = {run.name: run.settings["train"]["packed_text"] for run in plan.runs}
    assert (packed["convirt"], packed["outside"]) == (
        True,
        False,
    )  # the outside encoder may be no BERT
    assert [store.state(run) for run in plan.runs] == ["finished", "finished", "failed"]
    assert any("failed: broken" in line for line in lines)
    site = write_site(plan, store)
    parts = {(failure.title.split(",")[0], failure.part) for failure in site.failures}
    assert parts == {("broken", "training"), ("convirt", "grounding"), ("outside", "grounding")}
    text = print_site(site)
    row = " ".join(line for line in text.splitlines() if line.startswith("outside "))
    assert row.startswith("outside  dual-encoder")
    assert "contrastive" in row
    assert "resnet_tiny + tiny_bert" in row
    assert "failed" in row  # grounding, whose phrases are missing
    assert "\\" not in text  # no escapes of Markdown
    assert " [" in row  # an interval
    assert [path.name for path in site.pages] == [
        *("index.html", "ranks.html", "cost.html", "curves.html", "systems.html", "failures.html")
    ]
    names = {path.suffix for path in (store.out / "index_files").iterdir()}
    assert names == {".csv", ".md", ".tex"}
    results = [json.loads(line) for line in (store.out / "results.jsonl").read_text().splitlines()]
    assert {line["system"] for line in results} == {"convirt", "outside"}
    cost = store.cost(plan.runs[0])
    assert cost is not None
    assert (cost.steps, cost.device, cost.terms) == (2, "CPU", ("contrastive",))


@pytest.mark.slow
def test_a_second_run_costs_nothing_and_prints_the_same(
    benchmark: tuple[Plan, Store, list[str]],
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, store, _ = benchmark
    text = print_site(write_site(plan, store))
    pages = {path: path.read_bytes() for path in store.out.glob("*.html")}
    runs = {
        path: path.stat().st_mtime_ns for path in (store.out / "runs").rglob("*") if path.is_file()
    }
    monkeypatch.setattr(sys, "executable", "/no/process/is/started")
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", str(file), "--out", str(store.out)])
    assert ended.value.code == 1  # something failed
    assert capsys.readouterr().out.strip() == text.strip()
    assert {path: path.read_bytes() for path in store.out.glob("*.html")} == pages
    assert {
        path: path.stat().st_mtime_ns for path in (store.out / "runs").rglob("*") if path.is_file()
    } == runs


@pytest.mark.slow
def test_the_dry_run_lists_states_hours_and_memory(
    benchmark: tuple[Plan, Store, list[str]], file: Path
) -> None:
    _, store, _ = benchmark
    more = plan_runs(read_benchmark(file, {"seeds": [0, 1], "systems": ["convirt"]}), store.out)
    text = describe_plan(more, store, 0.0, errors={})
    first, second, *_ = text.splitlines()
    assert "seed 0: convirt_mimic tiny" in first
    assert "; finished; 0.00 h, " in first
    assert first.endswith("GiB (measured)")
    assert "GiB (from another run); evaluations 0.00 h" in second
    assert (
        "2 runs: 1 finished, 0 failed, 1 to do. To do, one after the other: training 0.00 "
        "h;\nevaluations" in text
    )
    assert not store.folder(more.runs[1]).exists()


@pytest.mark.slow
def test_memory_is_estimated_in_a_process_of_its_own(
    benchmark: tuple[Plan, Store, list[str]], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of a process never falls, so that large systems would count for all after them."""
    _, store, _ = benchmark
    [run] = plan_runs(
        read_benchmark(file, {"systems": ["convirt"], "budget.batch": 4}), store.out
    ).runs
    np.ones(2**27).sum()  # a gigabyte
    processes = SimpleNamespace(get_context=forked.context)
    monkeypatch.setattr(sys.modules[estimate_run.__module__], "multiprocessing", processes)
    found = estimate_run(run, store, {}, 0.05, print)
    assert 0 < found["memory_gb"] < peak_resident_bytes() / 2**30 - 0.5
    assert found["hours"] > 0


@pytest.mark.parametrize("task", [name for name in tasks.evaluation_tasks() if name != "change"])
def test_evaluations_refuse_patients_of_the_training(
    file: Path, tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the run, and in a ranking also those of the system that proposes candidates."""
    [run] = plan_runs(read_benchmark(file, {"systems": ["convirt"]}), tmp_path).runs
    pairs = run.corpus.pairs
    corpus = dataclasses.replace(
        run.corpus,
        phrases=f"{pairs}/test",
        questions=pairs,
        questions_valid=f"{pairs}/test",
        choices=pairs,
    )
    model = create_model("convirt", **run.settings["model"] | {"pretrained": False})
    for name, manifests in (
        ("seen", {"train_manifest": Manifest.read(f"{pairs}/test").to_json()}),
        ("unknown", {}),
    ):
        (tmp_path / name).mkdir()
        save(model, tmp_path / name, manifests)
    seen, unknown = tmp_path / "seen", tmp_path / "unknown"
    monkeypatch.setattr(Setup, "check", lambda *_, **__: None)  # whether the system fits
    with raises(SplitError, "leak"):
        tasks.evaluate_trial(
            dataclasses.replace(run, corpus=corpus),
            task,
            checkpoint=unknown,  # the weights before the training have no manifest
            origin=unknown if task == "reranking" else seen,
            folder=tmp_path,
            other=lambda name: seen,
        )


def test_results_of_other_data_are_refused(file: Path, tmp_path: Path) -> None:
    """Keys name the folders of the data, which may have other data by now."""
    plan = plan_runs(
        read_benchmark(file, {"systems": ["convirt"], "tasks": ["zero-shot"]}), tmp_path
    )
    [run], store = plan.runs, Store(tmp_path)
    folder = execute.checkpoint_of(run, store)
    folder.mkdir(parents=True)
    model = create_model("convirt", **run.settings["model"])
    train, test = (Manifest.read(f"{run.corpus.pairs}/{split}") for split in ("train", "test"))
    save(model, folder, {"train_manifest": test.to_json()})
    check_data(plan, store)  # the training is not finished
    (store.folder(run) / "cost.json").write_text(json.dumps(dataclasses.asdict(COST)))
    with raises(ConfigError, "mismatch", "corpora.phantom", names=run.train_shards):
        check_data(plan, store)
    save(model, folder, {"train_manifest": train.to_json()})
    results = store.evaluation(run, "trained", "zero-shot")
    studies = StudySource(ShardSource(f"{run.corpus.pairs}/test")).fingerprint
    cases = (
        (test.fingerprint, None),
        (train.fingerprint, "mismatch"),
        (studies, "mismatch"),
        (None, None),
    )
    for manifest, code in cases:
        inputs = {"manifest": manifest}
        write_results(
            Results(protocol="zero_shot", protocol_version=1, rows=(), config={}, inputs=inputs),
            results,
        )
        with (
            raises(ConfigError, code, "corpora.phantom", names=str(results))
            if code
            else contextlib.nullcontext()
        ):
            check_data(plan, store)
    other = dataclasses.replace(
        run, corpus=dataclasses.replace(run.corpus, pairs=str(tmp_path / "removed"))
    )
    check_data(dataclasses.replace(plan, runs=(other,)), store)
    reports = dataclasses.replace(
        run, family="report", tasks=("reports",)
    )  # they may be read by studies
    inputs, results = {"manifest": studies}, store.evaluation(reports, "trained", "reports")
    write_results(
        Results(protocol="reports", protocol_version=1, rows=(), config={}, inputs=inputs), results
    )
    check_data(dataclasses.replace(plan, runs=(reports,)), store)


def test_sections_that_no_text_has_are_refused(file: Path, tmp_path: Path) -> None:
    changes = {
        "systems": ["m3ae"],
        "tasks": ["matching"],
        "evaluation.sections": ["findings", "impression"],
    }
    check_data(plan_runs(read_benchmark(file, changes), tmp_path), Store(tmp_path))
    changes["evaluation.sections"] = ["findings", "impresion"]
    with raises(ConfigError, "unknown_name", "evaluation.sections", names="'impression'"):
        check_data(plan_runs(read_benchmark(file, changes), tmp_path), Store(tmp_path))


def test_a_corpus_without_labels_needs_no_validation_shards(file: Path, tmp_path: Path) -> None:
    """Its tasks of labels do not apply; a probe of labels reads the validation shards, which are
    asked for at first.
    """
    changes = {
        "systems": ["convirt"],
        "tasks": ["zero-shot", "probe"],
        "corpora.0.root": str(tmp_path),
    }
    [run] = plan_runs(read_benchmark(file, changes), tmp_path).runs
    corpus = dataclasses.replace(run.corpus, phrases=None)
    for name in ("vocab", "shards/train", "shards/test"):
        shutil.copytree(file.parent / "data" / name, tmp_path / name)
    with raises(CorpusError, "not_found", "corpora.pairs", names="validate"):
        make_corpus(corpus, runs=[run])
    make_corpus(corpus, runs=[dataclasses.replace(run, tasks=("zero-shot",))])
    for split in ("train", "test"):
        shards = tmp_path / "shards" / split
        dataclasses.replace(Manifest.read(shards), label_names=()).write(shards)
    make_corpus(corpus, runs=[run])
    (tmp_path / "own").mkdir()
    save(create_model("convirt", **run.settings["model"]), tmp_path / "own")
    own = tmp_path / "own"
    for task in run.tasks:
        with raises(EvaluationError, "unsupported", "labels"):
            tasks.evaluate_trial(run, task, checkpoint=own, origin=own, folder=tmp_path, other=Path)


def test_all_systems_have_the_classes_of_the_prompts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose own prompts, statements, have a sentence for every label of the data."""
    changes = {"systems": ["convirt"], "corpora.0.prompts": "gloria_all"}
    [run] = plan_runs(read_benchmark(file, changes), tmp_path).runs
    model = create_model("convirt", **run.settings["model"], tokenizer=run.corpus.tokenizer)
    save(model, tmp_path)
    classes = []

    def evaluate(evaluation: ZeroShot, setup: Setup) -> SimpleNamespace:
        prompts = load_prompts(evaluation.prompts or "")
        names = setup.source(evaluation.data).label_names
        classes.append(set(prompts.for_labels(names, evaluation.labels).classes))
        return SimpleNamespace(result=None)

    monkeypatch.setattr(ZeroShot, "run", evaluate)
    for own in ("chexpert_ensemble", "statements"):
        monkeypatch.setattr(ConVIRT, "zero_shot_prompts", own)
        tasks.evaluate_trial(
            run, "zero-shot", checkpoint=tmp_path, origin=tmp_path, folder=tmp_path, other=Path
        )
    assert classes[0] == classes[1] == set(COMPETITION_FINDINGS)


def test_job_arrays_hold_all_runs_after_those_they_need(file: Path, tmp_path: Path) -> None:
    changes = {"systems": ["umrl", "convirt"], "settings": {"umrl": {"image_from": "run:convirt"}}}
    plan = plan_runs(read_benchmark(file, changes), tmp_path)
    submit, first, second = write_slurm(plan, Store(tmp_path), "--gpus=1")
    assert plan.runs[0].key in first.read_text()
    assert plan.runs[1].key in second.read_text()
    assert "#SBATCH --gpus=1\n" in first.read_text()
    assert submit.read_text().count("sbatch --parsable") == 2


def test_scripts_of_job_arrays_are_valid(file: Path, tmp_path: Path) -> None:
    """Also of a benchmark whose name is not one word; an option with a value stays on one line."""
    plan = plan_runs(
        read_benchmark(file, {"systems": ["convirt"], "name": "it's & more"}), tmp_path
    )
    submit, script = write_slurm(plan, Store(tmp_path), "-p gpu --time=08:00:00")
    lines = script.read_text().splitlines()
    assert "#SBATCH -p gpu --time=08:00:00" in lines
    assert "#SBATCH --job-name=it-s-more-1" in lines
    for path in (submit, script):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_a_second_process_does_not_make_the_same_corpus(file: Path, tmp_path: Path) -> None:
    corpus = plan_runs(
        read_benchmark(file, {"corpora.0.root": str(tmp_path), "systems": ["convirt"]}), tmp_path
    )
    with RunLock(tmp_path), raises(CorpusError, "in_use", "corpora"):
        make_corpus(corpus.runs[0].corpus)


def test_an_evaluation_that_was_killed_is_not_called_a_training(file: Path, tmp_path: Path) -> None:
    plan, store = (
        plan_runs(read_benchmark(file, {"systems": ["convirt"]}), tmp_path),
        Store(tmp_path),
    )
    [run] = plan.runs
    store.write_runs(plan)
    (store.folder(run) / "failure.json").write_text('{"error": "killed by SIGKILL"}')
    assert [one.part for one in measure_systems(plan, store).failures] == ["training"]
    (store.folder(run) / "cost.json").write_text(json.dumps(dataclasses.asdict(COST)))
    assert [one.part for one in measure_systems(plan, store).failures] == ["evaluations"]


def test_a_share_below_a_batch_is_trained_in_batches_of_all_its_pairs(
    file: Path, tmp_path: Path
) -> None:
    config = read_benchmark(
        file, {"systems": ["convirt"], "shares": [0.1, 1.0], "budget.batch": 16}
    )
    few, all_pairs = (
        prepare_run(run, Store(tmp_path)).data.train for run in plan_runs(config, tmp_path).runs
    )
    assert (few.global_batch, few.steps_per_epoch) == (len(few.source), 1)
    assert len(few.source) < 16
    assert all_pairs.global_batch == 16
    run = dataclasses.replace(
        plan_runs(config, tmp_path).runs[0], evaluation=EvaluationConfig(random_start=True)
    )
    store = Store(tmp_path)
    store.folder(run).mkdir(parents=True)
    execute._save_start(run, store)
    assert (store.folder(run) / "start-weights/model.safetensors").is_file()


def test_evaluations_are_estimated_from_finished_ones(file: Path, tmp_path: Path) -> None:
    """Of the same system where there are some, else of the others; a task that none has finished
    is not known.
    """
    changes = {"seeds": [0, 1], "systems": ["convirt", "clip"], "tasks": ["zero-shot", "retrieval"]}
    plan, store = plan_runs(read_benchmark(file, changes), tmp_path), Store(tmp_path)
    runs = {(run.name, run.seed): run for run in plan.runs}
    for name, task, hours in (
        ("convirt", "zero-shot", 1),
        ("convirt", "retrieval", 3),
        ("clip", "zero-shot", 2),
    ):
        folder = store.evaluation(runs[name, 0], "trained", task)
        folder.mkdir(parents=True)
        (folder / "results.json").touch()
        (folder / "seconds.json").write_text(f"{3600 * hours}\n")
    found = _EvaluationHours(plan, store)
    assert {key: list(found.missing(run)) for key, run in runs.items()} == {
        ("convirt", 0): [],
        ("convirt", 1): [1.0, 3.0],
        ("clip", 0): [3.0],
        ("clip", 1): [2.0, 3.0],
    }
    text = describe_plan(plan, store, 0.0, errors={})
    assert "training 0.00 h and 4 runs without an estimate;\nevaluations 12.00 h, as long" in text
    (store.evaluation(runs["convirt", 0], "trained", "retrieval") / "seconds.json").unlink()
    text = describe_plan(plan, store, 0.0, errors={})
    assert "evaluations 3.00 h and 4 evaluations without an estimate" in text


def test_a_share_below_a_batch_of_studies(file: Path, tmp_path: Path) -> None:
    """CXR-CLIP reads each study once."""
    config = read_benchmark(file, {"systems": ["cxrclip"], "shares": [0.9], "budget.batch": 64})
    [run] = plan_runs(config, tmp_path).runs
    train = prepare_run(run, Store(tmp_path)).data.train
    assert train.global_batch == len(train.source) < 64


def test_an_estimate_that_failed_is_made_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause may be gone: a run that it starts from is trained, or the memory is free."""
    [run] = plan_runs(read_benchmark(file, {"systems": ["convirt"]}), tmp_path).runs
    found: list[dict[str, Any]] = [
        {"error": "killed"},
        {"hours": 1.0, "memory_gb": 2.0, "source": "doctor"},
    ]
    monkeypatch.setattr(estimate, "_examine_apart", lambda *_: found.pop(0))
    store = Store(tmp_path)
    assert "error" in estimate_run(run, store, {}, 1.0, print)
    assert [estimate_run(run, store, {}, 1.0, print)["hours"] for _ in range(2)] == [1.0, 1.0]


def test_means_over_fewer_seeds_say_so() -> None:
    measured = Measured(values=(0.8, 0.9), errors=(0.1, 0.1), resampled=(None, None))
    assert measured_cell(measured, 3).text == "0.850 (2 of 3 seeds)"
    assert measured_cell(measured, 2).text == "0.850"


def test_a_system_without_data_on_one_corpus_takes_part_on_another(
    file: Path, tmp_path: Path
) -> None:
    config = read_benchmark(file, {"systems": ["r2gen", "convirt"], "tasks": ["all"]})
    [corpus] = config.corpora
    other = dataclasses.replace(corpus, name="other", reports="reports", words="words")
    assert list(plan_runs(config, tmp_path).left_out) == ["r2gen"]
    both = dataclasses.replace(config, corpora=(corpus, other))
    assert not plan_runs(both, tmp_path).left_out


def test_pages_name_the_runs_that_systems_start_from(file: Path, tmp_path: Path) -> None:
    changes = {"systems": ["umrl", "convirt"], "settings": {"umrl": {"image_from": "run:convirt"}}}
    write_site(plan_runs(read_benchmark(file, changes), tmp_path), Store(tmp_path))
    assert "1 system from the run of convirt" in (tmp_path / "index.html").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    from medvl.benchmark import execute_run

    with raises(ConfigError, "not_found", "run"):
        execute_run(tmp_path)


# Writes and converts a phantom, trains and probes.
@pytest.mark.slow
def test_masked_records_are_trained_and_probed(tmp_path: Path) -> None:
    """MRM has no scores of images and texts: its image encoder is probed, and compared."""
    path = tmp_path / "records.toml"
    content = FILE.replace("ROOT", str(tmp_path / "data")).replace("--patients 20", "--patients 60")
    path.write_text(content.replace('phrases = "nothing/test"\n', ""))
    plan, store = (
        plan_runs(read_benchmark(path, {"systems": ["mrm"], "tasks": ["all"]}), tmp_path),
        Store(tmp_path),
    )
    make_corpus(plan.runs[0].corpus, run=lambda arguments: cli.main(list(arguments)))
    store.write_runs(plan)
    execute_locally(plan, store, jobs=0, report=lambda _: None)
    [run] = plan.runs
    assert (store.state(run), run.tasks) == ("finished", ("probe", "neighbours"))
    text = print_site(write_site(plan, store))
    row = " ".join(line for line in text.splitlines() if line.startswith("mrm "))
    assert row.split()[:3] == ["mrm", "masked-record", "model"]
    assert " [0." in row  # an interval, without the escapes of Markdown
    assert "Masked-record models" in text


def test_random_start_of_a_finished_run(
    file: Path, benchmark: tuple[Plan, Store, list[str]], tmp_path: Path
) -> None:
    _, store, lines = benchmark
    changes = {
        "systems": ["convirt"],
        "tasks": ["zero-shot"],
        "evaluation": {"resamples": 20, "random_start": True},
    }
    plan = plan_runs(read_benchmark(file, changes), store.out)
    [run] = plan.runs
    cost = (store.folder(run) / "cost.json").stat().st_mtime_ns
    assert store.state(run) == "to do"
    store.write_runs(plan)
    execute_locally(plan, store, jobs=0, report=lines.append)
    assert store.state(run) == "finished"
    assert (store.folder(run) / "cost.json").stat().st_mtime_ns == cost  # not trained again
    fresh = Store(tmp_path / "fresh")
    fresh_plan = plan_runs(read_benchmark(file, changes), fresh.out)
    fresh.write_runs(fresh_plan)
    execute_locally(fresh_plan, fresh, jobs=0, report=lines.append)
    weights = [one.folder(run) / "start-weights/model.safetensors" for one in (store, fresh)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    trained = store.folder(run) / "run/last/model.safetensors"
    assert trained.read_bytes() != weights[0].read_bytes()
    results = [read_results(one.evaluation(run, "start", "zero-shot")) for one in (store, fresh)]
    assert results[0].rows == results[1].rows
