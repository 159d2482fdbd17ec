"""LViT: its network against the released one's arithmetic, its sizes, its text, and its
unlabelled images.
"""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from torch import Tensor, nn

import medvl
from medvl import losses
from medvl.cli import main as cli
from medvl.data import (
    Deidentifier,
    EvalTransform,
    LViTAugmentation,
    OtherTexts,
    Plan,
    Record,
    ShardOptions,
    ShardRun,
    ShardSource,
    encode_runs,
    train_wordpiece,
    write_shards,
)
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.loading.dense_targets import DenseBatch
from medvl.errors import ConfigError
from medvl.eval import mask_segmentation, read_results
from medvl.eval.core.open import open_for_evaluation
from medvl.models import LViT, load, save, train_manifests
from medvl.models.downstream.lvit import (
    Block,
    LViTNetwork,
    PixelAttention,
    PseudoLabels,
    References,
    UNet,
    turn_maps,
)
from medvl.schema import Sample
from medvl.train import DenseDataConfig, open_dense

TEXTS = [
    "bilateral infection, two areas, upper left lung",
    "one area, lower right lung",
    "one area",
    "no area",
]
SIZE = 32
TOKENIZER = train_wordpiece(TEXTS, vocab_size=200, min_frequency=1)
TINY: dict[str, Any] = {
    "text_encoder": "tiny_bert",
    "text_arguments": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "image_size": SIZE,
    "width": 8,
}


def make(**settings: Any) -> LViT:
    torch.manual_seed(0)
    network = {**settings}
    reads = network.get("text", "first_level") != "off" and network.get("network", "lvit") == "lvit"
    model = medvl.create_model(
        "lvit",
        tokenizer=TOKENIZER if reads else None,
        **{"labels": ("Infection",), **TINY, **settings},
    )
    assert isinstance(model, LViT)
    return model


def batch_of(texts: list[str] = TEXTS, **fields: Any) -> DenseBatch:
    torch.manual_seed(1)
    ids_BT, mask_BT = TOKENIZER(texts)
    count = len(texts)
    mask = torch.zeros(count, 1, SIZE, SIZE, dtype=torch.uint8)
    mask[:, :, 8:20, 4:16] = 255
    defaults: dict[str, Any] = {
        "image_BCHW": torch.randint(0, 256, (count, 1, SIZE, SIZE), dtype=torch.uint8)
    }
    return DenseBatch(
        keys=[str(n) for n in range(count)], ids_BT=ids_BT, mask_BT=mask_BT,
        labels_BL=torch.zeros(count, 0), texts=texts, masks_BLhw=mask, **{**defaults, **fields},
    )  # fmt: skip


# Network


