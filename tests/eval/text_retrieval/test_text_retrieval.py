"""Retrieval of one section of a report by another: baselines, ranks, inputs, and the command."""

import dataclasses
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import make_source
from sklearn.feature_extraction.text import TfidfVectorizer

from medvl.cli import main as cli
from medvl.common.seeding import seeded
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError, CorpusError, EvaluationError
from medvl.eval import evaluate_text_retrieval
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.text_retrieval import (
    Pairs,
    Report,
    TextRetrievalResult,
    embedder,
    reports_of_file,
    reports_of_shards,
)
from medvl.eval.text_tasks.evaluation import TextEncoderOptions
from medvl.eval.text_tasks.metrics import TfIdf
from medvl.eval.text_tasks.protocol import EvaluatedEncoder, encoder_by_name
from medvl.models import create_model
from medvl.models.checkpoint import save

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
REPORTS = (
    ("The heart is large.", "Cardiomegaly."),
    ("Fluid in the left pleural space.", "Pleural effusion."),
    ("Fluid on both sides.", "Pleural  effusion."),
    ("Lungs and heart are normal.", "No acute disease."),
    ("Normal pleural space.", "No acute disease."),
    ("Normal examination.", "No acute disease."),
)


def pairs_of(reports: Sequence[tuple[str, str]] = REPORTS) -> Pairs:
    return Pairs.of([Report(str(n), f"p{n}", *texts) for n, texts in enumerate(reports)])


def evaluate(
    vectors: dict[str, Sequence[float]], pairs: Pairs | None = None
) -> TextRetrievalResult:
    """Evaluate given vectors; those of other texts are (0, 1)."""
    return evaluate_text_retrieval(
        lambda texts: torch.tensor([vectors.get(text, (0.0, 1.0)) for text in texts]),
        pairs or pairs_of(),
        ks=(1, 2),
        resamples=20,
    )


def value(result: TextRetrievalResult, metric: str, target: str) -> float:
    return result.results.row(metric, target).value


def test_tfidf_is_that_of_scikit_learn() -> None:
    rng = random.Random(0)
    words = (
        "Left",
        "right",
        "pleural",
        "effusion",
        "no",
        "a",
        "5",
        "50",
        "T-1",
        "café",
        "not_seen",
    )
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 12))) + "." for _ in range(30)]
    others = ["Unknown words.", "", "effusion effusion pleural, unknown"]
    known = TfidfVectorizer().fit(texts)
    tfidf = TfIdf(texts)
    for some in (texts, others):
        assert tfidf.vectors(some).toarray() == pytest.approx(known.transform(some).toarray())
    with raises(EvaluationError, "empty", "texts"):
        TfIdf(["", "a ."])


def test_equal_texts_are_one_candidate_and_incomplete_reports_are_counted() -> None:
    pairs = pairs_of((*REPORTS, ("Normal.", " "), ("", "Normal.")))
    assert pairs.texts == ("Cardiomegaly.", "Pleural effusion.", "No acute disease.")
    assert pairs.text_of_N.tolist() == [0, 1, 1, 2, 2, 2]
    assert pairs.incomplete == 2
    with raises(EvaluationError, "empty", "data", names="2 of 2 reports and 1 distinct"):
        pairs_of(REPORTS[3:5])


def test_ranks_beside_baselines() -> None:
    heart, fluid, normal = np.eye(3).tolist()
    vectors = {
        "Cardiomegaly.": heart,
        "Pleural effusion.": fluid,
        "No acute disease.": normal,
        **dict.fromkeys([query for query, _ in REPORTS], normal),
        REPORTS[1][0]: [0.1, 2.0, 1.9],
    }
    result = evaluate(vectors)
    assert result.rank_N.tolist() == [3, 1, 3, 1, 1, 1]  # a tie counts against the model
    assert value(result, "recall@1", "model") == pytest.approx(4 / 6)
    assert value(result, "mrr", "model") == pytest.approx((4 + 2 / 3) / 6)
    assert value(result, "median_rank", "model") == 1
    assert result.nearest_NK[1].tolist() == [1, 2, 0]

    assert result.tfidf_rank_N.tolist() == [3, 1, 3, 3, 3, 3]  # only "pleural" is in both
    assert value(result, "recall@1", "tfidf") == pytest.approx(1 / 6)
    assert value(result, "recall@1", "above_tfidf") == pytest.approx(3 / 6)
    assert value(result, "mrr", "above_tfidf") == pytest.approx(
        value(result, "mrr", "model") - value(result, "mrr", "tfidf")
    )
    assert value(result, "recall@1", "commonest_texts") == pytest.approx(3 / 6)
    assert value(result, "recall@2", "commonest_texts") == pytest.approx(5 / 6)
    assert value(result, "recall@2", "chance") == pytest.approx(2 / 3)
    assert value(result, "mrr", "chance") == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert value(result, "median_rank", "chance") == 2
    assert result.results.details["patients"] == 6

    assert evaluate({}).rank_N.tolist() == [3] * 6
    with raises(EvaluationError, "nonfinite"):
        evaluate({"Cardiomegaly.": (float("nan"), 1.0)})


def test_intervals_are_over_the_named_groups() -> None:
    one_patient = [Report(str(n), "p", *texts) for n, texts in enumerate(REPORTS)]
    vectors = {REPORTS[0][0]: (1.0, 0.0), "Cardiomegaly.": (1.0, 0.0)}
    of_one, of_six = (evaluate(vectors, pairs) for pairs in (Pairs.of(one_patient), pairs_of()))
    row, other = (one.results.row("recall@1", "model") for one in (of_one, of_six))
    assert row.value == other.value == pytest.approx(1 / 6)
    assert np.isnan([row.low, row.high]).all()  # one patient has no interval
    assert other.low < other.value < other.high


