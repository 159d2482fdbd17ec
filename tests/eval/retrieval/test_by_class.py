"""Retrieval by class against a naive search, and candidate lists: published, sampled, read and
refused.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source, text_vector
from helpers.retrieval_images import noisy_images, unit_images

from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError, EvaluationError
from medvl.eval import RetrievalList, class_retrieval, image_retrieval
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.core.results import PageHeader, write_results
from medvl.eval.retrieval.by_class import precision_at
from medvl.eval.retrieval.candidate_lists import CHEXPERT_8X200, read_chexpert_8x200, sample_list
from medvl.eval.retrieval.evaluation import write_class_retrieval_page
from medvl.schema import Embeddings

NAMES = ("Edema", "Fracture", "Cardiomegaly")


def labelled(count: int = 60, seed: int = 0) -> np.ndarray:
    return np.eye(3)[np.random.default_rng(seed).integers(0, 3, count)]


def loader_of(
    labels_NL: np.ndarray, noise: float = 60, texts: list[str] | None = None, **settings
) -> FakeLoader:
    """Return images whose embeddings are the vector of their class's name plus noise."""
    source = make_source(labels_NL, NAMES, **settings)
    source.images = noisy_images(
        [NAMES[int(np.nanargmax(row))] for row in labels_NL], noise, seed=1
    )
    return FakeLoader(source, texts=texts)


# The metric


@pytest.mark.parametrize("k", [1, 3, 7])
def test_precision_equals_a_naive_search_with_ties_against_the_query(k: int) -> None:
    rng = np.random.default_rng(k)
    similarity_QN = np.round(rng.normal(size=(12, 9)), 0)  # many ties
    relevant_NL = (rng.random((9, 3)) < 0.4).astype(float)
    precision_QL = precision_at(
        torch.from_numpy(similarity_QN).float(), torch.from_numpy(relevant_NL).float(), [k]
    )[k]
    for query in range(12):
        for label in range(3):
            order = sorted(
                range(9), key=lambda n: (-similarity_QN[query, n], relevant_NL[n, label])
            )
            expected = np.mean([relevant_NL[n, label] for n in order[:k]])
            assert precision_QL[query, label].item() == pytest.approx(expected)


def test_constant_similarity_gives_the_lowest_possible_precision() -> None:
    relevant_NL = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    precision = precision_at(torch.zeros(2, 3), relevant_NL, [1, 2])
    assert precision[1].tolist() == [[0, 0], [0, 0]]
    assert precision[2].tolist() == [
        [0.5, 0],
        [0.5, 0],
    ]  # of two candidates at most one is without the class


# Over a folder


def test_images_are_retrieved_among_other_patients() -> None:
    loader = loader_of(labelled(), patients=20)  # three images a patient
    results = image_retrieval(FakeModel(), loader, ks=(5,), resamples=0).results
    images, labels_NL = unit_images(loader), labelled()
    similarity = images @ images.T
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for query in range(60):
        others = [n for n in range(60) if n % 20 != query % 20]
        nearest = sorted(others, key=lambda n: -similarity[query, n])[:5]
        label = int(labels_NL[query].argmax())
        values[label].append(labels_NL[nearest, label].mean())
    for label, name in enumerate(NAMES):
        row = results.row("precision@5", name)
        assert row.value == pytest.approx(np.mean(values[label]))
        assert row.n == len(values[label])
    assert results.row("precision@5", "macro").value == pytest.approx(
        np.mean([np.mean(v) for v in values.values()])
    )
    shares = [
        np.mean([labels_NL[n, 0] for n in range(60) if n % 20 != q % 20])
        for q in range(60)
        if labels_NL[q, 0]
    ]
    assert results.details["chance"]["Edema"] == pytest.approx(np.mean(shares))
    assert results.protocol == "image_retrieval"


def test_a_class_of_one_patient_has_no_chance_of_a_hit() -> None:
    labels_NL = np.tile([0.0, 1.0, 0.0], (12, 1))
    labels_NL[[0, 4, 8]] = [1.0, 0.0, 0.0]  # the images of the first of four patients
    results = image_retrieval(
        FakeModel(), loader_of(labels_NL, patients=4), ks=(2,), resamples=0
    ).results
    assert results.row("precision@2", "Edema").value == 0
    assert results.details["chance"] == {"Edema": 0.0, "Fracture": 6 / 9}


