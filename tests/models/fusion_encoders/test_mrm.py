"""MRM with its options: pixels, words and contrast against the formulas, masks, incomplete
samples, its encoders.
"""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises

from medvl.common.seeding import seeded
from medvl.data import ShuffledSentences
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import CheckpointError, ConfigError
from medvl.losses.masked import mask_patches
from medvl.models import MRM, create_model, load, load_towers, save, warm_start
from medvl.models.fusion_encoders.mrm import RecordMask, RecordWords, WeightedContrast
from medvl.schema import Batch

TINY: dict[str, Any] = {
    "image_encoder": "timm:vit_tiny_patch16_224",
    "image_arguments": {"embed_dim": 32, "depth": 1, "num_heads": 2},
    "image_size": 32,
    "text_encoder": "tiny_bert",
    "text_arguments": {"num_hidden_layers": 1},
    "decoder_width": 24,
    "decoder_layers": 1,
    "decoder_heads": 2,
    "max_tokens": 64,
}
MACO = {"mlm_weight": 0.0, "text_fusion": "attention", "contrast_weight": 1.0}
ALL = {
    "entities_first": True,
    "negation_weight": 0.05,
    "text_fusion": "attention",
    "contrast_weight": 1.0,
}


def mrm(**settings: Any) -> MRM:
    with seeded(0):
        model = create_model(
            "mrm", **{"tokenizer": gloria_ranks.tiny_tokenizer(), **TINY, **settings}
        )
    assert isinstance(model, MRM)
    return model


