"""Inference on folders: what is read, what is skipped, what is written, and resuming."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.fusion_samples import shaken, tiny_model, tiny_tokenizer

import medvl
from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import train_words
from medvl.errors import ConfigError, ImageError
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.zero_shot_classification.calibration import (
    Calibration,
    FindingCalibration,
    calibration_path,
    write_calibration,
)
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.inference import folder as module, write_study_reports
from medvl.inference.folder import ImageModel, find_images, infer_files
from medvl.models import VQA, save

TEXTS = ["cardiomegaly", "left apical nodule"]
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convirt")
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "projection_dim": 8,
    }
    save(
        medvl.create_model("convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **settings),
        folder,
    )
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A tree with four images, of which one is truncated, and files that are none."""
    root = tmp_path / "images"
    (root / "study" / ".hidden").mkdir(parents=True)
    for name in ("b.png", "a.jpg"):
        cv2.imwrite(str(root / name), RNG.integers(0, 256, (40, 50), dtype=np.uint8))
    write_dataset(
        root / "study" / "IM000001", image_dataset(RNG.integers(0, 256, (40, 30), dtype=np.uint8))
    )
    (root / "study" / "cut.PNG").write_bytes((root / "b.png").read_bytes()[:500])
    (root / "study" / "notes.txt").write_text("no image")
    shutil.copy(root / "b.png", root / "study" / ".hidden" / "c.png")
    shutil.copy(root / "study" / "IM000001", root / "DICOMDIR")
    return root


def test_files_of_a_tree(images: Path, tmp_path: Path) -> None:
    names = ["a.jpg", "b.png", "study/IM000001", "study/cut.PNG"]
    assert [str(path.relative_to(images)) for path in find_images([images])] == names
    assert find_images([images / "b.png", images])[0] == images / "b.png"
    assert len(find_images([images / "b.png", images])) == 4
    assert find_images([images / "study/notes.txt"]) == [
        images / "study/notes.txt"
    ]  # as the user says
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "scan.TIFF").write_bytes(b"II*\0")  # counted, though it cannot be read
    assert find_images([tmp_path / "other"]) == [tmp_path / "other" / "scan.TIFF"]
    with raises(ImageError, "empty", "images"):
        find_images([tmp_path / "empty"])
    with raises(ImageError, "not_found", "images", names="nowhere"):
        find_images([tmp_path / "nowhere"])


def test_the_command_writes_a_folder(
    checkpoint: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        "infer",
        str(images),
        "--checkpoint",
        str(checkpoint),
        "--texts",
        *TEXTS,
        "--out",
        str(out),
    ]
    cli.main(command)
    printed = capsys.readouterr().out
    assert "1 of 4 images skipped: 1 truncated" in printed
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    expected = medvl.infer(checkpoint, images / "b.png", TEXTS)
    assert lines[1]["values"] == pytest.approx(expected, rel=1e-5)
    assert lines[3] == {
        "image": str(images / "study/cut.PNG"),
        "values": {},
        "skipped": "truncated",
    }
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(rows[1][text]) for text in TEXTS] == pytest.approx(
        list(expected.values()), rel=1e-5
    )
    assert rows[3]["skipped"] == "truncated"
    overlay = cv2.imread(str(out / lines[0]["overlays"][0]))
    assert overlay.shape == (40, 50, 3)
    assert len(list((out / "overlays").iterdir())) == 3
    cli.main(command)  # nothing is left to do
    assert len((out / "results.jsonl").read_text().splitlines()) == 4
    with pytest.raises(SystemExit):
        cli.main([*command, "--prompts", "chexpert_pairs"])
    assert "other texts or options" in capsys.readouterr().err


