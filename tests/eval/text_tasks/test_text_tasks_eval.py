"""Evaluation of text encoders: BLURB's score, metrics, baselines, fine-tuning, the command and
its page.
"""

import gzip
import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from sklearn.metrics import f1_score

from medvl.cli import main as cli
from medvl.data.text_tasks.tasks import TASKS, TextExample
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from medvl.encoders import create_text_encoder
from medvl.errors import ConfigError, CorpusError, EvaluationError, MedvlError
from medvl.eval import (
    EvaluatedEncoder,
    FinetuneGrid,
    FinetuneSettings,
    TextTaskOptions,
    blurb_score,
    encoder_by_name,
    encoder_of_checkpoint,
    evaluate_text_tasks,
    read_results,
)
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.core.metric_rows import MetricRow, measure
from medvl.eval.core.open import OutputOptions
from medvl.eval.core.results import Results, write_results
from medvl.eval.evaluation import run_evaluation
from medvl.eval.text_tasks import protocol
from medvl.eval.text_tasks.evaluation import TextTasks
from medvl.eval.text_tasks.finetune import encode_task, finetune, predict
from medvl.eval.text_tasks.metrics import (
    ScoredTask,
    Summed,
    baselines,
    entity_spans,
    mean_over_seeds,
    score_rows,
    summed_metric,
)
from medvl.eval.text_tasks.protocol import TaskRun, TextTaskResult, complete_tasks
from medvl.models import create_model, save
from medvl.models.language.base import TextHead

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
NAMES = (
    *(
        "bc5-chem",
        "bc5-disease",
        "ncbi-disease",
        "bc2gm",
        "jnlpba",
        "ebm-pico",
        "chemprot",
        "ddi",
        "gad",
        "biosses",
    ),
    *("hoc", "pubmedqa", "bioasq"),
)
PUBLISHED = {
    "BERT": (
        76.11,
        "89.25 81.44 85.67 80.90 77.69 72.34 71.86 80.04 80.41 82.68 80.20 51.62 70.36",
    ),
    "BERT cased": (
        75.86,
        "89.99 79.92 85.87 81.23 77.51 71.70 71.54 79.34 79.61 81.40 80.12 49.96 74.44",
    ),
    "RoBERTa": (
        76.46,
        "89.43 80.65 86.62 80.90 77.86 73.02 72.98 79.52 80.63 81.25 79.66 52.84 75.20",
    ),
    "BioBERT": (
        80.34,
        "92.85 84.70 89.13 83.82 78.55 73.18 76.14 80.88 82.36 89.52 81.54 60.24 84.14",
    ),
    "SciBERT": (
        78.86,
        "92.49 84.54 88.10 83.36 78.68 73.12 75.24 81.06 82.38 86.25 80.66 57.38 78.86",
    ),
    "SciBERT cased": (
        78.14,
        "92.51 84.70 88.25 83.36 78.51 73.06 75.00 81.22 81.34 87.15 81.16 51.40 74.22",
    ),
    "ClinicalBERT": (
        77.29,
        "90.80 83.04 86.32 81.71 78.07 72.06 72.04 78.20 80.48 91.23 80.74 49.08 68.50",
    ),
    "BlueBERT": (
        76.27,
        "91.19 83.69 88.04 81.87 77.71 72.54 71.46 77.78 79.15 85.38 80.48 48.44 68.71",
    ),
    "PubMedBERT": (
        81.16,
        "93.33 85.62 87.82 84.52 79.10 73.38 77.24 82.36 83.96 92.30 82.32 55.84 87.56",
    ),
    "BioLinkBERT": (
        83.39,
        "93.75 86.10 88.18 84.90 79.03 73.97 77.57 82.72 84.39 93.25 84.35 70.20 91.43",
    ),
}
"""Gu et al. 2021, Table 6, and the survey's column of BioLinkBERT: score, and the sets in the
order of NAMES.
"""


