"""Re-ranked retrieval against a naive implementation that encodes every pair; number of
encodings.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source
from helpers.fusion_samples import SIDE, TEXTS, tiny_model, tiny_tokenizer
from helpers.shard_plans import OPTIONS, make_plan
from torch import Tensor, nn

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import RunOptions, reranked_retrieval, run_evaluation
from medvl.eval.retrieval import rerank
from medvl.eval.retrieval.evaluation import Retrieval
from medvl.eval.retrieval.rerank import ShortlistModel, reranked_ranks
from medvl.models.checkpoint import save
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.schema import Batch

REPORTS = [
    *TEXTS,
    "The heart is enlarged.",
    "Dense left consolidation of the lungs.",
    "",
    "No effusion.",
]
COUNT = 17


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


class NoiseLoader(FakeLoader):
    """Images of noise, each with one of the reports; one report is empty."""

    def __init__(self, batch: int = 5, side: int = SIDE) -> None:
        source = make_source(np.zeros((COUNT, 0)), ())
        rng = np.random.default_rng(0)
        source.images = [rng.integers(0, 256, (side, side), dtype=np.uint8) for _ in range(COUNT)]
        super().__init__(
            source, batch, [f" {REPORTS[row % len(REPORTS)]}\n" for row in range(COUNT)]
        )


class RowLoader(FakeLoader):
    """The same samples with one row of pixels, as `FakeModel` takes them."""

    def __init__(self) -> None:
        source = make_source(np.zeros((COUNT, 0)), ())
        super().__init__(source, 4, [f"{REPORTS[row % len(REPORTS)]}" for row in range(COUNT)])


class CountingModule(nn.Module):
    """A module that counts the rows of its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.count = inner, 0

    def __getattr__(self, name: str) -> Any:
        return (
            super().__getattr__(name)
            if name in ("inner", "count")
            else getattr(super().__getattr__("inner"), name)
        )

    def forward(self, rows: Tensor, *rest: Any) -> Any:
        self.count += len(rows)
        return self.inner(rows, *rest)


def plain_ranks(
    similarity_NM: np.ndarray, score_NM: np.ndarray, text_of: Sequence[int], k: int
) -> tuple[list[int], list[int]]:
    """Return the ranks of the protocol, one query at a time."""
    positive_NM = np.array(text_of)[:, None] == np.arange(similarity_NM.shape[1])
    return (
        [_rank(s, f, p, k) for s, f, p in zip(similarity_NM, score_NM, positive_NM, strict=True)],
        [
            _rank(s, f, p, k)
            for s, f, p in zip(similarity_NM.T, score_NM.T, positive_NM.T, strict=True)
        ],
    )


def _rank(similarity: np.ndarray, score: np.ndarray, positive: np.ndarray, k: int) -> int:
    order = sorted(range(len(similarity)), key=lambda index: (-similarity[index], positive[index]))[
        :k
    ]
    positives = [index for index in order if positive[index]]
    if positives:
        best = max(score[index] for index in positives)
        return 1 + sum(score[index] >= best for index in order if not positive[index])
    best = max(similarity[positive])
    return 1 + sum(similarity[~positive] >= best)


@torch.no_grad()
def uncached(model: FusionModel, loader: FakeLoader) -> tuple[list[int], np.ndarray]:
    """Return the text of each image with text, and the score of every pair, each image and text
    encoded alone.
    """
    batches = [batch for batch in _singles(loader) if batch.texts[0].strip()]
    plain = [" ".join(batch.texts[0].split()) for batch in batches]
    texts = list(dict.fromkeys(plain))
    scores = np.zeros((len(batches), len(texts)))
    words = [model.text_tokens(*model.tokenize([text])) for text in texts]
    for row, batch in enumerate(batches):
        cells = model.image_tokens(batch.image_BCHW)
        for column in range(len(texts)):
            logits_B2 = model.match(words[column], cells)
            scores[row, column] = (logits_B2[0, 1] - logits_B2[0, 0]).item()
    return [texts.index(text) for text in plain], scores


def _singles(loader: FakeLoader) -> Iterator[Batch]:
    yield from FakeLoader(loader.source, 1, loader.texts)