def test_images_that_are_no_chest_radiographs_are_marked_or_left_out(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels, images, out = (
        RNG.integers(0, 256, (40, 30), dtype=np.uint8),
        tmp_path / "images",
        tmp_path / "out",
    )
    images.mkdir()
    for name, fields in (
        ("chest", {"Modality": "DX", "BodyPartExamined": "CHEST"}),
        ("brain", {"Modality": "MR", "BodyPartExamined": "BRAIN"}),
        ("hand", {"Modality": "CR", "BodyPartExamined": "hand "}),
        ("unknown", {"Modality": None}),
    ):
        write_dataset(images / f"{name}.dcm", image_dataset(pixels, **fields))
    cv2.imwrite(str(images / "x.png"), pixels)
    command = ["infer", str(images), "--checkpoint", str(checkpoint), "--texts", *TEXTS]
    cli.main([*command, "--out", str(out)])
    printed = capsys.readouterr().out
    assert "warning: 3 of 5 images are no chest radiographs by their header" in printed
    assert "MR BRAIN (!)" in printed
    assert "DX CHEST  " in printed
    lines = {
        Path(row["image"]).stem: row
        for row in map(json.loads, (out / "results.jsonl").read_text().splitlines())
    }
    assert lines["brain"]["modality"] == "MR"
    assert {name: row.get("warning") for name, row in lines.items()} == {
        "brain": "MR, BRAIN", "chest": None, "hand": "HAND", "unknown": "no known modality",
        "x": None,
    }  # fmt: skip
    with (out / "results.csv").open() as file:
        assert [row["warning"] for row in csv.DictReader(file)] == [
            "MR, BRAIN",
            "",
            "HAND",
            "no known modality",
            "",
        ]
    cli.main([*command, "--modality", "cr", "DX"])
    printed = capsys.readouterr().out
    assert "2 of 5 images skipped: 2 other_modality" in printed
    assert "warning" not in printed
    cli.main(
        ["infer", str(images / "brain.dcm"), "--checkpoint", str(checkpoint), "--texts", TEXTS[0]]
    )
    assert "brain.dcm: MR BRAIN (!)" in capsys.readouterr().out


def test_the_python_interface_warns_of_other_images(
    checkpoint: Path, tmp_path: Path, recwarn: Any
) -> None:
    pixels = RNG.integers(0, 256, (40, 30), dtype=np.uint8)
    brain = write_dataset(tmp_path / "brain.dcm", image_dataset(pixels, Modality="MR"))
    chest = write_dataset(tmp_path / "chest.dcm", image_dataset(pixels, Modality="DX"))
    model = medvl.load(checkpoint)
    recwarn.clear()
    medvl.infer(model, [chest, pixels], TEXTS)
    assert not [warning for warning in recwarn if warning.category is UserWarning]
    for image in (brain, brain.read_bytes(), medvl.data.read_dicom(brain)):
        with pytest.warns(
            UserWarning, match="1 of 1 images are no chest radiographs by their header"
        ):
            medvl.infer(model, image, TEXTS)


def test_an_interrupted_run_continues(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = ImageModel(medvl.load(checkpoint), TEXTS), tmp_path / "out"
    (images / "b.png").rename(images / "b\u2028.png")  # not the end of a line
    paths, settings = find_images([images]), {"texts": TEXTS}
    whole = infer_files(model, paths, batch=2)
    real, calls = module._infer_batch, []

    def fails_at_second(*arguments: Any) -> Any:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "_infer_batch", fails_at_second)
    with pytest.raises(KeyboardInterrupt):
        infer_files(model, paths, out=out, settings=settings, batch=2)
    with (out / "results.jsonl").open("a") as file:
        file.write('{"image": "half')
    assert infer_files(model, paths, out=out, settings=settings, batch=2) == whole
    assert calls[2] == paths[2:]
    assert (out / "results.jsonl").read_text().count("\n") == 4
    with raises(ConfigError, "exists", "out"):
        infer_files(model, paths, out=out, settings={"texts": ["other"]})
    (out / "settings.json").unlink()
    with raises(ConfigError, "exists", "out"):
        infer_files(model, paths, out=out, settings=settings)


def test_tables(checkpoint: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["infer", str(images / "a.jpg"), "--checkpoint", str(checkpoint)])
    printed = capsys.readouterr().out
    values = [float(line.split()[-1]) for line in printed.splitlines()[3:]]
    assert len(values) == 14
    assert values == sorted(values, reverse=True)
    assert printed.splitlines()[2].split() == ["score"]
    cli.main(["infer", str(images), "--checkpoint", str(checkpoint)])
    assert "more columns" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["infer", str(images / "study/cut.PNG"), "--checkpoint", str(checkpoint)])
    assert "no image could be read: 1 truncated" in capsys.readouterr().err