@pytest.mark.parametrize("model", PUBLISHED)
def test_score_equals_the_published_table(model: str) -> None:
    printed, values = PUBLISHED[model]
    score = blurb_score(dict(zip(NAMES, map(float, values.split()), strict=True)))
    assert score is not None
    assert score.value == pytest.approx(printed, abs=0.01)
    assert (score.name, score.missing) == ("BLURB", ())


def test_partial_score_names_what_it_leaves_out() -> None:
    score = blurb_score({"ddi": 0.8, "gad": 0.6, "hoc": 0.5, "mednli": 1.0})
    assert score is not None
    assert score.value == pytest.approx((0.7 + 0.5) / 2)
    assert "chemprot" in score.name
    assert "hoc" not in score.name
    assert blurb_score({"mednli": 1.0}) is None


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O B I O", {(1, 3)}),
        ("I I O I", {(0, 2), (3, 4)}),
        ("B B I I", {(0, 1), (1, 4)}),
        ("B O I", {(0, 1), (2, 3)}),
        ("O O", set()),
    ],
)
def test_entities_of_tags(tags: str, spans: set[tuple[int, int]]) -> None:
    assert entity_spans(tags.split()) == spans


def make(labels: list[Any], texts: list[tuple[str, ...]] | None = None) -> list[TextExample]:
    texts = texts or [("x",)] * len(labels)
    return [
        TextExample(key=str(n), document=str(n), texts=text, label=label)
        for n, (label, text) in enumerate(zip(labels, texts, strict=True))
    ]


def test_metrics_equal_their_definitions() -> None:
    rng = random.Random(0)
    names = list(TASKS["ddi"].labels)
    truth, guess = ([rng.choice(names) for _ in range(200)] for _ in range(2))
    expected = f1_score(truth, guess, labels=names[1:], average="micro")
    assert summed_metric(TASKS["ddi"], truth, guess)() == pytest.approx(expected)
    elements = list(TASKS["ebm-pico"].labels)
    words = [tuple(rng.choice(elements) for _ in range(5)) for _ in range(2 * 30)]
    flat = [[tag for tags in part for tag in tags] for part in (words[:30], words[30:])]
    expected = f1_score(*flat, labels=elements[1:], average="macro")
    assert summed_metric(TASKS["ebm-pico"], words[:30], words[30:])() == pytest.approx(expected)
    topics = TASKS["hoc"].labels
    sets = [tuple(topic for topic in topics if rng.random() < 0.3) for _ in range(60)]
    binary = [
        np.array([[topic in row for topic in topics] for row in part])
        for part in (sets[:30], sets[30:])
    ]
    expected = f1_score(*binary, average="micro")
    assert summed_metric(TASKS["hoc"], sets[:30], sets[30:])() == pytest.approx(expected)
    a, b = [1000 + rng.random() for _ in range(40)], [rng.random() for _ in range(40)]
    assert summed_metric(TASKS["biosses"], a, b)() == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert np.isnan(summed_metric(TASKS["biosses"], [1.0, 1.0], [1.0, 2.0])())


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e30])
def test_correlation_does_not_depend_on_the_scale(scale: float) -> None:
    truth, guess = [0.0, 1.0, 2.0, 4.0], [0.3, 0.1, 0.7, 0.9]
    metric = summed_metric(TASKS["biosses"], truth, [scale * value for value in guess])
    assert metric() == pytest.approx(np.corrcoef(truth, guess)[0, 1])
    metric = summed_metric(
        TASKS["biosses"], truth, [scale * 0.37, scale * 0.37, scale * 0.37, scale * 0.9]
    )
    counts_NR = np.array([[7.0, 6.0, 7.0, 0.0]]).T  # all drawn guesses are equal
    assert np.isnan(
        mean_over_seeds([metric], MetricRow(metric="pearson", target="x", n=4)).statistic(counts_NR)
    ).all()
    rounded = [
        scale * float(np.float32(2.5) + np.float32(2.4e-7 * place)) for place in (0, 1, 1, 0)
    ]
    assert len(set(rounded)) == 2
    assert np.isnan(summed_metric(TASKS["biosses"], truth, rounded)())
    answers = summed_metric(TASKS["pubmedqa"], ["yes", "no", "maybe"], ["yes", "no", "no"])
    assert answers() == pytest.approx(2 / 3)
    tags = summed_metric(
        TASKS["bc2gm"], [("B", "I", "O"), ("B", "O", "B")], [("B", "O", "O"), ("B", "O", "B")]
    )
    assert tags() == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))


