"""Folders of results: evaluations of different checkpoints never meet, and `medvl compare` finds
the right ones.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.label_shards import make_shards

import medvl
from medvl.cli import main as cli
from medvl.data import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import EvaluationError
from medvl.eval import default_folder, read_results, write_results
from medvl.eval.compare.compare import find_runs
from medvl.eval.core.results import Results, check_output, checkpoint_sha256, publish
from medvl.eval.retrieval import image_text
from medvl.eval.zero_shot_classification import calibration
from medvl.models import checkpoint_folder
from medvl.models.checkpoint import save

COMMON = ["--workers", "0", "--resamples", "5", "--device", "cpu"]
RESULTS = Results(
    protocol="p", protocol_version=1, rows=(), config={}, inputs={"checkpoint": "a" * 64}
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `shards/`, `imported/a` and `imported/b`, and a run with two steps."""
    folder = tmp_path_factory.mktemp("output-folders")
    make_shards(folder, texts=True)
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "fit": "squash",
    }
    tokenizer = train_wordpiece(["edema is seen", "no fracture"], vocab_size=60, min_frequency=1)
    names = (
        "imported/a",
        "imported/b",
        "run/checkpoints/step-00000100",
        "run/checkpoints/step-00000200",
    )
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        (folder / name).mkdir(parents=True)
        save(medvl.create_model("convirt", tokenizer=tokenizer, projection_dim=8,
            frozen_text_layers=0, **settings),
             folder / name)  # fmt: skip
    (folder / "run/best").symlink_to("checkpoints/step-00000100")
    (folder / "run/last").symlink_to("checkpoints/step-00000200")
    return folder


