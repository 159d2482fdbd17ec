"""Zero-shot protocol on a small fake model."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, FakeSource, make_source, text_vector
from sklearn import metrics as reference

from medvl.errors import EvaluationError, SplitError
from medvl.eval import LabelPolicy, ZeroShotEval, load_prompts, write_results, zero_shot
from medvl.eval.core.metrics import bootstrap_indices
from medvl.eval.zero_shot_classification.prompts import default_prompts
from medvl.eval.zero_shot_classification.protocol import PromptScorer, predict
from medvl.models import system
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, Embeddings

COUNT = 120


def random_labels(count: int = COUNT, seed: int = 0, share: float = 0.4) -> np.ndarray:
    return (np.random.default_rng(seed).random((count, len(FINDINGS))) < share).astype(float)


@pytest.fixture
def source() -> FakeSource:
    return make_source(random_labels(), FINDINGS)


def test_pair_softmax_matches_formula():
    """CheXzero: softmax over the two raw cosines of "positive" and "negative"."""
    prompts = load_prompts("chexpert_pairs")
    pixels_BW = np.random.default_rng(0).integers(0, 256, (5, 16), dtype=np.uint8)
    model = FakeModel().eval()
    with torch.no_grad():
        scores_BL = PromptScorer(model, prompts)(
            model.embed_images(torch.from_numpy(pixels_BW)[:, None, None])
        )
    for pixels_W, scores_L in zip(pixels_BW, scores_BL.numpy(), strict=True):
        image = pixels_W.astype(np.float64) - 128
        image /= np.linalg.norm(image)
        for sides, score in zip(prompts.classes.values(), scores_L, strict=True):
            positive, negative = (
                np.exp(image @ text_vector(side[0])) for side in (sides.positive, sides.negative)
            )
            assert score == pytest.approx(positive / (positive + negative), abs=1e-6)


def score(prompts, images: Embeddings) -> np.ndarray:
    with torch.no_grad():
        return PromptScorer(FakeModel().eval(), prompts)(images).numpy()


@pytest.fixture
def images() -> Embeddings:
    generator = torch.Generator().manual_seed(0)
    return Embeddings(torch.nn.functional.normalize(torch.randn(6, 16, generator=generator), dim=1))


def test_prompt_pooling_matches_formulas(images):
    base = load_prompts("chexpert_ensemble").select(["Edema", "Support Devices"])
    for ensemble in ("similarity_mean", "similarity_max", "embedding_mean"):
        prompts = dataclasses.replace(base, ensemble=ensemble, scoring="margin")
        for column, sides in enumerate(prompts.classes.values()):
            pooled = []
            for sentences in (sides.positive, sides.negative):
                vectors = np.stack([text_vector(sentence) for sentence in sentences])
                if ensemble == "embedding_mean":
                    mean = vectors.mean(axis=0)
                    pooled.append(images.global_NE.numpy() @ (mean / np.linalg.norm(mean)))
                else:
                    cosines = images.global_NE.numpy() @ vectors.T
                    pooled.append(
                        cosines.mean(axis=1)
                        if ensemble == "similarity_mean"
                        else cosines.max(axis=1)
                    )
            np.testing.assert_allclose(
                score(prompts, images)[:, column], pooled[0] - pooled[1], atol=1e-6
            )


def test_raw_embeddings_are_averaged_before_they_are_normalised(images):
    class Raw(FakeModel):
        def unnormalized_text(self, texts):
            return torch.stack(
                [len(text) * torch.as_tensor(text_vector(text)) for text in texts]
            ).float()

    prompts = load_prompts("chexpert_ensemble").select(["Edema", "Support Devices"])
    prompts = dataclasses.replace(prompts, ensemble="embedding_mean_raw", scoring="margin")
    with torch.no_grad():
        actual = PromptScorer(Raw().eval(), prompts)(images).numpy()
    for column, sides in enumerate(prompts.classes.values()):
        means = [
            np.mean([len(sentence) * text_vector(sentence) for sentence in sentences], axis=0)
            for sentences in (sides.positive, sides.negative)
        ]
        cosines = [images.global_NE.numpy() @ (mean / np.linalg.norm(mean)) for mean in means]
        np.testing.assert_allclose(actual[:, column], cosines[0] - cosines[1], atol=1e-6)
    with raises(EvaluationError, "unsupported", "ensemble"):
        PromptScorer(FakeModel(), prompts)


def test_class_softmax_matches_formula(images):
    prompts = load_prompts("chexpert_classes").select(COMPETITION_FINDINGS)
    means = np.stack(
        [
            (
                images.global_NE.numpy()
                @ np.stack([text_vector(text) for text in sides.positive]).T
            ).mean(axis=1)
            for sides in prompts.classes.values()
        ],
        axis=1,
    )
    expected = np.exp(means / 0.1) / np.exp(means / 0.1).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(score(prompts, images), expected, atol=1e-5)


def test_temperature_changes_probabilities_but_not_ranking(images):
    prompts = load_prompts("chexpert_pairs")
    raw, sharp = (
        score(prompts, images),
        score(dataclasses.replace(prompts, temperature=0.05), images),
    )
    np.testing.assert_array_equal(np.argsort(raw, axis=0), np.argsort(sharp, axis=0))
    assert np.abs(sharp - 0.5).max() > 2 * np.abs(raw - 0.5).max()


def test_embedding_mean_rejects_models_with_local_similarity():
    class Local(FakeModel):
        def embed_texts(self, texts):
            return Embeddings(super().embed_texts(texts).global_NE, torch.zeros(len(texts), 3, 16))

    prompts = dataclasses.replace(load_prompts("chexpert_pairs"), ensemble="embedding_mean")
    with raises(EvaluationError, "unsupported", "ensemble"):
        PromptScorer(Local(), prompts)


def test_embedding_mean_rejects_models_whose_vectors_have_any_length():
    """Such as a MutualInfo of whole images and texts: its critic would get vectors of another
    scale.
    """

    class Long(FakeModel):
        def embed_texts(self, texts):
            return Embeddings(3 * super().embed_texts(texts).global_NE)

    prompts = dataclasses.replace(load_prompts("chexpert_pairs"), ensemble="embedding_mean")
    with raises(EvaluationError, "unsupported", "ensemble"):
        PromptScorer(Long(), prompts)


def test_predict_encodes_each_image_once(source):
    model = FakeModel()
    sets = [load_prompts("chexpert_pairs"), load_prompts("chexpert_ensemble")]
    predictions = predict(model, FakeLoader(source), sets)
    assert model.images_encoded == COUNT
    assert model.texts_encoded == sum(len(prompts.texts()) for prompts in sets)
    assert predictions.keys == tuple(sample.key for sample in source.samples)
    assert model.training
    assert model.head.training


def test_scores_do_not_depend_on_other_images(source):
    prompts = [load_prompts("chexpert_classes")]
    full = predict(FakeModel(), FakeLoader(source), prompts)
    few = FakeSource(source.samples[40:43], source.images[40:43], FINDINGS)
    alone = predict(FakeModel(), FakeLoader(few, batch=1), prompts)
    np.testing.assert_allclose(alone.scores_NL[0], full.scores_NL[0][40:43], rtol=1e-5)


def test_models_are_asked_as_they_were_trained(source):
    class Asked(FakeModel):
        zero_shot_prompts = "statements"

    for model, name in (
        (FakeModel(), "chexpert_ensemble"),
        (Asked(), "statements"),
        ([Asked(), Asked()], "statements"),
    ):
        assert zero_shot(model, FakeLoader(source), resamples=0).prompts.name == name
    assert (
        zero_shot(Asked(), FakeLoader(source), "chexpert_pairs", resamples=0).prompts.name
        == "chexpert_pairs"
    )
    own = {
        name: default_prompts(system(name))
        for name in ("radzero", "carzero", "medklip", "kad", "mavl")
    }
    assert set(own.values()) == {"statements"}
    assert default_prompts(system("convirt")) == "chexpert_ensemble"


def test_zero_shot_rows_match_scikit_learn(source):
    result = zero_shot(
        FakeModel(),
        FakeLoader(source),
        "chexpert_pairs",
        resamples=20,
        bootstrap_unit="image",
        seed=4,
    )
    scores_NL, labels_NL, results = result.images.scores_NL, result.images.labels_NL, result.results
    for index, name in enumerate(result.images.names):
        truth, scores = labels_NL[:, index], scores_NL[:, index]
        row = results.row("auroc", name)
        assert row.value == pytest.approx(reference.roc_auc_score(truth, scores))
        assert (row.n, row.n_positive) == (COUNT, int(truth.sum()))
        loop = [
            reference.roc_auc_score(truth[drawn], scores[drawn])
            for drawn in bootstrap_indices(COUNT, 20, seed=4)
        ]
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(loop, (2.5, 97.5))))
        assert results.row("average_precision", name).value == pytest.approx(
            reference.average_precision_score(truth, scores)
        )
        assert results.row("brier", name).value == pytest.approx(
            reference.brier_score_loss(truth, scores)
        )
    for target, members in (("macro", FINDINGS), ("macro_competition", COMPETITION_FINDINGS)):
        columns = [result.images.names.index(name) for name in members]
        row = results.row("auroc", target)
        assert row.value == pytest.approx(
            reference.roc_auc_score(labels_NL[:, columns], scores_NL[:, columns])
        )
        loop = [
            reference.roc_auc_score(labels_NL[drawn][:, columns], scores_NL[drawn][:, columns])
            for drawn in bootstrap_indices(COUNT, 20, seed=4)
        ]
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(loop, (2.5, 97.5))))


def test_patients_are_resampled_by_default(source):
    source = make_source(random_labels(), FINDINGS, patients=12)
    by_patient = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=30)
    by_image = zero_shot(
        FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=30, bootstrap_unit="image"
    )
    assert by_patient.results.details["patients"] == 12
    assert by_patient.groups == [sample.patient for sample in source.samples]
    assert by_image.groups is None
    one, other = (result.results.row("auroc", "macro") for result in (by_patient, by_image))
    assert one.value == other.value
    assert one.low != other.low


def test_thresholds_are_chosen_on_validation_images(source):
    valid = make_source(random_labels(80, seed=5), FINDINGS, seed=6, prefix="v")
    result = zero_shot(
        FakeModel(),
        FakeLoader(source),
        "chexpert_pairs",
        valid_loader=FakeLoader(valid),
        threshold_rule="mcc",
        resamples=5,
    )
    relabelled = make_source(1 - random_labels(), FINDINGS)
    other = zero_shot(
        FakeModel(), FakeLoader(relabelled), "chexpert_pairs", valid_loader=FakeLoader(valid),
        threshold_rule="mcc", resamples=5,
    )  # fmt: skip
    assert result.thresholds == other.thresholds
    column = result.images.names.index("Edema")
    truth, decided = (
        result.images.labels_NL[:, column],
        result.images.scores_NL[:, column] >= result.thresholds["Edema"],
    )
    assert result.results.row("mcc", "Edema").value == pytest.approx(
        reference.matthews_corrcoef(truth, decided)
    )
    assert result.results.row("f1", "Edema").value == pytest.approx(
        reference.f1_score(truth, decided)
    )
    assert result.results.config["threshold_rule"] == "mcc"


def test_no_decision_metrics_without_validation_images(source):
    result = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=0)
    assert {row.metric for row in result.results.rows} == {
        "auroc",
        "average_precision",
        "brier",
        "ece",
        "auroc_gap",
    }
    assert result.thresholds is None


def test_no_decision_metrics_for_findings_missing_in_validation(source):
    labels_NL = random_labels(80, seed=5)
    labels_NL[:, FINDINGS.index("Fracture")] = 0
    valid = FakeLoader(make_source(labels_NL, FINDINGS, prefix="v"))
    result = zero_shot(
        FakeModel(), FakeLoader(source), "chexpert_pairs", valid_loader=valid, resamples=0
    )
    assert np.isnan(result.thresholds["Fracture"])
    with raises(EvaluationError, "not_found", names="f1/Fracture"):
        result.results.row("f1", "Fracture")
    assert result.results.row("f1", "Edema").n == COUNT
    empty_loader = FakeLoader(make_source(np.zeros((9, 14)), FINDINGS, prefix="v"))
    result = zero_shot(
        FakeModel(), FakeLoader(source), "chexpert_pairs", valid_loader=empty_loader, resamples=0
    )
    assert np.isnan(list(result.thresholds.values())).all()
    assert "f1" not in {row.metric for row in result.results.rows}


def test_zero_shot_rejects_shared_patients(source):
    valid = make_source(random_labels(30), FINDINGS)
    with raises(SplitError, "leak", names="30 patients"):
        zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", valid_loader=FakeLoader(valid))


def test_uncertain_labels_are_left_out_and_counted(source):
    labels_NL = random_labels()
    labels_NL[:10, FINDINGS.index("Edema")] = -1
    labels_NL[10:15, FINDINGS.index("Edema")] = np.nan
    result = zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, FINDINGS)), "chexpert_pairs", resamples=0
    )
    row, account = result.results.row("auroc", "Edema"), result.results.details["labels"]["Edema"]
    assert row.n == COUNT - 10
    assert (account["uncertain"], account["missing"], account["left_out"]) == (10, 5, 10)
    assert account["positive"] + account["negative"] + account["left_out"] == COUNT
    ones = zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, FINDINGS)), "chexpert_pairs", resamples=0,
        policy=LabelPolicy(uncertain="ones"),
    )  # fmt: skip
    assert ones.results.row("auroc", "Edema").n_positive == row.n_positive + 10
    assert ones.results.config["policy"]["uncertain"] == "ones"


def test_single_class_finding_has_no_value_and_is_not_averaged(source):
    labels_NL = random_labels()
    labels_NL[:, FINDINGS.index("Fracture")] = 0
    result = zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, FINDINGS)), "chexpert_pairs", resamples=5
    )
    row = result.results.row("auroc", "Fracture")
    assert np.isnan(row.value)
    assert (row.n, row.n_positive) == (COUNT, 0)
    others = [result.results.row("auroc", name).value for name in FINDINGS if name != "Fracture"]
    assert result.results.row("auroc", "macro").value == pytest.approx(np.mean(others))


def test_competition_mean_needs_all_five_findings():
    labels_NL = random_labels()
    labels_NL[:, FINDINGS.index("Edema")] = 0
    result = zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, FINDINGS)), "chexpert_pairs", resamples=0
    )
    with raises(EvaluationError, "not_found", names="auroc/macro_competition"):
        result.results.row("auroc", "macro_competition")


def test_subgroup_means_use_common_labels(source):
    result = zero_shot(
        FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=5, smallest_subgroup=10
    )
    women = np.array([sample.sex == "F" for sample in source.samples])
    column = result.images.names.index("Edema")
    row = result.results.row("auroc", "Edema", "sex: F")
    expected = reference.roc_auc_score(
        result.images.labels_NL[women, column], result.images.scores_NL[women, column]
    )
    assert row.value == pytest.approx(expected)
    assert row.n == women.sum()
    assert {row.subgroup for row in result.results.rows if row.metric == "auroc"} - {""} == {
        "view: frontal", "view: lateral", "projection: AP", "projection: PA", "sex: F", "sex: M",
        "age: under 40", "age: 40-59", "age: 60-79", "age: 80 and over",
    }  # fmt: skip
    common = result.results.details["labels_in_subgroup_mean"]["sex"]
    values = [result.results.row("auroc", name, "sex: F").value for name in common]
    assert result.results.row("auroc", "macro", "sex: F").value == pytest.approx(np.mean(values))


def test_gaps_match_loop_over_same_resamples(source):
    result = zero_shot(
        FakeModel(),
        FakeLoader(source),
        "chexpert_pairs",
        resamples=20,
        seed=4,
        bootstrap_unit="image",
    )
    rows = {(row.metric, row.target, row.subgroup): row for row in result.results.rows}
    gaps = [row for row in result.results.rows if row.metric == "auroc_gap"]
    for row in gaps:
        attribute, _, pair = row.subgroup.partition(": ")
        best, worst = (
            rows["auroc", row.target, f"{attribute}: {group}"] for group in pair.split(" - ")
        )
        assert row.value == pytest.approx(best.value - worst.value)
        assert row.value >= 0
        assert row.n == best.n + worst.n
    assert {row.target for row in gaps} > {"macro", "Edema"}
    (edema,) = (row for row in gaps if row.target == "Edema" and row.subgroup.startswith("sex"))
    first, _, second = edema.subgroup.removeprefix("sex: ").partition(" - ")
    column = result.images.names.index("Edema")
    scores, truth = result.images.scores_NL[:, column], result.images.labels_NL[:, column]
    sexes = np.array([sample.sex for sample in result.images.samples])
    loop = []
    for drawn in bootstrap_indices(COUNT, 20, seed=4):
        of_sex = {sex: drawn[sexes[drawn] == sex] for sex in (first, second)}
        one, other = (
            reference.roc_auc_score(truth[chosen], scores[chosen]) for chosen in of_sex.values()
        )
        loop.append(one - other)
    np.testing.assert_allclose(
        (edema.low, edema.high), np.quantile(loop, (0.025, 0.975)), atol=1e-12
    )


def test_small_subgroups_have_no_values(source):
    labels_NL = random_labels()
    edema = FINDINGS.index("Edema")
    labels_NL[::2, edema] = 0
    labels_NL[:10:2, edema] = 1  # five women
    result = zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, FINDINGS)), "chexpert_pairs", resamples=5
    )
    row = result.results.row("auroc", "Edema", "sex: F")
    assert np.isnan(row.value)
    assert (row.n, row.n_positive) == (60, 5)
    assert not np.isnan(result.results.row("auroc", "Edema", "sex: M").value)
    assert "Edema" not in result.results.details["labels_in_subgroup_mean"]["sex"]


def test_top1_accuracy_uses_images_of_one_class():
    labels_NL = np.eye(3)[np.arange(90) % 3]
    labels_NL[:20, 0] = 1  # images 1, 2, 4, 5, ... have two classes now
    source = make_source(labels_NL, ("Edema", "Fracture", "Pneumonia"))
    prompts = load_prompts("chexpert_classes").select(source.label_names)
    result = zero_shot(
        FakeModel(), FakeLoader(source), prompts, resamples=10, bootstrap_unit="image", seed=2
    )
    single = labels_NL.sum(axis=1) == 1
    truth, predicted = (
        labels_NL[single].argmax(axis=1),
        result.images.scores_NL[single].argmax(axis=1),
    )
    row = result.results.row("top1_accuracy", "one class")
    assert row.value == pytest.approx((truth == predicted).mean())
    assert row.n == single.sum()
    balanced = result.results.row("top1_balanced_accuracy", "one class")
    assert balanced.value == pytest.approx(reference.balanced_accuracy_score(truth, predicted))
    everything = result.images.scores_NL.argmax(axis=1) == labels_NL.argmax(axis=1)
    loop = [everything[drawn][single[drawn]].mean() for drawn in bootstrap_indices(90, 10, seed=2)]
    assert (row.low, row.high) == pytest.approx(tuple(np.percentile(loop, (2.5, 97.5))))


def test_zero_shot_lists_classes_without_labels():
    source = make_source(random_labels()[:, :2], ("Edema", "Fracture"))
    result = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=0)
    assert result.images.names == ("Edema", "Fracture")
    assert len(result.results.details["classes_without_labels"]) == 12
    with raises(EvaluationError, "mismatch", "prompts", names="CT, MR"):
        zero_shot(
            FakeModel(),
            FakeLoader(make_source(random_labels()[:, :2], ("CT", "MR"))),
            "chexpert_pairs",
        )


def test_statements_score_every_label_of_the_data_or_those_that_are_chosen():
    """Of ChestX-ray14's 14 findings, 7 have CheXpert's names: the mean was over these and No
    Finding.
    """
    names = ("Edema", "Hernia", "Mass")
    source = make_source(random_labels()[:, :3], names)
    result = zero_shot(FakeModel(), FakeLoader(source), "statements", resamples=0)
    assert result.images.names == names
    assert "Hernia" in result.results.config["prompts"]["classes"]
    rows = [result.results.row("auroc", name).value for name in names]
    assert result.results.row("auroc", "macro").value == pytest.approx(sum(rows) / 3)
    assert set(ZeroShotEval(FakeLoader(source), "statements")(FakeModel())) >= {
        "zero_shot/auroc/Hernia"
    }
    chosen = zero_shot(
        FakeModel(), FakeLoader(source), "statements", labels=("Mass", "Edema"), resamples=0
    )
    assert chosen.images.names == ("Mass", "Edema")
    assert chosen.results.row("auroc", "macro").value == pytest.approx((rows[0] + rows[2]) / 2)
    with raises(EvaluationError, "unknown_name", "labels"):
        zero_shot(FakeModel(), FakeLoader(source), "statements", labels=("Fracture",), resamples=0)


def test_zero_shot_rejects_labels_of_single_class():
    source = make_source(np.zeros((5, 2)), ("Edema", "Fracture"))
    with raises(EvaluationError, "empty", "labels", names="Edema, Fracture"):
        zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs")


def test_unreadable_images_are_counted(source):
    source.damaged = {3, 50}
    loader = FakeLoader(source)
    result = zero_shot(FakeModel(), loader, "chexpert_pairs", resamples=0)
    assert result.results.details["unreadable"] == {"shard_damaged": 2}
    assert result.results.details["images"] == COUNT - 2
    again = zero_shot(FakeModel(), loader, "chexpert_pairs", resamples=0)
    assert again.results.details["unreadable"] == {"shard_damaged": 2}


def test_full_pass_rejects_missing_and_repeated_images(source):
    class Dropping(FakeLoader):
        def __iter__(self):
            batches = list(super().__iter__())
            return iter(batches[:-1])

    with raises(EvaluationError, "mismatch", names="119"):
        zero_shot(FakeModel(), Dropping(source), "chexpert_pairs")

    class Repeating(FakeLoader):
        def __iter__(self):
            yield from super().__iter__()
            yield next(super().__iter__())

    with raises(EvaluationError, "mismatch", names="7 more than once"):
        zero_shot(FakeModel(), Repeating(source), "chexpert_pairs")


def test_nonfinite_scores_are_rejected(source):
    model = FakeModel()
    model.scale.data.fill_(float("nan"))
    with raises(EvaluationError, "nonfinite", names="120 of 120"):
        zero_shot(model, FakeLoader(source), "chexpert_pairs")


def test_zero_shot_rejects_unknown_bootstrap_unit(source):
    with raises(EvaluationError, "unknown_name", "bootstrap_unit"):
        zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", bootstrap_unit="study")


def test_autocast_applies_to_encoder_only(source):
    types = []

    class Watching(FakeModel):
        def embed_images(self, image_BCHW):
            types.append(("image", torch.is_autocast_enabled("cpu")))
            return super().embed_images(image_BCHW)

        def similarity(self, images, texts):
            types.append(("similarity", torch.is_autocast_enabled("cpu")))
            return super().similarity(images, texts)

    zero_shot(
        Watching(), FakeLoader(source), "chexpert_pairs", resamples=0, autocast=torch.bfloat16
    )
    assert set(types) == {("image", True), ("similarity", False)}


def test_zero_shot_eval_matches_protocol(source):
    numbers = ZeroShotEval(FakeLoader(source), "chexpert_pairs")(FakeModel())
    results = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=0).results
    assert numbers["zero_shot/auroc_macro"] == results.row("auroc", "macro").value
    assert (
        numbers["zero_shot/auroc_macro_competition"]
        == results.row("auroc", "macro_competition").value
    )
    assert numbers["zero_shot/auroc/Edema"] == results.row("auroc", "Edema").value
    assert len(numbers) == 16


def test_zero_shot_eval_rejects_data_without_labels():
    with raises(EvaluationError, "mismatch", "prompts"):
        ZeroShotEval(
            FakeLoader(make_source(random_labels()[:, :2], ("CT", "MR"))), "chexpert_pairs"
        )


def test_results_files_are_deterministic(source, tmp_path):
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        result = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=10)
        written.append(
            [
                path.read_bytes()
                for path in write_results(result.results, folder, result.predictions())
            ]
        )
    assert written[0] == written[1]
    lines = [json.loads(line) for line in written[0][0].decode().splitlines()]
    assert [line["key"] for line in lines] == [sample.key for sample in source.samples]
    assert lines[0]["labels"]["Edema"] in (0.0, 1.0)
    assert 0 < lines[0]["scores"]["Edema"] < 1
