"""Robustness: versions of images, and tests that a model can fail."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import make_source
from helpers.fusion_samples import SIDE as FUSION_SIDE, tiny_model, tiny_tokenizer
from torch import Tensor

from medvl.errors import ConfigError, EvaluationError, ShardError
from medvl.eval import LabelPolicy, RobustnessSettings, evaluate_robustness, write_robustness_page
from medvl.eval.compare.items import read_items
from medvl.eval.core.metric_rows import MetricRow, measure
from medvl.eval.core.results import PageHeader, Results, checkpoint_sha256, write_results
from medvl.eval.robustness.assemble import assemble
from medvl.eval.robustness.image_versions import (
    CORRUPTIONS,
    MADE_UP,
    PARAPHRASES,
    Version,
    VersionSource,
    corruption_versions,
    made_up_versions,
    paraphrases,
    statements,
)
from medvl.eval.robustness.protocol import RobustnessResult
from medvl.eval.robustness.scorers import ClassifierScorer, Scorer, make_scorer, score_everything
from medvl.eval.zero_shot_classification.calibration import Calibration
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.models import FusionModel, create_model
from medvl.schema import COMPETITION_FINDINGS, Batch

SIDE, NAMES = 32, ("Edema", "Pneumonia")
STATEMENTS = statements(NAMES)
MADE_UP_VERSIONS = made_up_versions(tuple(MADE_UP))


def picture(level: int, seed: int) -> np.ndarray:
    """Return a bright square on a gradient, whose brightness is `level`."""
    image = np.random.default_rng(seed).integers(0, 30, (SIDE, SIDE)).astype(np.uint8) + np.uint8(
        60
    )
    image[8:24, 8:24] = level
    return image


def patients(count: int = 40, *, prefix: str = "p") -> Any:
    """Return images whose square is bright where both findings are present, with reports that
    name a side.
    """
    labels_NL = np.repeat((np.arange(count) % 2)[:, None], 2, axis=1).astype(float)
    source = make_source(labels_NL, NAMES, prefix=prefix)
    source.images = [
        picture(200 if label else 100, seed) for seed, label in enumerate(labels_NL[:, 0])
    ]
    sides = ("left", "right")
    source.samples = [
        dataclasses.replace(
            sample, sections={"findings": f"Opacity {number} in the {sides[number % 2]} lung."}
        )
        for number, sample in enumerate(source.samples)
    ]
    return source


class Loader:
    """Loader of any source: squares of one size, in order."""

    def __init__(self, source: Any) -> None:
        self.source, self.skipped = source, Counter[str]()

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.source), 16):
            rows = self._readable(range(start, min(start + 16, len(self.source))))
            samples = [self.source.sample(row) for row in rows]
            pixels = [cv2.resize(self.source.pixels(row), (SIDE, SIDE)) for row in rows]
            labels = [
                [sample.labels.get(name, np.nan) for name in self.source.label_names]
                for sample in samples
            ]
            yield Batch(
                keys=[sample.key for sample in samples],
                image_BCHW=torch.from_numpy(np.stack(pixels))[:, None],
                ids_BT=torch.zeros(len(samples), 1, dtype=torch.int64),
                mask_BT=torch.ones(len(samples), 1, dtype=torch.bool),
                labels_BL=torch.tensor(labels, dtype=torch.float32),
                texts=["" for _ in samples],
            )

    def _readable(self, rows: range) -> list[int]:
        readable = []
        for row in rows:
            try:
                self.source.sample(row)
                readable.append(row)
            except ShardError:
                self.skipped["shard_damaged"] += 1
        return readable


class MeanScorer(Scorer):
    """Mean of the pixels in place of every score: it reads neither sentences nor texts."""

    names, statements, compares_texts, confidence_is = NAMES, STATEMENTS, True, "mean of the pixels"
    prompt_sets, named_sets = ("first", "second"), 2

    def encode(self, batch: Batch) -> Tensor:
        return batch.image_BCHW.double().mean(dim=(1, 2, 3))

    def confidence(self, images: Tensor, statement_BS: Tensor | None = None) -> Tensor:
        return images

    def findings(self, images: Tensor) -> Tensor:
        return images[:, None].expand(-1, 2)

    def prompts(self, images: Tensor) -> Tensor:
        return torch.stack([self.findings(images), -self.findings(images)], dim=1)

    def statement_scores(self, images: Tensor) -> Tensor:
        return images[:, None].expand(-1, 4)

    def set_texts(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def text_scores(self, images: Tensor, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        return images[image_Q]


class ReadingScorer(MeanScorer):
    """Reads statements, and prefers texts that name the side that the source's reports of the
    image name.
    """

    def statement_scores(self, images: Tensor) -> Tensor:
        present_B = images > 90
        sign_B = torch.where(present_B, 1.0, -1.0).double()
        return torch.stack([sign_B, -sign_B, sign_B, -sign_B], dim=1)

    def text_scores(self, images: Tensor, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        side_Q = ["right" if present else "left" for present in (images[image_Q] > 90).tolist()]
        found = [
            float(side in self.texts[text])
            for side, text in zip(side_Q, text_Q.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)


class BareScorer(Scorer):
    """No more than every scorer has."""

    confidence_is = "none"

    def encode(self, batch: Batch) -> Tensor:
        return batch.image_BCHW

    def confidence(self, images: Tensor, statement_BS: Tensor | None = None) -> Tensor:
        return images.mean(dim=(1, 2, 3))


def test_optional_scores_name_the_attribute_to_check() -> None:
    scorer, none = BareScorer(), torch.zeros(0)
    for call, attribute in (
        (lambda: scorer.findings(none), "names"),
        (lambda: scorer.prompts(none), "prompt_sets"),
        (lambda: scorer.statement_scores(none), "statements"),
        (lambda: scorer.set_texts([]), "compares_texts"),
        (lambda: scorer.text_scores(none, none, none), "compares_texts"),
    ):
        with pytest.raises(NotImplementedError, match=f"'{attribute}'"):
            call()


def evaluate(
    scorer: Scorer, corruptions: Sequence[str] = ("contrast",), **others: Any
) -> dict[str, MetricRow]:
    source = patients()
    versions = corruption_versions(corruptions)
    parts = {"sites": {}, "outside": {}, "made_up": MADE_UP_VERSIONS, **others}
    scores = score_everything(scorer, source, Loader, versions=versions, seed=0, **parts)
    tests = assemble(scores, LabelPolicy(), 5, None)
    rows = measure(tests.groups, len(tests.patients), resamples=50, groups=tests.patients)
    return {row.name: row for row in rows}


@pytest.mark.parametrize("shape", [(112, 96), (112, 96, 3)])
@pytest.mark.parametrize("name", [*CORRUPTIONS, *MADE_UP])
def test_versions_depend_on_the_key_alone(name: str, shape: tuple[int, ...]) -> None:
    coarse, fine = (
        np.random.default_rng(seed).integers(0, 256, shape).astype(np.float32) for seed in (0, 1)
    )
    smooth = cv2.normalize(
        cv2.GaussianBlur(coarse, (0, 0), 12), np.zeros(shape, np.float32), 20, 200, cv2.NORM_MINMAX
    )
    image = (smooth + fine / 8).astype(np.uint8)
    before = image.copy()
    versions = (
        [Version(name)]
        if name in MADE_UP
        else [Version(name, strength) for strength in range(1, 6)]
    )
    found = [version.apply(image, "a", 0) for version in versions]
    again = [version.apply(image, "a", 0) for version in versions]
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
    assert np.array_equal(image, before)
    assert all(one.dtype == np.uint8 and one.ndim == image.ndim for one in found)
    if name == "crop":
        assert [one.shape[0] for one in found] == sorted(
            (one.shape[0] for one in found), reverse=True
        )
        return
    changes = [np.abs(one.astype(float) - image).mean() for one in found]
    assert changes == sorted(changes)
    assert changes[0] > 0
    if name not in ("blur", "inverted"):
        others = (versions[-1].apply(image, key, 0) for key in "bcdefghi")
        assert any(not np.array_equal(found[-1], other) for other in others)
    if name == "shuffled tiles":
        assert np.array_equal(np.sort(found[0].ravel()), np.sort(image.ravel()))


def test_images_are_decoded_once_for_all_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    source, decoded = patients(3), list[int]()
    pixels = source.pixels

    def decode(position: int, color: bool = False) -> np.ndarray:
        decoded.append(position)
        return np.asarray(pixels(position))

    monkeypatch.setattr(source, "pixels", decode)
    versions = VersionSource(source, corruption_versions(["blur", "noise"]), 0)
    for position in range(len(versions)):
        versions.pixels(position)
    assert decoded == [0, 1, 2]
    assert len({versions.sample(position).key for position in range(len(versions))}) == 30
    assert not versions.sample(0).sections


def test_a_mean_of_pixels_suffers_under_contrast_and_reads_no_text() -> None:
    rows = evaluate(MeanScorer(), ["contrast", "blur"])
    assert rows["auroc/macro"].value == 1
    assert rows["auroc/macro (contrast 5)"].value < 0.9
    assert rows["auroc_change/macro (contrast)"].high < 0
    assert (
        rows["auroc_change/macro (contrast 5)"].value == rows["auroc/macro (contrast 5)"].value - 1
    )
    assert rows["auroc_change/macro (blur 1)"].value == rows["auroc_change/macro (blur 1)"].low == 0
    means = [rows[f"auroc/macro ({name})"].value for name in ("contrast", "blur")]
    assert rows["auroc/macro (all corruptions)"].value == pytest.approx(np.mean(means))
    for name in ("negation/macro", "negation/Edema", "above_mirror/all", "above_other/all"):
        assert rows[name].value == rows[name].low == rows[name].high == 0.5, name
    assert rows["auroc/macro (prompts: second)"].value == 0
    assert rows["auroc_gap/macro (prompts: first - second)"].value == 1
    assert rows["auroc_sd/macro (prompts: 2 sets)"].value == pytest.approx(0.5**0.5)
    assert rows["ood_auroc/all (shuffled tiles)"].value == 0.5


def test_a_model_that_reads_passes() -> None:
    rows = evaluate(ReadingScorer(), ())
    assert rows["negation/macro"].value == rows["negation_present/macro"].value == 1
    assert rows["above_mirror/all"].value == 1
    assert rows["above_other/all"].value == 1
    assert not any("contrast" in name for name in rows)


def test_made_up_images_are_those_that_are_named() -> None:
    every, one = (
        evaluate(MeanScorer()),
        evaluate(MeanScorer(), made_up=made_up_versions(["inverted"])),
    )
    assert one["ood_auroc/all (inverted)"] == every["ood_auroc/all (inverted)"]
    assert set(every) - set(one) == {
        f"{metric}/all ({name})"
        for metric in ("ood_auroc", "confidence")
        for name in ("natural noise", "shuffled tiles")
    }


def test_predictions_have_what_pairs_two_runs(tmp_path: Path) -> None:
    scores = score_everything(
        MeanScorer(),
        patients(),
        Loader,
        versions=corruption_versions(["blur"]),
        made_up=[],
        seed=0,
        sites={},
        outside={},
    )
    rows = tuple(evaluate(MeanScorer(), ["blur"]).values())
    config = {"policy": dataclasses.asdict(LabelPolicy()), "smallest_subgroup": 5}
    results = Results(
        protocol="robustness", protocol_version=2, rows=rows, config=config, inputs={}
    )
    write_results(results, tmp_path, RobustnessResult(results=results, scores=scores).predictions())
    items = read_items(tmp_path, results)
    assert items is not None
    assert {f"auroc/{name}" for name in (*NAMES, "macro")} <= set(items.rows) & {
        row.name for row in rows
    }


def test_a_damaged_image_is_left_out_with_all_its_versions() -> None:
    source = patients()
    source.damaged = {3}
    scores = score_everything(
        MeanScorer(),
        source,
        Loader,
        versions=corruption_versions(["blur"]),
        made_up=made_up_versions(["inverted"]),
        sites={},
        outside={},
        seed=0,
    )
    assert scores.clean.unreadable == {"shard_damaged": 1}
    assert scores.of_versions["findings"].shape == (39, 5, 2)
    assert scores.made_up["inverted"].shape == (39,)
    assert len(assemble(scores, LabelPolicy(), 5, None).patients) == 39


def test_a_model_of_regions_has_the_tests_of_texts() -> None:
    source = patients()
    source.region_manifest = object()
    versions = corruption_versions(["blur"])
    scores = score_everything(
        ReadingScorer(),
        source,
        Loader,
        versions=versions,
        made_up=MADE_UP_VERSIONS,
        sites={},
        outside={},
        seed=0,
    )
    assert scores.left_out.keys() == {"corruptions"}
    rows = [
        row.name for group in assemble(scores, LabelPolicy(), 5, None).groups for row in group.rows
    ]
    assert {"negation/macro", "above_mirror/all", "confidence/all (clean)"} <= set(rows)
    assert not any("blur" in name or "inverted" in name for name in rows)


def test_always_preferring_the_statement_is_chance() -> None:
    class Yes(MeanScorer):
        def statement_scores(self, images: Tensor) -> Tensor:
            return torch.tensor([[1.0, 0.0] * 2]).double().expand(len(images), -1)

    rows = evaluate(Yes(), ())
    assert rows["negation/macro"].value == 0.5
    assert (rows["negation_present/macro"].value, rows["negation_absent/macro"].value) == (1, 0)


def test_sites_and_other_images() -> None:
    """Another site with its labels exchanged has AUROC 0; black images have less of the mean
    than all others.
    """
    site, black = patients(20, prefix="q"), patients(6, prefix="r")
    site.images = [
        picture(100 if sample.labels["Edema"] else 200, row)
        for row, sample in enumerate(site.samples)
    ]
    black.images = [np.zeros((SIDE, SIDE), np.uint8) for _ in black.images]
    rows = evaluate(MeanScorer(), (), sites={"other": site}, outside={"black": black})
    assert rows["auroc/macro (site: these data)"].value == 1
    assert rows["auroc/macro (site: other)"].value == 0
    assert rows["auroc_gap/macro (site: these data - other)"].value == 1
    assert rows["ood_auroc/all (black)"].value == 1
    assert (rows["ood_auroc/all (black)"].n, rows["confidence/all (black)"].value) == (6, 0)
    assert rows["auroc/macro"].n == 40


@pytest.mark.parametrize("name", ["m3ae", "convirt"])
@torch.no_grad()
def test_scores_are_those_of_each_pair_alone(name: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "image_size": FUSION_SIDE,
        "frozen_text_layers": 0,
        "projection_dim": 8,
    }
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "tokenizer": tiny_tokenizer(),
    }
    model = (
        tiny_model(name, tiny_tokenizer())
        if name == "m3ae"
        else create_model(name, **towers, **sizes)
    )
    scorer = make_scorer(model.eval(), [load_prompts("chexpert_pairs")], NAMES, None)
    image_BCHW = torch.randint(0, 256, (2, 1, FUSION_SIDE, FUSION_SIDE), dtype=torch.uint8)
    batch: Any = SimpleNamespace(
        image_BCHW=image_BCHW,
        slices_BNCHW=None,
        embedded=(image_BCHW,),
        has_image_B=None,
        to=lambda *_, **__: batch,
    )
    images, texts = scorer.encode(batch), ["left effusion", "no effusion"]

    def alone(row: int, text: str) -> float:
        pixels = image_BCHW[row : row + 1]
        if isinstance(model, FusionModel):
            logits_2 = model.match(
                model.text_tokens(*model.tokenize([text])), model.image_tokens(pixels)
            )[0]
            return float(logits_2[1] - logits_2[0])
        return float(model.similarity(model.embed_images(pixels), model.embed_texts([text])))

    sentences = [text for pair in STATEMENTS.values() for text in pair]
    expected = torch.tensor(
        [[alone(row, text) for text in sentences] for row in range(2)], dtype=torch.float64
    )
    assert torch.allclose(scorer.statement_scores(images), expected, atol=1e-4)
    assert torch.allclose(scorer.confidence(images), expected.amax(dim=1), atol=1e-4)
    assert torch.equal(scorer.confidence(images, expected + 1), expected.amax(dim=1) + 1)
    scorer.set_texts(texts)
    pairs = scorer.text_scores(images, torch.tensor([1, 0]), torch.tensor([0, 1]))
    assert torch.allclose(
        pairs, torch.tensor([alone(1, texts[0]), alone(0, texts[1])]).double(), atol=1e-4
    )
    if name == "convirt":
        margin_BL = expected[:, 0::2] - expected[:, 1::2]
        assert torch.allclose(scorer.prompts(images)[:, 1], margin_BL, atol=1e-4)
        assert torch.allclose(scorer.findings(images), torch.sigmoid(margin_BL), atol=1e-4)
        with raises(ConfigError, "unsupported", "prompts"):
            make_scorer(model, [load_prompts("gloria_all")], COMPETITION_FINDINGS, None)


def dual_encoder() -> Any:
    torch.manual_seed(0)
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "tokenizer": tiny_tokenizer(),
    }
    return create_model(
        "convirt", **towers, image_size=FUSION_SIDE, frozen_text_layers=0, projection_dim=8
    ).eval()


@torch.no_grad()
def test_prompt_sets_score_labels_that_they_do_not_list() -> None:
    labels, model = ("Edema", "Nodule", "No Finding"), dual_encoder()
    alone = make_scorer(model, [load_prompts("statements")], labels, None)
    assert (alone.names, alone.not_scored) == (("Edema", "Nodule"), {})
    assert alone.statements["Nodule"] == ("There is nodule.", "There is no nodule.")
    both = make_scorer(
        model, [load_prompts("statements"), load_prompts("chexpert_pairs")], labels, None
    )
    assert (both.names, both.not_scored) == (("Edema",), {"Nodule": ("chexpert_pairs",)})
    scores = score_everything(
        both, patients(4), Loader, versions=[], made_up=[], sites={}, outside={}, seed=0
    )
    assert assemble(scores, LabelPolicy(), 5, None).details["not_scored"] == {
        "Nodule": ["chexpert_pairs"]
    }


def test_no_finding_of_a_classifier_is_no_finding() -> None:
    def probabilities(batch: Batch) -> Tensor:
        return torch.tensor([[0.9, 0.2, 0.1], [0.0, 0.3, 0.7]])

    model: Any = SimpleNamespace(
        config=SimpleNamespace(labels=("No Finding", "Edema", "Pneumonia")), tokenizer=None,
        device=torch.device("cpu"), probabilities=probabilities,
    )  # fmt: skip
    scorer = ClassifierScorer(model, ("Pneumonia", "No Finding"))
    assert scorer.names == ("Pneumonia",)
    batch: Any = SimpleNamespace(to=lambda *_, **__: batch)
    images = scorer.encode(batch)
    assert scorer.findings(images).flatten().tolist() == pytest.approx([0.1, 0.7])
    assert scorer.confidence(images).tolist() == pytest.approx([0.2, 0.7])


def test_a_calibration_of_other_prompts_or_weights_is_refused(tmp_path: Path) -> None:
    checkpoint, prompts = tmp_path / "model.safetensors", load_prompts("chexpert_pairs")
    checkpoint.write_bytes(b"weights")
    calibration = Calibration(
        prompts=prompts.name,
        prompts_sha256=prompts.sha256,
        checkpoint_sha256=checkpoint_sha256(checkpoint),
        data={},
        findings={},
        left_out={},
    )
    for changed in ("prompts_sha256", "checkpoint_sha256"):
        other = dataclasses.replace(calibration, **{changed: "0" * 64})
        with raises(EvaluationError, "mismatch", "calibration"):
            evaluate_robustness(
                dual_encoder(),
                patients(4),
                Loader,
                prompts=[prompts],
                calibration=other,
                checkpoint=checkpoint,
            )
    settings = RobustnessSettings(corruptions=(), made_up=(), resamples=0, smallest_subgroup=2)
    evaluate_robustness(
        dual_encoder(), patients(4), Loader, prompts=[prompts], calibration=calibration,
        checkpoint=checkpoint, settings=settings,
    )  # fmt: skip


def test_a_fusion_encoder_has_a_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = patients(12)
    settings = RobustnessSettings(corruptions=("blur",), resamples=10, smallest_subgroup=2)
    result = evaluate_robustness(
        tiny_model("m3ae", tiny_tokenizer()), source, Loader, settings=settings
    )
    names = {row.name for row in result.results.rows}
    assert {
        "negation/macro",
        "above_other_change/all (blur 5)",
        "ood_auroc/all (inverted)",
    } <= names
    assert not any(name.startswith("auroc/") for name in names)
    page = write_robustness_page(
        result, tmp_path / "a.html", PageHeader(model="m", data="d"), pixels=source.pixels
    ).read_text()
    assert "log-odds of a match" in page
    assert "Versions of an image" in page
    assert "macro" in result.table()
    assert set(next(result.predictions())) == {
        *("key", "patient", "subgroups", "labels", "confidence", "statements", "texts")
    }
    write_results(result.results, tmp_path, result.predictions())
    items = read_items(tmp_path, result.results)
    assert items is not None
    assert {"above_other/all", "above_mirror/all"} <= set(items.rows), "two runs can be paired"


def test_sentences_and_their_denials() -> None:
    assert STATEMENTS["Edema"] == ("There is pulmonary edema.", "There is no pulmonary edema.")
    assert statements(["CT", "No Finding"]) == {"CT": ("There is ct.", "There is no ct.")}
    sets = paraphrases(["Edema", "Support Devices"])
    assert [one.name for one in sets] == ["there is", *PARAPHRASES]
    assert sets[0].classes["Support Devices"].negative == ("There are no support devices.",)
    assert sets[1].classes["Support Devices"].negative == ("No support devices can be seen.",)
    assert len({one.sha256 for one in sets}) == len(sets)


def test_what_cannot_be_tested_is_refused() -> None:
    segmenter: Any = SimpleNamespace(name="segmenter", modules=lambda: iter(()))
    with raises(ConfigError, "unsupported", "checkpoint"):
        evaluate_robustness(segmenter, patients(4), Loader)
    with raises(EvaluationError, "unknown_name", "corruptions"):
        corruption_versions(["rain"])
    with raises(EvaluationError, "unknown_name", "made_up"):
        made_up_versions(["snow"])
    bare = patients(4)
    bare.label_names = ()
    bare.samples = [dataclasses.replace(sample, sections={}) for sample in bare.samples]
    scorer = MeanScorer()
    scorer.names = ()
    with raises(EvaluationError, "mismatch", "data"):
        score_everything(
            scorer, bare, Loader, versions=[], made_up=[], sites={}, outside={}, seed=0
        )
    sites = {"a": bare}
    scores = score_everything(
        scorer, patients(4), Loader, versions=[], made_up=[], sites=sites, outside={}, seed=0
    )
    assert (dict(scores.sites), set(scores.left_out)) == ({}, {"sites"})
