"""VQA fine-tuning at another image size than pretraining, by both commands of the recipe's
docstring.
"""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.fusion_samples import make_batch, shaken, tiny_model, tiny_tokenizer
from helpers.vqa_corpora import write_rad_shards

import medvl
from medvl.errors import ConfigError
from medvl.models import VQA, DualStreamConfig, create_vqa, save
from medvl.models.downstream.dense import at_image_size, resize_positions
from medvl.models.downstream.vqa.decoder import DecoderConfig
from medvl.train import Run

RECIPE = Path(__file__).parents[3] / "recipes" / "vqa_finetune.py"
ANSWERS = ("yes", "no")
ENCODERS: dict[str, dict[str, Any]] = {
    "m3ae": {"image_encoder": "clip_vit_b16", "image_arguments": {"layers": 2, "width": 64}},
    "albef": {
        "image_encoder": "vit_b16",
        "image_arguments": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    },
}
POSITIONS = {
    "m3ae": {"image_encoder.backbone.positional_embedding"},
    "albef": {
        "image_encoder.backbone.pos_embed",
        "momentum.module.image_encoder.backbone.pos_embed",
    },
}
"""The published encoders, with fewer and narrower layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rad_shards(tmp_path_factory.mktemp("vqa"))


def test_positions_are_interpolated_as_published() -> None:
    """M3AE's adapt_position_encoding and ALBEF's interpolate_pos_embed: bicubic, the class
    token's row kept.
    """
    table_ND = torch.randn(1 + 18 * 18, 8, generator=torch.Generator().manual_seed(0))
    grid = table_ND[1:].reshape(1, 18, 18, 8).permute(0, 3, 1, 2)
    published = (
        F.interpolate(grid, size=(24, 24), mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)[0]
    )
    resized = resize_positions(table_ND, (18, 18), (24, 24))
    torch.testing.assert_close(resized, torch.cat([table_ND[:1], published]))
    torch.testing.assert_close(resize_positions(table_ND[None], (18, 18), (24, 24)), resized[None])
    assert resize_positions(table_ND[:5], (18, 18), (24, 24)).shape == (5, 8)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [("m3ae", 48, {}), ("albef", 32, {"head": "ranking", "optim": {"lr": 2e-5}})],
)
def test_both_published_commands_train_at_the_larger_size(
    name: str, size: int, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """288 to 384 pixels, and 256 to 384: here 48 to 64, and 32 to 48."""
    torch.manual_seed(0)
    start = shaken(tiny_model(name, tiny_tokenizer(), image_size=size, **ENCODERS[name])).eval()
    save(start, tmp_path)
    names = runpy.run_path(str(RECIPE))
    paper, larger = names["paper"], {48: 64, 32: 48}[size]
    assert (paper.data.image.size, paper.init_from) == (384, Path("runs/m3ae/best"))
    recipe = dataclasses.replace(
        paper,
        init_from=tmp_path,
        head=options.get("head", paper.head),
        decoder=DecoderConfig(layers=2, heads=2, intermediate=64),
        data=dataclasses.replace(
            paper.data, train=folder, valid=folder, valid_split="test", workers=0,
            image=dataclasses.replace(paper.data.image, size=larger),
        ),
        train=dataclasses.replace(paper.train, global_batch=4, precision="fp32"),
    )  # fmt: skip
    run: Run = names["prepare"](recipe)
    model, batch = run.model, next(iter(run.data.train))
    assert isinstance(model, VQA)
    assert batch.image_BCHW.shape[2:] == (larger, larger)
    assert model.transform.size == model.fusion_model.config.image_size == larger
    model.train()(batch).total.backward()
    state = model.fusion_model.state_dict()
    changed = {
        key for key, tensor in start.state_dict().items() if not torch.equal(tensor, state[key])
    }
    assert changed == POSITIONS[name]
    (tmp_path / "tuned").mkdir()
    save(model, tmp_path / "tuned")
    loaded = medvl.load(tmp_path / "tuned")
    assert torch.equal(loaded.eval().answer_logits(batch), model.eval().answer_logits(batch))


def test_pixel_decoder_and_positions_of_a_grid_belong_to_the_new_size(tmp_path: Path) -> None:
    model = tiny_model(
        "m3ae",
        tiny_tokenizer(),
        image_encoder="resnet_tiny",
        image_arguments={},
        image_positions=True,
        image_size=64,
    )
    larger: Any = at_image_size(model, 128)
    assert larger.mim_head.patches.grid == (4, 4)
    assert larger.mim_head.positions_ND.shape[0] == 17
    expected = resize_positions(model.state_dict()["image_input.positions"], (2, 2), (4, 4))
    assert torch.equal(larger.image_input.positions, expected)
    batch = make_batch(tiny_tokenizer(), image_BCHW=torch.zeros(6, 1, 128, 128, dtype=torch.uint8))
    larger(batch).total.backward()
    assert at_image_size(model, 64) is model


@pytest.mark.parametrize("name", ["m3ae", "arl", "m2i2"])
def test_only_the_head_of_pixels_is_new_where_cells_have_another_size(
    name: str, tmp_path: Path
) -> None:
    """Cells of 96 pixels' grid (3, 3) are 32 pixels wide, of 112 pixels' (4, 4) 28."""
    model: Any = tiny_model(
        name, tiny_tokenizer(), image_encoder="resnet_tiny", image_arguments={}, image_size=96
    )
    larger: Any = at_image_size(model, 112)
    old, new = model.state_dict(), larger.state_dict()
    head = {"mim_head.pixels.weight", "mim_head.pixels.bias"}
    assert {key for key in old if old[key].shape != new[key].shape} == head
    assert all(torch.equal(old[key], new[key]) for key in old.keys() - head)
    save(model, tmp_path)
    batch = make_batch(tiny_tokenizer(), image_BCHW=torch.zeros(6, 1, 112, 112, dtype=torch.uint8))
    assert (
        create_vqa(tmp_path, ANSWERS, fusion=None, image_size=112)
        .eval()
        .answer_logits(batch)
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(
    ("name", "settings"), [("medvill", {}), ("visualbert", {"image_positions": True})]
)
def test_numbers_of_cells_belong_to_one_size(name: str, settings: dict[str, bool]) -> None:
    model = tiny_model(name, tiny_tokenizer(), image_size=64, **settings)
    with raises(ConfigError, "unsupported", "image_size", names="64 pixels"):
        at_image_size(model, 128)


def test_dual_encoder_starts_and_other_tables(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dual = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=64,
        frozen_text_layers=0, projection_dim=8, tokenizer=tiny_tokenizer(),
    )  # fmt: skip
    save(dual, tmp_path)
    sizes = DualStreamConfig(
        image_arguments={}, width=24, layers=1, heads=2, intermediate=48, image_positions=True
    )
    model = create_vqa(tmp_path, ANSWERS, fusion=sizes, image_size=96)
    assert model.fusion_model.image_encoder.image_size == (96, 96)
    window = {"depths": (1, 1, 1, 1), "embed_dim": 12, "num_heads": (1, 1, 1, 1)}
    swin = tiny_model(
        "single_stream",
        None,
        image_encoder="timm:swin_tiny_patch4_window7_224",
        image_arguments=window,
        image_size=224,
    )
    with raises(ConfigError, "unsupported", "image_size"):
        at_image_size(swin, 96)
