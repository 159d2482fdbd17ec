"""Optional parts of batches: second views and texts, sentences and previous images."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises

from medvl.data.loading.collate import Collate
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.studies import prior_positions
from medvl.data.reports.sentences import sentence_spans, split_sentences
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import RandomSentence, TextPair, WholeText
from medvl.errors import ConfigError
from medvl.schema import Batch, Inputs, Sample

REPORT = (
    "1. The left lung is clear today. 2. There is a small right effusion.  ___. No "
    "pneumothorax\nis seen."
)
COUNT = 10
ALL = Inputs(second_image=True, second_text=True, sentences=True, prior_image=True)
OPTIONAL = (
    "second_image_BCHW",
    "second_ids_BT",
    "second_mask_BT",
    "sentence_BT",
    "prior_BCHW",
    "has_prior_B",
)


class MemorySource:
    """Noise images of one patient, with one report for all."""

    def __init__(self, label_names: tuple[str, ...] = ()) -> None:
        self.label_names = label_names
        self.fingerprint = hashlib.sha256(b"memory").hexdigest()

    def __len__(self) -> int:
        return COUNT

    def sample(self, position: int) -> Sample:
        return Sample(
            key=f"k{position}",
            corpus="c",
            split="train",
            patient="p",
            study="s",
            sections={"findings": REPORT},
        )

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        return np.random.default_rng(position).integers(0, 256, (40, 40), dtype=np.uint8)


class OrderedSource(MemorySource):
    """The same images as a series in time."""

    def sample(self, position: int) -> Sample:
        return dataclasses.replace(super().sample(position), order=position)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece([REPORT], vocab_size=60, min_frequency=1)


def open_it(tokenizer: Any, **changes: Any) -> Loader:
    settings: dict[str, Any] = {
        "source": OrderedSource(),
        "batch": 4,
        "image": ConVIRTAugmentation(size=32, flip="swap_text"),
        "text": RandomSentence(),
        "train": True,
        "seed": 7,
        "inputs": ALL,
    }
    settings |= changes
    return open_loader(settings.pop("source"), tokenizer=tokenizer, **settings)


def parts(batch: Batch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def assert_equal(left: Batch, right: Batch) -> None:
    for name, value in parts(left).items():
        other = parts(right)[name]
        assert (
            torch.equal(value.nan_to_num(9), other.nan_to_num(9))
            if torch.is_tensor(value)
            else value == other
        ), name


def test_a_loader_makes_only_the_declared_inputs(tokenizer: Tokenizer) -> None:
    plain = next(iter(open_it(tokenizer, inputs=None)))
    assert all(getattr(plain, name) is None for name in OPTIONAL)
    batch = next(iter(open_it(tokenizer)))
    assert all(getattr(batch, name) is not None for name in OPTIONAL)
    for name in ("keys", "texts"):  # optional parts leave the others as they are
        assert getattr(batch, name) == getattr(plain, name)
    assert torch.equal(batch.image_BCHW, plain.image_BCHW)
    moved = batch.to("cpu")
    assert_equal(moved, batch)


def test_second_views_differ_and_flip_with_the_text(tokenizer: Tokenizer) -> None:
    batch = next(iter(open_it(tokenizer, batch=8)))
    assert batch.second_image_BCHW is not None
    assert batch.second_image_BCHW.shape == batch.image_BCHW.shape
    assert all(
        not torch.equal(*views)
        for views in zip(batch.image_BCHW, batch.second_image_BCHW, strict=True)
    )
    loader = open_it(tokenizer)
    maker = loader.samples.maker
    for key in map(str, range(20)):
        views = maker.views(key, np.zeros((40, 40), np.uint8), 0, prior=np.ones((40, 40), np.uint8))
        assert views.second is not None
        assert views.prior is not None
        assert views.image.flipped == views.second.flipped == views.prior.flipped


def test_second_texts_are_drawn_on_their_own(tokenizer: Tokenizer) -> None:
    batch = next(iter(open_it(tokenizer, batch=8)))
    assert batch.second_ids_BT is not None
    assert batch.second_mask_BT is not None
    second = [
        tokenizer.decode(ids[mask])
        for ids, mask in zip(batch.second_ids_BT, batch.second_mask_BT, strict=True)
    ]
    first = [
        tokenizer.decode(ids[mask]) for ids, mask in zip(batch.ids_BT, batch.mask_BT, strict=True)
    ]
    assert first != second
    assert len(set(second)) > 1


def test_the_two_texts_of_a_pair_come_from_a_policy_each(tokenizer: Tokenizer) -> None:
    """Without an impression both would be the findings: the second text is then absent."""

    class Sections(OrderedSource):
        def sample(self, position: int) -> Sample:
            impression = {"impression": "No pneumothorax."} if position % 2 else {}
            return dataclasses.replace(
                super().sample(position), sections={"findings": REPORT, **impression}
            )

    text = TextPair(
        first=WholeText(sections=("impression",)), second=WholeText(sections=("findings",))
    )
    batch = next(
        iter(open_it(tokenizer, source=Sections(), text=text, inputs=Inputs(second_text=True)))
    )
    assert batch.has_second_text_B is not None
    assert batch.second_mask_BT is not None
    odd = [int(key[1:]) % 2 == 1 for key in batch.keys]
    assert batch.has_second_text_B.tolist() == odd
    longest = len(tokenizer([REPORT])[0][0])
    assert batch.second_mask_BT.sum(dim=1).tolist() == [longest if each else 2 for each in odd]
    assert [text == "No pneumothorax." for text in batch.texts] == odd


def test_every_token_has_the_number_of_its_sentence(tokenizer: Tokenizer) -> None:
    batch = next(
        iter(
            open_it(tokenizer, text=WholeText(), image=EvalTransform(size=32), train=False, batch=2)
        )
    )
    assert batch.sentence_BT is not None
    assert batch.sentence_BT.shape == batch.ids_BT.shape
    sentences = split_sentences(batch.texts[0])
    assert len(sentences) == 3
    for number, sentence in enumerate(sentences):
        expected = tokenizer([sentence])[0][0, 1:-1]
        assert torch.equal(batch.ids_BT[0][batch.sentence_BT[0] == number], expected)
    outside = batch.ids_BT[0][batch.sentence_BT[0] == -1]
    assert tokenizer.decode(outside).replace(" ", "") == "1.2.___."


def test_sentence_spans_are_the_places_of_the_sentences() -> None:
    spans = [REPORT[start:end] for start, end in sentence_spans(REPORT)]
    assert [" ".join(span.split()) for span in spans] == split_sentences(REPORT)
    assert sentence_spans("") == []


def test_the_prior_image_is_that_of_the_source(tokenizer: Tokenizer) -> None:
    batch = next(iter(open_it(tokenizer, image=EvalTransform(size=40), train=False, batch=3)))
    assert batch.prior_BCHW is not None
    assert batch.has_prior_B is not None
    assert batch.has_prior_B.tolist() == [False, True, True]
    assert not batch.prior_BCHW[0].any()
    assert torch.equal(batch.prior_BCHW[1:], batch.image_BCHW[:2])


def test_prior_images_are_those_of_the_latest_earlier_study(tokenizer: Tokenizer) -> None:
    """Frontal with frontal images, the same view first; a patient's studies need no consecutive
    numbers.
    """
    rows = [
        *(
            ("a", 0, "PA"),
            ("a", 0, "LATERAL"),
            ("a", 2, "AP"),
            ("a", 2, "PA"),
            ("a", 2, "LL"),
            ("a", 5, "PA"),
        ),
        *(("b", 3, "AP"), ("b", None, "AP"), ("b", 4, "LATERAL"), ("a", 6, "LATERAL")),
    ]
    expected = [-1, -1, 0, 0, 1, 3, -1, -1, -1, 4]

    class Rows(MemorySource):
        def sample(self, position: int) -> Sample:
            patient, order, view = rows[position]
            return dataclasses.replace(
                super().sample(position), patient=patient, order=order, view=view
            )

    assert prior_positions(Rows()).tolist() == expected

    class Named(Rows):
        def sample(self, position: int) -> Sample:
            extra = {5: {"prior": "k0"}, 6: {"prior": "elsewhere"}}.get(position, {})
            return dataclasses.replace(super().sample(position), extra=extra)

    expected[5] = 0
    assert prior_positions(Named()).tolist() == expected


def test_inputs_are_the_same_on_any_ranks_and_after_a_resume(tokenizer: Tokenizer) -> None:
    full = list(open_it(tokenizer))
    for batch, again in zip(full, open_it(tokenizer, workers=1), strict=True):
        assert_equal(again, batch)
    ranks = [list(open_it(tokenizer, rank=rank, world=2)) for rank in (0, 1)]
    for batch, *shares in zip(full, *ranks, strict=True):
        for name in ("image_BCHW", "second_image_BCHW", "prior_BCHW", "has_prior_B"):
            assert torch.equal(
                torch.cat([getattr(share, name) for share in shares]), getattr(batch, name)
            ), name
    first = open_it(tokenizer)
    next(iter(first))
    resumed = open_it(tokenizer)
    resumed.load_state_dict(first.state_dict())
    for batch, again in zip(full[1:], resumed, strict=True):
        assert_equal(again, batch)
    second_epoch = next(iter(resumed))
    assert not torch.equal(second_epoch.second_image_BCHW, full[0].second_image_BCHW)


def test_inputs_that_the_source_cannot_give_are_refused(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "unsupported", "prior_image"):
        open_it(tokenizer, source=MemorySource())
    with raises(ConfigError, "missing", "labels"):
        open_it(tokenizer, inputs=Inputs(labels=True))
    assert (
        open_it(tokenizer, source=MemorySource(("Edema",)), inputs=Inputs(labels=True)) is not None
    )
    shared: Any = OrderedSource()
    shared.image_keys = ["same"] * COUNT
    with raises(ConfigError, "conflict", "second_image"):
        open_it(tokenizer, source=shared, train=False)
    with raises(ConfigError, "wrong_type", "tokenizer"):
        Collate(lambda texts: (torch.zeros(1, 1), torch.zeros(1, 1)), Inputs(sentences=True))
    with raises(ConfigError, "unsupported", "sentences"):
        load_tokenizer("clip").sentence_ids(["Clear."], [[(0, 6)]])
