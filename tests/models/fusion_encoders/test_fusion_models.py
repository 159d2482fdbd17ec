"""Tests that every fusion-encoder must pass: gradients, padding, missing modalities,
checkpoints, parameter groups.
"""

import copy
import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forked
from helpers.errors import raises
from helpers.fusion_samples import SIDE, TINY, flags, make_batch, tiny_model, tiny_tokenizer
from torch import Tensor, nn

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import create_text_encoder
from medvl.errors import CheckpointError, ConfigError
from medvl.models.checkpoint import load_towers, save, warm_start
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.bases.objectives import Encoded, Objective
from medvl.models.fusion_encoders.m3ae import M3AEConfig
from medvl.models.fusion_encoders.medvill import MedViLLConfig
from medvl.models.fusion_encoders.streams import DualStreamConfig, SingleStreamConfig
from medvl.schema import Batch
from medvl.train.config import OptimConfig
from medvl.train.optim.optimizer import build_optimizer

SYSTEMS = sorted(TINY)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(params=SYSTEMS)
def model(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> FusionModel:
    return tiny_model(request.param, tokenizer)


def step(model: FusionModel, batch: Batch, seed: int = 0) -> medvl.schema.Losses:
    torch.manual_seed(seed)
    if model.training:
        model.before_step(seed)
    return model(batch)


def test_systems_are_listed_by_name() -> None:
    assert set(SYSTEMS) <= set(medvl.list_models())
    assert medvl.list_models("*_stream") == ["dual_stream", "single_stream"]


def test_every_trainable_parameter_gets_a_gradient(
    model: FusionModel, tokenizer: Tokenizer
) -> None:
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    step(model, make_batch(tokenizer)).total.backward()
    # timm initialises the last norm of each residual branch with zeros: no gradient before it at
    # first
    optimizer.step()
    optimizer.zero_grad()
    step(model, make_batch(tokenizer)).total.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("momentum."):
            assert not parameter.requires_grad
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_losses_start_at_their_expectations(model: FusionModel, tokenizer: Tokenizer) -> None:
    """ln V, ln 2, (D - 1) / D, ln B, 2 ln 2; the total is their weighted sum."""
    batch = make_batch(tokenizer, 12)
    result = step(model, batch)
    expected = {"mlm": math.log(tokenizer.vocab_size), "itm": math.log(2)}
    if model.name in ("m3ae", "arl"):
        values = 3 * 16 * 16
        expected["mim"] = (values - 1) / values
    if model.name in ("albef", "m2i2", "mumc"):
        expected["itc"] = math.log(12)
    if model.name == "arl":
        expected["align"] = 2 * math.log(2)
    if model.name == "ptunifier":
        expected["itc"] = math.log(12)
    if (
        model.name == "mixed"
    ):  # two scales: pixels as the encoder reads them, and means of 2 x 2 of them
        pixels = model.image_encoder.normalize(batch.image_BCHW)
        halves = [pixels.square().mean(), torch.nn.functional.avg_pool2d(pixels, 2).square().mean()]
        expected["mim"] = torch.stack(halves).mean().item()
    if model.name == "m2i2":  # pixels as the encoder reads them
        expected["mim"] = model.image_encoder.normalize(batch.image_BCHW).square().mean().item()
    if model.name == "mumc":
        expected["unimodal"] = math.log(12)
    assert set(result.terms) - {"wpa", "mrfr", "region_features"} == set(expected)
    for name, value in expected.items():
        assert result.terms[name].item() == pytest.approx(value, rel=0.05), name
    weights = {objective.name: objective.weight for objective in model.objectives}
    weighted = [weights[name] * value for name, value in result.terms.items()]
    torch.testing.assert_close(result.total, torch.stack(weighted).sum())


def test_seed_determines_a_step(model: FusionModel, tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer)
    totals = [step(copy.deepcopy(model), batch, seed).total for seed in (1, 1, 2)]
    assert torch.equal(totals[0], totals[1])
    assert not torch.equal(totals[0], totals[2])


def test_padding_and_row_order_change_nothing(model: FusionModel, tokenizer: Tokenizer) -> None:
    model.eval()
    batch = make_batch(tokenizer)
    fused = model.features(batch)
    noise = torch.randint(5, 50, (6, 3))
    longer = dataclasses.replace(
        batch,
        ids_BT=torch.cat([batch.ids_BT, noise], dim=1),
        mask_BT=torch.cat([batch.mask_BT, torch.zeros(6, 3, dtype=torch.bool)], dim=1),
    )
    padded = model.features(longer)
    torch.testing.assert_close(padded.pooled_BD, fused.pooled_BD, **CLOSE)
    real, width = fused.text.real_BN(), fused.text.states_BND.shape[1]
    torch.testing.assert_close(
        padded.text.states_BND[:, :width][real], fused.text.states_BND[real], **CLOSE
    )
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    reordered = model.features(
        dataclasses.replace(
            batch,
            image_BCHW=batch.image_BCHW[order],
            ids_BT=batch.ids_BT[order],
            mask_BT=batch.mask_BT[order],
        )
    )
    torch.testing.assert_close(reordered.pooled_BD, fused.pooled_BD[order], **CLOSE)
    torch.testing.assert_close(reordered.image.states_BND, fused.image.states_BND[order], **CLOSE)


def test_image_and_text_attend_to_each_other(model: FusionModel, tokenizer: Tokenizer) -> None:
    model.eval()
    batch = make_batch(tokenizer)
    fused = model.features(batch)
    other = model.features(dataclasses.replace(batch, image_BCHW=batch.image_BCHW.flip(0)))
    assert not torch.allclose(other.text.states_BND, fused.text.states_BND, atol=1e-5)
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    image = model.image_tokens(batch.image_BCHW)
    torch.testing.assert_close(model.fuse(text, image).pooled_BD, fused.pooled_BD, **CLOSE)
    assert model.match(text, image).shape == (6, 2)
    assert fused.pooled_BD.shape == (6, model.pooled_dim)


def test_placeholders_of_missing_modalities_are_ignored(
    model: FusionModel, tokenizer: Tokenizer
) -> None:
    model.eval()
    batch = make_batch(tokenizer, 4, has_image_B=flags(1, 0, 1, 1), has_text_B=flags(1, 1, 0, 1))
    fused = model.features(batch)
    image_BCHW, ids_BT = batch.image_BCHW.clone(), batch.ids_BT.clone()
    image_BCHW[1], ids_BT[2, 1:3] = 255, 9
    other = model.features(dataclasses.replace(batch, image_BCHW=image_BCHW, ids_BT=ids_BT))
    torch.testing.assert_close(other.pooled_BD, fused.pooled_BD)
    whole = model.features(dataclasses.replace(batch, has_image_B=None, has_text_B=None))
    complete = torch.tensor([0, 3])
    torch.testing.assert_close(whole.pooled_BD[complete], fused.pooled_BD[complete], **CLOSE)
    assert not torch.allclose(whole.pooled_BD[1], fused.pooled_BD[1], atol=1e-5)
    assert not torch.allclose(whole.pooled_BD[2], fused.pooled_BD[2], atol=1e-5)


def assert_all_gradients(model: FusionModel) -> None:
    """Assert that every trainable parameter has a finite gradient: DDP waits for each, on every
    rank.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_losses_are_finite_with_missing_modalities(
    model: FusionModel, tokenizer: Tokenizer
) -> None:
    batch = make_batch(
        tokenizer, 6, has_image_B=flags(1, 0, 1, 1, 0, 1), has_text_B=flags(1, 1, 0, 1, 1, 1)
    )
    result = step(model, batch)
    result.total.backward()
    assert result.total.isfinite()
    assert_all_gradients(model)


@pytest.mark.parametrize(("images", "texts"), [(0, 1), (1, 0), (0, 0)])
def test_batches_of_one_modality_alone_train(
    model: FusionModel, tokenizer: Tokenizer, images: int, texts: int
) -> None:
    """A term without any sample is zero, and gradients are finite."""
    batch = make_batch(
        tokenizer, 3, has_image_B=flags(*[images] * 3), has_text_B=flags(*[texts] * 3)
    )
    buffers = {name: buffer.clone() for name, buffer in model.image_encoder.named_buffers()}
    result = step(model, batch)
    result.total.backward()
    assert result.terms["itm"] == 0
    assert (result.terms["mlm"] > 0) == bool(texts)
    if "mim" in result.terms:
        assert (result.terms["mim"] > 0) == bool(images)
    assert_all_gradients(model)
    if not images:  # placeholders do not change batch-norm statistics
        assert all(
            torch.equal(buffer, buffers[name])
            for name, buffer in model.image_encoder.named_buffers()
        )


def test_model_without_a_tokenizer_fuses_but_cannot_be_pretrained(tokenizer: Tokenizer) -> None:
    for name in SYSTEMS:
        bare = tiny_model(name, None, vocab_size=tokenizer.vocab_size).eval()
        batch = make_batch(tokenizer, 2)
        assert bare.features(batch).pooled_BD.shape == (2, bare.pooled_dim)
        with raises(ConfigError, "missing", "tokenizer", names=name):
            bare(batch)


def test_loaded_checkpoint_equals_the_saved_model(
    model: FusionModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save(model.eval(), tmp_path)
    loaded = medvl.load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    batch = make_batch(tokenizer)
    assert torch.equal(loaded.features(batch).pooled_BD, model.features(batch).pooled_BD)
    assert torch.equal(step(loaded, batch).total, step(model, batch).total)


def test_parameter_groups_have_their_rates_and_norms_do_not_decay(model: FusionModel) -> None:
    config = dataclasses.replace(model.config, fusion_lr_mult=5.0, head_lr_mult=7.0)
    model.config = config
    groups = model.parameter_groups(1e-5, 0.01)
    assert len({group["name"] for group in groups}) == len(groups)
    rates = {id(parameter): group for group in groups for parameter in group["params"]}
    names = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert sum(len(group["params"]) for group in groups) == len(rates) == len(names)
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.LayerNorm | nn.BatchNorm2d)
        for p in m.parameters()
    }
    for name, parameter in names.items():
        group = rates[id(parameter)]
        scale = 1 if name.startswith(("image_encoder.", "text_encoder.")) else 5
        scale = 7 if name.partition(".")[0].endswith("_head") else scale
        assert group["lr"] == pytest.approx(scale * 1e-5), name
        undecayed = id(parameter) in norms or parameter.ndim <= 1
        assert group["weight_decay"] == (0.0 if undecayed else 0.01), name
    optimizer = build_optimizer(model, OptimConfig(lr=1e-5, weight_decay=0.01))
    scales = sorted({round(group["lr_scale"], 9) for group in optimizer.param_groups})
    assert scales == [1, 5, 7]


@pytest.mark.parametrize(("name", "image"), [("m3ae", "timm:test_vit"), ("medvill", "resnet_tiny")])
def test_dual_encoder_towers_initialise_a_fusion_encoder(
    name: str, image: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Towers trained by ConVIRT, saved and loaded give bit-equal features."""
    torch.manual_seed(3)
    convirt = medvl.create_model(
        "convirt",
        tokenizer=tokenizer,
        image_encoder=image,
        text_encoder="tiny_bert",
        image_size=SIDE,
        projection_dim=16,
        frozen_text_layers=1,
    )
    batch = make_batch(tokenizer)
    before = convirt.text_encoder.get_parameter(
        "backbone.encoder.layer.2.output.dense.weight"
    ).clone()
    optimizer = torch.optim.AdamW(convirt.parameters(), lr=1e-3)
    convirt(batch).total.backward()
    optimizer.step()
    assert not torch.equal(
        before, convirt.text_encoder.get_parameter("backbone.encoder.layer.2.output.dense.weight")
    )
    save(convirt.eval(), tmp_path)
    fusion = tiny_model(
        name, tokenizer, image_encoder=image, image_arguments={}, text_arguments={}
    ).eval()
    head = fusion.itm_head.weight.clone()
    load_towers(fusion, tmp_path)
    assert torch.equal(fusion.itm_head.weight, head)
    for mine, theirs in (
        (fusion.image_encoder(batch.image_BCHW), convirt.image_encoder(batch.image_BCHW)),
        (
            fusion.text_encoder(batch.ids_BT, batch.mask_BT),
            convirt.text_encoder(batch.ids_BT, batch.mask_BT),
        ),
    ):
        for field in dataclasses.fields(mine):
            value = getattr(mine, field.name)
            if (
                isinstance(value, Tensor) and field.name != "pooled_BD"
            ):  # ConVIRT pools its text by the maximum
                assert torch.equal(value, getattr(theirs, field.name))
    assert step(fusion.train(), batch).total.isfinite()


def test_warm_start_loads_everything_or_the_towers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pretrained = tiny_model("medvill", tokenizer)
    save(pretrained, tmp_path)
    report = tiny_model("medvill", tokenizer, attention="seq2seq", objective="report")
    warm_start(report, tmp_path)
    weights = pretrained.state_dict()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in report.state_dict().items())
    encoders = ("image_encoder", "image_arguments", "text_arguments")
    same = {name: TINY["medvill"][name] for name in encoders}
    other = tiny_model("single_stream", tokenizer, **same)
    head = other.itm_head.weight.clone()
    warm_start(other, tmp_path)
    assert torch.equal(other.itm_head.weight, head)
    assert all(
        torch.equal(t, weights[f"text_encoder.{key}"])
        for key, t in other.text_encoder.state_dict().items()
    )
    with pytest.raises(CheckpointError):
        warm_start(other, tmp_path / "none")


