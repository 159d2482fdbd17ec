"""Retrieval by class against a plain search, and the lists that pin it: published, drawn, read and refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.eval_fakes import WIDTH, FakeLoader, FakeModel, make_source, text_vector

from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError, EvaluationError
from medvl.eval import RetrievalList, class_retrieval, image_retrieval
from medvl.eval.retrieval.by_class import precision_at
from medvl.eval.retrieval.by_class_page import write_class_retrieval_page
from medvl.eval.retrieval.candidate_lists import CHEXPERT_8X200, draw_list, read_chexpert_8x200
from medvl.schema import Embeddings

NAMES = ("Edema", "Fracture", "Cardiomegaly")


def labelled(count: int = 60, seed: int = 0) -> np.ndarray:
    return np.eye(3)[np.random.default_rng(seed).integers(0, 3, count)]


def loader_of(labels_NL: np.ndarray, noise: float = 60, texts: list[str] | None = None, **settings) -> FakeLoader:
    """Images that lie near the vector of their class's name: the nearer, the less noise."""
    rng = np.random.default_rng(1)
    source = make_source(labels_NL, NAMES, **settings)
    source.images = [
        np.clip(128 + 100 * text_vector(NAMES[int(np.nanargmax(row))]) + noise * rng.normal(size=WIDTH), 0, 255).astype(
            np.uint8
        )[None]
        for row in labels_NL
    ]
    return FakeLoader(source, texts=texts)


def unit_images(loader: FakeLoader) -> np.ndarray:
    images = np.stack([image[0].astype(np.float64) - 128 for image in loader.source.images])
    return images / np.linalg.norm(images, axis=1, keepdims=True)


# The metric


@pytest.mark.parametrize("k", [1, 3, 7])
def test_precision_equals_a_plain_search_with_ties_against_the_query(k: int) -> None:
    rng = np.random.default_rng(k)
    similarity_QN = np.round(rng.normal(size=(12, 9)), 0)  # many ties
    relevant_NL = (rng.random((9, 3)) < 0.4).astype(float)
    ours_QL = precision_at(torch.from_numpy(similarity_QN).float(), torch.from_numpy(relevant_NL).float(), [k])[k]
    for query in range(12):
        for label in range(3):
            order = sorted(range(9), key=lambda n: (-similarity_QN[query, n], relevant_NL[n, label]))
            expected = np.mean([relevant_NL[n, label] for n in order[:k]])
            assert ours_QL[query, label].item() == pytest.approx(expected)


def test_a_model_that_says_the_same_of_everything_finds_what_it_must() -> None:
    relevant_NL = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    found_QL = precision_at(torch.zeros(2, 3), relevant_NL, [1, 2])
    assert found_QL[1].tolist() == [[0, 0], [0, 0]]
    assert found_QL[2].tolist() == [[0.5, 0], [0.5, 0]]  # of two candidates at most one is without the class


# Over a folder


def test_images_look_among_other_patients_and_are_counted_by_label() -> None:
    loader = loader_of(labelled(), patients=20)  # three images a patient
    results = image_retrieval(FakeModel(), loader, ks=(5,), resamples=0)
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
    assert results.row("precision@5", "macro").value == pytest.approx(np.mean([np.mean(v) for v in values.values()]))
    assert results.details["chance"]["Edema"] == labels_NL[:, 0].mean()
    assert results.protocol == "image_retrieval"


def test_labels_that_are_left_out_are_no_hits_and_ask_for_nothing() -> None:
    labels_NL = labelled()
    labels_NL[0] = [-1, 0, 1]
    results = image_retrieval(FakeModel(), loader_of(labels_NL), ks=(5,), resamples=0)
    assert results.row("precision@5", "Edema").n == (labels_NL[:, 0] == 1).sum()
    assert results.details["labels"]["Edema"]["uncertain"] == 1


def test_intervals_draw_patients() -> None:
    loader = loader_of(labelled(), patients=12)
    row = image_retrieval(FakeModel(), loader, ks=(5,), resamples=200).row("precision@5", "macro")
    assert row.low < row.value < row.high


# Over a list


def listed_of(loader: FakeLoader, queries: int = 6) -> RetrievalList:
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


