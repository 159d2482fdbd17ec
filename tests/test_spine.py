"""One pass through everything, as a user types it: DICOM and reports, shards, vocabulary,
ConVIRT, zero-shot table.
"""

import csv
import gzip
import hashlib
import json
import math
import os
import random
import re
import select
import shutil
import signal
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

import pytest
from helpers import forked, train_fakes as fakes
from helpers.learning import seed_of, share_of
from helpers.spine_corpus import PATIENTS, Spine, canaries, contents

from medvl.cli import main as cli
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.eval import read_results
from medvl.models import load
from medvl.schema import FINDINGS

# All commands of the quickstart, and trainings that are killed and repeated.
pytestmark = pytest.mark.slow

SPLITS = ("train", "validate", "test")


@pytest.fixture(scope="module")
def spine(tmp_path_factory: pytest.TempPathFactory) -> Spine:
    """The folders after all commands have run once."""
    spine = Spine(tmp_path_factory.mktemp("spine"))
    spine.make()
    spine.run("train", spine.recipe(spine.home / "run"))
    spine.run("eval", [*spine.medvl, *evaluation(spine)])
    return spine


def evaluation(spine: Spine, data: str = "test") -> list[str]:
    return ["eval", "zero-shot", "--checkpoint", str(spine.home / "run" / "best"), "--data",
        str(spine.shards / data),
            "--valid", str(spine.shards / "validate"), "--out", str(spine.home / "results"),
            "--resamples", "50", "--workers", "0"]  # fmt: skip


def table(spine: Spine, kind: str) -> list[dict[str, str]]:
    with gzip.open(spine.corpus / f"mimic-cxr-2.0.0-{kind}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


def test_every_image_of_the_tables_is_in_the_shards_once(spine: Spine) -> None:
    expected = Counter(row["split"] for row in table(spine, "split"))
    assert set(expected) == set(SPLITS)
    assert len(list(spine.corpus.rglob("*.dcm"))) == expected.total()
    for split in SPLITS:
        source = ShardSource(spine.shards / split)
        manifest = source.manifest
        assert manifest.samples == manifest.planned == len(source) == expected[split]
        assert (manifest.skipped, manifest.excluded) == ({}, {})
        assert len({source.key(position) for position in range(len(source))}) == expected[split]
        line = f"{split}: {manifest.samples} samples of {len(manifest.patients)} patients"
        assert line in spine.printed["shards"].splitlines()
        assert f"mimic-cxr/{line} " in spine.printed["verify"]
    assert spine.printed["verify"].count(": intact\n") == 3


@pytest.mark.fault("S11")
def test_no_patient_is_in_two_splits(spine: Spine) -> None:
    manifests = {split: Manifest.read(spine.shards / split) for split in SPLITS}
    patients = {split: set(manifest.patients) for split, manifest in manifests.items()}
    assert (
        sum(len(group) for group in patients.values())
        == len(set.union(*patients.values()))
        == PATIENTS
    )
    rows = {row["subject_id"]: row["split"] for row in table(spine, "split")}
    assert Counter(rows.values()) == {split: len(group) for split, group in patients.items()}


def test_labels_and_reports_are_those_of_their_images(spine: Spine) -> None:
    """Counted over all samples: a sample with another study's labels would show."""
    truth: Counter[tuple[str, int]] = Counter()
    labels = {row["study_id"]: row for row in table(spine, "chexpert")}
    for row in table(spine, "metadata"):
        study = labels[row["study_id"]]
        truth.update((name, int(float(study[name]))) for name in FINDINGS if study[name])
    found: Counter[tuple[str, int]] = Counter()
    for split in SPLITS:
        source = ShardSource(spine.shards / split)
        for position in range(len(source)):
            sample = source.sample(position)
            found.update(sample.labels.items())
            assert sample.sections
            assert min(source.pixels(position).shape) == 48
    assert found == truth


@pytest.mark.fault("S9")
def test_nothing_of_a_patient_gets_past_the_shards(spine: Spine) -> None:
    """Neither headers' names, ids and dates nor those in paths: in shards, vocabulary,
    checkpoints, results, page.
    """
    texts = canaries(spine.corpus)
    assert all(texts.values()), "a field without a canary proves nothing"
    everywhere = set.union(*texts.values())
    made = [spine.shards, spine.vocab, spine.home / "run", spine.home / "results"]
    files = [(path, data) for folder in made for path, data in contents(folder)]
    kinds = {path.suffix for path, _ in files}
    assert {".tar", ".index", ".json", ".safetensors", ".html", ".jsonl", ".txt"} <= kinds
    for path, data in files:
        assert not [text for text in everywhere if text.encode() in data], path
    for name, output in spine.printed.items():
        assert not [text for text in everywhere if text in output.lower()], name


def test_the_search_for_canaries_finds_them_where_they_are(spine: Spine) -> None:
    """In the corpus each, compressed files set aside; and source names in the folder that is
    kept private.
    """
    everything = b"".join(data for _, data in contents(spine.corpus))
    for texts in canaries(spine.corpus).values():
        assert all(text.encode() in everything for text in texts)
    private = b"".join(data for _, data in contents(spine.home / "shards-private"))
    stems = {path.stem for path in spine.corpus.rglob("*.dcm")}
    assert all(stem.encode() in private for stem in stems)


@pytest.mark.training
def test_training_lowers_the_loss(spine: Spine, tmp_path: Path) -> None:
    steps = share_of(12)
    seeds = {"data__seed": seed_of(), "train__seed": seed_of()}
    done = spine.ended(spine.recipe(tmp_path / "run", train__steps=steps, **seeds))
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in fakes.records(tmp_path / "run", "train")]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_training_ends_with_a_checkpoint(spine: Spine) -> None:
    assert len(fakes.records(spine.home / "run", "train")) == 12
    assert {row["step"] for row in fakes.records(spine.home / "run", "valid")} == {7, 12}
    assert "finished after step 12" in spine.printed["train"]
    model = load(spine.home / "run" / "last")
    assert model.name == "convirt"
    assert model.config.vocab_size == model.tokenizer.vocab_size
    seen = Manifest.read(spine.home / "run" / "last", "train_manifest.json")
    assert seen == Manifest.read(spine.shards / "train")