def test_towers_that_do_not_fit_are_rejected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save(tiny_model("dual_stream", tokenizer), tmp_path)
    wider = tiny_model(
        "m3ae", tokenizer, text_arguments={"hidden_size": 48, "num_attention_heads": 3}
    )
    before = {key: tensor.clone() for key, tensor in wider.state_dict().items()}
    with pytest.raises(CheckpointError, match="text_encoder"):
        load_towers(wider, tmp_path)
    assert all(
        torch.equal(tensor, before[key]) for key, tensor in wider.state_dict().items()
    )  # nothing was loaded
    other = medvl.data.tokenizer.tokenizer.train_wordpiece(
        ["Other words entirely."], vocab_size=200, min_frequency=1
    )
    incompatible = tiny_model("m3ae", other)
    with pytest.raises(CheckpointError, match="vocabulary"):
        load_towers(incompatible, tmp_path)


@pytest.mark.parametrize("name", ["single_stream", "dual_stream"])
@pytest.mark.parametrize(
    "image", ["resnet_tiny", "timm:test_vit", "torchvision:resnet18", "timm:mobilenetv3_small_050"]
)
def test_all_kinds_of_image_encoders_work(name: str, image: str, tokenizer: Tokenizer) -> None:
    """CNN grids, Transformer tokens, and a model whose pooled vector is wider than its map."""
    model = tiny_model(
        name, tokenizer, image_encoder=image, image_arguments={}, image_positions=True
    )
    result = step(model, make_batch(tokenizer))
    result.total.backward()
    assert result.total.isfinite()
    with pytest.raises(ConfigError):
        model.image_tokens(torch.zeros(2, 1, 96, 96, dtype=torch.uint8))


