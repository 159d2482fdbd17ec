"""`medvl eval probe`, `classify`, `class-retrieval` and `make-retrieval-list`, on shards and
checkpoints on disk.
"""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import eval_ranks
from helpers.label_shards import NAMES, make_shards
from helpers.two_ranks import on_two_ranks

import medvl
from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.eval import RetrievalList, Setup, read_results
from medvl.eval.core.results import checkpoint_sha256, format_value
from medvl.models import create_classifier
from medvl.models.checkpoint import save

COMMON = ["--workers", "0", "--resamples", "20"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `shards/` and two checkpoints: `run/best` of ConVIRT, `labels/best` of a
    classifier on it.
    """
    folder = tmp_path_factory.mktemp("label-commands")
    make_shards(folder, texts=True)
    torch.manual_seed(0)
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "fit": "squash",
    }
    tokenizer = train_wordpiece(["edema is seen", "no fracture"], vocab_size=60, min_frequency=1)
    model = medvl.create_model(
        "convirt", tokenizer=tokenizer, projection_dim=8, frozen_text_layers=0, **settings
    )
    for name in ("run/best", "labels/best"):
        (folder / name).mkdir(parents=True)
    save(model, folder / "run" / "best")
    save(create_classifier(folder / "run" / "best", NAMES), folder / "labels" / "best")
    return folder


def splits(home: Path) -> list[str]:
    names = {"train": "train", "valid": "validate", "test": "test"}
    return [
        text
        for option, split in names.items()
        for text in (f"--{option}", str(home / "shards" / split))
    ]


def error_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail and return its error output."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_probe_and_random_baseline_share_run_and_feature_cache(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = ["eval", "probe", "--checkpoint", str(home / "run" / "best"), *splits(home), *COMMON]
    cli.main([*probe, "--fractions", "0.5", "1.0", "--seeds", "2"])
    assert "auroc@50%" in capsys.readouterr().out
    folder = home / "run" / "best" / "eval" / "probe"
    assert {path.name for path in folder.iterdir()} == {
        "results.json",
        "predictions.jsonl",
        "index.html",
        "index_files",
    }
    assert len(list((home / "run" / "best" / "eval" / "features").iterdir())) == 3
    results = read_results(folder)
    assert results.row("auroc@100%", "Edema").value > 0.9
    assert results.inputs["checkpoint"] is not None
    cli.main([*probe, "--fractions", "1.0", "--random-weights"])
    baseline = read_results(home / "run" / "best" / "eval" / "probe_random")
    assert baseline.inputs["checkpoint"] is None
    assert baseline.inputs["encoder"] != results.inputs["encoder"]
    assert len(list((home / "run" / "best" / "eval" / "features").iterdir())) == 6
    cli.main(["eval", "probe", "--encoder", "resnet_tiny", "--image-size", "32", *splits(home),
        *COMMON,
              "--fractions", "1.0", "--out", str(home / "named")])  # fmt: skip
    assert "resnet_tiny, random weights" in (home / "named" / "index.html").read_text()


def test_zero_shot_on_a_device_equals_the_cpu(
    home: Path, device: torch.device, tmp_path: Path
) -> None:
    """Scores within two thousandths: on a GPU convolutions are in TF32 by default."""
    where = ["--checkpoint", str(home / "run/best"), "--data", str(home / "shards/test")]
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder, name in zip(folders, (device.type, "cpu"), strict=True):
        cli.main(["eval", "zero-shot", *where, *COMMON, "--device", name, "--out", str(folder)])
    ours, theirs = (
        [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        for folder in folders
    )
    assert len(theirs) == 14
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["key"] == other["key"]
        assert mine["scores"] == pytest.approx(other["scores"], abs=2e-3)
    spread = max(row["scores"]["Edema"] for row in theirs) - min(
        row["scores"]["Edema"] for row in theirs
    )
    assert spread > 0.02
    for mine, other in zip(*(read_results(folder).rows for folder in folders), strict=True):
        assert mine.name == other.name
        assert mine.value == pytest.approx(other.value, abs=0.1, nan_ok=True)


def test_probe_needs_exactly_one_of_checkpoint_and_encoder(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = ["--checkpoint", str(home / "run" / "best")]
    for arguments in (
        [],
        [*checkpoint, "--encoder", "resnet_tiny"],
        ["--encoder", "resnet_tiny", "--random-weights"],
    ):
        text = error_text(["eval", "probe", *splits(home), *arguments], capsys)
        assert "--checkpoint" in text
        assert "--encoder" in text
    text = error_text(
        ["eval", "probe", *splits(home), "--encoder", "resnet_tiny", "--image-size", "32"], capsys
    )
    assert "--out" in text


def test_classify_writes_results_and_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(home / "shards" / "test"), "--valid", str(home / "shards" / "validate")]
    cli.main(["eval", "classify", "--checkpoint", str(home / "labels" / "best"), *data, *COMMON])
    results = read_results(home / "labels" / "best" / "eval" / "classify")
    assert results.row("auroc", "Edema").value == 0.5  # its head is still zero
    assert (
        "Classification: classifier"
        in (home / "labels" / "best" / "eval" / "classify" / "index.html").read_text()
    )
    assert "Edema" in capsys.readouterr().out
    text = error_text(
        ["eval", "classify", "--checkpoint", str(home / "run" / "best"), *data], capsys
    )
    assert "is a convirt" in text
    assert "recipes/linear_probe.py" in text


@pytest.mark.parametrize("task", ["classify", "detection", "segmentation", "zero-shot-masks"])
def test_thresholds_are_not_chosen_on_training_patients(
    home: Path,
    tmp_path: Path,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards, checkpoint = home / "shards", tmp_path / "best"
    trained = dataclasses.asdict(ShardSource(shards / "train").manifest)
    checkpoint.mkdir()
    save(medvl.load(home / "labels" / "best"), checkpoint, {"train_manifest": trained})
    model = SimpleNamespace(name="any", tokenizer=None)
    monkeypatch.setattr(Setup, "check", lambda *_, **__: None)
    monkeypatch.setattr(Setup, "model", lambda *_, **__: model)
    monkeypatch.setattr(Setup, "loader", lambda *_, **__: None)
    paths = [
        "--checkpoint",
        str(checkpoint),
        "--data",
        str(shards / "test"),
        "--valid",
        str(shards / "train"),
    ]
    assert "was trained on patients of" in error_text(["eval", task, *paths], capsys)


def test_class_retrieval_uses_list_of_make_retrieval_list(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = str(home / "shards" / "train"), home / "list.json"
    cli.main(
        [
            "eval",
            "make-retrieval-list",
            "--out",
            str(path),
            "--data",
            data,
            "--classes",
            *NAMES,
            "--per-class",
            "5",
        ]
    )
    assert "10 candidates" in capsys.readouterr().out
    search = [
        "eval",
        "class-retrieval",
        "--checkpoint",
        str(home / "run" / "best"),
        "--data",
        data,
        *COMMON,
    ]
    cli.main([*search, "--candidates", str(path), "--ks", "3"])
    results = read_results(home / "run" / "best" / "eval" / "class_retrieval")
    assert results.inputs["list"] == RetrievalList.read(path).sha256
    assert results.row("precision@3", "Edema", "image to image").n == 5
    cli.main([*search, "--ks", "5"])
    assert (
        read_results(home / "run" / "best" / "eval" / "image_retrieval")
        .row("precision@5", "Edema")
        .value
        > 0.5
    )
    assert "--chexpert-8x200" in error_text(
        ["eval", "make-retrieval-list", "--out", str(path)], capsys
    )
    text = error_text([*search[:3], str(home / "labels" / "best"), *search[4:]], capsys)
    assert "is a classifier" in text
    assert "dual-encoder" in text


def test_two_ranks_write_the_files_of_one_process(home: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    eval_ranks.evaluate(home, tmp_path / "one")
    torch.set_num_threads(threads)
    on_two_ranks(eval_ranks.evaluate, home, tmp_path / "two", group=False)
    for name in eval_ranks.commands(home, tmp_path):
        for file in ("results.json", "predictions.jsonl"):
            assert (tmp_path / "one" / name / file).read_bytes() == (
                tmp_path / "two" / name / file
            ).read_bytes()
        assert (tmp_path / "two" / name / "index.html").is_file()


def test_other_evaluations_are_refused_on_several_ranks(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = ["--data", str(home / "shards/test")]
    checkpoint = ["--checkpoint", str(home / "run/best")]
    for name, options in (
        ("matching", checkpoint),
        ("calibrate", checkpoint),
        ("make-retrieval-list", ["--out", "list.json"]),
    ):
        message = error_text(["eval", name, *options, *data], capsys)
        expected = f"expected one process for medvl eval {name}, got several"
        assert f"{expected}; start it without torchrun" in message


def test_robustness_of_a_dual_encoder_and_a_classifier(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(home / "shards" / "test"), "--corruptions", "blur"]
    test = ["eval", "robustness", "--checkpoint", str(home / "run" / "best"), *data, *COMMON]
    cli.main(
        [
            *test,
            "--sites",
            str(home / "shards" / "validate"),
            "--outside",
            str(home / "shards" / "validate"),
        ]
    )
    table = capsys.readouterr().out
    folder = home / "run" / "best" / "eval" / "robustness"
    results = read_results(folder)
    row = results.row("above_other_change", "all", "all corruptions")
    assert row.n == 14
    assert "macro (all corruptions)" in table
    assert results.row("ood_auroc", "all", "shards/validate").n == 14
    assert results.config["prompts"][:3] == [
        "chexpert_ensemble",
        "chexpert_pairs",
        "chexzero_template",
    ]
    page = (folder / "index.html").read_text()
    assert "Corruptions: Own text above another patient" in page
    assert "Images that are not chest radiographs" in page
    before = (folder / "results.json").read_bytes()
    cli.main(
        [
            *test,
            "--sites",
            str(home / "shards" / "validate"),
            "--outside",
            str(home / "shards" / "validate"),
        ]
    )
    assert (folder / "results.json").read_bytes() == before
    cli.main(["eval", "robustness", "--checkpoint", str(home / "labels" / "best"), *data, *COMMON])
    results = read_results(home / "labels" / "best" / "eval" / "robustness")
    assert results.row("auroc_change", "macro", "blur 5").value == 0  # its head is still zero
    assert results.row("ood_auroc", "all", "inverted").value == 0.5
    assert not any(row.metric == "negation" for row in results.rows)
    assert "rain" in error_text([*test, "--corruptions", "rain"], capsys)
    assert "expected made-up among natural noise" in error_text(
        [*test, "--made-up", "snow"], capsys
    )


def test_robustness_of_a_linear_probe(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its clean AUROC is that of `medvl eval probe` with the same features, and it compares no
    texts.
    """
    data = [
        "--data",
        str(home / "shards" / "test"),
        "--corruptions",
        "blur",
        "--made-up",
        "inverted",
    ]
    fit = [
        "--probe-train",
        str(home / "shards" / "train"),
        "--probe-valid",
        str(home / "shards" / "validate"),
    ]
    test = ["eval", "robustness", "--checkpoint", str(home / "run" / "best"), *data, *COMMON]
    cli.main([*test, *fit])
    folder = home / "run" / "best" / "eval" / "robustness_probe"
    results = read_results(folder)
    cli.main(["eval", "probe", "--checkpoint", str(home / "run" / "best"), *splits(home), *COMMON,
              "--fractions", "1.0", "--out",
              str(home / "run" / "best" / "eval" / "probe_of_all")])  # fmt: skip
    probed = read_results(home / "run" / "best" / "eval" / "probe_of_all")
    for name in ("Edema", "Fracture"):
        assert results.row("auroc", name).value == pytest.approx(
            probed.row("auroc@100%", name).value
        )
        assert results.row("ece", name).value == pytest.approx(probed.row("ece", name).value)
    assert results.row("auroc_change", "macro", "blur 5").n == 14
    assert {row.metric for row in results.rows}.isdisjoint({"negation", "above_other", "auroc_sd"})
    assert results.inputs["probe train"] == probed.inputs["train_manifest"]
    assert "linear probe of convirt" in (folder / "index.html").read_text()
    capsys.readouterr()
    assert "give both --probe-train and --probe-valid" in error_text([*test, *fit[:2]], capsys)
    assert "a linear probe has no prompts" in error_text(
        [*test, *fit, "--prompts", "chexpert_pairs"], capsys
    )
    own = [fit[0], str(home / "shards" / "test"), *fit[2:]]
    assert "in both train and test" in error_text([*test, *own], capsys)


def test_before_after_writes_one_page_of_paired_differences(home: Path, tmp_path: Path) -> None:
    """Each evaluation of both checkpoints, prompts in other words, another site, and no evaluation
    that the data does not allow.
    """
    start, trained, out = home / "run/best", tmp_path / "trained", tmp_path / "page"
    model = medvl.load(start)
    for part in ("image_encoder", "image_head"):
        torch.nn.init.normal_(next(model.get_submodule(part).parameters()), std=0.3)
    trained.mkdir()
    save(model, trained)
    before_after = ["eval", "before-after", "--start", str(start), "--trained", str(trained)]
    before_after += ["--data", str(home / "shards/test"), "--out", str(out), *COMMON]
    cli.main([
        *before_after, "--wordings", "statements", "--sites", str(home / "shards/validate"),
        *splits(home)[:4],
    ])  # fmt: skip
    compared = {one["title"]: one for one in json.loads((out / "comparison.json").read_text())}
    assert list(compared) == [
        "Zero-shot classification",
        "Zero-shot classification with statements",
        "Retrieval",
        "Linear probe",
        "Zero-shot classification on validate",
        "Retrieval on validate",
    ]
    page = (out / "index.html").read_text()
    assert "Before and after training" in page
    assert "Brier score, mean over classes" in page
    assert len(re.findall(f"<dd>checkpoint sha256 {checkpoint_sha256(trained)[:12]}", page)) == 1
    boxes = re.findall(r'class="what">(.*?): (.*?)</span><strong>(.*?)</strong><small>start', page)
    assert [title for title, _, _ in boxes] == list(compared), "one box for each evaluation"
    headlines = {title: rest for title, *rest in boxes}
    for title, comparison in compared.items():
        assert title in page
        rows = {row["name"]: row for row in comparison["rows"]}
        name = next(name for name, row in rows.items() if row["differences"][0] is not None)
        folder = out / "evaluations" / title.lower().replace(" ", "-")
        results = [read_results(folder / run) for run in ("start", "trained")]
        values = [next(row.value for row in each.rows if row.name == name) for each in results]
        assert [one["value"] for one in rows[name]["values"]] == pytest.approx(values)
        label, after = headlines[title]
        main = "auroc@100%/macro" if title == "Linear probe" else name
        assert label.startswith("recall@1" if title.startswith("Retrieval") else "AUROC")
        assert after == format_value(next(row for row in results[1].rows if row.name == main))[:5]
        difference = rows[name]["differences"][0]
        assert difference["value"] == pytest.approx(values[1] - values[0])
        assert difference["low"] <= difference["value"] <= difference["high"]
    assert any("commonest" in row["name"] for row in compared["Retrieval"]["rows"])
    paired = {row["name"] for row in compared["Linear probe"]["rows"] if row["differences"][0]}
    assert {"auroc@100%/macro", "ece/macro"} <= paired