def test_reports_of_shards_are_those_of_studies() -> None:
    source: Any = make_source(np.zeros((4, 0)), ())
    sections = (
        {"findings": "a", "impression": "b"},
        {"findings": "a", "impression": "b"},
        {"section_findings": "c", "impression": "d"},
        {"history": "e"},
    )
    source.samples = [
        dataclasses.replace(sample, sections=texts, study=study)
        for sample, texts, study in zip(source.samples, sections, "sstu", strict=True)
    ]
    reports = reports_of_shards(source, "findings", "impression")
    assert [tuple(report[1:]) for report in reports] == [
        ("p0", "a", "b"),
        ("p2", "c", "d"),
        ("p3", "", ""),
    ]


def test_reports_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"findings": "a", "impression": null, "who": 7}\n\n')
        file.write('{"findings": "c", "impression": "d", "who": 8}\n')
    read = reports_of_file(path, "findings", "impression", "who")
    assert read == [Report("1", "7", "a", ""), Report("3", "8", "c", "d")]
    assert reports_of_file(path, "impression", "findings", None)[1] == Report("3", "3", "d", "c")
    with raises(CorpusError, "missing", names="indication"):
        reports_of_file(path, "indication", "impression", None)
    plain = tmp_path / "numbers.jsonl"
    plain.write_text('{"findings": "a", "impression": 3}\n')
    with raises(CorpusError, "malformed", "data", names="got int"):
        reports_of_file(plain, "findings", "impression", None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [text.lower() for report in REPORTS for text in report]
    return train_wordpiece(texts * 3, vocab_size=110, min_frequency=1)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> EvaluatedEncoder:
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer.save(folder)
    return encoder_by_name("hf:bert", folder, None, SMALL)


def test_vectors_keep_the_order_and_do_not_depend_on_the_batch(encoder: EvaluatedEncoder) -> None:
    texts = [query for query, _ in REPORTS]
    own = embedder(encoder, "cpu", "own", 2)(texts)
    network = encoder.make(0).eval()
    with torch.inference_mode():
        alone = [network(*encoder.tokenizer(40)([text])) for text in texts]
    expected = torch.cat([one.pooled_BD for one in alone])
    means = torch.stack([one.tokens_BTD[0].mean(dim=0) for one in alone])
    assert torch.allclose(own, expected, atol=1e-6)
    assert torch.allclose(embedder(encoder, "cpu", "mean", 4)(texts), means, atol=1e-6)
    assert not torch.allclose(own, means, atol=1e-3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "reports.jsonl"
    rows = [dict(zip(("findings", "impression"), texts, strict=True)) for texts in REPORTS]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(checkpoint: Path, file: Path, *options: str) -> dict[str, Any]:
    """Evaluate a checkpoint by the command, and return value by row."""
    options = ("--data", str(file), "--resamples", "20", "--device", "cpu", *options)
    cli.main(["eval", "text-retrieval", "--checkpoint", str(checkpoint), *options])
    out = Path(options[options.index("--out") + 1])
    return {
        row["name"]: row["value"]
        for row in json.loads((out / "results.json").read_text())["metrics"]
    }


def test_command_on_checkpoints(tokenizer: Tokenizer, file: Path, tmp_path: Path) -> None:
    """A dual-encoder gives its shared space, another system its text encoder; pages show texts
    unless told not to.
    """
    text: dict[str, Any] = {"text_encoder": "hf:bert", "text_arguments": SMALL, "max_tokens": 32}
    image: dict[str, Any] = {"image_encoder": "resnet_tiny", "frozen_text_layers": 0}
    for name, settings, examples in (("convirt", image, "0"), ("masked_text", {}, "1")):
        with seeded(0):
            model: Any = create_model(name, tokenizer=tokenizer, **text, **settings).eval()
        (tmp_path / name).mkdir()
        save(model, tmp_path / name)
        out = tmp_path / "results" / name
        rows = run(tmp_path / name, file, "--out", str(out), "--examples", examples)

        def embed(texts: Sequence[str], model: Any = model) -> torch.Tensor:
            with torch.inference_mode():
                if model.name == "convirt":
                    return model.embed_texts(list(texts)).global_NE
                return model.text_encoder(*model.tokenizer(list(texts))).pooled_BD

        expected = evaluate_text_retrieval(embed, pairs_of(), resamples=0)
        for target in ("model", "tfidf"):
            assert rows[f"mrr/{target}"] == pytest.approx(value(expected, "mrr", target))
        page = (out / "index.html").read_text()
        assert "TF-IDF" in page
        assert ("The heart is large" in page) == (examples == "1")
    runs = find_runs([tmp_path / "results" / name for name in ("convirt", "masked_text")])
    compared = compare(runs["text_retrieval"], resamples=20)
    recalls = {f"recall@{k}/model" for k in (1, 5, 10)}
    assert compared.differences[0].keys() == recalls | {"median_rank/model", "mrr/model"}


@pytest.mark.parametrize(
    ("options", "field", "code"),
    [
        (TextEncoderOptions(), "checkpoint", "conflict"),
        (TextEncoderOptions(encoder="hf:bert"), "tokenizer", "missing"),
        (
            TextEncoderOptions(encoder="minilm", pretrained=True, text_weights="weights"),
            "text_weights",
            "conflict",
        ),
    ],
)
def test_options_of_the_encoder_are_checked(
    options: TextEncoderOptions, field: str, code: str
) -> None:
    with raises(ConfigError, code, field):
        options.evaluated_encoder(random=False)
