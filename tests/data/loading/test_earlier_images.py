"""Questions with the earlier image of the patient beside the current one."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
from helpers.errors import raises
from helpers.eval_fakes import FakeSource

from medvl.data.annotations import Question
from medvl.data.loading.loader import open_loader
from medvl.data.loading.studies import QuestionSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.eval.vqa.controls import ControlledQuestions
from medvl.schema import Inputs, Sample


class Shards(FakeSource):
    """Two patients with two dates, whose grey values are 10, 60, 110 and 160."""

    region_manifest = None
    folder = Path("shards")

    def __init__(self) -> None:
        parts: dict[str, Any] = {"corpus": "c", "split": "test", "study": "s"}
        question = Question(
            id="q", question="Changed?", answer="no", answer_type="closed", split="test"
        )
        samples = [
            Sample(
                key=f"k{n}",
                patient=f"p{n // 2}",
                extra={
                    "questions": [Question(**{**vars_of(question), "id": f"q{n}"}).as_json()],
                    **({"prior": f"k{n - 1}"} if n % 2 else {}),
                },
                **parts,
            )
            for n in range(4)
        ]
        pixels = [np.full((8, 6), 10 + 50 * n, np.uint8) for n in range(4)]
        super().__init__(samples, pixels, ())

    def key(self, position: int) -> str:
        return self.samples[position].key


def vars_of(question: Question) -> dict[str, Any]:
    return question.as_json()


def grey(pixels: np.ndarray | None) -> int | None:
    return None if pixels is None else int(np.unique(pixels).item())


def test_questions_have_the_earlier_image_of_their_patient() -> None:
    shards = cast(Any, Shards())
    alone = QuestionSource(shards, "test", ("no",), str)
    beside = QuestionSource(shards, "test", ("no",), str, earlier=True)
    assert alone.fingerprint != beside.fingerprint
    assert [grey(alone.prior_pixels(n)) for n in range(4)] == [None] * 4
    assert [grey(beside.pixels(n)) for n in range(4)] == [10, 60, 110, 160]
    assert [grey(beside.prior_pixels(n)) for n in range(4)] == [None, 10, None, 110]
    swapped = ControlledQuestions(beside, image_of=[2, 3, 0, 1])
    assert (grey(swapped.pixels(1)), grey(swapped.prior_pixels(1))) == (160, 110)
    mean = ControlledQuestions(beside, pixels=np.zeros((4, 4), np.uint8))
    assert mean.prior_pixels(1) is None
    shards.samples = shards.samples[::2]
    with raises(ConfigError, "unsupported", "earlier_image"):
        QuestionSource(shards, "test", ("no",), str, earlier=True)


def test_loader_reads_two_images_once_for_the_questions_that_share_them() -> None:
    shards = cast(Any, Shards())
    asked = Question.from_json(shards.samples[1].extra["questions"][0])
    shards.samples[1].extra["questions"].append(dataclasses.replace(asked, id="q9").as_json())
    source = QuestionSource(shards, "test", ("no",), str, earlier=True)
    loader = open_loader(
        source, batch=5, image=EvalTransform(size=16, fit="squash"),
        text=WholeText(sections=("question",)), tokenizer=train_words(["Changed ?"], min_frequency=1),
        train=False, workers=0, inputs=Inputs(prior_image=True),
    )  # fmt: skip
    [batch] = loader
    assert batch.image_of_B.tolist() == [0, 1, 1, 2, 3]
    assert batch.image_BCHW[:, 0, 0, 0].tolist() == [10, 60, 110, 160]
    assert batch.prior_BCHW[:, 0, 0, 0].tolist() == [0, 10, 0, 110]
    assert batch.has_prior_B.tolist() == [False, True, False, True]
