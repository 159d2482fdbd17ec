"""Evaluation of generated images from end to end: good images, copies, noise; the page and the
command.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from helpers.generated_images import (
    DEID,
    PROMPTS,
    SIZE,
    MeanEncoder,
    draw,
    write_generated,
    write_real,
)
from helpers.html_pages import check_resources, read

import medvl
from medvl.cli import main as cli
from medvl.common.files import sha256
from medvl.data.convert.generated import Generated
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.generated import GeneratedImages
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError, EvaluationError, SplitError
from medvl.eval import MetricRow, read_results
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.core.results import PageHeader, write_results
from medvl.eval.generation.fidelity import FidelityOptions
from medvl.eval.generation.findings import Resampling
from medvl.eval.generation.inputs import FramedSource, GeneratedSource, RealData
from medvl.eval.generation.page import write_generation_page
from medvl.eval.generation.protocol import GenerationModels, GenerationOptions, evaluate_generation
from medvl.eval.generation.training_images import UseOptions, describe_copies
from medvl.eval.probing.features import ProbedEncoder
from medvl.models.checkpoint import save

OPTIONS = GenerationOptions(
    fidelity=FidelityOptions(draws=3, subsets=3),
    use=UseOptions(fractions=(0.2, 1.0), seeds=2),
    resampling=Resampling(resamples=50),
    pixel_size=SIZE,
)
JUDGE = GenerationModels(
    judge=ProbedEncoder(name="mean", module=MeanEncoder(), transform=EvalTransform(size=SIZE))
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with real shards, wider than high, and generated images of the test set's prompts at
    two guidances: good ones, of which every fourth is the middle of a training image, and noise.
    """
    root = tmp_path_factory.mktemp("generation")
    shards = write_real(root / "real", {"train": 60, "validate": 24, "test": 40})
    test, rng = ShardSource(shards["test"]), np.random.default_rng(1)
    samples = [test.sample(position) for position in range(40)]
    prompts, keys = (
        [sample.sections["impression"] for sample in samples],
        [sample.key for sample in samples],
    )
    good = [draw(prompt, rng) for prompt in prompts]
    train = ShardSource(shards["train"])
    copies = [
        train.pixels(position)[:, 4:-4] if position % 4 == 0 else good[position]
        for position in range(40)
    ]
    noise = [rng.integers(0, 256, (SIZE, SIZE), np.uint8) for _ in prompts]
    told = {"manifests": [Manifest.read(shards["train"])], "prompt_keys": keys, "source_keys": keys}
    for name, images, guidance in (
        ("good", good, 3.0),
        ("copies", copies, 5.0),
        ("noise", noise, 1.0),
    ):
        write_generated(root / name, images, prompts, guidance=guidance, **told)
    written = [train.sample(position) for position in range(40)]
    told["source_keys"] = told["prompt_keys"] = [sample.key for sample in written]
    texts = [sample.sections["impression"] for sample in written]
    write_generated(root / "more", [draw(text, rng) for text in texts], texts, **told)
    return root


def real_of(home: Path, *names: str, **options) -> RealData:
    shards = home / "real" / "shards"
    folders = [GeneratedImages.open(home / name) for name in names]
    return RealData.open(
        [shards / "train"], shards / "validate", shards / "test", folders=folders, **options
    )


@pytest.fixture(scope="module")
def result(home):
    names = ("good", "noise", "copies")
    folders = [GeneratedImages.open(home / name) for name in names]
    return evaluate_generation(
        folders,
        real_of(home, *names),
        JUDGE,
        reconstructed=GeneratedImages.open(home / "good"),
        synthetic_train=GeneratedImages.open(home / "more"),
        options=OPTIONS,
    )


