"""Images of several requests in one forward pass: each gets the answer of its own image, and its
own error.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.served import PLENTY, client, png, post, served, tiny_convirt
from torch import Tensor

from medvl.errors import ConfigError, EvaluationError
from medvl.serve import ServeConfig
from medvl.serve.engine import Engine, Pending


def answers(
    images: list[Any],
    encode: Any,
    most: int = 16,
    finish: Any = lambda row: row,
    wait: float = 0.004,
) -> list[Any]:
    """Return the result or error of each image, all asked for at once."""

    async def run() -> list[Any]:
        engine, pending = Engine(100, 1000), Pending(encode, most, wait)
        try:
            return await asyncio.gather(
                *(engine.together(pending, image, finish) for image in images),
                return_exceptions=True,
            )
        finally:
            engine.close()

    return asyncio.run(run())


def test_images_of_several_requests_are_encoded_in_one_call() -> None:
    calls: list[list[int]] = []

    def encode(images: list[int]) -> list[int]:
        calls.append(list(images))
        return [image * 10 for image in images]

    assert answers(list(range(8)), encode, finish=lambda row: row + 1) == [
        image * 10 + 1 for image in range(8)
    ]
    assert calls == [list(range(8))]
    calls.clear()
    assert answers(list(range(8)), encode, most=3) == [image * 10 for image in range(8)]
    assert calls == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_bad_image_does_not_fail_the_others() -> None:
    def encode(images: list[int]) -> list[int]:
        if 3 in images:
            raise EvaluationError("the third", "nonfinite")
        return images

    def finish(row: int) -> int:
        if row == 5:
            raise ConfigError("the fifth", "unknown_name")
        return row

    results = answers(list(range(8)), encode, finish=finish)
    assert [each for each in results if isinstance(each, int)] == [0, 1, 2, 4, 6, 7]
    assert [type(results[3]), type(results[5])] == [EvaluationError, ConfigError]


def test_images_that_come_while_the_model_is_busy_go_together() -> None:
    calls: list[int] = []

    def encode(images: list[int]) -> list[int]:
        calls.append(len(images))
        time.sleep(0.05)
        return images

    async def run() -> None:
        engine, pending = Engine(100, 1000), Pending(encode, 16, 0.0)

        async def late(number: int) -> int:
            await asyncio.sleep(0.02 if number else 0)
            return await engine.together(pending, number, lambda row: row)

        assert await asyncio.gather(*(late(number) for number in range(7))) == list(range(7))
        engine.close()

    asyncio.run(run())
    assert calls == [1, 6]


def test_request_that_is_gone_does_not_stop_the_others() -> None:
    async def run() -> None:
        engine, pending = Engine(100, 1000), Pending(lambda images: images, 16, 0.01)
        tasks = [
            asyncio.create_task(engine.together(pending, number, lambda row: row))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert [await tasks[0], await tasks[2]] == [0, 2]
        engine.close()
        with pytest.raises(RuntimeError):  # nobody waits forever for a server that ends
            await engine.together(pending, 4, lambda row: row)

    asyncio.run(run())


def test_answers_of_a_batch_are_those_of_single_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six images, one of them damaged, in grey and in color, with findings and a sentence."""
    import cv2
    import numpy as np

    model = tiny_convirt()
    sizes: list[int] = []
    whole = model.embed_images

    def embed_images(image_BCHW: Tensor) -> Any:
        sizes.append(len(image_BCHW))
        return whole(image_BCHW)

    color = cv2.imencode(
        ".png", np.random.default_rng(9).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    )[1].tobytes()
    images = [png(seed) for seed in range(4)] + [color, png(7)[:90]]
    texts = ["Edema", "Large left effusion"]
    single = client([served(model)], config=ServeConfig(requests_per_minute=100_000, batch=1))
    expected = [post(single, "scores", data, texts) for data in images]
    monkeypatch.setattr(model, "embed_images", embed_images)
    config = ServeConfig(requests_per_minute=100_000, batch_wait=0.5)
    with client([served(model)], config=config) as together, ThreadPoolExecutor(6) as threads:
        sizes.clear()
        found = list(threads.map(lambda data: post(together, "scores", data, texts), images))
    assert sorted(sizes) == [1, 4]
    assert (
        [each.status_code for each in found]
        == [each.status_code for each in expected]
        == [200] * 5 + [422]
    )
    for ours, alone in zip(found[:5], expected[:5], strict=True):
        for score, other in zip(
            *(each.json()["models"][0]["result"] for each in (ours, alone)), strict=True
        ):
            assert score["text"] == other["text"]
            assert score["score"] == pytest.approx(other["score"], abs=1e-5)
    assert len({str(each.json()) for each in found}) == 6


def test_weights_that_give_nan_are_an_error_of_each_request() -> None:
    model = tiny_convirt()
    with torch.no_grad():
        next(model.image_encoder.parameters()).fill_(torch.nan)
    result = post(client([served(model)], config=PLENTY), "scores", png()).json()["models"][0]
    assert result["error"]["code"] == "nonfinite"


@pytest.mark.parametrize(
    ("field", "value"), [("batch", 0), ("batch_wait", -0.1), ("batch_wait", 2.0)]
)
def test_settings_are_checked(field: str, value: float) -> None:
    with raises(ConfigError, "out_of_range", field):
        ServeConfig(**{field: value})
