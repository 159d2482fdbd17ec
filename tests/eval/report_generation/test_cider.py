"""CIDEr and CIDEr-D against the definition written out, and values by hand."""

import math
from collections.abc import Sequence

import pytest

from medvl.eval.report_generation.metrics import Cider

REFERENCES = [text.split() for text in (
    "there is a small left effusion",
    "there is no effusion",
    "the heart is enlarged and there is a small left effusion",
    "no pneumothorax no effusion no edema",
)]  # fmt: skip
GENERATED = [text.split() for text in (
    "there is a small left effusion", "no effusion", "the heart is enlarged",
    "no edema no edema no edema no edema",
)]  # fmt: skip


def vector(words: Sequence[str], length: int) -> dict[tuple[str, ...], float]:
    """tf-idf of n-grams of one length: count times log(references / references with it)."""
    result: dict[tuple[str, ...], float] = {}
    for start in range(len(words) - length + 1):
        ngram = tuple(words[start : start + length])
        with_it = 0
        for reference in REFERENCES:
            with_it += any(
                tuple(reference[s : s + length]) == ngram
                for s in range(len(reference) - length + 1)
            )
        idf = math.log(len(REFERENCES)) - math.log(max(1.0, with_it))
        result[ngram] = result.get(ngram, 0.0) + idf
    return result


def naive(generated: Sequence[str], reference: Sequence[str], clipped: bool) -> float:
    total = 0.0
    for length in range(1, 5):
        ours, theirs = vector(generated, length), vector(reference, length)
        product = 0.0
        for ngram, weight in ours.items():
            other = theirs.get(ngram, 0.0)
            product += (min(weight, other) if clipped else weight) * other
        norm = math.sqrt(sum(w * w for w in ours.values())) * math.sqrt(
            sum(w * w for w in theirs.values())
        )
        total += product / norm if norm else 0.0
    bigrams = max(len(generated) - 1, 0) - max(len(reference) - 1, 0)
    return 10 * total / 4 * (math.exp(-(bigrams**2) / 72) if clipped else 1)


def test_scores_equal_the_definition() -> None:
    cider = Cider(REFERENCES)
    for generated in [*GENERATED, ["unseen", "words"], []]:
        for reference in REFERENCES:
            plain, clipped = cider.scores(generated, reference)
            assert plain == pytest.approx(naive(generated, reference, False), abs=1e-9)
            assert clipped == pytest.approx(naive(generated, reference, True), abs=1e-9)


def test_values_by_hand() -> None:
    cider = Cider(REFERENCES)
    assert cider.scores(REFERENCES[2], REFERENCES[2]) == pytest.approx((10, 10))
    assert cider.scores([], REFERENCES[0]) == (0, 0)
    # three words: no n-gram of four; "the heart is" of all weights of the reference
    plain, clipped = Cider([["a", "b"], ["c", "d"]]).scores(["a"], ["a", "b"])
    assert plain == pytest.approx(
        10 / 4 / math.sqrt(2)
    )  # one of two words of equal weight, nothing longer
    assert clipped == pytest.approx(plain * math.exp(-1 / 72))  # lengths differ by one bigram
    repeated = cider.scores(["no"] * 6, REFERENCES[3])
    assert repeated[0] > repeated[1]  # repetition is clipped
    assert Cider([["one"]]).scores(["one"], ["one"]) == (
        0,
        0,
    )  # a single reference gives every word the weight 0