def test_queries_of_both_kinds_look_among_the_listed_candidates() -> None:
    loader = loader_of(labelled())
    listed = listed_of(loader)
    model = FakeModel()
    results = class_retrieval(model, loader, listed, ks=(4,), resamples=10)
    images, labels_NL = unit_images(loader), labelled()
    pool = range(6, 60)
    by_text = []
    for label, name in enumerate(NAMES):
        nearest = sorted(pool, key=lambda n, name=name: -float(images[n] @ text_vector(name)))[:4]
        by_text.append(labels_NL[nearest, label].mean())
        assert results.row("precision@4", name, "text to image").value == pytest.approx(by_text[-1])
    assert results.row("precision@4", "macro", "text to image").value == pytest.approx(np.mean(by_text))
    found = []
    for query in range(6):
        nearest = sorted(pool, key=lambda n, query=query: -float(images[n] @ images[query]))[:4]
        found.append((int(labels_NL[query].argmax()), labels_NL[nearest, labels_NL[query].argmax()].mean()))
    for label in {label for label, _ in found}:
        value = results.row("precision@4", NAMES[label], "image to image").value
        assert value == pytest.approx(np.mean([share for other, share in found if other == label]))
    assert {row.subgroup for row in results.rows} == {"image to image", "text to image"}  # no report of its own
    assert results.inputs["list"] == listed.sha256
    assert not model.head.training or model.training  # as it was


def test_without_image_queries_each_candidate_asks_for_the_others_and_reports_are_looked_for() -> None:
    labels_NL = labelled(30)
    loader = loader_of(labels_NL, noise=5)
    loader.source.samples = [
        dataclasses.replace(sample, sections={"impression": NAMES[int(row.argmax())]})
        for sample, row in zip(loader.source.samples, labels_NL, strict=True)
    ]
    listed = dataclasses.replace(listed_of(loader, 0), text_queries=())
    results = class_retrieval(FakeModel(), loader, listed, ks=(5,), resamples=0)
    assert results.row("precision@5", "macro", "image to image").n == 30
    assert results.row("precision@5", "macro", "image to image").value > 0.9
    assert results.row("precision@5", "macro", "image to text").value > 0.9


def test_what_is_not_there_is_named() -> None:
    loader = loader_of(labelled())
    listed = listed_of(loader)
    stranger = dataclasses.replace(listed, candidates=(*listed.candidates, ("nobody", ("Edema",))))
    with pytest.raises(
        EvaluationError, match=r"1 of 61 images of the list 'six' are not in these shards \(the first is nobody\)"
    ):
        class_retrieval(FakeModel(), loader, stranger, ks=(4,))
    with pytest.raises(EvaluationError, match="a query has 54 candidates, fewer than k = 55"):
        class_retrieval(FakeModel(), loader, listed, ks=(55,))
    with pytest.raises(EvaluationError, match="a query has 59 candidates, fewer than k = 60"):
        image_retrieval(FakeModel(), loader, ks=(60,))
    with pytest.raises(EvaluationError, match="no label of these images has a positive"):
        image_retrieval(FakeModel(), FakeLoader(make_source(np.zeros((9, 3)), NAMES)), ks=(1,))
    broken = FakeModel()
    with torch.no_grad():
        broken.scale.fill_(torch.nan)
    with pytest.raises(EvaluationError, match="embeddings are not finite"):
        image_retrieval(broken, loader, ks=(4,))


def test_images_are_compared_whatever_the_models_similarity_of_images_and_texts() -> None:
    class Words(FakeModel):
        def similarity(self, images: Embeddings, texts: Embeddings) -> torch.Tensor:
            raise AssertionError("texts are not asked for")

    image_retrieval(Words(), loader_of(labelled()), ks=(4,), resamples=0)


# Lists


def test_a_list_is_written_read_and_known_by_its_hash(tmp_path: Path) -> None:
    listed = listed_of(loader_of(labelled()))
    path = listed.write(tmp_path / "six.json")
    again = RetrievalList.read(path)
    assert again == listed
    assert again.sha256 == listed.sha256
    other = dataclasses.replace(listed, candidates=listed.candidates[::-1])
    assert other.sha256 != listed.sha256
    for damage in ("", "[]", json.dumps({"name": "x"}), json.dumps({"name": "x", "classes": [], "candidates": [1]})):
        path.write_text(damage)
        with pytest.raises(EvaluationError, match="is not a list of candidates and queries"):
            RetrievalList.read(path)
    with pytest.raises(EvaluationError, match="`medvl eval make-retrieval-list` makes one"):
        RetrievalList.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ((), "has no candidates"),
        ((("a", ("Edema",)), ("a", ("Edema",))), "has an item twice"),
        ((("a", ("Mass",)),), "has items without a class of Edema"),
        ((("a", ()),), "has items without a class of Edema"),
    ],
)
def test_a_list_that_is_none_is_refused(candidates, told) -> None:
    with pytest.raises(EvaluationError, match=told):
        RetrievalList(name="x", classes=NAMES, candidates=candidates)


