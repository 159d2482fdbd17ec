"""ALBEF: moving average, queue, hard negatives, dual-encoder interface, checkpoints and ranks."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import train_fakes as fakes
from helpers.albef_ranks import make, quiet, silent, three_steps
from helpers.errors import raises
from helpers.fusion_samples import flags, make_batch, tiny_model, tiny_tokenizer
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.errors import ConfigError, WeightsError
from medvl.losses.pairs.image_text import ramped_alpha
from medvl.models.checkpoint import load_towers, save
from medvl.models.downstream.vqa.model import VQA
from medvl.models.fusion_encoders import albef
from medvl.models.fusion_encoders.albef import ALBEF, ALBEFConfig
from medvl.models.fusion_encoders.bases.bert_stream import init_from_bert
from medvl.schema import Batch, Losses
from medvl.train.config import OptimConfig
from medvl.train.optim.optimizer import build_optimizer
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import DDPModel

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def step(model: ALBEF, batch: Batch, seed: int = 0) -> Losses:
    torch.manual_seed(seed)
    if model.training:
        model.before_step(seed)
    return model(batch)


def train(model: ALBEF, batches: list[Batch], first: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number, batch in enumerate(batches, first):
        optimizer.zero_grad()
        step(model, batch, number).total.backward()
        optimizer.step()
    return optimizer


def teacher_weights(model: ALBEF) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.momentum.module.named_parameters()}


def model_weights(model: ALBEF) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.towers.named_parameters()}


@pytest.mark.fault("N5")
def test_teacher_follows_its_formula_before_each_training_pass(tokenizer: Tokenizer) -> None:
    """A copy first; then m * average + (1 - m) * weights, before the update. Eval mode changes
    nothing.
    """
    model = make(tokenizer, momentum=0.9)
    with torch.no_grad():
        for parameter in model.towers.parameters():  # as if towers were loaded into a new model
            parameter.add_(0.01)
    expected = model_weights(model)
    for number in range(3):
        before = model_weights(model)
        expected = {name: 0.9 * expected[name] + 0.1 * before[name] for name in expected}
        train(model, [make_batch(tokenizer)], number)
        torch.testing.assert_close(teacher_weights(model), expected)
        assert not torch.equal(model_weights(model)["mlm_head.bias"], before["mlm_head.bias"])
    state = copy.deepcopy(model.state_dict())
    step(model.eval(), make_batch(tokenizer))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_teacher_moves_once_for_the_micro_batches_of_a_step(tokenizer: Tokenizer) -> None:
    """It used to move in each forward pass."""
    model = make(tokenizer)
    with raises(ConfigError, "missing", "before_step"):
        model(make_batch(tokenizer))
    update = fakes.step_of(DDPModel(model, fakes.ONE_RANK))
    for number in range(2):
        update(number, 1e-3, [make_batch(tokenizer), make_batch(tokenizer, 3)], 2)
        assert int(model.momentum.n_averaged) == number + 1


@pytest.mark.fault("N5")
def test_teacher_is_not_trained(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    step(model, make_batch(tokenizer)).total.backward()
    assert all(parameter.grad is None for parameter in model.momentum.parameters())
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4, weight_decay=0.02))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert not held & {id(parameter) for parameter in model.momentum.parameters()}
    assert id(model.itc_head.temperature) in held


def test_contrastive_loss_equals_its_formula(tokenizer: Tokenizer) -> None:
    """In the second step, with one batch in the queue and alpha at a quarter of its ramp."""
    model = make(tokenizer, alpha=0.8, dropout=0.0, text_arguments=quiet(), momentum=0.5)
    first, second = (
        make_batch(tokenizer, 4, studies=list("abcd")),
        make_batch(tokenizer, 3, studies=list("bxy")),
    )
    train(model, [first])
    queue_image, queue_text = (teacher(model, first, side) for side in ("image", "text"))
    torch.testing.assert_close(model.itc_head.queue.image_QE[:4], queue_image, **CLOSE)
    result = step(model, second)
    assert int(model.momentum.n_averaged) == 2
    alpha, tau = ramped_alpha(1, 4, 0.8), model.itc_head.temperature
    assert alpha == pytest.approx(0.2)
    keys_image = torch.cat([teacher(model, second, "image"), queue_image])
    keys_text = torch.cat([teacher(model, second, "text"), queue_text])
    hard_BN = F.pad(torch.eye(3), (0, 4))
    hard_BN[0, 3 + 1] = 1  # study b of the first batch
    hard_BN = hard_BN / hard_BN.sum(dim=1, keepdim=True)
    total = torch.zeros(())
    image_BE, text_BE = (
        model.encode_image(second.image_BCHW),
        model.encode_text(second.ids_BT, second.mask_BT),
    )
    for query, own, other in ((image_BE, keys_image, keys_text), (text_BE, keys_text, keys_image)):
        target = alpha * (own[:3] @ other.T / tau).softmax(dim=1) + (1 - alpha) * hard_BN
        total = total - (target * (query @ other.T / tau).log_softmax(dim=1)).sum() / 6
    torch.testing.assert_close(result.terms["itc"], total, **CLOSE)
    torch.testing.assert_close(
        result.total, result.terms["itc"] + result.terms["itm"] + result.terms["mlm"]
    )


@torch.no_grad()
def teacher(model: ALBEF, batch: Batch, side: str) -> Tensor:
    """Embed one side of a batch with the moving average."""
    average: Any = model.momentum.module
    if side == "image":
        return F.normalize(
            average.image_head(average.image_encoder(batch.image_BCHW).pooled_BD), dim=1
        )
    return F.normalize(
        average.text_head(average.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD), dim=1
    )


def test_contrast_starts_at_ln_of_batch_and_queue(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    for number in range(3):
        batch = make_batch(tokenizer, 8, keys=[f"{number}-{row}" for row in range(8)])
        itc = step(model, batch).terms["itc"].item()
        assert itc == pytest.approx(math.log(8 + 8 * number), rel=0.05)
    model.eval()
    assert step(model, batch).terms["itc"].item() == pytest.approx(
        math.log(8), rel=0.05
    )  # without the queue


def test_hard_negatives_are_similar_and_share_no_study_or_text(tokenizer: Tokenizer) -> None:
    model = make(tokenizer, temperature=0.01)
    studies = ["a", "b", "a", "c", "d", "e"]  # texts 0 and 4, and 1 and 5, are equal
    batch = make_batch(tokenizer, 6, studies=studies, has_image_B=flags(1, 1, 1, 0, 1, 1))
    row_K = torch.tensor([0, 1, 2, 4, 5])
    similarity = torch.zeros(5, 5)
    similarity[0, 4] = similarity[2, 0] = (
        1  # similar: rows 0 and 5, and 4 and 0, which share a text
    )
    for seed in range(20):
        torch.manual_seed(seed)
        pairs = model.sample_hard_pairs(batch, torch.eye(5), similarity.T, row_K)
        rows = list(zip(pairs.image_N.tolist(), pairs.text_N.tolist(), strict=True))
        assert rows[:5] == [(row, row) for row in row_K.tolist()]
        assert pairs.matched_N.tolist() == [True] * 5 + [False] * 10
        for image, text in rows[5:]:
            assert studies[image] != studies[text]
            assert batch.texts[image] != batch.texts[text]
            assert {image, text} <= {0, 1, 2, 4, 5}
        assert rows[10] == (0, 5)


def test_hard_negatives_are_those_of_full_precision_under_autocast(tokenizer: Tokenizer) -> None:
    model, batch = tiny_model("albef", tokenizer, temperature=0.01), make_batch(tokenizer, 4)
    image_KE, text_KE = F.normalize(torch.ones(2, 4, 16) + 0.1 * torch.rand(2, 4, 16), dim=2)
    picked = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            rounds = [
                model.sample_hard_pairs(batch, image_KE, text_KE, torch.arange(4))
                for _ in range(50)
            ]
        picked.append(
            torch.cat([torch.stack([pairs.image_N, pairs.text_N]) for pairs in rounds], dim=1)
        )
    assert torch.equal(*picked)


def test_albef_has_the_dual_encoder_interface(tokenizer: Tokenizer) -> None:
    model = make(tokenizer).eval()
    batch = make_batch(tokenizer, 4)
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
    similarity_NM = model.similarity(images, texts)
    assert similarity_NM.shape == (4, 4)
    torch.testing.assert_close(images.global_NE.norm(dim=1), torch.ones(4))
    image = model.image_tokens(batch.image_BCHW)  # fusion and similarity share the encoded tokens
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    torch.testing.assert_close(
        F.normalize(model.image_head(image.states_BND[:, 0]), dim=1), images.global_NE
    )
    torch.testing.assert_close(
        F.normalize(model.text_head(text.states_BND[:, 0]), dim=1), texts.global_NE
    )
    assert model.match(text, image).shape == (4, 2)
    noise = torch.randint(5, 50, (4, 3))
    padded = (
        torch.cat([batch.ids_BT, noise], dim=1),
        torch.cat([batch.mask_BT, torch.zeros(4, 3).bool()], dim=1),
    )
    torch.testing.assert_close(model.encode_text(*padded), texts.global_NE, **CLOSE)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        model.encode_image(batch.image_BCHW[order]), images.global_NE[order], **CLOSE
    )


def test_training_resumed_from_a_checkpoint_is_exact(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The checkpoint has the average, the queue with its position, and the ramp."""
    batches = [make_batch(tokenizer, 5, keys=[f"{n}-{row}" for row in range(5)]) for n in range(6)]
    uninterrupted, interrupted = make(tokenizer, queue_size=12), make(tokenizer, queue_size=12)
    train(uninterrupted, batches)
    train(interrupted, batches[:3])
    save(interrupted, tmp_path)
    resumed = medvl.load(tmp_path)
    assert isinstance(resumed, ALBEF)
    train(resumed.train(), batches[3:], 3)
    assert resumed.state_dict().keys() == uninterrupted.state_dict().keys()
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_checkpoint_initialises_towers_and_vqa(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(tokenizer)
    train(model, [make_batch(tokenizer)] * 2)
    save(model, tmp_path)
    other = tiny_model("dual_stream", tokenizer)
    load_towers(other, tmp_path)
    torch.testing.assert_close(other.image_encoder.state_dict(), model.image_encoder.state_dict())
    new = make(tokenizer, projection_dim=8)
    load_towers(new, tmp_path)
    step(new, make_batch(tokenizer))
    torch.testing.assert_close(
        teacher_weights(new), model_weights(new)
    )  # the first update copies the loaded towers
    vqa = VQA.on(model, ["yes", "no"])
    batch = make_batch(tokenizer, 4, labels_BL=torch.eye(2).repeat(2, 1))
    vqa(batch).total.backward()
    unused = [
        name
        for name, parameter in vqa.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    assert unused == []


def test_pretrained_halves_equal_the_whole_bert(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cross-attention, text encoder and fusion-encoder compute the whole BERT."""
    torch.manual_seed(1)
    sizes = {**quiet(), "num_hidden_layers": 4}
    bert = create_text_encoder("tiny_bert", vocab_size=tokenizer.vocab_size, **sizes).eval()
    published: Any = bert.backbone
    published.save_pretrained(tmp_path)

    def encoders(config: ALBEFConfig, name: str, *, pretrained: bool) -> Any:
        """Published image weights are not available in tests."""
        image_encoder = create_image_encoder(config.image_encoder, image_size=config.image_size)
        return image_encoder, create_text_encoder(
            tmp_path, pretrained=pretrained, **config.text_arguments
        )

    monkeypatch.setattr(albef, "create_pixel_encoders", encoders)
    settings = {
        "text_encoder": str(tmp_path),
        "text_arguments": {"num_hidden_layers": 2},
        "image_arguments": {},
    }
    model: Any = make(tokenizer, pretrained=True, **settings).eval()
    batch = make_batch(tokenizer, 3)
    states = model.text_tokens(batch.ids_BT, batch.mask_BT).states_BND
    for layer in model.fusion:
        states = layer.feed_forward(layer.attention(states, states, batch.mask_BT[:, None]))
    real = batch.mask_BT
    torch.testing.assert_close(
        states[real], bert(batch.ids_BT, batch.mask_BT).tokens_BTD[real], **CLOSE
    )


def test_fusion_layers_start_only_from_a_bert_of_equal_size(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    with raises(ConfigError, "unsupported", "text_encoder"):
        init_from_bert(
            model.fusion, create_text_encoder("hf:distilbert", dim=32, n_layers=2, n_heads=2)
        )
    with raises(WeightsError, "mismatch", names="tiny_bert"):
        init_from_bert(model.fusion, create_text_encoder("tiny_bert"))


def test_paper_model_has_published_parameter_counts() -> None:
    """86 million in the image encoder, 109 in BERT, 14 in the cross-attention of its upper half."""
    with torch.device("meta"):
        model = medvl.create_model("albef")
    assert isinstance(model, ALBEF)
    count = {
        name: sum(p.numel() for p in part.parameters()) / 1e6
        for name, part in model.named_children()
    }
    assert count["image_encoder"] == pytest.approx(85.9, abs=0.3)
    assert count["text_encoder"] == pytest.approx(66.4, abs=0.1)
    assert count["fusion"] == pytest.approx(42.5 + 14.2, abs=0.1)
    heads = sum(count[name] for name in ("image_head", "text_head", "mlm_head"))
    assert count["momentum"] == pytest.approx(
        count["image_encoder"] + count["text_encoder"] + count["fusion"] + heads
    )
    assert model.itc_head.queue.image_QE.shape == (65536, 256)


CONTRASTIVE = ("albef", "mumc")


def steps_of_this_rank() -> dict[str, dict[str, Any]]:
    """Return the steps of each system under DDP, with its queue and what DDP leaves out."""
    rank, found = dist.get_rank(), {}
    world = RankInfo(rank=rank, size=2, local_size=2, device=torch.device("cpu"))
    for name in CONTRASTIVE:
        model = silent(name)
        module = DDPModel(model, world).ddp
        ignored = sorted(module.parameters_to_ignore)
        results = three_steps(model, module, rank, 2)
        queue = {key: buffer.tolist() for key, buffer in model.itc_head.queue.named_buffers()}
        found[name] = {**results, "queue": queue, "ignored": ignored}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return on_two_ranks(steps_of_this_rank)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_contrast_on_two_ranks_equals_one(
    name: str, ranks: list[dict[str, dict[str, Any]]]
) -> None:
    """Value and gradient, with a queue, also where a rank has no pair; queues are equal without
    DDP's broadcast.
    """
    first, second = (found[name] for found in ranks)
    model = silent(name)
    alone = three_steps(model, model, 0, 1)
    for results in (first, second):
        for key, expected in alone.items():
            torch.testing.assert_close(
                torch.tensor(results[key]), torch.tensor(expected), rtol=1e-4, atol=1e-5
            )
        assert results["ignored"] == [
            f"itc_head.queue.{name}" for name in ("image_QE", "names_Q", "seen", "text_QE")
        ]
    assert first["queue"] == second["queue"]
    queue = model.itc_head.queue
    assert first["queue"]["names_Q"] == queue.names_Q.tolist()
    torch.testing.assert_close(torch.tensor(first["queue"]["image_QE"]), queue.image_QE, **CLOSE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("momentum", 1.0),
        ("alpha", -0.1),
        ("temperature", 0.0),
        ("queue_size", -1),
        ("projection_dim", 0),
    ],
)
def test_config_rejects_values_out_of_range(field: str, value: float) -> None:
    with raises(ConfigError, "out_of_range", field):
        ALBEFConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        (
            {"image_encoder": "timm:mobilenetv3_small_050", "image_arguments": {}},
            "unsupported",
            "image_encoder",
        ),
        ({"image_encoder": "regions:11", "image_arguments": {}}, "unsupported", "image_encoder"),
        (
            {"text_encoder": "static", "text_arguments": {"dimension": 12}},
            "unsupported",
            "text_encoder",
        ),
        (
            {"text_encoder": "bioalbert", "text_arguments": {"num_hidden_layers": 1}},
            "unsupported",
            "text_encoder",
        ),
        ({"heads": 5}, "conflict", "heads"),
    ],
)
def test_encoders_that_do_not_fit_are_rejected(
    tokenizer: Tokenizer, settings: dict[str, Any], code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        make(tokenizer, **settings)