def test_good_images_are_as_real_ones_and_noise_is_not(result):
    good, real, noise = (
        result.row("auroc", "macro", name) for name in ("guidance 3", "real", "guidance 1")
    )
    assert good.value > 0.95
    assert real.value > 0.95
    assert noise.value < 0.8
    assert (good.n, real.n) == (40, 40)
    assert result.row("side_auroc", "macro").value > 0.95
    assert result.row("negation_auroc", "macro").value > 0.95
    assert abs(result.row("auroc", "macro", "shuffled prompts").value - 0.5) < 0.05
    assert result.row("auroc", "macro", "reconstructed") is not None
    target = next(
        row.target
        for row in result.results.rows
        if row.metric == "recall" and row.subgroup == "real"
    )
    distances = {
        name: result.row("frechet_distance", target, name).value
        for name in ("guidance 3", "real", "guidance 1")
    }
    assert distances["guidance 3"] < 5 * distances["real"] < distances["guidance 1"]
    assert result.row("precision", "all images", "guidance 1").value == 0
    assert result.row("coverage", "all images", "guidance 3").value > 0.5
    assert (
        result.row("frechet_distance", "all images").low
        <= result.row("frechet_distance", "all images").value
    )


def test_copies_of_any_training_image_are_caught(result):
    """Every fourth image is a training image, of another patient and another prompt than its
    own.
    """
    for space in ("pixels", "pixels, relative"):
        row = result.row("too_near", space, "guidance 5")
        assert row.value == pytest.approx(0.25, abs=0.06)
        assert row.low > 0.05
        assert result.row("nearer_than_all", space, "guidance 5").value >= 0.25
    lines = [line for line in result.predictions() if line["guidance"] == 5]
    for number, line in enumerate(lines):
        assert ("pixels" in line["too_near"]) >= (number % 4 == 0)
        if number % 4 == 0:
            assert line["distance"]["pixels"] == pytest.approx(0, abs=1e-2)
            assert line["nearest"]["pixels"] == f"train-{number:03d}"
    for name in ("guidance 3", "guidance 1"):
        assert result.row("too_near", "pixels", name).value < 0.1
    assert result.results.details["nearest"]["pixels"]["guidance 5"] < 0.01
    assert [text.split(":")[0] for text in describe_copies(result.results.rows)] == [
        "Memorisation, guidance 5"
    ]
    assert "Memorisation, guidance 5" in result.table()


def test_two_generators_are_paired_by_prompt(result, tmp_path):
    """The second generator shows the opposite of every prompt at guidance 3, and copies nothing
    at guidance 5.
    """

    def worse(line):
        if line["set"] == "guidance 3":
            return line | {"logits": {name: -value for name, value in line["logits"].items()}}
        return line | {"too_near": [] if line["set"] == "guidance 5" else line["too_near"]}

    changed = {
        ("auroc", "guidance 3"): lambda value: 1 - value,
        ("too_near", "guidance 5"): lambda value: 0.0,
    }
    rows = [
        dataclasses.replace(
            row, value=changed.get((row.metric, row.subgroup), lambda value: value)(row.value)
        )
        for row in result.results.rows
    ]
    inputs = result.results.inputs | {"generator": "other", "images, guidance 3": "other"}
    other = dataclasses.replace(result.results, rows=tuple(rows), inputs=inputs)
    write_results(result.results, tmp_path / "first", result.predictions())
    write_results(other, tmp_path / "second", map(worse, result.predictions()))
    ((_, runs),) = find_runs([tmp_path / "first", tmp_path / "second"]).items()
    comparison = compare(runs, resamples=50)
    assert not comparison.notes
    (differences,) = comparison.differences
    value = result.row("auroc", "macro", "guidance 3").value
    assert differences["auroc/macro (guidance 3)"].value == pytest.approx(1 - 2 * value)
    assert differences["auroc/macro (guidance 3)"].high < 0
    assert differences["auroc/macro (guidance 1)"].value == 0
    near = differences["too_near/pixels (guidance 5)"]
    assert near.value == pytest.approx(-result.row("too_near", "pixels", "guidance 5").value)
    assert near.high < 0


def test_blurred_images_are_not_called_copies():
    """They are near to many training images, so that only the plain distance is below that of
    real images.
    """
    blurred = MetricRow(
        metric="too_near", target="pixels", subgroup="guidance 2", value=0.04, low=0.02, high=0.06
    )
    assert describe_copies([blurred])[0].startswith("Near to training images, guidance 2")
    relative = dataclasses.replace(blurred, target="pixels, relative")
    assert describe_copies([blurred, relative])[0].startswith("Memorisation, guidance 2")
    assert describe_copies([dataclasses.replace(blurred, low=0.009)]) == []