def test_the_calibration_of_the_checkpoint_makes_probabilities_of_scores(
    checkpoint: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = load_prompts("chexpert_ensemble")
    fitted = FindingCalibration(slope=2.0, intercept=-1.0, images=90, positives=30,
        brier_before=0.3, brier_after=0.2,
                                ece_before=0.2, ece_after=0.1)  # fmt: skip
    whole = Calibration(prompts=prompts.name, prompts_sha256=prompts.sha256, data={"corpus": "c",
        "split": "s"},
                        checkpoint_sha256=checkpoint_sha256(checkpoint),
                        findings={"Cardiomegaly": fitted},
                        left_out={"Edema": "needs 10 positive and 10 negative images, has 2 and "
                                           "80"})  # fmt: skip
    file, image = write_calibration(whole, tmp_path / "c.json"), images / "a.jpg"
    raw = medvl.infer(checkpoint, image, TEXTS)["cardiomegaly"]
    for texts, kind in (
        (["cardiomegaly"], "probability"),
        (["Edema", "left apical nodule"], "score"),
        (["cardiomegaly", "Edema"], "value"),
    ):
        out = tmp_path / kind
        cli.main(["infer", str(image), "--checkpoint", str(checkpoint), "--texts", *texts,
            "--calibration", str(file),
                  "--out", str(out)])  # fmt: skip
        printed = capsys.readouterr()
        assert printed.out.splitlines()[2].split() == [kind]
        (line,) = (out / "results.jsonl").read_text().splitlines()
        values = json.loads(line)["values"]
        if "cardiomegaly" in texts:
            assert values["cardiomegaly"] == pytest.approx(fitted.probability(raw), rel=1e-4)
        assert ("needs 10 positive" in printed.err) == ("Edema" in texts)
        assert ("probabilities" in json.loads((out / "settings.json").read_text())) == (
            "cardiomegaly" in texts
        )
    default = calibration_path(checkpoint, prompts.name)
    write_calibration(whole, default)
    cli.main(["infer", str(image), "--checkpoint", str(checkpoint), "--texts", "cardiomegaly"])
    assert "probability" in capsys.readouterr().out
    write_calibration(dataclasses.replace(whole, checkpoint_sha256="other"), default, replace=True)
    cli.main(["infer", str(image), "--checkpoint", str(checkpoint), "--texts", "cardiomegaly"])
    printed = capsys.readouterr()
    assert "probability" not in printed.out
    assert "made for another checkpoint" in printed.err
    default.unlink()


def test_questions_and_reports(images: Path) -> None:
    vqa = VQA.on(tiny_model("m3ae", tiny_tokenizer()), ("yes", "no"))
    model, paths = ImageModel(vqa, ["is the heart enlarged"]), [images / "a.jpg", images / "b.png"]
    results = infer_files(model, paths)
    assert [result.values["is the heart enlarged"] for result in results] == medvl.answer(
        vqa, paths, "is the heart enlarged"
    )
    with raises(ConfigError, "missing", "texts"):
        ImageModel(vqa, None)
    writer = tiny_model("medvill", tiny_tokenizer(), objective="report")
    assert infer_files(ImageModel(writer, None), paths)[0].values == {
        "report": medvl.write_report(writer, paths[0])
    }
    with raises(ConfigError, "unsupported", "model"):
        ImageModel(tiny_model("vilt", tiny_tokenizer()), TEXTS)


def test_a_folder_is_a_study_with_one_report(
    images: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_words(["edema . pneumothorax . clear lungs ."], min_frequency=1)
    torch.manual_seed(0)
    model = medvl.create_model(
        "cxrmate", tokenizer=words, image_encoder="timm:test_vit", image_arguments={"depth": 1},
        image_size=64, width=16, layers=1, heads=2, intermediate=24, max_tokens=8, views=2,
    )  # fmt: skip
    shaken(model)
    folder = tmp_path / "cxrmate"
    folder.mkdir()
    save(model, folder)
    shutil.copy(images / "b.png", images / "c.png")
    out = tmp_path / "out"
    command = ["infer", str(images), "--by-study", "--out", str(out), "--checkpoint"]
    for _ in range(2):  # the second time, nothing is left to do
        cli.main([*command, str(folder)])
        assert "2 images of studies not read" in capsys.readouterr().out
    root, study = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [root["image"], study["image"]] == [str(images), str(images / "study")]
    assert root["unread"] == {"over_limit": 1}
    assert study["unread"] == {"truncated": 1}
    both = write_study_reports(model, [[images / "a.jpg", images / "b.png"]])
    assert both == [root["values"]["report"]]
    alone = medvl.write_report(model, images / "study" / "IM000001")
    assert write_study_reports(model, [[images / "study" / "IM000001"]]) == [alone]
    assert alone == study["values"]["report"]
    with raises(ConfigError, "empty", "studies"):
        write_study_reports(model, [[]])
    with pytest.raises(SystemExit):  # the same images by themselves are other results
        cli.main(["infer", str(images), "--out", str(out), "--checkpoint", str(folder)])
    with pytest.raises(SystemExit):  # a dual-encoder writes no reports
        cli.main([*command[:3], "--checkpoint", str(checkpoint)])