def test_baselines() -> None:
    train = make([("B", "I", "O"), ("O", "B")], [("Lung", "cancer", "is"), ("and", "cancer")])
    test = make([("O",) * 4], [("big", "lung", "CANCER", "cancer")])
    assert baselines(TASKS["ncbi-disease"], train, test) == {"dictionary": [("O", "B", "I", "B")]}
    tagged = baselines(
        TASKS["ebm-pico"],
        make([("PAR", "O")], [("men", "took")]),
        make([("O",) * 2], [("Men", "new")]),
    )
    assert tagged == {"dictionary": [("PAR", "O")]}
    known = make([1.0, 0.0], [("old rib", "new rib"), ("old rib", "lung")])
    similar = baselines(TASKS["biosses"], known, make([1.0], [("old rib", "Rib unknown")]))
    assert similar["word overlap"] == pytest.approx([1 / 3])
    # of four texts, three have "rib" and two "old"
    rib, old = (1 + math.log(5 / (1 + count)) for count in (3, 2))
    assert similar["TF-IDF"] == pytest.approx([rib / math.hypot(rib, old)])
    texts = [("good study",), ("bad study",)] * 10
    found = baselines(
        TASKS["gad"], make(["1", "0"] * 10, texts), make(["0", "1"], [("bad",), ("good",)])
    )
    assert found == {"constant": ["1", "1"], "bag of words": ["0", "1"]}
    answers = baselines(
        TASKS["pubmedqa"], make(["yes", "yes", "no"], texts[:3]), make(["no"], [("x",)])
    )
    assert answers["constant"] == ["yes"]


def test_bag_of_words_does_not_predict_classes_without_training_examples() -> None:
    texts = [("good study",), ("bad study",)] * 10
    found = baselines(
        TASKS["pubmedqa"],
        make(["maybe", "no"] * 10, texts),
        make(["no"] * 2, [("bad",), ("good",)]),
    )
    assert found["bag of words"] == ["no", "maybe"]
    always = TASKS["hoc"].labels[0]
    found = baselines(TASKS["hoc"], make([(always,)] * 20, texts), make([(always,)], [("bad",)]))
    assert found["bag of words"] == [(always,)]