def test_use_is_measured_on_real_patients(result):
    assert result.row("use_auroc@100%", "macro", "real").value > 0.9
    assert result.row("use_auroc@0%", "macro", "synthetic").value > 0.9
    assert result.row("use_auroc_gain@20%", "macro", "both minus real") is not None


def test_settings_and_hashes_are_recorded(result):
    results = result.results
    assert results.config["features"] == "mean"
    assert (results.config["image_size"], results.config["fit"]) == (SIZE, "crop")
    assert results.inputs["generator"] == "ab" * 32
    assert len(results.inputs["features"]) == 64
    details = results.details
    assert (details["training_shards_not_given"], details["generator_training_unknown"]) == (
        0,
        False,
    )
    assert (details["training_images"], details["test_images"], details["prompts"]) == (60, 40, 40)
    for words in (
        "prompted findings, AUROC",
        "use auroc@20%",
        "real and synthetic",
        "features of mean (sha256",
    ):
        assert words in result.table()
    json.dumps([*result.predictions()])


def test_the_page_shows_prompts_images_and_the_sweep(result, tmp_path):
    path = write_generation_page(
        result, tmp_path / "index.html", PageHeader(model="drawn", data="test"), examples=2
    )
    check_resources(path)
    text = " ".join(read(path).text)
    for words in (
        "Prompts and images",
        "Guidance",
        "Nearest training images",
        "Memorisation",
        "Left against right",
    ):
        assert words in text
    assert PROMPTS[0] in text
    assert {"summary.csv", "memorisation.md", "guidance-0.svg"} <= {
        file.name for file in (tmp_path / "index_files").iterdir()
    }


def test_real_images_get_the_frame_of_the_generator(home):
    real = real_of(home, "good", views=["PA"])
    assert real.test.pixels(0).shape == (SIZE, SIZE)
    assert len(real.all_train) == 60
    assert len(real.train) == 40
    source = ShardSource(home / "real/shards/test")
    np.testing.assert_array_equal(
        FramedSource(source, SIZE, "crop").pixels(0), source.pixels(0)[:, 4:-4]
    )
    assert (
        FramedSource(source, SIZE, "crop").fingerprint
        != FramedSource(source, SIZE, "pad").fingerprint
    )
    assert real_of(home, "good", fit="pad").framing["fit"] == "pad"
    with raises(EvaluationError, "empty", "views"):
        real_of(home, "good", views=["AP"])


def test_a_generator_that_has_seen_test_patients_is_refused(home, tmp_path):
    shards = home / "real" / "shards"
    images = write_generated(
        tmp_path,
        [draw("", np.random.default_rng(0))],
        ["Edema."],
        manifests=[Manifest.read(shards / "test")],
    )
    with raises(SplitError, "leak"):
        RealData.open([shards / "train"], shards / "validate", shards / "test", folders=[images])
    with raises(SplitError, "leak"):
        RealData.open(
            [shards / "test"],
            shards / "validate",
            shards / "test",
            folders=[GeneratedImages.open(home / "good")],
        )


def test_without_validation_shards_a_tenth_of_the_training_patients_is_held_out(home):
    shards = home / "real" / "shards"
    good = GeneratedImages.open(home / "good")
    real = RealData.open([shards / "train"], None, shards / "validate", folders=[good])
    train, valid = (
        {part.sample(place).patient for place in range(len(part))}
        for part in (real.train, real.valid)
    )
    assert not train & valid
    assert len(valid) == round(0.1 * len(train | valid))
    assert len(real.train) + len(real.valid) == len(real.all_train)
    assert real.train.fingerprint != real.all_train.fingerprint


def test_settings_out_of_range():
    for field in ("k", "draws", "subsets"):
        with raises(EvaluationError, "out_of_range", field):
            FidelityOptions(**{field: 0})


def test_folders_of_one_generator_and_different_guidance(home, tmp_path):
    real, good = real_of(home, "good"), GeneratedImages.open(home / "good")
    with raises(ConfigError, "conflict", "generated"):
        evaluate_generation([good, good], real, JUDGE)
    other = write_generated(
        tmp_path, [draw("", np.random.default_rng(0))], ["a"], generator="cd" * 32, guidance=2
    )
    with raises(ConfigError, "mismatch", "generated"):
        evaluate_generation([good, other], real, JUDGE)


