"""Linear probe: solver compared with scikit-learn, label fractions, feature cache and
evaluation.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import radzero
from helpers.errors import raises
from helpers.eval_fakes import make_source
from helpers.mimic_files import textured
from sklearn import metrics as reference
from sklearn.linear_model import LogisticRegression

import medvl
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import FileSource, Subset, label_fraction, no_text
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, EvaluationError, SplitError
from medvl.eval import linear_probe, write_probe_page
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.results import PageHeader
from medvl.eval.probing.features import (
    FeatureTable,
    ProbedEncoder,
    Standardizer,
    comparable_probabilities,
    encode_features,
    fit_logistic,
    fit_path,
)
from medvl.eval.probing.protocol import PENALTIES, FittedProbe

NAMES = ("Edema", "Fracture", "Cardiomegaly")


def table(
    count: int, seed: int, prefix: str, labels_NL: np.ndarray | None = None, signal: float = 1.0
) -> FeatureTable:
    """Return noise features of which the first three correlate with the labels, with two images
    per patient.
    """
    rng = np.random.default_rng(seed)
    if labels_NL is None:
        labels_NL = (rng.random((count, 3)) < [0.3, 0.5, 0.2]).astype(float)
    source = make_source(labels_NL, NAMES, patients=count // 2, prefix=prefix)
    x_ND = rng.normal(size=(count, 8))
    x_ND[:, :3] += signal * np.nan_to_num(labels_NL)
    return FeatureTable(
        x_ND=torch.from_numpy(3 + 5 * x_ND).float(),
        labels_NL=labels_NL,
        label_names=NAMES,
        samples=tuple(source.samples),
        positions=tuple(range(count)),
        unreadable={},
        fingerprint=prefix * 4,
    )


@pytest.fixture
def sets() -> tuple[FeatureTable, FeatureTable, FeatureTable]:
    return table(400, 0, "train"), table(120, 1, "valid"), table(160, 2, "test")


# The solver


@pytest.mark.parametrize("penalty", [1e-3, 0.1])
def test_fit_logistic_matches_scikit_learn(penalty):
    data = table(150, 3, "a")
    x_ND, y_NL = Standardizer.fit(data.x_ND)(data.x_ND), data.labels_NL.copy()
    y_NL[:40, 1] = np.nan
    probe = fit_logistic(x_ND, y_NL, penalty, tolerance=1e-7)
    assert probe.converged
    for label in range(3):
        known = ~np.isnan(y_NL[:, label])
        referee = LogisticRegression(C=1 / (penalty * known.sum()), tol=1e-10, max_iter=10_000)
        referee.fit(x_ND.numpy()[known], y_NL[known, label])
        np.testing.assert_allclose(probe.weight_LD[label], referee.coef_[0], atol=1e-4)
        np.testing.assert_allclose(probe.bias_L[label], referee.intercept_[0], atol=1e-4)
        np.testing.assert_allclose(
            probe.probability_NL(x_ND)[:, label],
            referee.predict_proba(x_ND.numpy())[:, 1],
            atol=1e-5,
        )


def test_fit_path_matches_single_fits():
    data = table(100, 4, "a")
    x_ND = Standardizer.fit(data.x_ND)(data.x_ND)
    path = fit_path(x_ND, data.labels_NL, (1e-3, 1.0, 1e-1))
    assert list(path) == [1.0, 0.1, 1e-3]
    for penalty, probe in path.items():
        single = fit_logistic(x_ND, data.labels_NL, penalty)
        torch.testing.assert_close(probe.weight_LD, single.weight_LD, atol=5e-3, rtol=0)


def test_single_class_label_gets_probability_one_half():
    data = table(100, 5, "a")
    x_ND, y_NL = Standardizer.fit(data.x_ND)(data.x_ND), data.labels_NL.copy()
    alone = fit_logistic(x_ND, y_NL[:, :1], 0.01)
    y_NL[:, 1] = 0
    y_NL[:, 2] = np.nan
    probe = fit_logistic(x_ND, y_NL, 0.01)
    assert (probe.probability_NL(x_ND)[:, 1:] == 0.5).all()
    torch.testing.assert_close(probe.weight_LD[:1], alone.weight_LD, atol=5e-3, rtol=0)


def test_probabilities_to_choose_between_labels_are_those_of_the_only_class():
    data = table(100, 5, "a")
    x_ND, y_NL = Standardizer.fit(data.x_ND)(data.x_ND), np.repeat(data.labels_NL[:, :1], 4, axis=1)
    y_NL[:, 1:] = [0, 1, np.nan]
    probe = fit_logistic(x_ND, y_NL, 0.01)
    found_NL = comparable_probabilities(probe, x_ND, y_NL)
    np.testing.assert_array_equal(found_NL[:, 0], probe.probability_NL(x_ND)[:, 0])
    np.testing.assert_array_equal(found_NL[:, 1:], np.tile([0, 1, 0.5], (100, 1)))


def test_standardizer_zeros_constant_features():
    x_ND = (
        torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 0.0, 1e-3])
        + 7
    )
    z_ND = Standardizer.fit(x_ND)(x_ND)
    assert (z_ND[:, 1] == 0).all()
    torch.testing.assert_close(
        z_ND[:, ::2].std(dim=0, unbiased=False), torch.ones(2, dtype=torch.float64)
    )


def test_standardized_features_do_not_depend_on_the_scale():
    """Encoders with random weights may have features far below 1."""
    x_ND = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(
        Standardizer.fit(1e-9 * x_ND)(1e-9 * x_ND), Standardizer.fit(x_ND)(x_ND)
    )
    constant_ND = torch.full((50, 3), 0.3e-9)
    assert (Standardizer.fit(constant_ND)(constant_ND) == 0).all()


# Draws


def test_label_fractions_are_nested_by_patient():
    patients = [f"p{number % 40}" for number in range(100)]
    small, large = label_fraction(patients, 0.1, 3), label_fraction(patients, 0.5, 3)
    assert set(small.tolist()) < set(large.tolist())
    for drawn, share in ((small, 4), (large, 20)):
        chosen = {patients[place] for place in drawn}
        assert len(chosen) == share
        assert (
            sorted(place for place, patient in enumerate(patients) if patient in chosen)
            == drawn.tolist()
        )
    assert label_fraction(patients, 1.0, 9).tolist() == list(range(100))
    assert label_fraction(patients, 0.1, 4).tolist() != small.tolist()
    assert len({patients[place] for place in label_fraction(patients, 1e-9, 0)}) == 1
    for fraction in (0, 1.1, -1):
        with raises(ConfigError, "out_of_range", "fraction"):
            label_fraction(patients, fraction, 0)


def test_subset_matches_source():
    source = make_source(np.zeros((9, 3)), NAMES)
    part = Subset(source, [7, 2])
    assert [part.sample(place).key for place in range(len(part))] == [
        source.sample(place).key for place in (7, 2)
    ]
    np.testing.assert_array_equal(part.pixels(1), source.pixels(2))
    assert part.fingerprint != Subset(source, [2, 7]).fingerprint != source.fingerprint
    assert part.label_names == NAMES


# The protocol


def test_probe_rows_are_mean_and_deviation_over_runs(sets):
    train, valid, test = sets
    result = linear_probe(train, valid, test, fractions=(0.05, 1.0), seeds=3, resamples=20)
    draws = result.results.details["runs"]
    assert [(draw["fraction"], draw["seed"]) for draw in draws] == [
        (0.05, 0),
        (0.05, 1),
        (0.05, 2),
        (1.0, 0),
    ]
    assert [draw["patients"] for draw in draws] == [10, 10, 10, 200]
    values = []
    standardize = Standardizer.fit(train.x_ND)
    for draw in draws[:3]:
        drawn = label_fraction(train.patients, 0.05, draw["seed"])
        probe = fit_logistic(
            standardize(train.x_ND)[drawn], train.labels_NL[drawn], draw["penalty"]
        )
        scores = probe.probability_NL(standardize(test.x_ND))
        values.append(reference.roc_auc_score(test.labels_NL, scores, average=None))
        on_valid = probe.probability_NL(standardize(valid.x_ND))
        assert draw["validation_auroc"] == pytest.approx(
            reference.roc_auc_score(valid.labels_NL, on_valid), abs=1e-3
        )
    for label, name in enumerate(NAMES):
        row, spread = (result.results.row(f"{metric}@5%", name) for metric in ("auroc", "auroc_sd"))
        assert row.value == pytest.approx(np.mean([value[label] for value in values]), abs=2e-3)
        assert spread.value == pytest.approx(
            np.std([value[label] for value in values], ddof=1), abs=2e-3
        )
        assert row.low <= row.value <= row.high
    full = result.results.row("auroc@100%", "macro")
    assert full.value == result.results.row("auroc", "macro").value
    assert full.value > result.results.row("auroc@5%", "macro").value
    assert full.value > 0.7
    metrics = {row.metric for row in result.results.rows}
    assert {"ece", "brier", "f1", "mcc", "auroc_gap", "average_precision@5%"} <= metrics
    assert "auroc_sd@100%" not in metrics
    assert "auroc@5%" in result.table()


def test_probe_of_noise_is_at_chance():
    train, valid, test = (
        table(n, seed, f"noise{seed}", signal=0) for seed, n in enumerate((400, 120, 160))
    )
    row = linear_probe(train, valid, test, fractions=(1.0,), resamples=50).results.row(
        "auroc@100%", "macro"
    )
    assert row.low < 0.5 < row.high


def test_penalty_and_thresholds_are_chosen_on_validation_images(sets):
    train, valid, test = sets
    result = linear_probe(train, valid, test, fractions=(0.1,), seeds=1, resamples=0)
    relabelled = dataclasses.replace(test, labels_NL=1 - test.labels_NL)
    other = linear_probe(train, valid, relabelled, fractions=(0.1,), seeds=1, resamples=0)
    assert result.results.details["runs"] == other.results.details["runs"]
    assert result.thresholds == other.thresholds
    np.testing.assert_array_equal(result.images.scores_NL, other.images.scores_NL)


def test_probe_scores_do_not_depend_on_other_images(sets):
    train, valid, test = sets
    full = linear_probe(train, valid, test, fractions=(1.0,), resamples=0)
    few = dataclasses.replace(
        test,
        x_ND=test.x_ND[:40],
        labels_NL=test.labels_NL[:40],
        samples=test.samples[:40],
        positions=test.positions[:40],
    )
    part = linear_probe(train, valid, few, fractions=(1.0,), resamples=0)
    np.testing.assert_allclose(part.images.scores_NL, full.images.scores_NL[:40], rtol=1e-12)


def test_probe_applies_label_policy(sets):
    train, valid, test = sets
    labels_NL = test.labels_NL.copy()
    labels_NL[:10, 0] = -1
    labels_NL[10:30, 0] = np.nan
    test = dataclasses.replace(test, labels_NL=labels_NL)
    ignore = linear_probe(train, valid, test, fractions=(1.0,), resamples=0)
    assert ignore.results.row("auroc", "Edema").n == 150
    policy = LabelPolicy(uncertain="ones", missing="ignore")
    ones = linear_probe(train, valid, test, fractions=(1.0,), resamples=0, policy=policy)
    assert ones.results.row("auroc", "Edema").n == 140
    assert ones.results.config["policy"]["uncertain"] == "ones"


def test_run_without_positives_has_chance_auroc(sets):
    train, valid, test = sets
    labels_NL = train.labels_NL.copy()
    labels_NL[:, 1] = 0
    result = linear_probe(
        dataclasses.replace(train, labels_NL=labels_NL), valid, test, fractions=(1.0,), resamples=0
    )
    assert result.results.row("auroc@100%", "Fracture").value == 0.5
    assert result.results.details["runs"][0]["one_class_only"] == ["Fracture"]


def test_linear_probe_rejects_invalid_inputs(sets):
    train, valid, test = sets
    with pytest.raises(SplitError, match="the linear probe: splits share patients: 60 in both"):
        linear_probe(train, valid, valid)
    with raises(EvaluationError, "mismatch", "labels"):
        linear_probe(train, valid, dataclasses.replace(test, label_names=("a", "b", "c")))
    with raises(EvaluationError, "out_of_range", "seeds"):
        linear_probe(train, valid, test, seeds=0)
    with raises(EvaluationError, "empty", "valid"):
        linear_probe(train, dataclasses.replace(valid, labels_NL=np.zeros((120, 3))), test)


def test_probe_page_shows_every_fraction(sets, tmp_path):
    result = linear_probe(*sets, fractions=(0.1, 1.0), seeds=2, resamples=20)
    page = write_probe_page(
        result, tmp_path / "index.html", PageHeader(model="random", data="noise")
    ).read_text()
    for text in (
        "AUROC, 10%",
        "AUROC, 100%",
        "SD over runs",
        "Gaps between subgroups",
        "Calibration and decisions",
    ):
        assert text in page


def test_a_probe_of_a_frozen_encoder_says_what_it_does_not_measure(sets, source, tmp_path):
    """RadZero's and UMRL's trained layers lie above the encoder, which stays as published."""
    probed, trained = (
        ProbedEncoder.from_model(radzero(frozen_image=frozen), name="radzero")
        for frozen in (True, False)
    )
    table = encode_features(probed, loader_of(probed, source))
    assert "above the encoder" in table.note
    assert not encode_features(trained, loader_of(trained, source)).note
    assert not ProbedEncoder.from_model(radzero(frozen_image=True), name="", random=True).note
    train, valid, test = sets
    noted = dataclasses.replace(train, note=table.note)
    result = linear_probe(noted, valid, test, fractions=(1.0,), resamples=0)
    assert result.results.details["note"] == table.note
    assert (
        "note"
        not in linear_probe(train, valid, test, fractions=(1.0,), resamples=0).results.details
    )
    header = PageHeader(model="radzero", data="noise")
    assert table.note in write_probe_page(result, tmp_path / "index.html", header).read_text()


# Features


@pytest.fixture(scope="module")
def encoder() -> ProbedEncoder:
    return ProbedEncoder.from_name("resnet_tiny", image_size=32)


def loader_of(encoder: ProbedEncoder, source: FileSource):
    return open_loader(
        source,
        batch=4,
        image=encoder.transform,
        text=WholeText(),
        tokenizer=no_text,
        train=False,
        max_skipped=9,
    )


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    import cv2

    samples = make_source(np.eye(3)[np.arange(9) % 3], NAMES).samples
    for number, sample in enumerate(samples):
        cv2.imwrite(str(tmp_path / f"{sample.key}.png"), textured(number, 40, 40))
    return FileSource(
        [dataclasses.replace(s, image=tmp_path / f"{s.key}.png") for s in samples], NAMES
    )


def test_pixels_are_an_encoder_without_parameters(source, tmp_path):
    """`--encoder patches:32 --image-size 32`: the baseline of a linear layer on the pixels."""
    pixels = ProbedEncoder.from_name("patches:32", image_size=32)
    table = encode_features(pixels, loader_of(pixels, source), cache=tmp_path / "cache")
    image_CHW = pixels.transform(source.samples[3].image)[0]
    expected_D = torch.nn.functional.pixel_unshuffle(image_CHW / 127.5 - 1, 32).flatten()
    assert table.x_ND.shape[1] == 3 * 32 * 32
    found = np.sort(table.x_ND[list(table.positions).index(3)])
    wanted = np.sort(np.tile(expected_D.numpy(), 3))  # grey, in three channels
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_feature_cache_depends_on_encoder_images_and_transform(
    encoder, source, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    (tmp_path / f"{source.samples[4].key}.png").write_bytes(b"")
    encoder.module.eval()
    first = encode_features(encoder, loader_of(encoder, source), cache=cache)
    assert first.x_ND.shape == (8, encoder.module.feature_dim)
    assert sum(first.unreadable.values()) == 1
    assert 4 not in first.positions
    images = [
        encoder.transform.build()(source.pixels(place), None).image_HWC for place in first.positions
    ]
    with torch.no_grad():
        plain = encoder.module(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)).pooled_BD
    torch.testing.assert_close(first.x_ND, plain, atol=1e-5, rtol=1e-4)

    changed = [
        dataclasses.replace(
            encoder, transform=dataclasses.replace(encoder.transform, fit="squash")
        ),
        ProbedEncoder.from_name("resnet_tiny", image_size=32, seed=1),
    ]
    monkeypatch.setattr(type(encoder.module), "forward", None)  # whoever encodes now fails
    again = encode_features(encoder, loader_of(encoder, source), cache=cache)
    torch.testing.assert_close(again.x_ND, first.x_ND, rtol=0, atol=0)
    assert (again.positions, again.unreadable) == (first.positions, first.unreadable)
    for other in changed:
        with pytest.raises(TypeError):
            encode_features(other, loader_of(other, source), cache=cache)
    with pytest.raises(TypeError):
        encode_features(
            encoder, loader_of(encoder, FileSource(source.samples[:5], NAMES)), cache=cache
        )
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:200])  # a damaged file is encoded anew
    with pytest.raises(TypeError):
        encode_features(encoder, loader_of(encoder, source), cache=cache)


def test_encode_features_keeps_encoder_state(encoder, source):
    encoder.module.train()
    before = {name: tensor.clone() for name, tensor in encoder.module.state_dict().items()}
    encode_features(encoder, loader_of(encoder, source))
    assert encoder.module.training
    for name, tensor in encoder.module.state_dict().items():  # running statistics among them
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_random_encoder_has_same_architecture_with_other_weights():
    torch.manual_seed(0)
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "frozen_text_layers": 0,
    }
    model = medvl.create_model("convirt", projection_dim=8, vocab_size=50, **settings)
    probed, random = (
        ProbedEncoder.from_model(model, name="convirt", random=random) for random in (False, True)
    )
    assert probed.module is model.image_encoder
    assert json.dumps(random.module.config) == json.dumps(probed.module.config)
    assert random.transform == probed.transform
    assert (
        len(
            {
                probed.sha256,
                random.sha256,
                ProbedEncoder.from_model(model, name="", random=True, seed=1).sha256,
            }
        )
        == 3
    )
    assert random.sha256 == ProbedEncoder.from_model(model, name="", random=True).sha256
    assert random.name == "convirt, random weights"


def test_encode_features_rejects_nonfinite_features(source):
    encoder = ProbedEncoder.from_name("resnet_tiny", image_size=32)
    with torch.no_grad():
        next(encoder.module.parameters()).fill_(torch.nan)
    with raises(EvaluationError, "nonfinite", names="resnet_tiny, random weights"):
        encode_features(encoder, loader_of(encoder, source))


# A fitted probe


class Pixels(torch.nn.Module):
    """Pixels in place of features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, image_BCHW: torch.Tensor) -> Any:
        return SimpleNamespace(pooled_BD=image_BCHW.flatten(1).float() * self.scale)