@pytest.mark.parametrize("shortlist", [1, 3, 100])
def test_albef_ranks_equal_the_uncached_protocol(tokenizer: Tokenizer, shortlist: int) -> None:
    """ALBEF's own embeddings make the shortlists."""
    model: Any = tiny_model("albef", tokenizer).eval()
    nn.init.normal_(model.itm_head.weight, generator=torch.Generator().manual_seed(5))
    result = reranked_retrieval(model, NoiseLoader(), shortlist=shortlist, resamples=0)
    text_of, score_NM = uncached(model, NoiseLoader())
    texts = list(
        dict.fromkeys(" ".join(text.split()) for text in NoiseLoader().texts if text.strip())
    )
    with torch.no_grad():
        images = torch.cat(
            [batch.image_BCHW for batch in _singles(NoiseLoader()) if batch.texts[0].strip()]
        )
        similarity_NM = model.similarity(images, texts).numpy()
    of_images, of_texts = plain_ranks(similarity_NM, score_NM, text_of, shortlist)
    assert result.image_rank_N.tolist() == of_images
    assert result.text_rank_M.tolist() == of_texts
    assert len(set(of_images)) > 3 or shortlist == 1
    details = result.results.details
    assert (details["images"], details["texts"], details["images_without_text"]) == (15, 7, 2)
    if shortlist == 100:
        assert details["positive_on_shortlist"] == {"image_to_text": 1.0, "text_to_image": 1.0}
    assert result.results.protocol == "image_text_retrieval_reranked"


@pytest.mark.parametrize("name", ["dual_stream", "medvill"])
def test_another_dual_encoder_makes_the_shortlists(tokenizer: Tokenizer, name: str) -> None:
    model = tiny_model(name, tokenizer).eval()
    nn.init.normal_(model.itm_head.weight, generator=torch.Generator().manual_seed(5))
    fake = FakeModel().eval()
    result = reranked_retrieval(
        model,
        NoiseLoader(),
        shortlist=3,
        shortlist_model=ShortlistModel(fake, RowLoader()),
        resamples=0,
    )
    text_of, score_NM = uncached(model, NoiseLoader())
    texts = list(dict.fromkeys(text for text in RowLoader().texts if text))
    with torch.no_grad():
        rows = torch.cat([batch.image_BCHW for batch in RowLoader()])
        kept = [row for row, text in enumerate(RowLoader().texts) if text]
        similarity_NM = (
            fake.embed_images(rows).global_NE[kept] @ fake.embed_texts(texts).global_NE.T
        ).numpy()
    of_images, of_texts = plain_ranks(similarity_NM, score_NM, text_of, 3)
    assert result.image_rank_N.tolist() == of_images
    assert result.text_rank_M.tolist() == of_texts


def test_images_and_texts_are_encoded_once_and_pairs_in_chunks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("albef", tokenizer).eval()
    reference = reranked_retrieval(model, NoiseLoader(), shortlist=4, resamples=0)
    model.image_encoder, model.text_encoder = (
        CountingModule(model.image_encoder),
        CountingModule(model.text_encoder),
    )
    monkeypatch.setattr(rerank, "_PAIRS", 6)
    monkeypatch.setattr(rerank, "_TEXTS", 2)
    largest, fuse = [], model.fuse
    monkeypatch.setattr(
        model, "fuse", lambda text, image: largest.append(len(text.states_BND)) or fuse(text, image)
    )
    chunked = reranked_retrieval(model, NoiseLoader(3), shortlist=4, resamples=0)
    assert model.image_encoder.count == COUNT
    assert model.text_encoder.count == 7
    assert max(largest) == 6
    assert sum(largest) <= 4 * (15 + 7)
    np.testing.assert_array_equal(chunked.image_rank_N, reference.image_rank_N)
    np.testing.assert_array_equal(chunked.text_rank_M, reference.text_rank_M)