def test_a_seed_with_constant_predictions_leaves_the_correlation_undefined(
    encoder: EvaluatedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_seed = iter([[float(number) for number in range(12)], [2.5] * 12])
    monkeypatch.setattr(protocol, "finetune", lambda *arguments, **options: None)
    monkeypatch.setattr(protocol, "predict", lambda *arguments, **options: next(by_seed))
    options = TextTaskOptions(
        grid=FinetuneGrid(lrs=(1e-3,), batches=(16,), epochs=(1,)), seeds=2, resamples=5
    )
    results = evaluate_text_tasks(encoder, write_data(tmp_path), ["biosses"], options).results
    assert np.isnan(
        [results.row(metric, "biosses").value for metric in ("pearson", "pearson_sd")]
    ).all()


def test_attention_has_dropout_whatever_the_pretraining_had(
    vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed texts are pretrained without; the results have the value."""
    tokenizer = load_tokenizer(vocabulary)
    settings: Any = {
        "text_encoder": "hf:bert",
        "text_arguments": SIZES,
        "pairs": "none",
        "max_tokens": 32,
    }
    for attention_dropout in (0.0, None):
        save(
            create_model(
                "masked_text", tokenizer=tokenizer, attention_dropout=attention_dropout, **settings
            ),
            tmp_path,
        )
        encoder = encoder_of_checkpoint(tmp_path)
        backbone: Any = encoder.make(0).backbone
        assert (
            backbone.encoder.layer[0].attention.self.dropout.p == encoder.attention_dropout == 0.1
        )
    given = encoder_by_name(
        "hf:bert", vocabulary, None, {**SIZES, "attention_probs_dropout_prob": 0.3}
    )
    assert given.attention_dropout == 0.3
    assert (
        encoder_by_name("hf:distilbert", vocabulary, None, {"n_layers": 1}).attention_dropout
        is None
    )
    monkeypatch.setattr(protocol, "finetune", lambda *arguments, **options: None)
    monkeypatch.setattr(protocol, "predict", lambda *arguments, **options: [1.0] * 12)
    options = TextTaskOptions(
        grid=FinetuneGrid(lrs=(1e-3,), batches=(16,), epochs=(1,)), seeds=1, resamples=5
    )
    results = evaluate_text_tasks(
        given, write_data(tmp_path / "data"), ["biosses"], options
    ).results
    assert results.config["attention_dropout"] == 0.3


WORDS = ("alpha", "beta", "gamma", "delta", "zinc", "iron", "lead", "gold")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_wordpiece([" ".join(WORDS)] * 5, vocab_size=120, max_tokens=32).save(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(vocabulary: Path) -> EvaluatedEncoder:
    return encoder_by_name("hf:bert", vocabulary, None, SIZES)


def sentences(count: int, seed: int) -> list[TextExample]:
    rng = random.Random(seed)
    rows = [tuple(rng.choice(WORDS) for _ in range(rng.randint(2, 6))) for _ in range(count)]
    return make(
        [tuple("B" if word in ("zinc", "gold") else "O" for word in row) for row in rows], rows
    )


def tokenizer_of(encoder: EvaluatedEncoder) -> Tokenizer:
    return encoder.tokenizer(32)


@pytest.mark.training
def test_fine_tuning_learns_and_repeats_itself(encoder: EvaluatedEncoder) -> None:
    task = TASKS["bc5-chem"]
    train, test = (
        encode_task(task, sentences(*sizes), tokenizer_of(encoder)) for sizes in ((64, 0), (32, 1))
    )
    settings = FinetuneSettings(lr=3e-3, batch=16, epochs=8)
    device = torch.device("cpu")

    def run(seed: int) -> tuple[TextHead, Any]:
        model = finetune(
            lambda: encoder.make(seed), train, settings, pool="tokens", seed=seed, device=device
        )
        return model, predict(model, test)

    (first, predicted), (second, again) = run(3), run(3)
    assert summed_metric(task, [example.label for example in test.examples], predicted)() > 0.95
    assert predicted == again
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert all(parameter.grad is not None for parameter in first.parameters())


def test_biases_and_norms_are_not_decayed(
    encoder: EvaluatedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in the optimiser of BERT's released code."""
    created: list[torch.optim.Optimizer] = []

    class Recorded(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            created.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    train = encode_task(TASKS["bc5-chem"], sentences(8, 0), tokenizer_of(encoder))
    settings = FinetuneSettings(lr=1e-3, batch=8, epochs=1)
    model = finetune(
        lambda: encoder.make(0), train, settings, pool="tokens", seed=0, device=torch.device("cpu")
    )
    (optimizer,) = created
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert set(decays) == set(model.parameters())
    assert all(
        decay == (0.01 if parameter.ndim > 1 else 0.0) for parameter, decay in decays.items()
    )
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-3}


def test_batches_hold_each_example_once(encoder: EvaluatedEncoder) -> None:
    data = encode_task(TASKS["bc5-chem"], sentences(50, 0), tokenizer_of(encoder))
    for seed in (None, 1, 2):
        assert sorted(row for batch in data.batches(8, seed) for row in batch.rows) == list(
            range(50)
        )
    orders = [[batch.rows for batch in data.batches(8, seed)] for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_truncated_words_are_no_entities(encoder: EvaluatedEncoder) -> None:
    rows = make([("B",) * 40], [("zinc",) * 40])
    data = encode_task(TASKS["bc5-chem"], rows, tokenizer_of(encoder))
    assert data.cut == 10  # 32 tokens without the first and the last
    model = TextHead(encoder.make(0), 3, "tokens").eval()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    assert predict(model, data) == [("B",) * 30 + ("O",) * 10]


@pytest.mark.parametrize("pool", ["mentions", "starts"])
def test_mentions_are_pooled(encoder: EvaluatedEncoder, pool: Any) -> None:
    example = TextExample(
        key="k",
        document="d",
        texts=("alpha zinc iron beta",),
        label="false",
        spans=((6, 15), (16, 20)),
    )
    data = encode_task(TASKS["ddi"], [example], tokenizer_of(encoder), mentions=True)
    batch = next(data.batches(1))
    assert batch.mention_BST is not None
    model = TextHead(encoder.make(0), 5, pool).eval()
    tokens_TD = model.encoder.encode(
        model.encoder.embed(batch.ids_BT, batch.mask_BT), batch.mask_BT
    )[-1][0]
    counts = [int(row.sum()) for row in batch.mention_BST[0]]
    places = [row.nonzero()[:, 0].tolist() for row in batch.mention_BST[0]]
    assert counts[0] >= 2
    if pool == "starts":
        places = [place[:1] for place in places]
    pooled = torch.cat([tokens_TD[place].mean(dim=0) for place in places])
    logits = model(batch.ids_BT, batch.mask_BT, None, batch.mention_BST)
    assert torch.allclose(logits[0], model.linear(pooled), atol=1e-6)
    with raises(ConfigError, "missing", "mention_BST"):
        model(batch.ids_BT, batch.mask_BT)


def test_padding_changes_no_logit() -> None:
    torch.manual_seed(0)
    model = TextHead(create_text_encoder("hf:bert", vocab_size=50, pad_id=0, **SIZES), 2).eval()
    ids_BT, types_BT = torch.randint(1, 50, (1, 6)), torch.tensor([[0, 0, 0, 1, 1, 1]])
    alone = model(ids_BT, torch.ones(1, 6, dtype=torch.bool), types_BT)
    mask_BT = torch.arange(9)[None] < 6
    padded = model(
        *(torch.nn.functional.pad(x, (0, 3)) for x in (ids_BT,)),
        mask_BT,
        torch.nn.functional.pad(types_BT, (0, 3)),
    )
    assert torch.allclose(alone, padded, atol=1e-6)
    assert not torch.allclose(alone, model(ids_BT, torch.ones(1, 6, dtype=torch.bool)), atol=1e-4)


def write_data(root: Path) -> Path:
    for name, rows in (
        ("bc5-chem", [{"tokens": e.texts, "tags": e.label} for e in sentences(40, 5)]),
        ("gad", [{"dummy": f"{WORDS[n % 8]} beta", "label": int(n % 8 > 3)} for n in range(40)]),
        (
            "biosses",
            [{"sentence1": "zinc", "sentence2": WORDS[n % 8], "score": n % 5} for n in range(12)],
        ),
    ):
        for split in ("train", "dev", "test"):
            path = root / name / f"{split}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"id": f"{split}-{n}", **row}) for n, row in enumerate(rows)]
            path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return root


def test_command_writes_results_and_a_page(
    tmp_path: Path, vocabulary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    sizes = [part for name, value in SIZES.items() for part in (name, str(value))]
    chosen = [
        "--lrs",
        "1e-3",
        "3e-3",
        "--batches",
        "16",
        "--epochs",
        "2",
        "--seeds",
        "2",
        "--resamples",
        "50",
        "--compare-random",
    ]
    encoder = ["--encoder", "hf:bert", "--tokenizer", str(vocabulary), "--text-arguments", *sizes]
    cli.main(["eval", "text", "--data", str(data), "--out", str(out), *encoder, *chosen])
    assert any(line.startswith("bc5-chem: entity_f1") for line in caplog.messages)
    fits = [line for line in caplog.messages if line.startswith("bc5-chem, ")]
    assert len(fits) == 2 * (2 + 2)  # both encoders: two rates on dev, two seeds on test
    assert fits[0].startswith("bc5-chem, hf:bert, random weights, lr 0.001, batch ")
    results = read_results(out)
    assert results.details["gad"]["settings"]["lr"] in (1e-3, 3e-3)
    assert results.details["gad"]["other"] == {
        k: v for k, v in results.details["gad"].items() if k != "other"
    }
    assert results.row("micro_f1", "gad: bag of words").value == 1.0
    assert results.row("entity_f1", "bc5-chem - other encoder").value == pytest.approx(
        0
    )  # both have random weights
    score, of_other, difference = [row for row in results.rows if row.metric == "blurb"]
    assert score.target.startswith("mean without")
    assert of_other.target == f"{score.target}: other encoder"
    assert (
        difference.value == pytest.approx(score.value - of_other.value) == 0
    )  # both have the same random weights
    assert score.low < score.value < score.high
    assert difference.low == difference.high == 0
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 40 + 40 + 12
    assert len(lines[0]["predictions"]) == 2
    page = (out / "index.html").read_text()
    assert "dictionary" in page
    assert "Test by seed" in page


def test_the_aggregate_has_intervals_and_a_paired_difference() -> None:
    """The interval is that of the mean of independent test sets, and the second seed counts as
    much as the first.
    """
    rng = np.random.default_rng(0)
    documents = {
        name: [f"{name} {n // 2}" for n in range(200)] for name in ("pubmedqa", "bioasq", "gad")
    }
    tasks = {}
    for name, keys in documents.items():
        right_SN = rng.random((2, 200)) < 0.7
        sums = [np.stack([right_N, np.ones(200)], axis=1).astype(float) for right_N in right_SN]
        own = tuple(
            Summed(sums_N2, lambda totals_R2: totals_R2[:, 0] / totals_R2[:, 1]) for sums_N2 in sums
        )
        tasks[name] = ScoredTask(metrics=own, other=own[:1], documents=keys)
    score, of_other, difference = score_rows(tasks, resamples=2000, seed=0)
    share = {name: np.mean([metric() for metric in task.metrics]) for name, task in tasks.items()}
    assert score.value == pytest.approx(
        ((share["pubmedqa"] + share["bioasq"]) / 2 + share["gad"]) / 2
    )
    assert score.n == 600
    assert difference.value == pytest.approx(score.value - of_other.value)
    by_document = {  # variance of the mean over documents of two examples, of both seeds together
        name: np.mean([m.sums_NK[:, 0] for m in task.metrics], axis=0)
        .reshape(-1, 2)
        .mean(axis=1)
        .var()
        / 100
        for name, task in tasks.items()
    }
    spread = np.sqrt(
        (by_document["pubmedqa"] + by_document["bioasq"]) / 16 + by_document["gad"] / 4
    )
    assert (score.high - score.low) / 2 == pytest.approx(1.96 * spread, rel=0.08)
    (unlike,) = score_rows(
        {"mednli": tasks["gad"], "gad": tasks["gad"], "ddi": tasks["gad"]}, resamples=0, seed=0
    )[:1]
    assert np.isnan(unlike.low)
    for alone in (
        {"mednli": tasks["gad"]},
        {"mednli": tasks["gad"], "gad": tasks["gad"]},
    ):  # the mean of one task
        assert score_rows(alone, resamples=10, seed=0) == []


def test_two_encoders_are_paired_in_every_task(tmp_path: Path) -> None:
    """Two seeds, of which the second encoder misses all entities and half of the answers in one."""
    rows = {"bc5-chem": sentences(30, 1), "pubmedqa": make(["yes", "no", "maybe"] * 10)}
    truth = {name: [example.label for example in examples] for name, examples in rows.items()}
    wrong: dict[str, list[Any]] = {
        "bc5-chem": [("O",) * len(example.texts) for example in rows["bc5-chem"]],
        "pubmedqa": ["yes" if n % 2 else label for n, label in enumerate(truth["pubmedqa"])],
    }
    for folder, second in (("right", truth), ("worse", wrong)):
        runs, groups = {}, []
        for name, examples in rows.items():
            predictions = (truth[name], second[name])
            metrics = tuple(
                summed_metric(TASKS[name], truth[name], predicted) for predicted in predictions
            )
            runs[name] = TaskRun(
                settings=FinetuneSettings(),
                dev=None,
                predictions=predictions,
                metrics=metrics,
                cut=0,
            )
            row = MetricRow(metric=TASKS[name].metric, target=name, n=len(examples))
            groups += list(measure([mean_over_seeds(metrics, row)], len(examples), resamples=0))
        results = Results(
            protocol="text_tasks",
            protocol_version=1,
            rows=tuple(groups),
            config={},
            inputs={"checkpoint": folder},
        )
        result = TextTaskResult(results=results, examples=rows, runs=runs, others={}, baselines={})
        write_results(results, tmp_path / folder, result.predictions())
    ((_, found),) = find_runs([tmp_path / "right", tmp_path / "worse"]).items()
    comparison = compare(found, resamples=100)
    assert not comparison.notes
    (differences,) = comparison.differences
    assert differences["entity_f1/bc5-chem"].value == pytest.approx(-0.5)  # the mean over the seeds
    share = np.mean(
        [guess == label for guess, label in zip(wrong["pubmedqa"], truth["pubmedqa"], strict=True)]
    )
    accuracy = differences["accuracy/pubmedqa"]
    assert accuracy.value == pytest.approx((share - 1) / 2)
    assert accuracy.low < accuracy.value < accuracy.high < 0


def test_all_tasks_are_those_that_are_complete(
    tmp_path: Path, encoder: EvaluatedEncoder, vocabulary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Incomplete data is found before the first fine-tuning."""
    data, printed = write_data(tmp_path / "data"), list[str]()
    (data / "bc5-chem/train.jsonl.gz").unlink()
    complete, left_out = complete_tasks(data, TextTaskOptions())
    assert complete == ["gad", "biosses"]
    assert "bc5-chem has no train split" in left_out["bc5-chem"]
    for options in (
        TextTaskOptions(relation_form="markers"),
        TextTaskOptions(relation_pool="starts"),
    ):
        complete, left_out = complete_tasks(
            data, options
        )  # of gad, texts with dummies alone are known
        assert (complete, list(left_out)) == (["biosses"], ["bc5-chem", "gad"])
        with raises(MedvlError, "unsupported"):
            evaluate_text_tasks(encoder, data, ["biosses", "gad"], options, report=printed.append)
    with raises(EvaluationError, "missing", "data"):
        evaluate_text_tasks(encoder, data, ["biosses", "bc5-chem"], report=printed.append)
    assert not printed
    sizes = [part for name, value in SIZES.items() for part in (name, str(value))]
    arguments = [
        "--encoder",
        "hf:bert",
        "--tokenizer",
        str(vocabulary),
        "--text-arguments",
        *sizes,
        "--seeds",
        "1",
    ]
    arguments += ["--lrs", "1e-3", "--batches", "16", "--epochs", "1", "--resamples", "5"]
    cli.main(["eval", "text", "--data", str(data), "--out", str(tmp_path / "out"), *arguments])
    assert any("left out: bc5-chem has no train split" in line for line in caplog.messages)
    assert set(read_results(tmp_path / "out").details) == {"gad", "biosses"}
    (data / "gad/dev.jsonl.gz").write_bytes(b"damaged")
    with raises(CorpusError, "malformed", "data"):
        complete_tasks(data, TextTaskOptions())


def test_missing_splits_and_wrong_settings(tmp_path: Path, encoder: EvaluatedEncoder) -> None:
    data = write_data(tmp_path)
    (data / "gad/dev.jsonl.gz").unlink()
    with raises(EvaluationError, "missing", "data", names="dev"):
        evaluate_text_tasks(encoder, data, ["gad"])
    with raises(ConfigError, "unknown_name", "task"):
        evaluate_text_tasks(encoder, data, ["glue"])
    with raises(ConfigError, "out_of_range", "epochs"):
        FinetuneSettings(epochs=0)
    with raises(ConfigError, "empty", "grid"):
        evaluate_text_tasks(encoder, data, ["biosses"], TextTaskOptions(grid=FinetuneGrid(lrs=())))
    with raises(ConfigError, "conflict", "checkpoint"):
        run_evaluation(TextTasks(data=tmp_path), OutputOptions(out=tmp_path / "out"))
