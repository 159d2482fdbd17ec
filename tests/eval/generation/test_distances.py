"""Distances and neighbours against formulas written out, known closed forms and naive loops."""

import numpy as np
import pytest
import scipy.linalg
import torch
from helpers.errors import raises

from medvl.errors import EvaluationError
from medvl.eval.generation.distances import (
    FeatureSet,
    NearestImages,
    frechet_distance,
    jackknife,
    kernel_distance,
    kernel_distance_subsets,
    manifolds,
    matched_draws,
    subset_size,
)
from medvl.eval.generation.fidelity import ms_ssim, pairs_across, pairs_within


def normal(count: int, dim: int, seed: int, *, mean: float = 0.0, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return mean + scale * rng.normal(size=(count, dim)) @ rng.normal(size=(dim, dim))


@pytest.mark.parametrize(("n", "m", "dim"), [(200, 150, 6), (5, 9, 30), (40, 40, 40)])
def test_frechet_distance_matches_the_root_of_the_product(n, m, dim):
    x_ND, y_MD = normal(n, dim, 0), normal(m, dim, 1, mean=0.5)
    covariances = np.cov(x_ND.T), np.cov(y_MD.T)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1] + 1e-13 * np.eye(dim)).real
    means = ((x_ND.mean(axis=0) - y_MD.mean(axis=0)) ** 2).sum()
    expected = means + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert frechet_distance(x_ND, y_MD) == pytest.approx(expected, rel=1e-4)
    assert frechet_distance(x_ND, x_ND) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_gaussians_has_its_closed_form():
    """Independent dimensions: sum of (difference of means)^2 + (difference of standard
    deviations)^2.
    """
    rng = np.random.default_rng(0)
    x_ND, y_MD = rng.normal(size=(40_000, 3)), 2 + 3 * rng.normal(size=(40_000, 3))
    assert frechet_distance(x_ND, y_MD) == pytest.approx(3 * (2**2 + 2**2), rel=0.02)


def test_kernel_distance_matches_a_naive_sum(monkeypatch):
    monkeypatch.setattr("medvl.eval.generation.distances._ROWS", 3)
    x_ND, y_MD = normal(7, 4, 0), normal(5, 4, 1)

    def k(a, b):
        return (a @ b / 4 + 1) ** 3

    within_x = np.mean([k(a, b) for i, a in enumerate(x_ND) for j, b in enumerate(x_ND) if i != j])
    within_y = np.mean([k(a, b) for i, a in enumerate(y_MD) for j, b in enumerate(y_MD) if i != j])
    across = np.mean([k(a, b) for a in x_ND for b in y_MD])
    assert kernel_distance(x_ND, y_MD) == pytest.approx(within_x + within_y - 2 * across)


@pytest.mark.parametrize("precision", [np.float32, np.float16])
@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_distances_are_computed_in_float64(distance, precision):
    x_ND, y_MD = (normal(60, 7, seed, mean=100.0).astype(precision) for seed in (0, 1))
    assert distance(x_ND, y_MD) == distance(x_ND.astype(np.float64), y_MD.astype(np.float64))


def test_kernel_distance_is_unbiased_and_subsets_are_not_the_whole_set():
    rng = np.random.default_rng(0)
    draws = [
        kernel_distance(rng.normal(size=(12, 3)), rng.normal(size=(12, 3))) for _ in range(2000)
    ]
    assert abs(np.mean(draws)) < 3 * np.std(draws) / np.sqrt(len(draws))
    assert subset_size(40, 100, 1000) == 20
    near, far = rng.normal(size=(60, 3)), 1 + rng.normal(size=(60, 3))
    values = kernel_distance_subsets(near, far, subsets=10)
    assert values.std() > 0
    assert values.min() > 10 * abs(
        kernel_distance_subsets(near, rng.normal(size=(60, 3)), subsets=10).mean()
    )
    with raises(EvaluationError, "empty", "generated"):
        subset_size(3, 100, 1000)


def test_two_sets_need_equal_features():
    for distance in (frechet_distance, kernel_distance):
        with raises(EvaluationError, "mismatch", "features"):
            distance(normal(5, 3, 0), normal(5, 4, 0))


def test_jackknife_of_a_difference_of_means_has_the_known_error():
    rng = np.random.default_rng(0)
    x, y = (
        FeatureSet(x_ND=rng.normal(size=(400, 1)), groups=[f"{name}{n}" for n in range(400)])
        for name in "xy"
    )
    interval = jackknife(lambda a, b: float(a.mean() - b.mean()), x, y)
    error = np.sqrt(x.x_ND.var(ddof=1) / 400 + y.x_ND.var(ddof=1) / 400)
    assert interval.value == pytest.approx(x.x_ND.mean() - y.x_ND.mean())
    assert (interval.high - interval.low) / (2 * 1.96) == pytest.approx(
        error, rel=0.35
    )  # 20 blocks


def test_jackknife_leaves_shared_patients_out_of_both_sets():
    """The same patients in both sets: their common part cancels only when they are left out
    together.
    """
    rng = np.random.default_rng(0)
    x_ND, groups = rng.normal(size=(400, 1)), [f"p{n}" for n in range(400)]
    x, y = FeatureSet(x_ND=x_ND, groups=groups), FeatureSet(x_ND=x_ND + 1, groups=groups)
    interval = jackknife(lambda a, b: float(b.mean() - a.mean()), x, y)
    assert (interval.low, interval.high) == pytest.approx((1, 1))


