"""Heat maps, answers and reports of single images, and the models that are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import tiny_model, tiny_tokenizer
from PIL import Image

import medvl
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.grounding.heatmaps import phrase_maps
from medvl.models import VQA, Decoding, System
from medvl.schema import Batch

WIDE_HW = np.random.default_rng(0).integers(0, 256, (40, 60), dtype=np.uint8)


@pytest.fixture(scope="module")
def gloria() -> System:
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "projection_dim": 8,
    }
    return medvl.create_model(
        "gloria", tokenizer=tiny_tokenizer(), **settings, margin=0, encoder_size=None, fit="crop"
    )


@pytest.fixture(scope="module")
def vqa() -> VQA:
    model = VQA.on(tiny_model("m3ae", tiny_tokenizer()), ("yes", "no", "left"))
    for parameter in model.answer_head.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("maps", ["attention", "similarity"])
def test_heat_maps_are_those_of_the_evaluation(gloria: Any, maps: Any) -> None:
    map_HW = medvl.heatmap(gloria, Image.fromarray(WIDE_HW), "left effusion", maps=maps)
    assert map_HW.shape == (40, 60)
    assert map_HW.dtype == np.float32
    gloria.eval()
    [expected] = phrase_maps(
        gloria, gloria.transform(WIDE_HW), ["left effusion"], [(40, 60)], maps=maps
    )
    np.testing.assert_allclose(map_HW, expected.numpy(), rtol=1e-5)
    assert np.isnan(map_HW[:, :9]).all()  # cut off by the model's centre crop
    assert np.isfinite(map_HW[:, 10:50]).all()


def test_answers(vqa: VQA) -> None:
    one = medvl.answer(vqa, WIDE_HW, "is the heart enlarged")
    assert one in vqa.config.answers
    flipped = WIDE_HW[:, ::-1]
    both = medvl.answer(vqa, [WIDE_HW, flipped], "is the heart enlarged")
    assert both == [one, medvl.answer(vqa, flipped, "is the heart enlarged")]
    asked = ["is the heart enlarged", "where is the effusion"]
    assert medvl.answer(vqa, WIDE_HW, asked) == [one, medvl.answer(vqa, WIDE_HW, asked[1])]
    with raises(ConfigError, "mismatch", "questions"):
        medvl.answer(vqa, [WIDE_HW] * 3, asked)
    with raises(ConfigError, "empty", "questions"):
        medvl.answer(vqa, WIDE_HW, " ")


def test_heat_maps_of_questions(vqa: VQA) -> None:
    map_HW = medvl.heatmap(vqa, WIDE_HW, "is the heart enlarged")
    assert map_HW.shape == (40, 60)
    assert (map_HW[np.isfinite(map_HW)] >= 0).all()


@pytest.mark.parametrize("name", ["r2gen", "medvill"])
def test_reports(name: str) -> None:
    model: Any
    if name == "medvill":
        model = tiny_model("medvill", tiny_tokenizer(), objective="report").eval()
    else:
        sizes = {
            "width": 16,
            "image_encoder": "resnet_tiny",
            "image_size": 32,
            "layers": 1,
            "heads": 2,
        }
        more = {"intermediate": 24, "memory_heads": 4, "max_tokens": 20}
        model = medvl.create_model("r2gen", tokenizer=tiny_tokenizer(), **sizes, **more)
    decoding = Decoding(max_tokens=6)
    one = medvl.write_report(model, WIDE_HW, decoding=decoding)
    assert isinstance(one, str)
    assert medvl.write_report(model, [WIDE_HW, WIDE_HW], decoding=decoding) == [one, one]
    ids_BT = torch.zeros(1, 0, dtype=torch.int64)
    batch = Batch(keys=[""], image_BCHW=model.transform(WIDE_HW), ids_BT=ids_BT,
        mask_BT=ids_BT.bool(),
                  labels_BL=torch.zeros(1, 0), texts=[""])  # fmt: skip
    output = model.eval().write_reports(batch, decoding=decoding)
    assert one == model.tokenizer.decode(output.ids_BT[0][output.mask_BT[0]])


def test_models_that_cannot(gloria: System, vqa: VQA) -> None:
    with raises(ConfigError, "unsupported", "model", names="vqa_finetune"):
        medvl.answer(gloria, WIDE_HW, "where")
    with raises(ConfigError, "unsupported", "model", names="r2gen"):
        medvl.write_report(vqa, WIDE_HW)
    with raises(ConfigError, "unsupported", "model", names="gloria"):
        medvl.heatmap(tiny_model("vilt", tiny_tokenizer()), WIDE_HW, "heart")
    with raises(ConfigError, "wrong_type", "image"):
        medvl.heatmap(gloria, [WIDE_HW], "heart")
    with raises(ConfigError, "empty", "text"):
        medvl.heatmap(gloria, WIDE_HW, "")
    with raises(EvaluationError, "unknown_name", "maps"):
        medvl.heatmap(gloria, WIDE_HW, "heart", maps="gradient")