def test_uncertain_labels_are_neither_hits_nor_queries() -> None:
    labels_NL = labelled()
    labels_NL[0] = [-1, 0, 1]
    results = image_retrieval(FakeModel(), loader_of(labels_NL), ks=(5,), resamples=0).results
    assert results.row("precision@5", "Edema").n == (labels_NL[:, 0] == 1).sum()
    assert results.details["labels"]["Edema"]["uncertain"] == 1


def test_intervals_resample_patients() -> None:
    loader = loader_of(labelled(), patients=12)
    row = image_retrieval(FakeModel(), loader, ks=(5,), resamples=200).results.row(
        "precision@5", "macro"
    )
    assert row.low < row.value < row.high


# Over a list


def make_list(loader: FakeLoader, queries: int = 6) -> RetrievalList:
    items = [
        (sample.key, tuple(sample.labels[n] and n for n in NAMES if sample.labels[n]))
        for sample in loader.source.samples
    ]
    return RetrievalList(
        name="six",
        classes=NAMES,
        candidates=tuple(items[queries:]),
        image_queries=tuple(items[:queries]),
        text_queries=tuple((name, (name,)) for name in NAMES),
    )


def test_image_and_text_queries_are_evaluated_over_the_listed_candidates() -> None:
    loader = loader_of(labelled())
    candidates = make_list(loader)
    model = FakeModel()
    results = class_retrieval(model, loader, candidates, ks=(4,), resamples=10).results
    images, labels_NL = unit_images(loader), labelled()
    pool = range(6, 60)
    by_text = []
    for label, name in enumerate(NAMES):
        nearest = sorted(pool, key=lambda n, name=name: -float(images[n] @ text_vector(name)))[:4]
        by_text.append(labels_NL[nearest, label].mean())
        assert results.row("precision@4", name, "text to image").value == pytest.approx(by_text[-1])
    assert results.row("precision@4", "macro", "text to image").value == pytest.approx(
        np.mean(by_text)
    )
    by_image = []
    for query in range(6):
        nearest = sorted(pool, key=lambda n, query=query: -float(images[n] @ images[query]))[:4]
        by_image.append(
            (int(labels_NL[query].argmax()), labels_NL[nearest, labels_NL[query].argmax()].mean())
        )
    for label in {label for label, _ in by_image}:
        value = results.row("precision@4", NAMES[label], "image to image").value
        assert value == pytest.approx(
            np.mean([share for other, share in by_image if other == label])
        )
    assert {row.subgroup for row in results.rows} == {
        "image to image",
        "text to image",
    }  # the candidates have no reports
    assert results.inputs["list"] == candidates.sha256
    assert not model.head.training or model.training  # the mode is restored