def test_a_drawn_list_has_images_of_one_class_alone() -> None:
    labels_NL = labelled(90)
    labels_NL[:9] = 1  # all three
    labels_NL[9:18, 1:] = -1  # one, and perhaps the others
    source = make_source(labels_NL, NAMES)
    listed = draw_list(source, classes=NAMES, per_class=15, seed=3)
    of_key = {sample.key: row for sample, row in zip(source.samples, labels_NL, strict=True)}
    assert len(listed.candidates) == 45
    for key, (name,) in listed.candidates:
        assert (of_key[key] == [float(name == other) for other in NAMES]).all()
    assert draw_list(source, classes=NAMES, per_class=15, seed=3).sha256 == listed.sha256
    assert draw_list(source, classes=NAMES, per_class=15, seed=4).sha256 != listed.sha256
    fewer = draw_list(source, classes=NAMES, per_class=5, seed=3)
    assert set(fewer.candidates) < set(listed.candidates)
    with pytest.raises(
        EvaluationError, match="100 images that show one class alone are asked for, there are fewer: Edema"
    ):
        draw_list(source, classes=NAMES, per_class=100)


def write_8x200(root: Path) -> Path:
    """The published files, with two candidates a class."""
    order = ("No Finding", "Enlarged Cardiomediastinum", *sorted(set(CHEXPERT_8X200) - {"No Finding"}))
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
        queries.append(f"{name},CheXpert-v1.0-small/train/patient{number + 50:05d}/study2/view1_frontal.jpg")
        sentences.append(f'{name},"{name} is seen, and nothing else."')
    (images / "candidate.csv").write_text("\n".join(lines))
    (images / "query.csv").write_text("\n".join(queries))
    (texts / "query.csv").write_text("\n".join(sentences))
    return root


def test_chexpert_8x200_is_read_as_published_by_the_keys_of_the_shards(tmp_path: Path, deid: Deidentifier) -> None:
    listed = read_chexpert_8x200(write_8x200(tmp_path), deid)
    assert (listed.name, listed.classes) == ("chexpert-8x200", CHEXPERT_8X200)
    assert (len(listed.candidates), len(listed.image_queries), len(listed.text_queries)) == (16, 8, 8)
    assert listed.candidates[0] == (deid.image("train/patient00000/study1/view1_frontal.jpg"), ("Atelectasis",))
    assert listed.image_queries[1] == (deid.image("train/patient00051/study2/view1_frontal.jpg"), ("Cardiomegaly",))
    assert listed.text_queries[2] == ("Edema is seen, and nothing else.", ("Edema",))
    query = tmp_path / "text-retrieval" / "query.csv"
    query.write_text(query.read_text().replace("Edema,", "Oedema,"))
    with pytest.raises(CorpusError, match="Variable has 'Oedema', which is none of the eight classes"):
        read_chexpert_8x200(tmp_path, deid)
    query.unlink()
    with pytest.raises(CorpusError, match="does not exist"):
        read_chexpert_8x200(tmp_path, deid)


# The page


def test_the_page_has_every_direction(tmp_path: Path) -> None:
    loader = loader_of(labelled())
    results = class_retrieval(FakeModel(), loader, listed_of(loader), ks=(4, 8), resamples=10)
    page = write_class_retrieval_page(results, tmp_path / "index.html", model="nobody's", data="noise").read_text()
    for text in ("Image to image", "Text to image", "Precision@8", "Chance", "List"):
        assert text in page
    alone = image_retrieval(FakeModel(), loader, ks=(4,), resamples=10)
    assert "Precision@4" in write_class_retrieval_page(alone, tmp_path / "a.html", model="m", data="d").read_text()
