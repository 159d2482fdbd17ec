"""Findings, negations, sides, alignment and use of generated images, each with images that must
fail the check.
"""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from helpers.generated_images import PROMPTS, SIZE, MeanEncoder, draw, write_generated
from torch import Tensor, nn

from medvl.data.reports.labeler import CONVENTIONS
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError, EvaluationError, SplitError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.generation.findings import (
    FindingClassifier,
    Resampling,
    align,
    alignment_rows,
    check_separate,
    double,
    negated_findings,
    prompted_findings,
    prompted_sides,
    shuffled_findings,
    sides_of,
    stated_labels,
)
from medvl.eval.generation.inputs import GeneratedSource, ImageSet, LoaderOptions
from medvl.eval.generation.protocol import GenerationOptions
from medvl.eval.generation.training_images import UseOptions, use_rows
from medvl.eval.probing.features import FeatureTable, LinearProbe
from medvl.schema import FINDINGS, Embeddings, Sample

RESAMPLING = Resampling(resamples=50)


class Judge:
    """An encoder with its transform, as `ProbedEncoder`."""

    name, module, transform = "mean", MeanEncoder(), EvalTransform(size=SIZE)


def images_of(
    folder: Path, prompts: list[str], drawn: list[str], seed: int = 0, **options
) -> ImageSet:
    """Return generated images of some prompts that show other texts."""
    rng = np.random.default_rng(seed)
    images = write_generated(folder, [draw(text, rng) for text in drawn], prompts, **options)
    source = GeneratedSource(images, {})
    pixels = np.stack([images.pixels(number) for number in range(len(images))])
    samples = tuple(source.samples)
    labels = [[sample.labels.get(name, np.nan) for name in FINDINGS] for sample in samples]
    table = FeatureTable(
        x_ND=Judge.module(torch.from_numpy(pixels)[:, None]).pooled_BD.detach(),
        labels_NL=np.array(labels, float),
        label_names=FINDINGS,
        samples=samples,
        positions=tuple(range(len(samples))),
        unreadable={},
        fingerprint=str(seed),
    )
    return ImageSet(
        name="guidance 3",
        source=source,
        scored=table,
        features=table,
        prompts=tuple(prompts),
        labels_NL=table.labels_NL,
    )