def test_prompts_without_findings_and_without_real_images(home, tmp_path):
    rng = np.random.default_rng(2)
    images = write_generated(
        tmp_path / "free", [draw("", rng) for _ in range(12)], [f"Text {n}." for n in range(12)]
    )
    found = evaluate_generation([images], real_of(home, "good"), JUDGE, options=OPTIONS)
    assert found.sets.real is None
    assert {row.metric for row in found.results.rows} >= {"frechet_distance", "too_near"}
    assert not [row for row in found.results.rows if row.metric.endswith("auroc")]
    assert found.results.details["generator_training_unknown"]
    assert "Frechet distance" in found.table()
    check_resources(
        write_generation_page(found, tmp_path / "index.html", PageHeader(model="free", data="test"))
    )


def test_changed_pixels_are_other_features(home):
    images = GeneratedImages.open(home / "good")
    rows = (dataclasses.replace(images.rows[0], pixel_hash="0" * 64), *images.rows[1:])
    changed = dataclasses.replace(images, rows=rows)
    assert GeneratedSource(images, {}).fingerprint != GeneratedSource(changed, {}).fingerprint


@pytest.fixture(scope="module")
def run(home) -> Path:
    """Checkpoint of a dual-encoder with random weights."""
    torch.manual_seed(0)
    tokenizer = train_wordpiece(list(PROMPTS), vocab_size=60, min_frequency=1)
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "fit": "squash",
    }
    model = medvl.create_model(
        "convirt", tokenizer=tokenizer, projection_dim=8, frozen_text_layers=0, **settings
    )
    (home / "run/best").mkdir(parents=True)
    save(model, home / "run/best")
    return home / "run/best"


def command(home: Path, run: Path, *more: str, generated: str = "good") -> None:
    shards = home / "real" / "shards"
    options = {
        "train": shards / "train",
        "valid": shards / "validate",
        "test": shards / "test",
        "classifier": run,
    }
    named = [str(text) for name, value in options.items() for text in (f"--{name}", value)]
    cli.main(
        [
            "eval",
            "generation",
            "--generated",
            str(home / generated),
            *named,
            "--workers",
            "0",
            "--resamples",
            "20",
            *more,
        ]
    )


def test_the_command_writes_results_and_page(home, run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "generator")
    shutil.copytree(run, tmp_path / "other")
    weights = safetensors.torch.load_file(run / "model.safetensors")
    safetensors.torch.save_file(
        {name: x + 1 for name, x in weights.items()}, tmp_path / "other/model.safetensors"
    )
    images = GeneratedImages.open(home / "good")
    for name in ("own", "apart"):
        write_generated(
            tmp_path / name,
            [images.pixels(number) for number in range(40)],
            [row.prompt for row in images.rows],
            source_keys=[row.source_key for row in images.rows],
            generator=sha256(
                tmp_path / {"own": "generator", "apart": "other"}[name] / "model.safetensors"
            ),
        )
    apart = ("--aligner", str(run), "--generator", str(tmp_path / "other"))
    command(home, run, *apart, "--out", str(tmp_path / "out"), generated=str(tmp_path / "apart"))
    assert "prompted findings, AUROC" in capsys.readouterr().out
    results = read_results(tmp_path / "out")
    assert (
        results.row("auroc", "macro", "real").n
        == results.row("recall@5", "4 prompts", "real").n
        == 40
    )
    assert results.details["aligner_text_weights_shared"] == 0
    check_resources(tmp_path / "out/index.html")
    for generator, words in (
        (None, "--generator"),
        ("other", "not the generator"),
        ("generator", "trained apart"),
    ):
        named = [] if generator is None else ["--generator", str(tmp_path / generator)]
        with pytest.raises(SystemExit):
            command(home, run, "--aligner", str(run), *named, generated=str(tmp_path / "own"))
        assert words in capsys.readouterr().err


def test_synthetic_shards_are_no_test_set(home, run, tmp_path, capsys):
    images = home / "more"
    made = Generated(root=images, source=(home / "real/shards/train",)).plan(DEID)
    write_shards(made, DEID, ShardRun(out=tmp_path / "shards", workers=1))
    with pytest.raises(SystemExit):
        command(home, run, "--test", str(tmp_path / "shards/train"))
    assert "synthetic" in capsys.readouterr().err
