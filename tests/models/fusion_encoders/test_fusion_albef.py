"""ALBEF: its moving average, queue and look-alike negatives; what it has of a dual-encoder; across checkpoints and ranks."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.albef_ranks import make, quiet, two_steps
from helpers.fusion_samples import flags, make_batch, tiny_model, tiny_tokenizer
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.losses.itc import ramped_alpha
from medvl.models.checkpoint import load_towers, save
from medvl.models.downstream.vqa.model import VQA
from medvl.models.fusion_encoders import albef
from medvl.models.fusion_encoders.albef import ALBEF, start_from_bert
from medvl.models.fusion_encoders.config import ALBEFConfig
from medvl.schema import Batch, Losses
from medvl.train.config import OptimConfig
from medvl.train.optim.optimizer import build_optimizer

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def step(model: ALBEF, batch: Batch, seed: int = 0) -> Losses:
    torch.manual_seed(seed)
    return model(batch)


def train(model: ALBEF, batches: list[Batch], first: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number, batch in enumerate(batches, first):
        optimizer.zero_grad()
        step(model, batch, number).total.backward()
        optimizer.step()
    return optimizer


def moving(model: ALBEF) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.momentum.module.named_parameters()}


def learning(model: ALBEF) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.layers.named_parameters()}


@pytest.mark.fault("N5")
def test_the_average_moves_by_its_formula_before_each_training_pass(tokenizer: Tokenizer) -> None:
    """First a copy; then m * average + (1 - m) * weights as they are before the update. Nothing in eval mode."""
    model = make(tokenizer, momentum=0.9)
    with torch.no_grad():
        for parameter in model.layers.parameters():  # as when towers are loaded into a fresh model
            parameter.add_(0.01)
    expected = learning(model)
    for number in range(3):
        before = learning(model)
        expected = {name: 0.9 * expected[name] + 0.1 * before[name] for name in expected}
        train(model, [make_batch(tokenizer)], number)
        torch.testing.assert_close(moving(model), expected)
        assert not torch.equal(learning(model)["mlm_head.bias"], before["mlm_head.bias"])
    state = copy.deepcopy(model.state_dict())
    step(model.eval(), make_batch(tokenizer))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.fault("N5")
def test_the_average_is_not_trained(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    step(model, make_batch(tokenizer)).total.backward()
    assert all(parameter.grad is None for parameter in model.momentum.parameters())
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4, weight_decay=0.02))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert not held & {id(parameter) for parameter in model.momentum.parameters()}
    assert id(model.itc_head.temperature) in held


def test_losses_are_those_of_the_formulas(tokenizer: Tokenizer) -> None:
    """Second step: a queue of one batch, alpha a quarter of the way. Contrast and words against plain arithmetic."""
    model = make(tokenizer, alpha=0.8, dropout=0.0, text_arguments=quiet(), momentum=0.5)
    first, second = make_batch(tokenizer, 4, studies=list("abcd")), make_batch(tokenizer, 3, studies=list("bxy"))
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
    image_BE, text_BE = model.encode_image(second.image_BCHW), model.encode_text(second.ids_BT, second.mask_BT)
    for query, own, other in ((image_BE, keys_image, keys_text), (text_BE, keys_text, keys_image)):
        target = alpha * (own[:3] @ other.T / tau).softmax(dim=1) + (1 - alpha) * hard_BN
        total = total - (target * (query @ other.T / tau).log_softmax(dim=1)).sum() / 6
    torch.testing.assert_close(result.terms["itc"], total, **CLOSE)
    torch.testing.assert_close(result.total, result.terms["itc"] + result.terms["itm"] + result.terms["mlm"])


@torch.no_grad()
def teacher(model: ALBEF, batch: Batch, side: str) -> Tensor:
    """Embeddings of the moving average, by the names of the encoders and heads."""
    average: Any = model.momentum.module
    if side == "image":
        return F.normalize(average.image_head(average.image_encoder(batch.image_BCHW).pooled_BD), dim=1)
    return F.normalize(average.text_head(average.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD), dim=1)


def test_contrast_starts_at_ln_of_batch_and_queue(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    for number in range(3):
        batch = make_batch(tokenizer, 8, keys=[f"{number}-{row}" for row in range(8)])
        found = step(model, batch).terms["itc"].item()
        assert found == pytest.approx(math.log(8 + 8 * number), rel=0.05)
    model.eval()
    assert step(model, batch).terms["itc"].item() == pytest.approx(math.log(8), rel=0.05)  # judged by itself


def test_negatives_look_alike_and_are_none_of_the_study_or_text(tokenizer: Tokenizer) -> None:
    model = make(tokenizer, temperature=0.01)
    studies = ["a", "b", "a", "c", "d", "e"]  # texts 0 and 4, and 1 and 5, are equal
    batch = make_batch(tokenizer, 6, studies=studies, has_image_B=flags(1, 1, 1, 0, 1, 1))
    row_K = torch.tensor([0, 1, 2, 4, 5])
    similarity = torch.zeros(5, 5)
    similarity[0, 4] = similarity[2, 0] = 1  # rows 0 and 5, 4 and 0 look alike; the latter share their text
    read = Reading(torch.eye(5), similarity.T)
    for seed in range(20):
        torch.manual_seed(seed)
        pairs = model.hard_negatives(batch, read, row_K)
        found = list(zip(pairs.image_N.tolist(), pairs.text_N.tolist(), strict=True))
        assert found[:5] == [(row, row) for row in row_K.tolist()]
        assert pairs.matched_N.tolist() == [True] * 5 + [False] * 10
        for image, text in found[5:]:
            assert studies[image] != studies[text]
            assert batch.texts[image] != batch.texts[text]
            assert {image, text} <= {0, 1, 2, 4, 5}
        assert found[10] == (0, 5)


@dataclasses.dataclass
class Reading:
    image_KE: Tensor
    text_KE: Tensor


def test_it_is_a_dual_encoder_too(tokenizer: Tokenizer) -> None:
    model = make(tokenizer).eval()
    batch = make_batch(tokenizer, 4)
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
    similarity_NM = model.similarity(images, texts)
    assert similarity_NM.shape == (4, 4)
    torch.testing.assert_close(images.global_NE.norm(dim=1), torch.ones(4))
    image = model.image_tokens(batch.image_BCHW)  # what is fused and what is compared is one encoding
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    torch.testing.assert_close(F.normalize(model.image_head(image.states_BND[:, 0]), dim=1), images.global_NE)
    torch.testing.assert_close(F.normalize(model.text_head(text.states_BND[:, 0]), dim=1), texts.global_NE)
    assert model.match(text, image).shape == (4, 2)
    noise = torch.randint(5, 50, (4, 3))
    padded = torch.cat([batch.ids_BT, noise], dim=1), torch.cat([batch.mask_BT, torch.zeros(4, 3).bool()], dim=1)
    torch.testing.assert_close(model.encode_text(*padded), texts.global_NE, **CLOSE)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model.encode_image(batch.image_BCHW[order]), images.global_NE[order], **CLOSE)


def test_a_run_goes_on_from_disk_as_if_undisturbed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Average, queue, its place and the ramp are all in the checkpoint."""
    batches = [make_batch(tokenizer, 5, keys=[f"{n}-{row}" for row in range(5)]) for n in range(6)]
    whole, begun = make(tokenizer, queue_size=12), make(tokenizer, queue_size=12)
    train(whole, batches)
    train(begun, batches[:3])
    save(begun, tmp_path)
    again = medvl.load(tmp_path)
    assert isinstance(again, ALBEF)
    train(again.train(), batches[3:], 3)
    assert again.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_its_towers_start_others_and_it_answers_questions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(tokenizer)
    train(model, [make_batch(tokenizer)] * 2)
    save(model, tmp_path)
    other = tiny_model("dual_stream", tokenizer)
    load_towers(other, tmp_path)
    torch.testing.assert_close(other.image_encoder.state_dict(), model.image_encoder.state_dict())
    fresh = make(tokenizer, projection_dim=8)
    load_towers(fresh, tmp_path)
    step(fresh, make_batch(tokenizer))
    torch.testing.assert_close(moving(fresh), learning(fresh))  # the first move is a copy, of loaded towers too
    vqa = VQA.on(model, ["yes", "no"])
    batch = make_batch(tokenizer, 4, labels_BL=torch.eye(2).repeat(2, 1))
    vqa(batch).total.backward()
    unused = [name for name, parameter in vqa.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert unused == []


def test_from_published_weights_both_halves_are_berts(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its attention to the image taken out, text encoder and fusion-encoder are the whole BERT."""
    torch.manual_seed(1)
    sizes = {**quiet(), "num_hidden_layers": 4}
    whole = create_text_encoder("tiny_bert", vocab_size=tokenizer.vocab_size, **sizes).eval()
    published: Any = whole.backbone
    published.save_pretrained(tmp_path)

    def encoders(config: ALBEFConfig, *, pretrained: bool) -> Any:
        """No published image encoder is on this machine."""
        image_encoder = create_image_encoder(config.image_encoder, image_size=config.image_size)
        return image_encoder, create_text_encoder(tmp_path, pretrained=pretrained, **config.text_arguments)

    monkeypatch.setattr(albef, "create_encoders", encoders)
    settings = {"text_encoder": str(tmp_path), "text_arguments": {"num_hidden_layers": 2}, "image_arguments": {}}
    model: Any = make(tokenizer, pretrained=True, **settings).eval()
    batch = make_batch(tokenizer, 3)
    found = model.text_tokens(batch.ids_BT, batch.mask_BT).states_BND
    for layer in model.fusion:
        found = layer.feed_forward(layer.attention(found, found, batch.mask_BT[:, None]))
    real = batch.mask_BT
    torch.testing.assert_close(found[real], whole(batch.ids_BT, batch.mask_BT).tokens_BTD[real], **CLOSE)


def test_other_text_encoders_are_no_upper_half(tokenizer: Tokenizer) -> None:
    model = make(tokenizer)
    for wrong, message in (
        (create_text_encoder("hf:distilbert", dim=32, n_layers=2, n_heads=2), "is not one"),
        (create_text_encoder("tiny_bert"), "of other sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            start_from_bert(model.fusion, wrong)


def test_the_published_size_is_that_of_its_parts() -> None:
    """86 million in the image encoder, 109 in BERT, whose upper half has 14 more to look at the image with."""
    with torch.device("meta"):
        model = medvl.create_model("albef")
    assert isinstance(model, ALBEF)
    count = {name: sum(p.numel() for p in part.parameters()) / 1e6 for name, part in model.named_children()}
    assert count["image_encoder"] == pytest.approx(85.9, abs=0.3)
    assert count["text_encoder"] == pytest.approx(66.4, abs=0.1)
    assert count["fusion"] == pytest.approx(42.5 + 14.2, abs=0.1)
    heads = sum(count[name] for name in ("image_head", "text_head", "mlm_head"))
    assert count["momentum"] == pytest.approx(count["image_encoder"] + count["text_encoder"] + count["fusion"] + heads)
    assert model.itc_head.queue.image_QE.shape == (65536, 256)


RANKS = """
import dataclasses, json, sys
import torch, torch.distributed as dist
from helpers.fusion_samples import make_batch, tiny_tokenizer
from helpers.albef_ranks import make, quiet, two_steps
from medvl.train.parallel.distributed import RankInfo, distribute

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make(tiny_tokenizer(), dropout=0.0, text_arguments=quiet())
world = RankInfo(rank=rank, size=2, local_size=2, device=torch.device("cpu"))
module = distribute(model, world, False)
ignored = sorted(module.parameters_to_ignore)
found = two_steps(model, module, rank, 2)
queue = {name: buffer.tolist() for name, buffer in model.itc_head.queue.named_buffers()}
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({**found, "queue": queue, "ignored": ignored}, file)
dist.destroy_process_group()
"""


def test_contrast_on_two_ranks_is_that_of_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Value and gradient, with the queue of the step before; the queue stays out of DDP's broadcast and is equal."""
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    model = make(tokenizer, dropout=0.0, text_arguments=quiet())
    alone = two_steps(model, model, 0, 1)
    for found in (first, second):
        assert found["itc"] == pytest.approx(alone["itc"], rel=1e-5)
        assert found["temperature"] == pytest.approx(alone["temperature"], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(torch.tensor(found["image"]), torch.tensor(alone["image"]), **CLOSE)
        assert found["ignored"] == [f"itc_head.queue.{name}" for name in ("image_QE", "names_Q", "seen", "text_QE")]
    assert first["queue"] == second["queue"]
    queue = model.itc_head.queue
    assert first["queue"]["names_Q"] == queue.names_Q.tolist()
    torch.testing.assert_close(torch.tensor(first["queue"]["image_QE"]), queue.image_QE, **CLOSE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, "momentum must be within"),
        ({"alpha": -0.1}, "alpha must be within"),
        ({"temperature": 0.0}, "temperature and itc_weight must be above 0"),
        ({"queue_size": -1}, "queue_size and ramp_steps"),
        ({"projection_dim": 0}, "must be positive"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ALBEFConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_encoder": "timm:mobilenetv3_small_050", "image_arguments": {}}, "pooled vector beside its patches"),
        ({"image_encoder": "regions:11", "image_arguments": {}}, "precomputed regions"),
        ({"text_encoder": "static", "text_arguments": {"dimension": 12}}, "with a class token and words"),
        ({"text_encoder": "bioalbert", "text_arguments": {"num_hidden_layers": 1}}, "as wide as its states"),
        ({"heads": 5}, "no multiple of heads 5"),
    ],
)
def test_encoders_that_do_not_fit_are_refused(tokenizer: Tokenizer, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tokenizer, **settings)