class _Page(HTMLParser):
    """Texts and outside addresses of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.outside: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = [value for name, value in attrs if name in ("src", "href") and value]
        self.outside += [value for value in loads if not value.startswith(("data:", "#"))]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_results_and_page_say_what_was_printed(spine: Spine) -> None:
    results = read_results(spine.home / "results")
    test = Manifest.read(spine.shards / "test")
    assert results.details["images"] == test.samples
    assert results.details["patients"] == len(test.patients)
    assert results.inputs["manifest"] == test.fingerprint
    macro = results.row("auroc", "macro")
    assert 0 <= macro.value <= 1
    assert math.isnan(
        macro.low
    )  # of nine images, most resamples lack a class: the mean has no interval
    edema = results.row("auroc", "Edema")
    assert 0 <= edema.low <= edema.value <= edema.high <= 1
    assert f"{macro.value:.3f}" in spine.printed["eval"]
    predictions = [
        json.loads(line)
        for line in (spine.home / "results/predictions.jsonl").read_text().splitlines()
    ]
    source = ShardSource(spine.shards / "test")
    assert {row["key"] for row in predictions} == {
        source.key(position) for position in range(len(source))
    }
    page = _Page((spine.home / "results" / "index.html").read_text())
    assert all(
        (spine.home / "results" / link).is_file() for link in page.outside
    )  # tables and figures beside it
    assert any(f"{macro.value:.3f}" in text for text in page.texts)
    assert "mimic-cxr, split test" in " ".join(page.texts)


def snapshot(*folders: Path) -> dict[Path, str]:
    """Hash of every file; locks name the process that took them."""
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    ]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.usefixtures("drawn_plots")
def test_the_same_commands_again_change_nothing(spine: Spine) -> None:
    (spine.home / "results" / "index.html").unlink()  # it tells the day
    made = (
        spine.corpus,
        spine.shards,
        spine.home / "shards-private",
        spine.vocab,
        spine.home / "run",
    )
    before = snapshot(*made, spine.home / "results")
    drawn = {
        path: path.stat().st_mtime_ns
        for path in [*spine.corpus.rglob("*.dcm"), *spine.shards.rglob("*.tar")]
    }
    for arguments in spine.commands.values():
        cli.main(arguments)
    spine.run("again", spine.recipe(spine.home / "run"))
    cli.main(evaluation(spine))
    (spine.home / "results" / "index.html").unlink()
    assert snapshot(*made, spine.home / "results") == before
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn


def test_other_settings_over_the_same_folders_are_refused(
    spine: Spine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(spine.corpus, spine.shards, spine.home / "run")
    phantom, shards = list(spine.commands["phantom"]), list(spine.commands["shards"])
    phantom[phantom.index("--seed") + 1] = "12"
    shards[shards.index("--short-side") + 1] = "32"
    for arguments, reason in ((phantom, "with another seed"), (shards, "differs in the options")):
        with pytest.raises(SystemExit, match="1"):
            cli.main(arguments)
        assert reason in capsys.readouterr().err
    done = spine.ended(spine.recipe(spine.home / "run", optim__lr=2e-3))
    assert done.returncode == 1
    assert "belongs to another run: optim.lr was 0.001 and is 0.002" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert snapshot(spine.corpus, spine.shards, spine.home / "run") == before


@pytest.mark.fault("S11")
def test_patients_that_a_model_has_seen_are_no_test(
    spine: Spine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(evaluation(spine, data="train"))
    assert "share 16 patients" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_of_a_checkpoint_is_found_before_it_is_judged(
    name: str, spine: Spine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other weights would give other numbers without a word."""
    checkpoint = tmp_path / "best"
    shutil.copytree(spine.home / "run" / "best", checkpoint)
    shutil.rmtree(checkpoint / "train_state")  # the run's own: a model is handed on without it
    assert load(checkpoint).name == "convirt"
    data = bytearray((checkpoint / name).read_bytes())
    data[-2] ^= 1
    (checkpoint / name).write_bytes(data)
    with pytest.raises(SystemExit, match="1"):
        cli.main(
            [
                "eval",
                "zero-shot",
                "--checkpoint",
                str(checkpoint),
                "--data",
                str(spine.shards / "test"),
            ]
        )
    *notices, error = capsys.readouterr().err.splitlines()
    assert all(notice.startswith("medvl: results go to ") for notice in notices)
    assert error.startswith(
        f"medvl: {checkpoint / name} "
    )  # of config.json the syntax may be what is found first
    assert error.endswith("damaged") or (
        name == "config.json" and "is not JSON that medvl reads" in error
    )


