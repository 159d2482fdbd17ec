"""Shared by all tests: no network, one thread a process, the folder of real data where there is
one.
"""

import functools
import gc
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)  # children import helpers
# Containers set this so that images stay small; every process that starts from here would compile
# torch anew.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Plots in PDF name their fonts: embedding them costs more than the rest of a page
# (tests/eval/html/test_plots.py does).
os.environ["MATPLOTLIBRC"] = str(Path(__file__).with_name("matplotlibrc"))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a search by CUDA could not be forked
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import cv2
import fsspec
import hypothesis
import numpy as np
import pytest
import torch
from helpers import blank_plots
from helpers.learning import SEEDS, shift_seeds
from helpers.mimic_files import IMAGES, LABELS, REPORTS, textured, write_csv_gz
from helpers.object_store import Bucket, Proxy, proxied
from helpers.processes import Processes
from helpers.unsynced import WITHOUT_WAITING
from numpy.typing import NDArray

from medvl.common.process import keep_freed_memory
from medvl.data.privacy import Deidentifier
from medvl.data.storage import store
from medvl.eval import evaluation
from medvl.eval.core import results as publish
from medvl.eval.core.results import Results
from medvl.eval.html import plots
from medvl.phantom.layouts import kaggle, writer
from medvl.phantom.population.world import View
from medvl.phantom.rendering.draw import draw
from medvl.schema import FINDINGS
from medvl.train.fault_tolerance import guards

# A machine that does other things as well is slow, and no input is at fault.
hypothesis.settings.register_profile(
    "shared", suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared")
keep_freed_memory()  # as trainings do, which the tests of models are not
torch.set_num_threads(int(os.environ.get("MEDVL_TEST_THREADS", "1")))


SAVE_PLOT = plots._save
LONGEST = (
    *("train/parallel/test_train_sharded.py", "test_benchmark_gpu.py", "test_spine.py"),
    *("benchmark/test_benchmark_runs.py", "models/fusion_encoders/test_fusion_models.py"),
    *("test_golden.py", "models/dual_encoders/test_contrastive.py"),
    *("encoders/test_image_encoder.py", "train/optim/test_train_grad_cache.py", "test_wheel.py"),
    *("models/downstream/test_vqa_heads.py", "test_notebooks.py", "data/odd/test_odd_inputs.py"),
    *("models/dual_encoders/test_clip.py", "encoders/test_encoder_interface.py"),
    *("models/fusion_encoders/test_fusion_ranks.py", "cli/eval/test_eval_label_commands.py"),
    *("train/loop/test_train_step_speed.py", "test_soak.py", "test_recipes.py"),
    *("data/corpora/test_published_preparations.py", "test_architecture.py"),
    *("export/test_key_tables.py", "models/downstream/test_vqa_heads_decoder.py"),
    *("export/test_export.py", "data/loading/test_loader.py", "train/loop/test_wandb.py"),
    *("models/downstream/test_fused_classifier.py", "train/test_nodes.py"),
    "eval/report_generation/test_report_generation.py",
)
"""Files that take more than ten seconds of a core, those that take longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    parser.addoption("--processes", type=int, default=1, help="processes that run the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Run tests in several processes where the command asks for it."""
    if (count := config.option.processes) > 1:
        config.pluginmanager.register(Processes(count))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without garbage collections, which would look at all modules again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests on a GPU where there is none; put the longest files first, then others with slow
    tests, and then those of the whole project.

    Otherwise one process would run the last of the long files while the others have ended.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False")
                )
    root = Path(__file__).parent
    longest = {root / name: place for place, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            longest.get(item.path, len(longest)),
            item.path not in slow,
            item.path.parent != root,
        )
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that train with several seeds where MEDVL_TEST_SEEDS asks for it
    (helpers/learning.py).
    """
    if SEEDS > 1 and any(mark.name == "training" for mark in metafunc.definition.iter_markers()):
        metafunc.fixturenames.insert(0, "seed_shift")
        metafunc.parametrize("seed_shift", [1000 * seed for seed in range(SEEDS)], indirect=True)


@pytest.fixture
def seed_shift(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other seeds than those that the test names."""
    shift_seeds(monkeypatch, request.param)