def test_two_models_are_paired_in_every_direction(tmp_path: Path) -> None:
    texts = [NAMES[int(row.argmax())] for row in labelled()]
    for name, noise in (("near", 20), ("far", 200)):
        loader = loader_of(labelled(), noise=noise, patients=20)
        loader.source.samples = [
            dataclasses.replace(sample, sections={"impression": text})
            for sample, text in zip(loader.source.samples, texts, strict=True)
        ]
        result = class_retrieval(FakeModel(), loader, make_list(loader), ks=(4,), resamples=10)
        write_results(result.results, tmp_path / name, result.predictions())
    ((_, runs),) = find_runs([tmp_path / "near", tmp_path / "far"]).items()
    comparison = compare(runs, resamples=50)
    (differences,) = comparison.differences
    assert not comparison.notes
    for direction in ("image to image", "text to image", "image to text"):
        far, near = (
            run.results.row("precision@4", "macro", direction).value for run in (runs[1], runs[0])
        )
        assert differences[f"precision@4/macro ({direction})"].value == pytest.approx(far - near)
        assert far < near
    lines = [
        json.loads(line) for line in (tmp_path / "near/predictions.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 6 + 3 + 54, "image queries, text queries, and the candidates with reports"


def test_candidates_and_their_reports_are_queries_without_image_queries() -> None:
    labels_NL = labelled(30)
    loader = loader_of(labels_NL, noise=5)
    loader.source.samples = [
        dataclasses.replace(
            sample, sections={"indication": "Fall?", "impression": NAMES[int(row.argmax())]}
        )
        for sample, row in zip(loader.source.samples, labels_NL, strict=True)
    ]
    candidates = dataclasses.replace(make_list(loader, 0), text_queries=())
    results = class_retrieval(FakeModel(), loader, candidates, ks=(5,), resamples=0).results
    assert results.row("precision@5", "macro", "image to image").n == 30
    assert results.row("precision@5", "macro", "image to image").value > 0.9
    assert results.row("precision@5", "macro", "image to text").value > 0.9


def test_missing_images_and_too_few_candidates_are_refused() -> None:
    loader = loader_of(labelled())
    candidates = make_list(loader)
    incomplete = dataclasses.replace(
        candidates, candidates=(*candidates.candidates, ("nobody", ("Edema",)))
    )
    with raises(EvaluationError, "mismatch", names="the first is nobody"):
        class_retrieval(FakeModel(), loader, incomplete, ks=(4,))
    with raises(EvaluationError, "out_of_range", "ks", names="54"):
        class_retrieval(FakeModel(), loader, candidates, ks=(55,))
    with raises(EvaluationError, "out_of_range", "ks", names="59"):
        image_retrieval(FakeModel(), loader, ks=(60,))
    with raises(EvaluationError, "empty"):
        image_retrieval(FakeModel(), FakeLoader(make_source(np.zeros((9, 3)), NAMES)), ks=(1,))
    broken = FakeModel()
    with torch.no_grad():
        broken.scale.fill_(torch.nan)
    with raises(EvaluationError, "nonfinite"):
        image_retrieval(broken, loader, ks=(4,))


def test_image_retrieval_does_not_use_the_image_text_similarity() -> None:
    class NoSimilarity(FakeModel):
        def similarity(self, images: Embeddings, texts: Embeddings) -> torch.Tensor:
            raise AssertionError("texts are not used")

    image_retrieval(NoSimilarity(), loader_of(labelled()), ks=(4,), resamples=0)


# Lists


def test_list_is_written_and_read_with_its_hash(tmp_path: Path) -> None:
    candidates = make_list(loader_of(labelled()))
    path = candidates.write(tmp_path / "six.json")
    reread = RetrievalList.read(path)
    assert reread == candidates
    assert reread.sha256 == candidates.sha256
    other = dataclasses.replace(candidates, candidates=candidates.candidates[::-1])
    assert other.sha256 != candidates.sha256
    for damage in (
        "",
        "[]",
        json.dumps({"name": "x"}),
        json.dumps({"name": "x", "classes": [], "candidates": [1]}),
    ):
        path.write_text(damage)
        with raises(EvaluationError, "malformed", names="six.json"):
            RetrievalList.read(path)
    with raises(EvaluationError, "not_found", names="medvl eval make-retrieval-list"):
        RetrievalList.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("candidates", "code"),
    [
        ((), "empty"),
        ((("a", ("Edema",)), ("a", ("Edema",))), "conflict"),
        ((("a", ("Mass",)),), "unknown_name"),
        ((("a", ()),), "unknown_name"),
    ],
)
def test_invalid_list_is_refused(candidates, code) -> None:
    with raises(EvaluationError, code):
        RetrievalList(name="x", classes=NAMES, candidates=candidates)


def test_sampled_list_has_images_with_exactly_one_class() -> None:
    labels_NL = labelled(150)
    labels_NL[:9] = 1  # all three
    labels_NL[9:18, 1:] = -1  # one class, the others uncertain
    source = make_source(labels_NL, NAMES)
    candidates = sample_list(source, classes=NAMES, per_class=15, seed=3)
    of_key = {sample.key: row for sample, row in zip(source.samples, labels_NL, strict=True)}
    assert len(candidates.candidates) == 45
    for key, (name,) in candidates.candidates:
        assert (of_key[key] == [float(name == other) for other in NAMES]).all()
    assert sample_list(source, classes=NAMES, per_class=15, seed=3).sha256 == candidates.sha256
    assert sample_list(source, classes=NAMES, per_class=15, seed=4).sha256 != candidates.sha256
    fewer = sample_list(source, classes=NAMES, per_class=5, seed=3)
    assert set(fewer.candidates) < set(candidates.candidates)
    with raises(EvaluationError, "empty", "per_class"):
        sample_list(source, classes=NAMES, per_class=100)


def test_sampled_list_is_exclusive_over_all_labels_and_frontal_as_gloria_s() -> None:
    """Five images of each class are exclusive and frontal; the others are not what GLoRIA's rule
    takes.
    """
    labels = [{name: 1} for name in NAMES] * 5
    labels[0] = {**labels[0], "No Finding": 1}  # no finding by GLoRIA's rule
    labels[1] = {**labels[1], "Pneumonia": 0}
    not_taken = [
        {"Edema": 1, "Pneumonia": 1},
        {"Edema": 1, "Support Devices": 1},
        {"Edema": 1, "Pneumonia": -1},
    ]
    source = make_source(np.zeros((len(labels) + 4, 0)), ())
    source.samples = [
        dataclasses.replace(sample, labels=of_image, view=view)
        for sample, of_image, view in zip(
            source.samples,
            [*labels, *not_taken, {"Edema": 1}],
            [*(["AP", "PA", "FRONTAL", "AP LLD", None] * 3), "AP", "AP", "AP", "LATERAL"],
            strict=True,
        )
    ]
    taken = [sample.key for sample in source.samples[: len(labels)]]
    candidates = sample_list(source, classes=NAMES, per_class=5)
    assert sorted(key for key, _ in candidates.candidates) == sorted(taken)
    with raises(EvaluationError, "empty", "per_class"):
        sample_list(source, classes=NAMES, per_class=6)
    for settings, edema in (({"exclusive": "classes"}, 8), ({"views": "all"}, 6), ({}, 5)):
        found = sample_list(source, classes=["Edema"], per_class=edema, **settings)
        assert len(found.candidates) == edema
        with raises(EvaluationError, "empty", "per_class"):
            sample_list(source, classes=["Edema"], per_class=edema + 1, **settings)
    names = {sample_list(source, classes=NAMES, per_class=1, **one).name
             for one in ({}, {"exclusive": "classes"}, {"views": "all"})}  # fmt: skip
    assert len(names) == 3


def write_8x200(root: Path) -> Path:
    """Write the published files with two candidates per class."""
    order = (
        "No Finding",
        "Enlarged Cardiomediastinum",
        *sorted(set(CHEXPERT_8X200) - {"No Finding"}),
    )
    lines = ["Path,Sex,Age,Frontal/Lateral,AP/PA," + ",".join(order)]
    images, texts = root / "image-retrieval", root / "text-retrieval"
    images.mkdir(parents=True)
    texts.mkdir()
    queries, sentences = ["Variable,Path"], ["Variable,Text"]
    for number, name in enumerate(CHEXPERT_8X200):
        cells = ",".join("1.0" if other == name else "0.0" for other in order)
        for view in (1, 2):
            path = f"CheXpert-v1.0-small/train/patient{number:05d}/study1/view{view}_frontal.jpg"
            lines.append(f"{path},Female,28,Frontal,AP,{cells}")
        queries.append(
            f"{name},CheXpert-v1.0-small/train/patient{number + 50:05d}/study2/view1_frontal.jpg"
        )
        sentences.append(f'{name},"{name} is seen, and nothing else."')
    (images / "candidate.csv").write_text("\n".join(lines))
    (images / "query.csv").write_text("\n".join(queries))
    (texts / "query.csv").write_text("\n".join(sentences))
    return root


def test_chexpert_8x200_is_read_with_the_keys_of_the_shards(
    tmp_path: Path, deid: Deidentifier
) -> None:
    candidates = read_chexpert_8x200(write_8x200(tmp_path), deid)
    assert (candidates.name, candidates.classes) == ("chexpert-8x200", CHEXPERT_8X200)
    assert (
        len(candidates.candidates),
        len(candidates.image_queries),
        len(candidates.text_queries),
    ) == (16, 8, 8)
    assert candidates.candidates[0] == (
        deid.image("train/patient00000/study1/view1_frontal.jpg"),
        ("Atelectasis",),
    )
    assert candidates.image_queries[1] == (
        deid.image("train/patient00051/study2/view1_frontal.jpg"),
        ("Cardiomegaly",),
    )
    assert candidates.text_queries[2] == ("Edema is seen, and nothing else.", ("Edema",))
    query = tmp_path / "text-retrieval" / "query.csv"
    query.write_text(query.read_text().replace("Edema,", "Oedema,"))
    with raises(CorpusError, "unknown_name", "Variable"):
        read_chexpert_8x200(tmp_path, deid)
    query.unlink()
    with pytest.raises(CorpusError, match="does not exist"):
        read_chexpert_8x200(tmp_path, deid)


# The page


def test_page_shows_every_direction(tmp_path: Path) -> None:
    loader = loader_of(labelled())
    results = class_retrieval(
        FakeModel(), loader, make_list(loader), ks=(4, 8), resamples=10
    ).results
    page = write_class_retrieval_page(
        results, tmp_path / "index.html", PageHeader(model="m", data="noise")
    ).read_text()
    for text in ("Image to image", "Text to image", "Precision@8", "Chance", "List"):
        assert text in page
    alone = image_retrieval(FakeModel(), loader, ks=(4,), resamples=10).results
    assert (
        "Precision@4"
        in write_class_retrieval_page(
            alone, tmp_path / "a.html", PageHeader(model="m", data="d")
        ).read_text()
    )
