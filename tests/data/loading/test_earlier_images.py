"""Questions with the earlier image of the patient beside the current one."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from helpers.eval_fakes import FakeSource

from medvl.data.annotations import Question
from medvl.data.loading.studies import QuestionSource, side_by_side
from medvl.eval.vqa.controls import ControlledQuestions
from medvl.schema import Sample


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


def halves(picture: np.ndarray) -> tuple[int, int]:
    left, right = np.unique(picture[:, :3]).tolist(), np.unique(picture[:, 3:]).tolist()
    assert len(left) == len(right) == 1
    return left[0], right[0]


def test_earlier_image_is_on_the_left_half_of_a_picture_of_the_same_size() -> None:
    shards = cast(Any, Shards())
    alone = QuestionSource(shards, "test", ("no",), str)
    beside = QuestionSource(shards, "test", ("no",), str, earlier=True)
    assert alone.fingerprint != beside.fingerprint
    assert alone.pixels(1).tolist() == shards.images[1].tolist()
    assert [beside.pixels(n).shape for n in range(4)] == [(8, 6)] * 4
    assert [halves(beside.pixels(n)) for n in range(4)] == [(0, 10), (10, 60), (0, 110), (110, 160)]
    swapped = ControlledQuestions(beside, image_of=[2, 3, 0, 1])
    assert halves(swapped.pixels(1)) == (110, 160)  # both dates are the other patient's


@pytest.mark.parametrize("shape", [(7, 5), (6, 9, 3)])
def test_pictures_have_the_size_of_the_current_image(shape: tuple[int, ...]) -> None:
    current = np.full(shape, 200, np.uint8)
    picture = side_by_side(np.zeros((4, 4, *shape[2:]), np.uint8), current)
    assert picture.shape == shape
    assert (picture[:, : shape[1] // 2] == 0).all()
    assert (picture[:, shape[1] // 2 :] == 200).all()
