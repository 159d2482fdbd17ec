"""Questions with the earlier image of the patient beside the current one."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeSource

import medvl
from medvl.data.annotations import DIFFERENCE, Question
from medvl.data.images.codecs import decode_image
from medvl.data.loading.loader import open_loader
from medvl.data.loading.studies import AnswerSource, QuestionSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.eval.vqa.controls import (
    EARLIER_REMOVED,
    EARLIER_SWAPPED,
    SWAPPED,
    ControlledQuestions,
    control_sources,
)
from medvl.eval.vqa.outside import export_questions
from medvl.schema import Inputs, Sample


class Shards(FakeSource):
    """Two patients with two dates, whose grey values are 10, 60, 110 and 160."""

    region_manifest = None
    folder = Path("shards")

    def __init__(self) -> None:
        parts: dict[str, Any] = {"corpus": "c", "split": "test", "study": "s"}
        question = Question(
            id="q", question="Changed?", answer="no", answer_type="closed", split="test",
            kind=DIFFERENCE,
        )  # fmt: skip
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
    names = (SWAPPED, EARLIER_REMOVED, EARLIER_SWAPPED)
    controls = control_sources(beside, shards, color=False, names=names)
    own = [[10, None], [60, 10], [110, None], [160, 110]]
    other = {10: {110, 160}, 60: {110, 160}, 110: {10, 60}, 160: {10, 60}}
    for name, control in controls.items():
        pairs = [[grey(control.pixels(n)), grey(control.prior_pixels(n))] for n in range(4)]
        assert [pair[0] == before[0] for pair, before in zip(pairs, own, strict=True)] == [
            name != SWAPPED
        ] * 4
        if name == EARLIER_REMOVED:
            assert [pair[1] for pair in pairs] == [None] * 4
        if name == EARLIER_SWAPPED:
            assert any(pair[1] is not None for pair in pairs)
            assert all(pair[1] in {None, *other[pair[0]]} for pair in pairs)
    assert tuple(controls) == names
    assert tuple(control_sources(alone, shards, color=False, names=names)) == (SWAPPED,)
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


def test_exported_questions_about_a_difference_have_both_images(tmp_path: Path) -> None:
    shards = cast(Any, Shards())
    for earlier in (True, False):
        source = QuestionSource(shards, "test", (), str, earlier=earlier)
        swapped = ControlledQuestions(source, image_of=[2, 3, 0, 1])
        folder = tmp_path / str(earlier)
        export_questions({"test": source, "image_swapped": swapped}, folder, "c")
        own, other = (
            pyarrow.parquet.read_table(folder / f"data/{name}-00000-of-00001.parquet").to_pylist()
            for name in ("test", "image_swapped")
        )
        if not earlier:
            assert all("earlier_image" not in row for row in (*own, *other))
            continue
        found = [
            [row["earlier_image"] and grey(decode_image(row["earlier_image"]["bytes"], color=False))
             for row in rows]
            for rows in (own, other)
        ]  # fmt: skip
        assert found == [[None, 10, None, 110], [None, 110, None, 10]]
        assert [row["prompt"].startswith("The first image") for row in own] == [False, True] * 2
        compile((folder / "utils.py").read_text(), "utils.py", "exec")


@torch.no_grad()
def test_a_writer_reads_the_earlier_image_of_questions_that_share_an_image() -> None:
    shards = cast(Any, Shards())
    asked = Question.from_json(shards.samples[1].extra["questions"][0])
    shards.samples[1].extra["questions"].append(dataclasses.replace(asked, id="q9").as_json())
    source = AnswerSource(shards, "test", earlier=True)
    torch.manual_seed(0)
    model: Any = medvl.create_model(
        "causal_lm", tokenizer=train_words(["Changed ? no"], min_frequency=1), prior=True,
        image_encoder="timm:test_vit", image_arguments={"depth": 1}, image_size=32, lora_language=0,
        language='{"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}',
    ).eval()  # fmt: skip
    loader = open_loader(
        source, batch=5, image=EvalTransform(size=32, fit="squash"),
        text=WholeText(sections=("answer",)), tokenizer=model.tokenizer, train=False, workers=0,
        inputs=model.inputs,
    )  # fmt: skip
    [batch] = loader
    assert batch.image_of_B is not None
    assert len(batch.image_BCHW) == 4
    read = model.read(batch)
    count = read.real_BN().sum(dim=1)
    has_B = batch.has_prior_B[batch.image_of_B]
    assert len(has_B) == 5
    assert len(set(count[has_B].tolist())) == len(set(count[~has_B].tolist())) == 1
    assert count[has_B][0] > count[~has_B][0]
    for row, image in enumerate(batch.image_of_B.tolist()):
        one = dataclasses.replace(
            batch, image_BCHW=batch.image_BCHW[[image]], prior_BCHW=batch.prior_BCHW[[image]],
            has_prior_B=batch.has_prior_B[[image]], image_of_B=None,
            prompt_ids_BT=batch.prompt_ids_BT[[row]], prompt_mask_BT=batch.prompt_mask_BT[[row]],
        )  # fmt: skip
        alone = model.read(one)
        torch.testing.assert_close(
            read.states_BND[row][read.real_BN()[row]], alone.states_BND[0][alone.real_BN()[0]]
        )