def test_other_text_encoders_work(tokenizer: Tokenizer) -> None:
    for text, arguments in (
        ("hf:distilbert", {"dim": 32, "n_layers": 1, "n_heads": 2}),
        ("static", {"dimension": 12}),
    ):
        model = tiny_model("dual_stream", tokenizer, text_encoder=text, text_arguments=arguments)
        assert step(model, make_batch(tokenizer)).total.isfinite()


def test_vectors_are_embedded_like_words() -> None:
    """Positions, types, norm and projection are added to vectors as to words."""
    ids_BT, mask_BT = torch.randint(5, 50, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    types_BT = torch.ones_like(ids_BT)
    for name in ("tiny_bert", "bioalbert"):
        encoder = create_text_encoder(name, vocab_size=60, num_hidden_layers=1).eval()
        vectors_BTD = encoder.backbone.get_input_embeddings()(ids_BT)
        expected = encoder.embed(ids_BT, mask_BT, token_type_ids=types_BT)
        torch.testing.assert_close(
            encoder.embed_vectors(vectors_BTD, token_type_ids=types_BT), expected
        )
    with pytest.raises(ConfigError):
        create_text_encoder("static", vocab_size=60, dimension=8).embed_vectors(
            torch.zeros(1, 2, 8)
        )


def test_precomputed_regions_replace_pixels(tokenizer: Tokenizer) -> None:
    regions_BPD = torch.randn(4, 5, 11, generator=torch.Generator().manual_seed(0))
    regions_BPD[1, 3:] = 0
    batch = make_batch(
        tokenizer, 4, regions_BPD=regions_BPD, image_BCHW=torch.zeros(4, 1, 0, 0, dtype=torch.uint8)
    )
    settings: dict[str, Any] = {"image_encoder": "regions:11", "image_arguments": {}}
    for name in ("single_stream", "dual_stream"):
        model = tiny_model(name, tokenizer, image_positions=False, **settings)
        result = step(model, batch)
        result.total.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.eval()
        fused = model.features(batch)
        fewer = dataclasses.replace(
            batch, regions_BPD=torch.nn.functional.pad(regions_BPD, (0, 0, 0, 4))
        )
        torch.testing.assert_close(model.features(fewer).pooled_BD, fused.pooled_BD, **CLOSE)
        with raises(ConfigError, "missing", "regions_BPD"):
            model.features(dataclasses.replace(batch, regions_BPD=None))
        with raises(ConfigError, "mismatch", "regions_BPD"):
            model.features(dataclasses.replace(batch, regions_BPD=regions_BPD[:, :, :4]))
    with raises(ConfigError, "wrong_type", "image_encoder"):
        tiny_model("dual_stream", tokenizer, **{**settings, "image_encoder": "regions:many"})
    with raises(ConfigError, "conflict", "image_positions"):
        tiny_model("dual_stream", tokenizer, image_positions=True, **settings)
    for name in ("m3ae", "medvill"):
        with raises(ConfigError, "unsupported", "image_encoder"):
            tiny_model(name, tokenizer, **settings)


def test_batch_moves_flags_and_regions(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, 2)
    assert batch.has_image_B is None
    assert batch.to("meta").has_text_B is None
    moved = dataclasses.replace(
        batch, has_image_B=flags(1, 0), has_text_B=flags(1, 1), regions_BPD=torch.zeros(2, 3, 4)
    ).to("meta")
    for tensor in (moved.has_image_B, moved.has_text_B, moved.regions_BPD):
        assert tensor is not None
        assert tensor.device.type == "meta"


class FirstWord(Objective[Encoded, Tensor, Tensor]):
    """An objective of another package: predict the first word from the text before fusion."""

    name = "first_word"

    def __init__(self, weight: float, head: nn.Module) -> None:
        super().__init__(weight)
        self.head = head

    def corrupt(self, batch: Batch) -> Tensor:
        return batch.ids_BT[:, 1]

    def predict(self, encoded: Encoded, corruption: Tensor) -> Tensor:
        scores: Tensor = self.head(encoded.text.states_BND[:, 0])
        return scores

    def loss(self, predictions: Tensor, corruption: Tensor) -> Tensor:
        return nn.functional.cross_entropy(predictions, corruption)


def test_added_objective_is_one_more_weighted_term(tokenizer: Tokenizer) -> None:
    model: Any = tiny_model("dual_stream", tokenizer)
    before = step(model, make_batch(tokenizer))
    model.first_word_head = nn.Linear(model.fused_dim, tokenizer.vocab_size)
    model.objectives = (*model.objectives, FirstWord(0.5, model.first_word_head))
    copied = copy.deepcopy(model)
    assert copied.objectives[-1].head is copied.first_word_head
    result = step(copied, make_batch(tokenizer))
    assert torch.equal(result.terms["mlm"], before.terms["mlm"])
    torch.testing.assert_close(result.total, before.total + 0.5 * result.terms["first_word"])
    result.total.backward()
    assert copied.first_word_head.weight.grad.abs().sum() > 0
    assert model.first_word_head.weight.grad is None


@pytest.mark.parametrize(
    ("config", "field", "value", "code"),
    [
        (DualStreamConfig, "mlm_probability", 0.0, "out_of_range"),
        (DualStreamConfig, "width", 100, "conflict"),
        (DualStreamConfig, "dropout", 1.0, "out_of_range"),
        (DualStreamConfig, "itm_weight", 0.0, "out_of_range"),
        (SingleStreamConfig, "attention", "causal", "unknown_name"),
        (SingleStreamConfig, "seq2seq_share", 1.5, "out_of_range"),
        (M3AEConfig, "mim_layer", 7, "out_of_range"),
        (M3AEConfig, "mask_ratio", 1.0, "out_of_range"),
        (M3AEConfig, "decoder_width", 10, "conflict"),
        (MedViLLConfig, "image_tokens", 0, "out_of_range"),
        (MedViLLConfig, "attention", "none", "unknown_name"),
    ],
)
def test_config_rejects_invalid_values(config: Any, field: str, value: Any, code: str) -> None:
    with raises(ConfigError, code, field):
        config(**{field: value})


def test_import_of_models_is_light_and_systems_are_imported_on_demand() -> None:
    """The second program is a fork of one that has imported ConVIRT and the training."""
    code = "import sys, medvl.models\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
    code = (
        "import sys\n"
        "from medvl.models import ConVIRTConfig, create_model\n"
        "tiny = dict(image_encoder='resnet_tiny', text_encoder='tiny_bert', image_size=64)\n"
        "create_model(ConVIRTConfig(**tiny, projection_dim=8, frozen_text_layers=0))\n"
        "print([name for name in sys.modules if name.startswith('medvl.models.fusion_encoders.')])"
    )
    done = forked.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stderr


def test_bfloat16_step_is_close_to_float32(model: FusionModel, tokenizer: Tokenizer) -> None:
    model.eval()
    batch = make_batch(
        tokenizer, 6, has_image_B=flags(1, 0, 1, 1, 1, 1), has_text_B=flags(1, 1, 0, 1, 1, 1)
    )
    full = step(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = step(model, batch)
    half.total.backward()
    assert half.total.dtype == torch.float32
    for name, value in full.terms.items():
        torch.testing.assert_close(half.terms[name], value, rtol=0.03, atol=0.03)
