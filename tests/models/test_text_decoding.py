"""Text decoding against plain Python loops, on tables of next-token logits."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import Tensor

from medvl.errors import ConfigError
from medvl.models.text_decoding import Decoding, Generated, search

END, PAD, NEVER = 1, 0, (0, 2)


class Bigrams:
    """Next-token logits from a table over the last token, with another table for every sample."""

    def __init__(self, batch: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_BVV = 3 * torch.randn(batch, vocabulary, vocabulary, generator=generator)
        self.sample_R = torch.arange(batch)

    def first(self) -> Tensor:
        return self.logits_BVV[:, PAD]

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.sample_R = self.sample_R[parent_R]
        return self.logits_BVV[self.sample_R, ids_R]


def naive_search(
    logits_VV: Tensor, decoding: Decoding, longest: int
) -> tuple[list[int], float, bool]:
    """Return (tokens, score, ended) of one sample by loops over hypotheses."""

    def score_of(hypothesis: tuple[list[int], float]) -> float:
        tokens, total = hypothesis
        return total / ((5 + len(tokens)) / 6) ** decoding.length_penalty

    logs = logits_VV.clone()
    logs[:, list(NEVER)] = -math.inf
    logs = logs.log_softmax(dim=1)
    hypotheses: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(longest):
        grown = []
        for tokens, total in hypotheses:
            if tokens and tokens[-1] == END:
                grown.append((tokens, total))
                continue
            row = logs[tokens[-1] if tokens else PAD]
            grown += [([*tokens, token], total + float(row[token])) for token in range(len(row))]
        hypotheses = sorted(grown, key=score_of, reverse=True)[: decoding.beams]
    tokens, total = hypotheses[0]
    ended = tokens[-1] == END
    return tokens[: len(tokens) - ended], score_of((tokens, total)), ended


def decode(model: Bigrams, decoding: Decoding, longest: int) -> Generated:
    return search(model, decoding, max_tokens=longest, end_id=END, pad_id=PAD, never=NEVER)


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_beam_search_equals_the_plain_loop(beams: int, penalty: float) -> None:
    decoding = Decoding(beams=beams, length_penalty=penalty)
    model = Bigrams(batch=20, vocabulary=7, seed=beams)
    generated = decode(model, decoding, longest=6)
    assert 0 < int(generated.ended_B.sum()) < 20
    for row in range(20):
        tokens, score, ended = naive_search(model.logits_BVV[row], decoding, 6)
        assert generated.ids_BT[row][generated.mask_BT[row]].tolist() == tokens
        assert (generated.ids_BT[row][~generated.mask_BT[row]] == PAD).all()
        assert float(generated.score_B[row]) == pytest.approx(score, abs=1e-4)
        assert bool(generated.ended_B[row]) is ended
    assert not torch.isin(generated.ids_BT[generated.mask_BT], torch.tensor([END, *NEVER])).any()


def test_one_beam_is_greedy_and_more_beams_score_higher() -> None:
    greedy = decode(Bigrams(40, 7, 3), Decoding(), longest=8)
    for row, logits_VV in enumerate(Bigrams(40, 7, 3).logits_BVV):
        tokens, last = [], PAD
        for _ in range(8):
            allowed = logits_VV[last].clone()
            allowed[list(NEVER)] = -math.inf
            last = int(allowed.argmax())
            tokens += [last]
            if last == END:
                break
        assert [token for token in tokens if token != END] == greedy.ids_BT[row][
            greedy.mask_BT[row]
        ].tolist()
    penalised = decode(Bigrams(40, 7, 3), Decoding(length_penalty=3.0), longest=8)
    assert torch.equal(penalised.ids_BT, greedy.ids_BT)
    wide = decode(Bigrams(40, 7, 3), Decoding(beams=4), longest=8)
    assert float(wide.score_B.mean()) > float(greedy.score_B.mean())


def naive_repeats(tokens: list[int], token: int, length: int) -> int:
    """Return how often the n-gram that `token` completes is in `tokens` already."""
    grown = [*tokens, token]
    places = range(len(tokens) - length + 1)
    return sum(grown[place : place + length] == grown[len(grown) - length :] for place in places)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("penalty", [None, 0.7])
@pytest.mark.parametrize("beams", [1, 3])
def test_repeated_ngrams_are_penalised_as_in_a_plain_loop(
    length: int, penalty: float | None, beams: int
) -> None:
    decoding = Decoding(beams=beams, block_ngrams=length, ngram_penalty=penalty)
    model, other = Bigrams(batch=10, vocabulary=6, seed=4), Bigrams(batch=10, vocabulary=6, seed=4)
    for each in (model, other):
        each.logits_BVV[:, :, END] -= 4.0  # texts long enough to repeat themselves
    generated, plain = (
        decode(model, decoding, longest=9),
        decode(other, Decoding(beams=beams), longest=9),
    )
    assert not torch.equal(generated.score_B, plain.score_B)
    for row, logits_VV in enumerate(model.logits_BVV):
        logs = logits_VV.clone()
        logs[:, list(NEVER)] = -math.inf
        logs = logs.log_softmax(dim=1)
        hypotheses: list[tuple[list[int], float]] = [([], 0.0)]
        for _ in range(9):
            grown = []
            for tokens, total in hypotheses:
                if tokens and tokens[-1] == END:
                    grown.append((tokens, total))
                    continue
                for token in range(6):
                    repeats = naive_repeats(tokens, token, length) if len(tokens) >= length else 0
                    cost = (math.inf if penalty is None else repeats * penalty) if repeats else 0.0
                    grown.append(
                        (
                            [*tokens, token],
                            total + float(logs[tokens[-1] if tokens else PAD][token]) - cost,
                        )
                    )
            hypotheses = sorted(grown, key=lambda hypothesis: hypothesis[1], reverse=True)[:beams]
        tokens, total = hypotheses[0]
        if beams == 1:  # beams may tie: another order of the same bigrams has the same score
            words = [token for token in tokens if token != END]
            assert generated.ids_BT[row][generated.mask_BT[row]].tolist() == words
        assert float(generated.score_B[row]) == pytest.approx(total, abs=1e-4)


def test_blocked_trigrams_are_never_sampled() -> None:
    model = Bigrams(batch=3, vocabulary=5, seed=1)
    model.logits_BVV[:, :, END] = -20.0
    generated = decode(model, Decoding(samples=50, block_ngrams=3), longest=12)
    texts = [
        tuple(ids[mask].tolist())
        for ids, mask in zip(generated.ids_BT, generated.mask_BT, strict=True)
    ]
    assert max(map(len, texts)) > 6
    for tokens in texts:
        trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
        assert len(set(trigrams)) == len(trigrams)
    with raises(ConfigError, "conflict", "ngram_penalty"):
        Decoding(ngram_penalty=1.0)


def test_length_penalty_lengthens_texts() -> None:
    lengths = [
        int(
            decode(
                Bigrams(60, 7, 5), Decoding(beams=4, length_penalty=penalty), longest=10
            ).mask_BT.sum()
        )
        for penalty in (0.0, 1.0, 3.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_search_that_forbids_nothing_is_greedy_over_all_ids() -> None:
    best_B = Bigrams(9, 4, seed=4).first().argmax(dim=1)
    assert {*NEVER} & {*best_B.tolist()}
    found = search(
        Bigrams(9, 4, seed=4), Decoding(beams=1), max_tokens=1, end_id=END, pad_id=PAD, never=()
    )
    assert torch.equal(found.ended_B, best_B == END)
    assert torch.equal(found.ids_BT[~found.ended_B, 0], best_B[best_B != END])


@pytest.mark.parametrize(
    ("field", "value"), [("beams", 0), ("max_tokens", 0), ("length_penalty", -1.0)]
)
def test_decoding_rejects_values_out_of_range(field: str, value: Any) -> None:
    with raises(ConfigError, "out_of_range", field):
        Decoding(**{field: value})


def test_samples_follow_the_distribution() -> None:
    model = Bigrams(batch=2, vocabulary=5, seed=3)
    draws, longest = 20_000, 2
    generated = decode(model, Decoding(samples=draws), longest=longest)
    assert generated.ids_BT.shape == (2 * draws, longest)
    logs_BVV = model.logits_BVV.clone()
    logs_BVV[:, :, list(NEVER)] = -math.inf
    chance_BVV = logs_BVV.softmax(dim=2)
    for sample in range(2):
        own = slice(sample * draws, (sample + 1) * draws)
        texts = [
            tuple(ids_T[mask_T].tolist())
            for ids_T, mask_T in zip(generated.ids_BT[own], generated.mask_BT[own], strict=True)
        ]
        for first in (3, 4):
            expected = float(chance_BVV[sample, PAD, first] * chance_BVV[sample, first, END])
            assert texts.count((first,)) / draws == pytest.approx(expected, abs=0.015)
            expected = float(chance_BVV[sample, PAD, first] * chance_BVV[sample, first, 4])
            assert texts.count((first, 4)) / draws == pytest.approx(expected, abs=0.015)
        assert texts.count(()) / draws == pytest.approx(
            float(chance_BVV[sample, PAD, END]), abs=0.015
        )


def test_samples_follow_their_seed_and_have_their_log_probability() -> None:
    first, repeated, other = (
        decode(Bigrams(batch=3, vocabulary=7, seed=1), Decoding(samples=4, seed=seed), longest=5)
        for seed in (5, 5, 6)
    )
    assert torch.equal(first.ids_BT, repeated.ids_BT)
    assert first.ids_BT.shape != other.ids_BT.shape or not torch.equal(first.ids_BT, other.ids_BT)
    logs_BVV = Bigrams(batch=3, vocabulary=7, seed=1).logits_BVV.index_fill(
        2, torch.tensor(NEVER), -math.inf
    )
    logs_BVV = logs_BVV.log_softmax(dim=2)
    for row, (ids_T, mask_T, ended) in enumerate(
        zip(first.ids_BT, first.mask_BT, first.ended_B, strict=True)
    ):
        tokens = [PAD, *ids_T[mask_T].tolist(), *[END] * int(ended)]
        score = sum(float(logs_BVV[row // 4, a, b]) for a, b in itertools.pairwise(tokens))
        assert float(first.score_B[row]) == pytest.approx(score, rel=1e-4)


def test_sampling_excludes_beams_and_length_penalty() -> None:
    settings: dict[str, Any]
    for settings, code in (
        ({"samples": 2, "beams": 3}, "conflict"),
        ({"samples": 2, "length_penalty": 1.0}, "conflict"),
        ({"samples": -1}, "out_of_range"),
    ):
        with raises(ConfigError, code, "samples"):
            Decoding(**settings)