def test_published_sizes() -> None:
    """29.9 M parameters learn; the released code has 10.0 M more that it never uses, 39.9 M as
    published.
    """
    network = LViTNetwork(3, 1, 64, 224, (10, 768))
    unused = 0
    for level, (dim, patch) in enumerate(zip((64, 128, 256, 512), (16, 8, 4, 2), strict=True)):
        narrow, widen, spread = (
            (3 * a * b + 3 * b) for a, b in ((dim, dim // 2), (2 * dim, dim), (10, 196))
        )
        unused += 2 * (
            dim + 1 + 2 * dim
        )  # a classifier and a norm in each of the eight Transformers
        unused += dim * dim * patch**2 + dim + 196 * dim  # embeddings of the four on the way up
        unused += (
            narrow * (1 if level else 2)
            + widen * (1 if level < 3 else 2)
            + spread * (2 if level else 1)
        )
        unused += (
            2 * dim**2 + 31 + 2 * (dim**2 + dim)
        )  # a pixel attention, and a layer of each of two
    learned = sum(parameter.numel() for parameter in network.parameters())
    assert (learned, learned + unused) == (29_908_033, 39_933_345)
    assert sum(parameter.numel() for parameter in UNet(3, 1, 64).parameters()) == 14_751_873
    products = (
        8 * 2 * 196**2 * 240
    )  # attention of two Transformers at each of the levels, whose mean width is 240
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
            part, level = name.split(".")[0], int(next(filter(str.isdigit, name), "0"))
            side = {
                "enter": 224,
                "leave": 224,
                "down": 112 >> level,
                "up": 224 >> level,
                "reconstruct": 224 >> level,
            }
            places = 64 if "spread" in name else 10 if part == "text" else side.get(part, 14) ** 2
            products += module.weight.numel() * places
    assert 2 * products / 1e9 == pytest.approx(
        54.2, abs=0.05
    )  # with the published reconstruction on pixels


def test_pixel_attention_and_block_equal_their_formulas() -> None:
    torch.manual_seed(0)
    plam, x = PixelAttention(4), torch.randn(2, 4, 3, 5)
    got = plam(x)
    first, _, second = plam.weigh
    for b, i, j in ((0, 0, 0), (1, 2, 4), (0, 1, 3)):
        mean = F.relu(plam.mean.weight[:, :, 0, 0] @ x[b, :, i, j]).mean()
        most = F.relu(plam.maximum.weight[:, :, 0, 0] @ x[b, :, i, j]).max()
        weight = second(F.relu(first(torch.stack([mean, most, mean + most]))))
        torch.testing.assert_close(got[b, :, i, j], weight * x[b, :, i, j])
    block, tokens = Block(16).eval(), torch.randn(2, 6, 16)
    query, key, value = block.qkv(block.norm1(tokens)).chunk(3, dim=2)
    heads = []
    for h in range(8):
        q, k, v = (each[:, :, 2 * h : 2 * h + 2] for each in (query, key, value))
        heads.append((q @ k.mT / 2**0.5).softmax(dim=2) @ v)
    attended = tokens + block.project(torch.cat(heads, dim=2))
    enter, _, _, leave, _, _ = block.mlp
    expected = attended + F.gelu(leave(F.gelu(enter(block.norm2(attended)))))
    torch.testing.assert_close(block(tokens), expected)


def test_reconstruction_on_tokens_equals_that_on_pixels() -> None:
    """In training mode too: every token has equally many pixels, so that their statistics are
    the same.
    """
    torch.manual_seed(0)
    network = LViTNetwork(3, 1, 8, SIZE, None)
    layers, cells = network.reconstruct[0], torch.randn(2, 8, 2, 2)
    pixels = layers(F.interpolate(cells, scale_factor=16))
    torch.testing.assert_close(F.interpolate(layers(cells), scale_factor=16), pixels)


@pytest.mark.parametrize(
    "settings", [{}, {"text": "off"}, {"network": "unet"}, {"frozen_text": False}]
)
def test_every_parameter_learns(settings: dict[str, Any]) -> None:
    model = make(**settings)
    model.train()(batch_of()).total.backward()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all(name.startswith("text_encoder.") for name in frozen)
    assert bool(frozen) == (not settings)
    without = [
        name for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]  # fmt: skip
    # The pooler is not part of the tokens; keys have no bias gradient; a bias before batch
    # normalisation cancels.
    assert all("pooler" in name or name.endswith("bias") for name in without)


# Text


def test_words_are_means_of_tokens_and_the_text_reaches_every_pixel() -> None:
    model = make().eval()
    batch = batch_of()
    seen: dict[str, Tensor] = {}
    model.network.register_forward_pre_hook(lambda _, inputs: seen.update(words=inputs[1]))
    logits = model.mask_logits(batch)
    assert model.text_encoder is not None
    tokens = model.text_encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
    word_BT = TOKENIZER.word_ids(batch.ids_BT, batch.mask_BT)
    for row in range(4):
        for word in range(10):
            mine = tokens[row][word_BT[row] == word]
            expected = mine.mean(dim=0) if len(mine) else torch.zeros(32)
            torch.testing.assert_close(seen["words"][row, word], expected)
    other = model.mask_logits(
        dataclasses.replace(batch, **vars_of(batch_of(TEXTS[::-1]), "ids_BT", "mask_BT"))
    )
    assert ((logits - other)[0].abs() > 0).float().mean() > 0.9
    nothing = model.mask_logits(
        dataclasses.replace(batch, has_text_B=torch.zeros(4, dtype=torch.bool))
    )
    assert not seen["words"].any()
    assert not torch.equal(nothing, logits)


def vars_of(batch: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in names}


def test_padding_and_longer_texts() -> None:
    model = make(words=4).eval()
    alone = model.mask_logits(batch_of([TEXTS[2]]))
    batch = batch_of([TEXTS[2], TEXTS[0]])
    image = batch_of([TEXTS[2]]).image_BCHW
    torch.testing.assert_close(
        model.mask_logits(dataclasses.replace(batch, image_BCHW=image.expand(2, -1, -1, -1)))[:1],
        alone,
    )
    long = batch_of([TEXTS[0], TEXTS[0] + " and more"])
    long.image_BCHW = image.expand(2, -1, -1, -1)
    mask = long.mask_BT.clone()
    first, second = model.mask_logits(long)
    assert mask.sum() > 12
    assert not torch.equal(
        first, second
    )  # the frozen encoder reads all words, the network the first four


@pytest.mark.parametrize(
    "settings", [{"words": 24, "image_size": 48}, {"text": "off"}, {"network": "unet"}]
)
def test_checkpoints_keep_sizes_and_options(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make(**settings).eval()
    save(model, tmp_path)
    again = load(tmp_path)
    assert isinstance(again, LViT)
    batch = batch_of()
    batch.image_BCHW = torch.randint(0, 256, (4, 3, *model.grid), dtype=torch.uint8)
    assert torch.equal(model.mask_logits(batch), again.mask_logits(batch))
    (map_LHW, *_) = again.maps(batch, [(50, 70)] * 4)
    assert map_LHW.shape == (1, 50, 70)


def test_labelled_batches_have_the_published_loss_in_both_precisions() -> None:
    model, batch = make(), batch_of()
    assert batch.masks_BLhw is not None
    loss = model.eval()(batch)
    expected = losses.lvit(model.mask_logits(batch).sigmoid(), (batch.masks_BLhw > 127).float())
    torch.testing.assert_close(loss.total, expected)
    assert (
        0.5 * 0.69 + 0.2 < loss.total.item() < 1.2
    )  # half of ln 2, and of a Dice loss between random and full masks
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch).total.item() == pytest.approx(expected.item(), abs=0.05)


def test_settings_are_checked() -> None:
    for settings, field in (
        ({"image_size": 40}, "image_size"),
        ({"width": 12}, "width"),
        ({"beta": 2}, "beta"),
    ):
        with raises(ConfigError, "out_of_range", field):
            make(**settings)
    with raises(ConfigError, "unknown_name", "text"):
        make(text="all")
    with raises(ConfigError, "missing", "tokenizer"):
        medvl.create_model("lvit", labels=("A",), **TINY)


# Unlabelled images


TURN = torch.tensor([[-1.0, 0], [0, 1]])


def test_pseudo_labels_are_moving_averages_in_the_upright_frame() -> None:
    labels = PseudoLabels(2, 1, 4, beta=0.75)
    first, second = torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 4)
    turns = torch.stack([TURN, torch.eye(2)])
    got = labels.update(first, torch.tensor([1, -1]), turns)
    torch.testing.assert_close(got[0], first[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(labels.map_MLHW[1].float(), first[0].flip(2), atol=1e-3, rtol=0)
    got = labels.update(second, torch.tensor([1, 0]), None)
    torch.testing.assert_close(
        got[0], 0.75 * first[0].flip(2) + 0.25 * second[0], atol=1e-3, rtol=0
    )
    torch.testing.assert_close(got[1], second[1], atol=1e-3, rtol=0)


def test_pixels_outside_of_a_rotated_view_keep_their_pseudo_label() -> None:
    labels = PseudoLabels(1, 1, 16, beta=0.5)
    ones = torch.ones(1, 1, 16, 16)
    number = torch.tensor([0])
    labels.update(ones, number, None)
    turn = torch.tensor([[[0.8, -0.6], [0.6, 0.8]]])
    labels.update(ones * 0, number, turn)
    values = labels.map_MLHW[0, 0]
    assert values[0, 0] == 1
    assert values[8, 8] == 0.5
    assert turn_maps(turn_maps(ones, turn), turn.mT)[0, 0, 8, 8].item() == pytest.approx(1)


def test_references_hold_the_newest_labelled_images_and_the_nearest_text_is_taken() -> None:
    references = References(2, 3, 1, 2)
    assert not references.nearest(torch.eye(3)).any()
    masks = torch.stack([torch.full((1, 2, 2), float(n % 2)) for n in range(3)])
    references.enter(torch.eye(3), masks, torch.tensor([True, True, False]))
    assert references.filled_R.all()
    assert [bool(mask.any()) for mask in references.nearest(torch.eye(3) * 5)[:2]] == [False, True]
    references.enter(torch.eye(3), masks, torch.tensor([False, False, True]))
    torch.testing.assert_close(references.text_RD, torch.stack([torch.eye(3)[2], torch.eye(3)[0]]))


def test_pseudo_labels_and_references_are_exact_under_autocast() -> None:
    """In 16 bits, a map that is not turned changed by 0.3, and of 14 similar texts, not the most
    similar was taken.
    """
    torch.manual_seed(0)
    labels, references, map_BLHW = (
        PseudoLabels(1, 1, 56, beta=0.5),
        References(14, 96, 1, 2),
        torch.rand(1, 1, 56, 56),
    )
    text_RD = 1 + 0.15 * torch.randn(14, 96)
    references.enter(
        text_RD, torch.arange(14.0)[:, None, None, None].expand(-1, 1, 2, 2), torch.ones(14) > 0
    )
    query_BD = 1 + 0.15 * torch.randn(14, 96)
    expected = references.nearest(query_BD)
    with torch.autocast("cpu", torch.bfloat16):
        updated_BLHW = labels.update(map_BLHW, torch.tensor([0]), None)
        assert torch.equal(references.nearest(query_BD), expected)
    torch.testing.assert_close(updated_BLHW, map_BLHW, atol=1e-3, rtol=0)


def test_unlabelled_images_learn_from_pseudo_labels_and_references() -> None:
    model = make(unlabelled=2, labelled_steps=1, words=12).train()
    unlabelled = torch.tensor([-1, 0, -1, 1])
    turns = torch.stack([torch.eye(2), TURN, torch.eye(2), torch.eye(2)])
    batch = batch_of(unlabelled_B=unlabelled, turn_B22=turns)
    assert batch.masks_BLhw is not None
    batch.masks_BLhw[1::2] = 255  # must not be used
    labelled = batch.rows([0, 2])
    model.before_step(0)
    torch.manual_seed(3)
    early = model(batch)
    assert model.pseudo_labels is not None
    assert model.references is not None
    assert not model.pseudo_labels.known_M.any()
    assert early.terms["lv"].item() == 0
    assert int(model.references.filled_R.sum()) == 2
    assert labelled.masks_BLhw is not None
    model.before_step(1)
    prob: list[Tensor] = []
    model.network.register_forward_hook(
        lambda _, inputs, output: prob.append(output.detach().sigmoid())
    )
    late = model(batch)
    assert model.pseudo_labels.known_M[:2].all()
    mask = (batch.masks_BLhw > 127).float()
    mask[1::2] = (prob[-1][1::2] >= 0.5).float()  # the first prediction is the pseudo label
    torch.testing.assert_close(late.terms["lvit"], losses.lvit(prob[-1], mask), atol=2e-3, rtol=0)
    reference = (labelled.masks_BLhw > 127).float()[:1]
    expected = losses.contrastive_mask(prob[-1][1::2], reference.expand(2, -1, -1, -1)).mean()
    torch.testing.assert_close(late.terms["lv"], expected)
    torch.testing.assert_close(late.total, late.terms["lvit"] + 0.1 * late.terms["lv"])
    late.total.backward()
    only = model(batch_of(unlabelled_B=torch.tensor([0, 1, 0, 1]), turn_B22=turns))
    assert torch.isfinite(only.total)
    assert make(unlabelled=2, text="off").references is None


# Training and evaluation


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise whose text alone names the bright half that the mask covers."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("halves")
    deid, records = Deidentifier(b"0123456789abcdef"), []
    for number in range(24):
        left = number % 2 == 0
        mask = np.zeros((64, 64), np.bool_)
        mask[:, slice(0, 32) if left else slice(32, 64)] = True
        path = folder / f"{number}.png"
        cv2.imwrite(str(path), rng.integers(0, 255, (64, 64), dtype=np.uint8))
        sample = Sample(
            key=f"k-{number:03d}", corpus="halves", split="train" if number < 16 else "validate",
            patient=deid.patient(number), study=f"s{number}", image=path,
            sections={"description": "the left half" if left else "the right half"},
            extra={"masks": [{"label": "Half", "runs": encode_runs(mask)}], "image_width": 64,
            "image_height": 64},
        )  # fmt: skip
        records.append(Record(sample))
    plan = Plan("halves", records, (), RowCounts())
    write_shards(
        plan, deid, ShardRun(out=folder / "shards", workers=1), ShardOptions(short_side=64)
    )
    return folder / "shards"


class ReadsHalf:
    """A model that marks the half that the text names, and everything where it has no text."""

    training = False
    config = type("Config", (), {"labels": ("Half",)})
    device = torch.device("cpu")

    def modules(self) -> list[Any]:
        return []

    def maps(self, batch: Any, sizes: Any) -> list[Tensor]:
        sides = torch.arange(64).expand(64, 64) < 32
        planes = [
            sides if "left" in text else ~sides if text else sides | True for text in batch.texts
        ]
        return [plane.float()[None] for plane in planes]


def test_evaluation_with_other_texts(shards: Path) -> None:
    source = ShardSource(shards / "validate")

    def read(source: Any) -> Any:
        return open_for_evaluation(source, EvalTransform(size=SIZE), TOKENIZER, batch=3, workers=0)

    model: Any = ReadsHalf()
    others: Any = {name: read(OtherTexts(source, name)) for name in ("none", "others")}
    results = mask_segmentation(model, read(source), other_texts=others, resamples=20).results
    sides = ["left" in source.sample(place).sections["description"] for place in range(8)]
    same = np.mean([sides[place] == sides[(place + 4) % 8] for place in range(8)])
    values = {row.subgroup: row.value for row in results.rows if row.metric == "dice"}
    assert values == pytest.approx({"": 1, "none": 2 / 3, "others": same})
    gains = {row.subgroup: row.value for row in results.rows if row.metric == "dice_gain"}
    assert gains == pytest.approx({"none": 1 / 3, "others": 1 - same})
    assert results.row("dice_pooled", "Half").value == 1


def test_command_shows_dice_with_other_texts(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best").mkdir()
    save(make(labels=("Half",)).eval(), tmp_path / "best")
    command = [
        "eval",
        "segmentation",
        "--checkpoint",
        str(tmp_path / "best"),
        "--data",
        str(shards / "validate"),
    ]
    cli.main(
        [
            *command,
            "--workers",
            "0",
            "--resamples",
            "20",
            "--out",
            str(tmp_path / "out"),
            "--empty",
            "lvit",
        ]
    )
    assert "Half (texts of other images)" in capsys.readouterr().out
    assert {row.subgroup for row in read_results(tmp_path / "out").rows} == {
        "",
        "no text",
        "texts of other images",
    }
    assert "With other texts" in (tmp_path / "out" / "index.html").read_text()


def test_augmentations_must_fit_the_model(shards: Path) -> None:
    data = DenseDataConfig(train=shards / "train", valid=shards / "validate", workers=0)
    assert data.names("masks") == ("Half",)
    model = make(labels=("Half",))
    with raises(ConfigError, "mismatch", "data.image"):
        open_dense(
            dataclasses.replace(data, image=LViTAugmentation(size=64)), model, "masks", batch=8
        )
    opened = open_dense(
        dataclasses.replace(data, image=LViTAugmentation(size=SIZE)), model, "masks", batch=8
    )
    batch = next(iter(opened.train))
    assert set(batch.texts) <= {"the left half", "the right half"}
    assert torch.isfinite(model(batch).total)


def test_unlabelled_images_are_those_outside_of_the_fraction(shards: Path) -> None:
    folder = shards
    data = DenseDataConfig(
        train=folder / "train", valid=folder / "validate", workers=0, fraction=0.25,
        unlabelled=True,
    )  # fmt: skip
    assert data.unlabelled_images("masks") == 12
    opened = open_dense(data, make(labels=("Half",)), "masks", batch=16)
    (batch,) = opened.train
    assert isinstance(batch, DenseBatch)
    assert batch.unlabelled_B is not None
    assert batch.masks_BLhw is not None
    assert sorted(batch.unlabelled_B.tolist()) == [-1] * 4 + list(range(12))
    assert (batch.masks_BLhw.flatten(1).any(dim=1) == (batch.unlabelled_B < 0)).all()
    assert opened.described["data"]["train"]["unlabelled"] == 12
    assert opened.valid is not None
    assert next(iter(opened.valid)).unlabelled_B is None
    with raises(ConfigError, "conflict", "unlabelled"):
        dataclasses.replace(data, fraction=1.0)


def test_recipe_trains_and_starts_from_a_u_net(shards: Path, tmp_path: Path) -> None:
    names = runpy.run_path(str(Path(__file__).parents[3] / "recipes" / "lvit_qata.py"))
    tiny = names["PRESETS"]["tiny"]
    TOKENIZER.save(tmp_path / "vocab")
    data = dataclasses.replace(
        tiny.data, train=shards / "train", valid=shards / "validate", workers=0, valid_batch=8,
        fraction=0.5, image=LViTAugmentation(size=SIZE), unlabelled=True,
    )  # fmt: skip
    settings = dataclasses.replace(
        tiny,
        model=dataclasses.replace(
            tiny.model, labels=("Half",), image_size=SIZE, text_arguments=TINY["text_arguments"]
        ),
        tokenizer=tmp_path / "vocab",
        data=data,
        train=dataclasses.replace(
            tiny.train,
            run_dir=tmp_path / "unet",
            epochs=1,
            global_batch=8,
            tensorboard=False,
            num_threads=1,
        ),
    )
    unet = dataclasses.replace(settings, model=dataclasses.replace(settings.model, network="unet"))
    first = names["prepare"](unet)
    best = first.train().best
    assert best is not None
    second = names["prepare"](dataclasses.replace(settings, init_from=best))
    model = second.model
    assert model.config.unlabelled == 8
    assert torch.equal(model.network.enter[0].weight, load(best).network.enter[0].weight)
    assert [each["corpus"] for each in model.trained_on] == [train_manifests(best)[0].corpus]
    losses = [model.train()(batch).total.item() for batch in second.data.train]
    assert np.isfinite(losses).all()