def make_batch(rows: list[int] | None = None) -> Batch:
    """Texts of unequal lengths, the fifth without words, and images of 64 x 64, twice the
    encoder's size.
    """
    return gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer(), rows or [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("options", "terms"),
    [({}, {"mim", "mlm"}), (ALL, {"mim", "mlm", "contrast"}), (MACO, {"mim", "contrast"})],
)
def test_every_parameter_has_a_gradient_also_under_autocast(
    options: dict[str, Any], terms: set[str]
) -> None:
    """Of a model without masked words, what only words need is frozen: DDP waits for the
    gradient of all others.
    """
    model, batch = mrm(**options).train(), make_batch()
    with seeded(0), torch.autocast("cpu", torch.bfloat16):
        losses = model(batch)
    losses.total.backward()
    assert losses.total.isfinite()
    assert set(losses.terms) == terms
    frozen = {
        name.partition(".")[0]
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen == (set() if "mlm" in terms else {"word_head", "image_to_words", "fusion"})
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == []


def test_hidden_patches_do_not_change_the_encoder() -> None:
    """In the downscaled image each patch has its own pixels, but bicubic filters reach into the
    neighbours.
    """
    model = mrm(target_scale=1).eval()
    patches = mask_patches(2, 4, 0.75, torch.Generator().manual_seed(0))
    pixels_BCHW = torch.randn(2, 3, 32, 32)
    hidden_BP = (
        patches.masked_BP.unflatten(1, (2, 2)).repeat_interleave(16, 1).repeat_interleave(16, 2)
    )
    other_BCHW = torch.where(hidden_BP[:, None], torch.randn(2, 3, 32, 32), pixels_BCHW)
    expected = model.encode_visible(pixels_BCHW, patches).patches_BPD
    torch.testing.assert_close(model.encode_visible(other_BCHW, patches).patches_BPD, expected)


def test_pixels_are_those_of_the_large_image_and_a_zero_predictor_has_the_known_error() -> None:
    model, batch = mrm().eval(), make_batch()
    for parameter in model.mim_head.pixels.parameters():
        parameter.data.zero_()
    found = model(batch).terms["mim"]
    numbers = (16 * 2) ** 2 * 3
    assert model.mim_head.pixels.out_features == numbers
    torch.testing.assert_close(found, torch.tensor((numbers - 1) / numbers), rtol=1e-3, atol=0)
    with raises(ConfigError, "mismatch", "image_size"):
        model(dataclasses.replace(batch, image_BCHW=batch.image_BCHW[:, :, :32, :32]))


def fixed_words(model: MRM, masked: RecordMask) -> None:
    vars(model)["words"] = lambda batch: masked


def test_words_are_masked_ones_with_the_mean_patch_added() -> None:
    model, batch = mrm(negation_weight=0.05).eval(), make_batch()
    with seeded(3):
        masked = model.words(batch)
    fixed_words(model, masked)
    visible_BKD = torch.randn(4, 1, 32)
    image_BD = model.image_to_words(visible_BKD).mean(dim=1)
    entropy, weights = [], []
    for row in range(4):  # one text at a time, without any padding
        length = int(batch.mask_BT[row].sum())
        hidden_1TD = model.text_encoder.embed(
            masked.ids_BT[row : row + 1, :length], batch.mask_BT[row : row + 1, :length]
        )
        states = model.text_encoder.features(
            hidden_1TD + image_BD[row], torch.ones(1, length, dtype=torch.bool)
        )
        table = model.text_encoder.backbone.get_input_embeddings().weight
        inside_N = (masked.position_N // batch.ids_BT.shape[1]) == row
        place_N = masked.position_N[inside_N] % batch.ids_BT.shape[1]
        logits_NV = model.word_head(states.tokens_BTD[0, place_N], table)
        entropy.append(F.cross_entropy(logits_NV, masked.target_N[inside_N], reduction="none"))
        weights.append(masked.weight_N[inside_N])
    expected = (torch.cat(entropy) * torch.cat(weights)).sum() / torch.cat(weights).sum()
    torch.testing.assert_close(model.word_loss(visible_BKD, batch), expected)
    text_only = model.word_loss(torch.zeros_like(visible_BKD), batch)
    model.image_to_words.weight.data.zero_()
    torch.testing.assert_close(model.word_loss(visible_BKD, batch), text_only)


def test_the_loss_of_words_does_not_depend_on_padding() -> None:
    """The released code counts 36 to 42 % of padding."""
    model, batch = mrm().eval(), make_batch()
    with seeded(3):
        masked = model.words(batch)
    fixed_words(model, masked)
    visible_BKD, short = torch.randn(4, 1, 32), batch.ids_BT.shape[1]
    expected = model.word_loss(visible_BKD, batch)
    longer = dataclasses.replace(
        batch, ids_BT=F.pad(batch.ids_BT, (0, 30)), mask_BT=F.pad(batch.mask_BT, (0, 30))
    )
    row_N = masked.position_N // short
    position_N = row_N * (short + 30) + masked.position_N % short
    padded = dataclasses.replace(
        masked, ids_BT=F.pad(masked.ids_BT, (0, 30)), position_N=position_N
    )
    fixed_words(model, padded)
    torch.testing.assert_close(model.word_loss(visible_BKD, longer), expected)


def test_entities_are_masked_first() -> None:
    tokenizer = train_wordpiece(gloria_ranks.TEXTS, vocab_size=200, min_frequency=1)
    model = mrm(entities_first=True, negation_weight=0.05, entities=("lungs",), tokenizer=tokenizer)
    texts = [
        "The heart is mildly enlarged and the lungs are clear. No small left effusion. The "
        "heart is clear."
    ]
    ids_BT, mask_BT = tokenizer(texts * 4)
    batch = dataclasses.replace(make_batch(), ids_BT=ids_BT, mask_BT=mask_BT)
    words = RecordWords(model, dataclasses.replace(model.config, mlm_probability=0.3))
    assert words.entities is not None
    mention_BT = words.entities(ids_BT, mask_BT).mention_BT >= 0
    assert mention_BT.any()
    for seed in range(3):
        with seeded(seed):
            masked = words(batch)
        masked_BT = torch.zeros_like(mask_BT).flatten()
        masked_BT[masked.position_N] = True
        masked_BT = masked_BT.view_as(mask_BT)
        assert masked_BT[mention_BT].all()
        assert (masked.ids_BT[masked_BT] == tokenizer.mask_id).all()
        assert 0.2 < masked_BT.sum() / mask_BT.sum() < 0.5


@pytest.mark.parametrize("entities", [("effusion", "lungs"), ()])
def test_templates_weigh_less_and_what_precedes_entities_more(entities: tuple[str, ...]) -> None:
    """The finding behind a template keeps its weight; before, the rest of the sentence had 0.05,
    and nothing gained.
    """
    text = (
        "There is no evidence of pleural effusion. Clear lungs. There is no large left "
        "effusion. No edema."
    )
    tokenizer = train_wordpiece([text, "Heart is large."], vocab_size=300, min_frequency=1)
    model = mrm(
        entities_first=bool(entities), negation_weight=0.05, entities=entities, tokenizer=tokenizer
    )
    ids_BT, mask_BT = tokenizer([text, "Heart is large."])
    mention_BT = None
    if model.words.entities is not None:
        mention_BT = model.words.entities(ids_BT, mask_BT).mention_BT
    weight_BT = model.words.word_weights(ids_BT, mask_BT, mention_BT)
    pieces = [tokenizer.token_texts[number].strip().lower() for number in ids_BT[0].tolist()]
    template = {
        place + k for place, piece in enumerate(pieces) if piece == "there" for k in range(3)
    }
    template |= {
        place + k for place, piece in enumerate(pieces) if piece == "evidence" for k in range(2)
    }
    near = {place - k for place, piece in enumerate(pieces) if piece in entities for k in (1, 2)}
    near = {place for place in near if pieces[place] != "."}
    # the released loop over one text, `expand_weight`
    expected = [0.05 if place in template else 1.0 for place in range(len(pieces))]
    if near:
        both = len(near & template)
        rate = (0.95 * (len(template) - both) + len(near)) / (len(near) - 0.95 * both)
    else:
        rate = len(pieces) / (len(pieces) - 0.95 * len(template))
    expected = [
        value * rate if place in near or not near else value for place, value in enumerate(expected)
    ]
    assert len(template) == 8
    assert len(near) == (5 if entities else 0)
    torch.testing.assert_close(weight_BT[0], torch.tensor(expected))
    torch.testing.assert_close((weight_BT * mask_BT).sum(dim=1), mask_BT.sum(dim=1).float())
    assert (weight_BT[1] == 1).all()


def test_contrast_is_the_mean_of_four_weighted_cross_entropies() -> None:
    with seeded(0):
        contrast = WeightedContrast(8, 6, 4)
    visible_BKD, text_BD = torch.randn(5, 2, 8, requires_grad=True), torch.randn(5, 6)
    visible_BP = torch.rand(5, 4) < 0.5
    torch.nn.init.normal_(contrast.place.weight)
    loss = contrast(visible_BKD, text_BD, visible_BP, torch.arange(5))
    image_BE = F.normalize(contrast.image_head(visible_BKD).mean(1), dim=1)
    logits = image_BE @ F.normalize(contrast.text_head(text_BD), dim=1).T / 0.03
    weight = torch.log1p(
        torch.exp(visible_BP.float() @ contrast.place.weight[0] + contrast.place.bias)
    )
    total = torch.zeros(())
    for each in (logits, logits.T):
        scaled = torch.diag(weight) @ each
        total = (
            total
            - torch.stack([scaled[n, n] - scaled[n].logsumexp(0) for n in range(5)]).mean() / 4
        )
        plain = torch.stack([each[n].logsumexp(0) - each[n, n] for n in range(5)])
        total = total + (plain * weight.detach()).sum() / weight.detach().sum() / 4
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)
    expected, actual = (
        torch.autograd.grad(value, visible_BKD, retain_graph=True)[0] for value in (total, loss)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_with_a_former_field_loads_if_it_holds_the_constant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mrm()
    save(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for value in (1 / 0.03, 10.0):
        written["model"]["settings"]["contrast_scale"] = value
        (tmp_path / "config.json").write_text(json.dumps(written))
        if value == 10.0:
            with raises(CheckpointError, "unsupported"):
                load(tmp_path)
            continue
        for name, tensor in load(tmp_path).state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])
        warm_start(mrm(), tmp_path)
        assert not caplog.records, "the settings are equal"


def test_products_of_the_contrast_have_full_precision() -> None:
    with seeded(0):
        contrast = WeightedContrast(8, 8, 4)
        image_BKD, text_BD = torch.randn(2, 64, 1, 8).bfloat16().float()
    for head in (contrast.image_head, contrast.text_head):  # exact in 16 bits
        torch.nn.init.eye_(head.weight)
        torch.nn.init.zeros_(head.bias)
    arguments = image_BKD, text_BD[:, 0], torch.ones(64, 4) > 0, torch.arange(64)
    expected = contrast(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(contrast(*arguments), expected, rtol=5e-5, atol=0)


def test_the_weight_of_the_contrast_is_used() -> None:
    """MaCo's released code reads `--lam`, the balance of pixels and contrast, and uses it
    nowhere.
    """
    batch, totals = make_batch(), {}
    for weight in (0.1, 0.9):
        model = mrm(contrast_weight=weight, mlm_weight=0.0).eval()
        with seeded(5):
            found = model(batch)
        assert set(found.terms) == {"mim", "contrast"}
        torch.testing.assert_close(
            found.total, found.terms["mim"] + weight * found.terms["contrast"]
        )
        totals[weight] = found.total.item()
    assert totals[0.1] != totals[0.9]


def test_samples_without_a_text_have_pixels_only_and_those_without_an_image_nothing() -> None:
    model, batch = mrm(contrast_weight=1.0).eval(), make_batch([0, 1])
    none, both = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    textless = model(dataclasses.replace(batch, has_text_B=none))
    assert textless.terms["mim"] > 0
    assert textless.terms["mlm"] == textless.terms["contrast"] == 0
    nothing = model(dataclasses.replace(batch, has_image_B=none, has_text_B=both))
    assert nothing.total == 0
    nothing.total.backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )


def test_settings_that_do_not_fit_are_refused() -> None:
    with raises(ConfigError, "conflict", "mlm_weight"):
        mrm(mlm_weight=0.0)
    with raises(ConfigError, "unsupported", "image_encoder"):
        mrm(image_encoder="resnet_tiny", image_arguments={})


def test_other_systems_start_from_its_encoders(tmp_path: Path) -> None:
    model = mrm()
    save(model, tmp_path)
    towers = {
        key: TINY[key]
        for key in ("image_encoder", "image_size", "text_encoder", "text_arguments", "max_tokens")
    }
    arguments = {**TINY["image_arguments"], "mean": 0.4978, "std": 0.2449}
    other = create_model(
        "convirt",
        tokenizer=model.tokenizer,
        image_arguments=arguments,
        frozen_text_layers=0,
        **towers,
    )
    load_towers(other, tmp_path)
    for part in ("image_encoder", "text_encoder"):
        for key, tensor in model.get_submodule(part).state_dict().items():
            torch.testing.assert_close(other.get_submodule(part).state_dict()[key], tensor)


def test_presets_have_the_published_batches_and_warm_up() -> None:
    """32 x 4 x 2 images of 200 epochs, ECAMP 256 x 4 x 8 of 120 and MaCo 512 x 4 of 51; 40, 40
    and 2 of them warm up.
    """
    images = 368_960  # of the training split, all views
    found = runpy.run_path(str(Path(__file__).parents[3] / "recipes" / "mrm_mimic.py"))
    batches = {}
    for name in ("paper", "ecamp", "maco"):
        image = found["PRESETS"][name].data.image
        assert (image.size, image.flip, image.brightness, image.area) == (
            448,
            "swap_text",
            0,
            (0.2, 1.0),
        )
        train, schedule = found["PRESETS"][name].train, found["PRESETS"][name].optim.schedule
        batches[name] = (
            train.global_batch,
            train.epochs,
            round(schedule.warmup_steps * train.global_batch / images),
        )
    assert batches == {"paper": (256, 200, 40), "ecamp": (8_192, 120, 40), "maco": (2_048, 51, 2)}
    assert "--views" not in found["MAKE_DATA"]
    assert isinstance(found["PRESETS"]["maco"].data.text, ShuffledSentences)