def test_matched_draws_compare_equal_counts_of_other_patients():
    real = FeatureSet(x_ND=np.arange(40.0)[:, None], groups=[f"p{n // 2}" for n in range(40)])
    fake = FeatureSet(x_ND=100 + np.arange(7.0)[:, None], groups=range(7))
    count, draws = matched_draws({"generated": fake}, real, draws=3)
    assert count == 7
    for draw in draws:
        (generated, reference), (other, same) = draw["generated"], draw["real"]
        assert len(generated) == len(reference) == len(other) == 7
        assert reference is same
        assert (generated >= 100).all()
        assert not {int(x) // 2 for x in other[:, 0]} & {
            int(x) // 2 for x in reference[:, 0]
        }  # patients


def naive_manifolds(real, fake, k):
    def radius(x):
        return np.array([np.sort(np.linalg.norm(x - row, axis=1))[k] for row in x])

    distance = np.array([[np.linalg.norm(a - b) for b in fake] for a in real])
    inside = distance < radius(real)[:, None]
    return {
        "precision": inside.any(axis=0).mean(),
        "density": inside.sum(axis=0).mean() / k,
        "recall": (distance < radius(fake)[None]).any(axis=1).mean(),
        "coverage": inside.any(axis=1).mean(),
    }


def test_manifolds_match_naive_loops():
    real, fake = normal(50, 3, 0), normal(40, 3, 0, mean=1.5)
    assert manifolds(real, fake, k=3).means() == pytest.approx(naive_manifolds(real, fake, 3))
    with raises(EvaluationError, "out_of_range", "k"):
        manifolds(real[:3], fake, k=3)


def test_manifolds_see_what_is_missing_and_what_is_wrong():
    rng = np.random.default_rng(0)
    real = rng.normal(size=(300, 2))
    same, one_mode, noise = (
        rng.normal(size=(300, 2)),
        0.01 * rng.normal(size=(300, 2)),
        50 + rng.normal(size=(300, 2)),
    )
    good, narrow, wrong = (manifolds(real, fake).means() for fake in (same, one_mode, noise))
    assert min(good["precision"], good["recall"], good["coverage"]) > 0.9
    assert good["density"] == pytest.approx(1, abs=0.15)
    assert narrow["precision"] > 0.9
    assert max(narrow["recall"], narrow["coverage"]) < 0.1
    assert set(wrong.values()) == {0.0}


def test_nearest_images_match_a_full_search_in_any_blocks(monkeypatch):
    monkeypatch.setattr("medvl.eval.generation.distances._BLOCK", 7)
    generator = torch.Generator().manual_seed(0)
    query, images = (torch.randn(n, 5, generator=generator) for n in (4, 33))
    nearest = NearestImages(query, 3)
    for part in images.split((20, 1, 12)):
        nearest.add(part)
    expected = torch.cdist(query.double(), images.double()).topk(3, dim=1, largest=False)
    np.testing.assert_allclose(nearest.distance_QK, expected.values, atol=1e-3)
    np.testing.assert_array_equal(nearest.position_QK, expected.indices)


def naive_ms_ssim(x, y, scales):
    weights = np.array([0.0448, 0.2856, 0.3001, 0.2363, 0.1333])[:scales]
    offset = np.arange(11) - 5
    window = np.exp(-(offset[:, None] ** 2 + offset[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    result = 1.0
    for scale, weight in enumerate(weights / weights.sum()):
        values = []
        for top in range(x.shape[0] - 10):
            for left in range(x.shape[1] - 10):
                a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
                ma, mb = (window * a).sum(), (window * b).sum()
                va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
                cov = (window * (a - ma) * (b - mb)).sum()
                contrast = (2 * cov + 0.03**2) / (va + vb + 0.03**2)
                luminance = (2 * ma * mb + 0.01**2) / (ma**2 + mb**2 + 0.01**2)
                values.append(contrast * luminance if scale == scales - 1 else contrast)
        result *= max(np.mean(values), 0) ** weight
        x, y = (z.reshape(z.shape[0] // 2, 2, z.shape[1] // 2, 2).mean(axis=(1, 3)) for z in (x, y))
    return result


def test_ms_ssim_matches_naive_loops():
    rng = np.random.default_rng(0)
    x = rng.random((2, 24, 24))
    y = np.clip(x + 0.2 * rng.normal(size=x.shape), 0, 1)
    found = ms_ssim(torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_allclose(
        found, [naive_ms_ssim(a, b, 2) for a, b in zip(x, y, strict=True)], rtol=1e-8
    )
    assert ms_ssim(torch.from_numpy(x), torch.from_numpy(x)).tolist() == pytest.approx([1, 1])
    with raises(EvaluationError, "mismatch", "images"):
        ms_ssim(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))


def test_pairs_differ_in_patient_and_share_the_text():
    texts, patients = ["a", "a", "b", "a", "b", "c"], ["p", "p", "q", "r", "s", "t"]
    pairs = pairs_within(texts, patients).tolist()
    assert sorted(map(tuple, pairs)) == [(0, 3), (1, 3), (2, 4)]
    assert len(pairs_within(["a"] * 100, range(100), per_group=6)) == 6
    for first, second in pairs_across(texts, patients, 5).tolist():
        assert texts[first] != texts[second]
        assert patients[first] != patients[second]