def evaluate(home: Path, checkpoint: str, *options: str) -> None:
    data = str(home / "shards/test")
    cli.main(["eval", "retrieval", "--checkpoint", checkpoint, "--data", data, *COMMON, *options])


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_imported_checkpoints_and_steps_of_a_run_are_compared(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for first, second in (("imported/a", "imported/b"), ("run/best", "run/last")):
        for name in (first, second):
            evaluate(home, str(home / name))
            results = read_results(default_folder(home / name, "retrieval"))
            assert results.inputs["checkpoint"] == checkpoint_sha256(home / name)
        cli.main(
            [
                "compare",
                str(home / first),
                str(home / second),
                "--out",
                str(tmp_path / "out"),
                "--resamples",
                "9",
            ]
        )
        (compared,) = json.loads((tmp_path / "out/comparison.json").read_text())
        hashes = [run["inputs"]["checkpoint"] for run in compared["runs"]]
        assert hashes == [checkpoint_sha256(home / name) for name in (first, second)]
        assert hashes[0] != hashes[1]
    assert (home / "run/eval/step-00000100/retrieval/results.json").is_file()
    assert (home / "run/eval/step-00000200/retrieval/results.json").is_file()
    assert (home / "imported/a/eval/retrieval/results.json").is_file()
    with raises(EvaluationError, "conflict", field="runs", names="same results"):
        find_runs([home / "run", home / "run/checkpoints/step-00000100"])
    capsys.readouterr()
    text = failed(
        ["compare", *[str(home / "imported/a")] * 2, "--out", str(tmp_path / "no")], capsys
    )
    assert "lead to the same results" in text


def test_results_of_another_checkpoint_are_replaced_on_request_only(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    evaluate(home, str(home / "imported/a"), *out)
    evaluate(home, str(home / "imported/a"), *out)  # the same checkpoint again
    command = [
        "eval",
        "retrieval",
        "--checkpoint",
        str(home / "imported/b"),
        "--data",
        str(home / "shards/test"),
    ]
    text = failed([*command, *COMMON, *out], capsys)
    for name in ("imported/a", "imported/b"):
        assert checkpoint_sha256(home / name)[:12] in text
    assert "--replace" in text
    evaluate(home, str(home / "imported/b"), *out, "--replace")
    assert read_results(tmp_path / "out").inputs["checkpoint"] == checkpoint_sha256(
        home / "imported/b"
    )


def test_results_on_other_data_are_kept(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "imported/a", tmp_path / "a", ignore=shutil.ignore_patterns("eval"))
    checkpoint, valid = str(tmp_path / "a"), str(home / "shards/validate")
    evaluate(home, checkpoint)
    for _ in range(2):  # the second one replaces the first, not the other data's
        cli.main(["eval", "retrieval", "--checkpoint", checkpoint, "--data", valid, *COMMON])
    folders = sorted((tmp_path / "a/eval").iterdir())
    manifests = [read_results(folder).inputs["manifest"] for folder in folders]
    assert [folder.name for folder in folders] == [
        "retrieval",
        f"retrieval-{str(manifests[1])[:8]}",
    ]
    assert manifests == [
        ShardSource(home / "shards" / split).fingerprint for split in ("test", "validate")
    ]
    assert str(folders[1]) in capsys.readouterr().out
    cli.main(
        ["eval", "retrieval", "--checkpoint", checkpoint, "--data", valid, *COMMON, "--replace"]
    )
    assert read_results(folders[0]).inputs["manifest"] == manifests[1]


def test_the_folder_is_announced_before_the_evaluation(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    shutil.copytree(home / "imported/a", tmp_path / "a", ignore=shutil.ignore_patterns("eval"))
    shutil.copytree(home / "imported/b", tmp_path / "b", ignore=shutil.ignore_patterns("eval"))
    out = tmp_path / "out"
    evaluate(home, str(tmp_path / "a"), "--out", str(out))
    assert f"results go to {out}" in caplog.messages
    other = ["--data", str(home / "shards/validate"), *COMMON, "--out", str(out)]
    aside = tmp_path / f"out-{ShardSource(home / 'shards/validate').fingerprint[:8]}"

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(image_text, "image_text_retrieval", interrupt)
        with pytest.raises(SystemExit):
            cli.main(["eval", "retrieval", "--checkpoint", str(tmp_path / "a"), *other])
        expected = (
            f"results go to {aside}: {out} holds results on other data (--replace replaces them)"
        )
        assert expected in caplog.messages
        aside.mkdir()
        write_results(RESULTS, aside)  # of another checkpoint
        text = failed(["eval", "retrieval", "--checkpoint", str(tmp_path / "a"), *other], capsys)
        assert f"{aside / 'results.json'} holds results of another checkpoint" in text
        with pytest.raises(SystemExit):
            cli.main(
                ["eval", "retrieval", "--checkpoint", str(tmp_path / "a"), *other, "--replace"]
            )
        assert caplog.messages.count(f"results go to {out}") == 2


def test_results_are_written_over_others_on_request_only(tmp_path: Path) -> None:
    write_results(RESULTS, tmp_path)
    other = Results(
        protocol="p", protocol_version=1, rows=(), config={}, inputs={"checkpoint": "b" * 64}
    )
    unnamed = Results(protocol="p", protocol_version=1, rows=(), config={}, inputs={})
    for results in (other, unnamed):
        with raises(EvaluationError, "exists", field="out", names="aaaaaaaaaaaa"):
            write_results(results, tmp_path)
    write_results(other, tmp_path, replace=True)
    assert read_results(tmp_path).inputs == {"checkpoint": "b" * 64}


def test_results_of_other_weights_are_not_those_of_the_checkpoint(
    home: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "c"
    shutil.copytree(home / "imported/b", checkpoint, ignore=shutil.ignore_patterns("eval"))
    write_results(RESULTS, checkpoint / "eval/p")
    with raises(EvaluationError, "mismatch", field="runs", names=str(checkpoint)):
        find_runs([checkpoint])
    beside = (
        tmp_path / "imported"
    )  # where earlier versions wrote, for every checkpoint of the folder
    shutil.copytree(home / "imported/b", beside / "b", ignore=shutil.ignore_patterns("eval"))
    write_results(RESULTS, beside / "eval/p")
    with raises(EvaluationError, "mismatch", field="runs"):
        find_runs([beside / "b"])
    with raises(EvaluationError, "not_found", field="runs", names="missing"):
        find_runs([tmp_path / "missing"])


def test_a_run_without_an_evaluation_of_its_best_step_names_the_others(
    home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in ("step-00000100", "step-00000200"):
        shutil.copytree(home / "run/checkpoints" / step, run / "checkpoints" / step)
    (run / "best").symlink_to("checkpoints/step-00000200")
    write_results(RESULTS, run / "eval/step-00000100/p")
    with raises(EvaluationError, "not_found", names="eval/step-00000100"):
        find_runs([run])


def test_default_folders(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = home / "run"
    assert (
        default_folder(run, "t")
        == default_folder(run / "best", "t")
        == run / "eval/step-00000100/t"
    )
    assert default_folder(run / "last", "t") == run / "eval/step-00000200/t"
    assert default_folder(run / "checkpoints/step-00000200", "t") == run / "eval/step-00000200/t"
    monkeypatch.chdir(home)
    assert default_folder(Path("run"), "t") == Path("run/eval/step-00000100/t")
    assert default_folder(Path("imported/a"), "t") == Path("imported/a/eval/t")
    for name in ("x.jsonl", "y.jsonl"):
        (tmp_path / name).touch()
    assert default_folder(tmp_path / "x.jsonl", "vqa") == tmp_path / "eval/x.jsonl/vqa"
    assert default_folder(tmp_path / "y.jsonl", "vqa") == tmp_path / "eval/y.jsonl/vqa"
    # a file system without links has copies, which name their step in the marker
    shutil.copytree(run / "checkpoints/step-00000200", tmp_path / "copy/best")
    (tmp_path / "copy/checkpoints").mkdir()
    (tmp_path / "copy/best/complete.json").write_text('{"step": 200}')
    assert default_folder(tmp_path / "copy", "t") == tmp_path / "copy/eval/step-00000200/t"
    # models of the hub: in the folder of their commit in the hub's cache
    monkeypatch.setattr(checkpoint_folder, "fetch_snapshot", lambda hub_id, *_: tmp_path / hub_id)
    for name in ("one", "two"):
        assert (
            default_folder(Path(f"hf-hub:owner/{name}"), "t")
            == tmp_path / "owner" / name / "eval/t"
        )


def test_an_output_folder_that_cannot_be_written_names_the_option(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "c"
    shutil.copytree(home / "imported/b", checkpoint, ignore=shutil.ignore_patterns("eval"))
    (checkpoint / "eval").touch()
    command = [
        "eval",
        "retrieval",
        "--checkpoint",
        str(checkpoint),
        "--data",
        str(home / "shards/test"),
        *COMMON,
    ]
    assert "--out" in failed(command, capsys)
    with raises(EvaluationError, "unreadable", field="out", names="--out"):
        publish(RESULTS, checkpoint / "eval/p", model="m", data="d")
    (checkpoint / "eval").unlink()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != checkpoint)
    with raises(EvaluationError, "unreadable", field="out", names="read-only"):
        check_output(checkpoint / "eval/p")


def test_calibrations_of_checkpoints_lie_apart(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        name: calibration.calibration_path(home / name, "p")
        for name in ("imported/a", "imported/b", "run/last")
    }
    assert len(set(paths.values())) == 3
    fitted = calibration.Calibration(prompts="p", prompts_sha256="0", checkpoint_sha256="a",
        data={}, findings={},
                                     left_out={})  # fmt: skip
    file = calibration.write_calibration(fitted, tmp_path / "p.json")
    other = calibration.Calibration(prompts="p", prompts_sha256="0", checkpoint_sha256="b", data={},
        findings={},
                                    left_out={})  # fmt: skip
    with raises(EvaluationError, "exists", field="out"):
        calibration.write_calibration(other, file)
    calibration.write_calibration(other, file, replace=True)
    assert calibration.read_calibration(file).checkpoint_sha256 == "b"