@pytest.mark.parametrize("shortlist", [1, 2, 5, 40])
def test_ties_count_against_the_positive_on_and_off_the_shortlist(shortlist: int) -> None:
    generator = torch.Generator().manual_seed(shortlist)
    similarity_NM = torch.randint(0, 4, (30, 9), generator=generator) / 4
    score_NM = torch.randint(0, 3, (30, 9), generator=generator).float()
    text_of_N = torch.arange(30) % 9
    plain = plain_ranks(similarity_NM.numpy(), score_NM.numpy(), text_of_N.tolist(), shortlist)
    before = plain_ranks(similarity_NM.numpy(), similarity_NM.numpy(), text_of_N.tolist(), 0)
    reranked = reranked_ranks(
        similarity_NM,
        text_of_N,
        shortlist,
        (np.array(before[0]), np.array(before[1])),
        lambda image_Q, text_Q: score_NM[image_Q, text_Q],
    )
    constant = torch.zeros(30, 9)
    worst = reranked_ranks(
        constant,
        text_of_N,
        shortlist,
        (np.full(30, 9), np.full(9, 30)),
        lambda image_Q, text_Q: torch.zeros(len(image_Q)),
    )
    assert set(worst[0].tolist()) == {9}
    assert all(rank >= 26 for rank in worst[1].tolist())
    listed = (
        np.array(before[0]) <= shortlist
    )  # otherwise ties decide which negatives are on the shortlist
    assert (reranked[0][~listed] == np.array(before[0])[~listed]).all()
    assert (reranked[0][listed] <= shortlist).all()
    if shortlist == 40:
        assert reranked[0].tolist() == plain[0]
        assert reranked[1].tolist() == plain[1]


def test_perfect_matcher_ranks_listed_positives_first(tokenizer: Tokenizer) -> None:
    similarity_NM = torch.rand(20, 20, generator=torch.Generator().manual_seed(0))
    text_of_N = torch.arange(20)
    before = plain_ranks(similarity_NM.numpy(), similarity_NM.numpy(), text_of_N.tolist(), 0)
    reranked = reranked_ranks(
        similarity_NM,
        text_of_N,
        5,
        (np.array(before[0]), np.array(before[1])),
        lambda image_Q, text_Q: (image_Q == text_Q).float(),
    )
    for rank, old in zip(reranked, before, strict=True):
        assert rank.tolist() == [1 if value <= 5 else value for value in old]
        assert 0 < sum(value <= 5 for value in old) < 20


def test_invalid_models_and_settings_are_refused(tokenizer: Tokenizer) -> None:
    fusion, albef = tiny_model("dual_stream", tokenizer), tiny_model("albef", tokenizer)
    with raises(EvaluationError, "missing", "shortlist_model", names="dual_stream"):
        reranked_retrieval(fusion, NoiseLoader())
    with raises(EvaluationError, "out_of_range", "shortlist"):
        reranked_retrieval(albef, NoiseLoader(), shortlist=0)
    other = RowLoader()
    other.source.samples = other.source.samples[::-1]
    with raises(EvaluationError, "mismatch"):
        reranked_retrieval(
            fusion, NoiseLoader(), shortlist_model=ShortlistModel(FakeModel(), other)
        )
    with torch.no_grad():
        albef.itm_head.bias.fill_(torch.nan)
    with raises(EvaluationError, "nonfinite"):
        reranked_retrieval(albef, NoiseLoader())


def test_reranking_gives_intervals_and_supports_autocast(tokenizer: Tokenizer) -> None:
    model = tiny_model("albef", tokenizer)
    result = reranked_retrieval(model, NoiseLoader(), resamples=50, autocast=torch.bfloat16)
    row = result.results.row("recall@5", "image_to_text")
    assert 0 <= row.low <= row.value <= row.high <= 1
    assert model.training
    assert result.results.config["autocast"] == "torch.bfloat16"
    assert {line["key"] for line in result.predictions()} == set(result.keys)


def test_retrieval_command_reranks_with_another_checkpoint_or_its_own(
    tokenizer: Tokenizer, deid: Deidentifier, tmp_path: Path
) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "shards", workers=1), OPTIONS
    )
    data = tmp_path / "shards" / "train"
    for name in ("albef", "dual_stream"):
        (tmp_path / name / "best").mkdir(parents=True)
        save(tiny_model(name, tokenizer), tmp_path / name / "best")
    albef, stream = tmp_path / "albef" / "best", tmp_path / "dual_stream" / "best"
    options = RunOptions(resamples=0, workers=0, device="cpu")
    for checkpoint, own in ((stream, False), (albef, True)):
        evaluation = Retrieval(checkpoint=albef, data=data, rerank=checkpoint, shortlist=3)
        outcome, _ = run_evaluation(evaluation, options)
        written = json.loads((checkpoint / "eval" / "retrieval" / "results.json").read_text())
        assert written["protocol"] == {"name": "image_text_retrieval_reranked", "version": 3}
        assert written["config"]["own_shortlist"] is own
        assert (written["inputs"]["shortlist_checkpoint"] is None) is own
        assert "recall@5" in outcome.table
    with raises(ConfigError, "unsupported", "checkpoint"):
        run_evaluation(Retrieval(checkpoint=stream, data=data), options)