CLASSIFIER = FindingClassifier(
    names=("Edema", "Pleural Effusion"),
    probe=LinearProbe(
        torch.tensor([[-1.0, 1.0, 0, 0], [1.0, 0.0, 0, 0]], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    ),
    standardize=None,
    details={},
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    prompts = list(PROMPTS) * 15
    return images_of(tmp_path_factory.mktemp("asked") / "out", prompts, prompts)


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    prompts = list(PROMPTS) * 15
    drawn = np.random.default_rng(1).permutation(prompts).tolist()
    return images_of(tmp_path_factory.mktemp("ignorant") / "out", prompts, drawn)


def means(rows, target: str = "macro") -> float:
    return next(row.value for row in rows if row.target == target)


def prompted(images: ImageSet):
    like = stated_labels(images, CLASSIFIER.names, LabelPolicy())
    return prompted_findings(images, CLASSIFIER, LabelPolicy(), RESAMPLING, like=like)


def test_prompted_findings_are_one_where_images_show_them_and_one_half_where_not(asked, ignorant):
    rows = prompted(asked)
    assert {row.subgroup for row in rows} == {"guidance 3"}
    assert means(rows) == 1
    assert [(row.n, row.n_positive) for row in rows if row.target == "Edema"] == [(60, 15)]
    assert abs(means(prompted(ignorant)) - 0.5) < 0.2


def test_shuffled_prompts_are_one_half_for_the_best_images(asked):
    rows = shuffled_findings(asked, CLASSIFIER, LabelPolicy())
    for row in rows:
        assert row.value == pytest.approx(0.5, abs=0.03)
        assert row.low < 0.5 < row.high
        assert row.subgroup == "shuffled prompts"


def test_negations_count_only_prompts_that_name_the_finding(asked, ignorant, tmp_path):
    rows = negated_findings(asked, CLASSIFIER, RESAMPLING)
    effusion = next(row for row in rows if row.target == "Pleural Effusion")
    assert (effusion.n, effusion.n_positive, effusion.value) == (
        45,
        30,
        1,
    )  # 15 prompts deny it, 15 do not name it
    assert abs(means(negated_findings(ignorant, CLASSIFIER, RESAMPLING)) - 0.5) < 0.25
    # a generator that reads the word and not the negation
    words = images_of(
        tmp_path / "words",
        ["Left pleural effusion.", "No pleural effusion."] * 10,
        [PROMPTS[0]] * 20,
    )
    assert abs(means(negated_findings(words, CLASSIFIER, RESAMPLING)) - 0.5) < 0.3


def test_sides_are_those_of_the_patient(asked, ignorant, tmp_path):
    rows = prompted_sides(asked, CLASSIFIER, Judge, RESAMPLING)
    assert (rows[0].target, rows[0].n, rows[0].n_positive) == ("Pleural Effusion", 30, 15)
    assert means(rows) == 1
    mirrored = [
        text.replace("Left", "x").replace("Right", "Left").replace("x", "Right")
        for text in asked.prompts
    ]
    swapped = images_of(tmp_path / "swapped", list(asked.prompts), mirrored)
    assert means(prompted_sides(swapped, CLASSIFIER, Judge, RESAMPLING)) == 0
    assert abs(means(prompted_sides(ignorant, CLASSIFIER, Judge, RESAMPLING)) - 0.5) < 0.3


@pytest.mark.parametrize(
    ("prompt", "sides"),
    [
        ("Small left effusion. No pneumothorax.", {"Pleural Effusion": "left"}),
        ("Bilateral effusions.", {}),
        ("Left effusion. Small right effusion.", {}),
        (
            "Right lower lobe consolidation, left effusion.",
            {"Consolidation": "right", "Pleural Effusion": "left"},
        ),
        ("No left effusion.", {}),
        ("No left effusion, small right effusion.", {"Pleural Effusion": "right"}),
    ],
)
def test_sides_of_prompts(prompt, sides):
    assert sides_of(prompt) == sides


def test_labels_and_sides_of_prompts_follow_the_conventions(tmp_path):
    prompt = "Probable left pleural effusion."
    images = write_generated(tmp_path, [np.zeros((SIZE, SIZE), np.uint8)], [prompt])
    labels = {
        name: GeneratedSource(images, {}, name).sample(0).labels["Pleural Effusion"]
        for name in ("chexpert", "indexed")
    }
    assert labels == {"chexpert": -1, "indexed": 1}
    assert [sides_of(prompt, CONVENTIONS[name]) for name in labels] == [
        {},
        {"Pleural Effusion": "left"},
    ]
    assert GenerationOptions(conventions="indexed").stored()["conventions"] == "indexed"
    with raises(EvaluationError, "unknown_name", "conventions"):
        GenerationOptions(conventions="radiologists")


def test_double_mirrors_the_half_of_the_patients_side():
    image = np.arange(5)[None, :, None].astype(np.uint8)
    assert double(image, "left")[0, :, 0].tolist() == [
        4,
        3,
        2,
        3,
        4,
    ]  # the patient's left is displayed on the right
    assert double(image, "right")[0, :, 0].tolist() == [0, 1, 2, 1, 0]


class FakeAligner(nn.Module):
    """Dual-encoder that knows the images: an image of the drawn prompts is embedded as its
    prompt.
    """

    transform = EvalTransform(size=SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        half = SIZE // 2
        x = image_BCHW[:, 0].float() - 60
        parts = [x[:, half:, half:], x[:, half:, :half], 20 - x, x[:, :half]]
        return Embeddings(torch.stack([part.mean(dim=(1, 2)) for part in parts], dim=1))

    def embed_texts(self, texts) -> Embeddings:
        return Embeddings(torch.eye(4)[[PROMPTS.index(text) for text in texts]])

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        return images.global_NE @ texts.global_NE.T


def test_alignment_finds_the_own_prompt(asked, ignorant):
    found = align(asked, FakeAligner(), list(PROMPTS), LoaderOptions(batch=7))
    similarity_NM = (
        FakeAligner()
        .embed_images(
            torch.from_numpy(np.stack([asked.source.pixels(n) for n in range(60)]))[:, None]
        )
        .global_NE
    )
    np.testing.assert_allclose(
        found.own_N, similarity_NM[np.arange(60), np.arange(60) % 4].detach(), rtol=1e-5
    )
    rows = {row.metric: row for row in alignment_rows(asked, found, RESAMPLING)}
    assert (rows["recall@1"].value, rows["median_rank"].value, rows["recall@1"].target) == (
        1,
        1,
        "4 prompts",
    )
    assert rows["alignment"].value > rows["alignment_other"].value
    other = {
        r.metric: r
        for r in alignment_rows(
            ignorant, align(ignorant, FakeAligner(), PROMPTS, LoaderOptions()), RESAMPLING
        )
    }
    assert other["recall@1"].value < 0.6


def test_alignment_with_other_prompts_is_undefined_where_there_is_one(tmp_path):
    images = images_of(tmp_path / "one", [PROMPTS[0]] * 6, [PROMPTS[0]] * 6)
    rows = {
        row.metric: row
        for row in alignment_rows(
            images, align(images, FakeAligner(), PROMPTS[:1], LoaderOptions()), RESAMPLING
        )
    }
    assert np.isnan(rows["alignment_other"].value)
    assert rows["alignment_other"].n == 0
    assert not np.isnan(rows["alignment"].value)


def test_an_aligner_with_the_generators_text_encoder_is_refused(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"text_encoder.{n}.weight": torch.randn(16, 32, generator=generator) for n in range(3)
    }
    for name in ("aligner", "same", "frozen", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    safetensors.torch.save_file(
        {**weights, "image.weight": torch.zeros(16, 32)}, tmp_path / "aligner/model.safetensors"
    )
    renamed = {
        name.replace("text_encoder", "prompt.model"): tensor for name, tensor in weights.items()
    }
    safetensors.torch.save_file(
        {**renamed, "unet": torch.ones(40, 40)}, tmp_path / "same/model.safetensors"
    )
    renamed["prompt.model.0.weight"] = renamed["prompt.model.0.weight"] + 1e-3
    safetensors.torch.save_file(renamed, tmp_path / "frozen/model.safetensors")
    safetensors.torch.save_file(
        {"a": torch.randn(16, 32, generator=generator)}, tmp_path / "other/model.safetensors"
    )
    with raises(ConfigError, "conflict", "aligner"):
        check_separate(tmp_path / "aligner", tmp_path / "same")
    assert check_separate(tmp_path / "aligner", tmp_path / "frozen") == pytest.approx(2 / 3)
    assert check_separate(tmp_path / "aligner", tmp_path / "other") == 0


def table(
    count: int, seed: int, prefix: str, signal: float = 1.0, *, right: bool = True
) -> FeatureTable:
    """Return features of which one depends on the label, or with `right=False` on its opposite."""
    rng = np.random.default_rng(seed)
    labels_NL = (rng.random((count, 1)) < 0.4).astype(float)
    x_ND = rng.normal(size=(count, 6))
    x_ND[:, :1] += signal * (labels_NL if right else 1 - labels_NL)
    samples = tuple(
        Sample(
            key=f"{prefix}{n}", corpus="c", split="s", patient=f"{prefix}{n}", study=f"{prefix}{n}"
        )
        for n in range(count)
    )
    return FeatureTable(
        x_ND=torch.from_numpy(x_ND).float(),
        labels_NL=labels_NL,
        label_names=("Edema",),
        samples=samples,
        positions=tuple(range(count)),
        unreadable={},
        fingerprint=prefix,
    )


def test_use_of_good_and_of_useless_images():
    train, valid, test = table(200, 0, "t", 2.0), table(60, 1, "v", 2.0), table(150, 2, "e", 2.0)
    options = UseOptions(fractions=(0.02, 1.0), seeds=3)

    def rows(synthetic: FeatureTable):
        found = use_rows(train, synthetic, valid, test, LabelPolicy(), options, RESAMPLING)
        return {(row.metric, row.subgroup): row for row in found if row.target == "macro"}

    good, wrong = rows(table(200, 3, "g", 2.0)), rows(table(200, 4, "w", 2.0, right=False))
    assert set(good) == {
        *(("use_auroc@2%", name) for name in ("real", "real and synthetic")),
        *(("use_auroc_sd@2%", name) for name in ("real", "real and synthetic")),
        *(("use_auroc@100%", name) for name in ("real", "real and synthetic")),
        *((f"use_auroc_gain@{fraction}", "both minus real") for fraction in ("2%", "100%")),
        ("use_auroc@0%", "synthetic"),
    }
    gain = good["use_auroc_gain@2%", "both minus real"]
    real, both = (good["use_auroc@2%", name].value for name in ("real", "real and synthetic"))
    assert gain.value == pytest.approx(both - real)
    assert gain.value > 0
    assert good["use_auroc@0%", "synthetic"].value > 0.85
    assert wrong["use_auroc@0%", "synthetic"].value < 0.2
    assert wrong["use_auroc_gain@2%", "both minus real"].value < -0.2


def test_use_refuses_prompts_of_test_patients():
    train, valid, test = table(50, 0, "t"), table(30, 1, "v"), table(30, 2, "e")
    for name, synthetic in (("test", table(20, 3, "e")), ("valid", table(20, 3, "v"))):
        assert name
        with raises(SplitError, "leak", "synthetic_train"):
            use_rows(train, synthetic, valid, test, LabelPolicy(), UseOptions(), RESAMPLING)
    for field, value in (("seeds", 0), ("fractions", (0.0,)), ("fractions", ())):
        with raises(EvaluationError, "out_of_range", field):
            UseOptions(**{field: value})