KILLED_STEPS, LATEST_KILL = 14, 9
"""Killed early enough that the run cannot end before the signal arrives."""


def shared(spine: Spine, run_dir: Path, workers: int) -> list[str]:
    """The command of a run that is killed, and of the one that is not."""
    return spine.recipe(
        run_dir,
        train__steps=KILLED_STEPS,
        train__checkpoint_every=2,
        train__log_every=1,
        data__workers=workers,
    )


def kill_after(spine: Spine, step: int, command: list[str], pipe: Path) -> IO[str]:
    """Start a training and kill it when it tells of that step: it alone, its workers must notice by
    themselves. Return its stderr, which ends when the last of them has.
    """
    process, stderr = forked.start_with_pipe(command, pipe, cwd=spine.home, env=spine.environment)
    for told in stderr:
        if re.search(rf"step {step} of {KILLED_STEPS}\b", told):
            process.kill()
            break
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, told
    return stderr


@pytest.mark.fault("F8")
def test_a_killed_recipe_started_again_ends_with_the_same_weights(
    spine: Spine, tmp_path: Path
) -> None:
    """Also when the second start has another number of workers."""
    spine.run("whole", shared(spine, tmp_path / "whole", workers=0))
    step = random.Random(time.time_ns()).randrange(1, LATEST_KILL + 1)
    with kill_after(
        spine, step, shared(spine, tmp_path / "killed", workers=2), tmp_path / "stderr"
    ) as stderr:
        shutil.copytree(tmp_path / "killed", tmp_path / "fewer", symlinks=True)
        for name, workers in (("killed", 2), ("fewer", 0)):
            spine.run(name, shared(spine, tmp_path / name, workers=workers))
            (resumed,) = re.findall(r"resuming from .*step-(\d+)", spine.printed[name])
            assert (step - 1) // 2 * 2 <= int(resumed) < KILLED_STEPS
            same = fakes.weights_hash(tmp_path / name) == fakes.weights_hash(tmp_path / "whole")
            assert same, f"{name} after step {step}, gone on from {resumed}"
            assert fakes.records(tmp_path / name) == fakes.records(tmp_path / "whole")
        while select.select([stderr], [], [], 30)[0]:
            if not os.read(stderr.fileno(), 1 << 16):
                return
        pytest.fail("a worker of the killed run is still there")