def batch_of(x_ND: torch.Tensor) -> Any:
    return SimpleNamespace(pixels=x_ND[:, None, None])


def test_fitted_probe_is_that_of_the_protocol(sets):
    train, valid, test = sets
    probe = FittedProbe.fit(
        ProbedEncoder(name="pixels", module=Pixels(), transform=None), train, valid
    )
    assert probe.names == NAMES
    assert probe.penalty in PENALTIES
    result = linear_probe(train, valid, test, fractions=(1.0,), resamples=0)
    with torch.no_grad():
        np.testing.assert_allclose(
            probe.probabilities(batch_of(test.x_ND)), result.images.scores_NL, atol=1e-9
        )
    assert probe.patients["train"] == set(train.patients)
    assert probe.manifests == {"train": train.fingerprint, "validation": valid.fingerprint}


def test_fitted_probe_leaves_out_what_it_cannot_learn(sets):
    train, valid, _ = sets
    encoder: Any = SimpleNamespace(module=Pixels())
    absent_NL = train.labels_NL.copy()
    absent_NL[:, 1] = 0
    without = dataclasses.replace(train, labels_NL=absent_NL)
    assert FittedProbe.fit(encoder, without, valid).names == ("Edema", "Cardiomegaly")
    renamed = ("Edema", "No Finding", "Cardiomegaly")
    parts = [dataclasses.replace(part, label_names=renamed) for part in (train, valid)]
    assert FittedProbe.fit(encoder, *parts).names == ("Edema", "Cardiomegaly")
    with raises(EvaluationError, "empty", "probe_train"):
        FittedProbe.fit(
            encoder, dataclasses.replace(train, labels_NL=np.zeros_like(absent_NL)), valid
        )
    with raises(SplitError, "leak"):
        FittedProbe.fit(encoder, train, train)