def pytest_collection_finish() -> None:
    """Leave what the imports have made to no garbage collection: each would take half a second,
    or copy it in a fork.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # in place of 700: tests make many objects, and few cycles of them


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, then a GPU: a test with this fixture is two tests with one body."""
    return torch.device(request.param, None if request.param == "cpu" else 0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that MEDVL_REAL_DATA names; tests that ask for it are skipped without it."""
    folder = os.environ.get("MEDVL_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEDVL_REAL_DATA names no folder")
    return Path(folder)


@pytest.fixture
def mimic_root(tmp_path: Path) -> Path:
    """A MIMIC-CXR-JPG of three patients in the exact layout, with the reports beside the
    studies.
    """
    root = tmp_path / "mimic-cxr"
    for number, (subject, study, dicom_id, _, _) in enumerate(IMAGES):
        folder = root / "files" / f"p{subject[:2]}" / f"p{subject}" / f"s{study}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{dicom_id}.jpg"), textured(number, 90 + number, 120))
        folder.with_suffix(".txt").write_text(REPORTS[subject, study])
    write_csv_gz(
        root / "mimic-cxr-2.0.0-metadata.csv.gz",
        [
            "dicom_id",
            "subject_id",
            "study_id",
            "PerformedProcedureStepDescription",
            "ViewPosition",
            "Rows",
            "Columns",
        ],
        [
            [dicom, subject, study, "CHEST (PA, LAT)", view, "90", "120"]
            for subject, study, dicom, view, _ in IMAGES
        ],
    )
    write_csv_gz(
        root / "mimic-cxr-2.0.0-split.csv.gz",
        ["dicom_id", "study_id", "subject_id", "split"],
        [[dicom, study, subject, split] for subject, study, dicom, _, split in IMAGES],
    )
    for labeler in ("chexpert", "negbio"):
        write_csv_gz(
            root / f"mimic-cxr-2.0.0-{labeler}.csv.gz",
            ["subject_id", "study_id", *FINDINGS],
            [
                [subject, study, *(LABELS[study].get(name, "") for name in FINDINGS)]
                for subject, study in REPORTS
            ],
        )
    return root


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    with WITHOUT_WAITING:
        yield


@pytest.fixture(scope="session", autouse=True)
def _imports_stay_frozen() -> Iterator[None]:
    """The end of a training leaves frozen what was before it: what the imports have made would be
    collected after each of some hundred trainings, which takes half a second.
    """
    collector = SimpleNamespace(freeze=lambda: None, unfreeze=lambda: None)
    with mock.patch.object(guards, "gc", collector):
        yield


@pytest.fixture(scope="session", autouse=True)
def _views_are_drawn_once() -> Iterator[None]:
    """The phantom's files in the layouts of many corpora show the same few patients: a view of one
    size is drawn once for all of them. Tests of the phantom draw each (tests/phantom/conftest.py).
    """
    with (
        mock.patch.object(writer, "draw", draw_once),
        mock.patch.object(kaggle, "draw", draw_once),
    ):
        yield


@functools.lru_cache(maxsize=4000)
def _drawn(view: View, size: int) -> NDArray[np.uint16]:
    return draw(view, size)


def draw_once(view: View, size: int) -> NDArray[np.uint16]:
    """Return what `draw` does; images of up to 128 pixels from memory."""
    return _drawn(view, size).copy() if size <= 128 else draw(view, size)


@pytest.fixture(scope="session", autouse=True)
def _plots_are_not_drawn() -> Iterator[None]:
    """Drawing takes longer than all else of a page: tests/eval/html draws every plot; the others
    make the figures, and write a picture without them.
    """
    with mock.patch.object(plots, "_save", blank_plots.save):
        yield


@pytest.fixture(scope="module")
def drawn_plots() -> Iterator[None]:
    """Files of plots as users have them."""
    with mock.patch.object(plots, "_save", SAVE_PLOT):
        yield


SALT = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="session", autouse=True)
def _one_salt(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The salt of every command that a test runs: a drawn one would split and order the same few
    patients anew in each run of the tests, and now and then leave a split empty.
    """
    path = tmp_path_factory.mktemp("salt") / "salt"
    path.write_text(SALT.hex() + "\n")
    path.chmod(0o600)
    os.environ["MEDVL_SALT_FILE"] = str(path)


@pytest.fixture(autouse=True)
def _announced_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `medvl eval` command that a test runs names its data before the evaluation as its
    results do after it.
    """
    settle, write, named = publish.OutputFolder.settle, evaluation.publish, {}

    def settle_and_keep(self: publish.OutputFolder, **data: str | None) -> Path:
        folder = settle(self, **data)
        named[folder] = data
        return folder

    def compare_and_write(results: Results, folder: Path, **settings: Any) -> list[Path]:
        hashes = {
            name: results.inputs[name]
            for name in ("manifest", "questions")
            if results.inputs.get(name)
        }
        assert folder not in named or named.pop(folder) == hashes
        return write(results, folder, **settings)

    monkeypatch.setattr(publish.OutputFolder, "settle", settle_and_keep)
    monkeypatch.setattr(evaluation, "publish", compare_and_write)


@pytest.fixture
def deid() -> Deidentifier:
    return Deidentifier(SALT)


@pytest.fixture(scope="session")
def store_proxy() -> Iterator[tuple[Proxy, Any]]:
    """An object store on this machine behind a proxy, to which s3:// leads, and a client of its
    own.
    """
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    secrets = {
        "aws_access_key_id": "access",
        "aws_secret_access_key": "secret-key",
        "region_name": "us-east-1",
    }
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **secrets)
    with proxied(host, port) as proxy:
        options = {"endpoint_url": proxy.url, "client_kwargs": secrets}
        fsspec.config.conf["s3"] = options
        yield proxy, client
        del fsspec.config.conf["s3"]
    server.stop()


@pytest.fixture
def bucket(
    store_proxy: tuple[Proxy, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """An empty bucket of the object store, a cache of its own, and short pauses between repeated
    requests.
    """
    proxy, client = store_proxy
    monkeypatch.setenv("MEDVL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MEDVL_CACHE_SIZE", "1GB")
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.001)
    found = Bucket(f"bucket-{uuid.uuid4().hex[:8]}", proxy, client)
    client.create_bucket(Bucket=found.name)
    yield found
    proxy.heal()
    proxy.requests.clear()
