"""PTUnifier: prompts in place of a missing image or text, and contrast of both halves of a pair."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.errors import raises
from helpers.fusion_samples import TINY, flags, make_batch, shaken, tiny_model, tiny_tokenizer
from helpers.two_ranks import on_two_ranks
from torch.nn.parallel import DistributedDataParallel

import medvl
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError
from medvl.models import VQA, PTUnifier, PTUnifierConfig
from medvl.models.fusion_encoders.parts.inputs import PromptPool
from medvl.schema import Batch

TOKENIZER = tiny_tokenizer()
CONVOLUTIONAL: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {},
    "image_positions": True,
}
ENCODERS = pytest.mark.parametrize("encoder", [{}, CONVOLUTIONAL], ids=["tokens", "cells"])


def make(**settings: Any) -> PTUnifier:
    model = tiny_model("ptunifier", TOKENIZER, **settings)
    assert isinstance(model, PTUnifier)
    return model


def alone(images: bool, size: int = 3) -> Batch:
    """Return a batch of images alone, or of texts alone."""
    return make_batch(
        TOKENIZER, size, **{"has_text_B" if images else "has_image_B": flags(*[0] * size)}
    )


def test_pool_returns_the_most_similar_prompts_with_gradient() -> None:
    """The released code selects them without gradient, so that its pools stay random."""
    torch.manual_seed(0)
    pool, query_BD = PromptPool(7, 4, 3, 4), torch.randn(2, 4)
    chosen_BKD = pool(query_BD)
    for row in range(2):
        order = sorted(range(7), key=lambda r: -(query_BD[row] @ pool.prompts_RD[r]).item())
        torch.testing.assert_close(chosen_BKD[row], pool.prompts_RD[order[:3]])
    weight_BKD = torch.randn(2, 3, 4)
    (chosen_BKD * weight_BKD).sum().backward()
    expected_RD = torch.zeros(7, 4)
    for row in range(2):
        order = (query_BD[row] @ pool.prompts_RD.T).argsort(descending=True)[:3]
        expected_RD[order] += weight_BKD[row]
    torch.testing.assert_close(pool.prompts_RD.grad, expected_RD)
    mapped = PromptPool(7, 4, 3, 6)
    assert mapped(torch.randn(2, 6)).shape == (2, 3, 4)
    assert [name for name, _ in mapped.named_parameters()] == ["prompts_RD"]


@ENCODERS
def test_each_term_reaches_what_it_should(encoder: dict[str, Any]) -> None:
    """The contrastive term has its published name and trains both pools; words without images
    train that of images.
    """
    model, batch = shaken(make(**encoder)), make_batch(TOKENIZER, 4)
    terms = model(batch).terms
    assert set(terms) == {"mlm", "itm", "itc"}
    terms["itc"].backward()
    for pool in (model.image_prompts, model.text_prompts):
        assert pool.prompts_RD.grad is not None
        assert pool.prompts_RD.grad.any()
    model.zero_grad()
    model(alone(images=False)).terms["mlm"].backward()
    assert model.image_prompts.prompts_RD.grad is not None
    assert model.image_prompts.prompts_RD.grad.any()
    assert {objective.name: objective.weight for objective in model.objectives} == {
        "mlm": 1,
        "itm": 0.5,
        "itc": 0.1,
    }


def test_contrast_equals_its_formula() -> None:
    model, batch = shaken(make()).eval(), make_batch(TOKENIZER, 4, has_image_B=flags(1, 1, 0, 1))
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    encoded = model.encode(batch, corruption)
    row_K = torch.tensor([0, 1, 3])
    pairs = batch.rows(row_K.tolist())
    images = model.features(dataclasses.replace(pairs, has_text_B=flags(0, 0, 0))).pooled_BD
    texts = model.features(dataclasses.replace(pairs, has_image_B=flags(0, 0, 0))).pooled_BD
    image_KE, text_KE = (
        F.normalize(head(x), dim=1)
        for head, x in ((model.itc_head.image, images), (model.itc_head.text, texts))
    )
    logits_KK = image_KE @ text_KE.T / 0.1
    own_K = torch.arange(3)
    expected = (F.cross_entropy(logits_KK, own_K) + F.cross_entropy(logits_KK.T, own_K)) / 2
    *_, itc = model.objectives
    loss = itc.loss(encoded, None)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    gradients = [
        torch.autograd.grad(x, model.image_prompts.prompts_RD)[0] for x in (loss, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_tokens_are_those_of_the_paper() -> None:
    """Class token and 5 patches; first token, 4 prompts, closing token; queries are means of
    embedded tokens.
    """
    model = shaken(make()).eval()
    pair = make_batch(TOKENIZER, 2)
    image, text = (
        model.features(alone(images=True, size=2)),
        model.features(alone(images=False, size=2)),
    )
    assert image.text.states_BND.shape[1] == 1 + 4 + 1
    assert text.image.states_BND.shape[1] == 1 + 5
    embedded = model.text_encoder.embed(pair.ids_BT, pair.mask_BT)[
        0, 1 : int(pair.mask_BT[0].sum())
    ].mean(0)
    assert (
        model.image_prompts.map_QD is not None
    )  # the tiny text encoder is narrower than the image encoder
    chosen = (
        (embedded @ model.image_prompts.map_QD @ model.image_prompts.prompts_RD.T).topk(5).indices
    )
    given: list[torch.Tensor] = []
    net: Any = model.image_encoder.backbone
    hook = net.patch_drop.register_forward_hook(lambda module, inputs, output: given.append(output))
    model.features(alone(images=False, size=2))
    hook.remove()
    torch.testing.assert_close(given[0][0, 1:], model.image_prompts.prompts_RD[chosen])
    torch.testing.assert_close(given[0][0, 0], net.cls_token[0, 0] + net.pos_embed[0, 0])


@ENCODERS
def test_other_rows_do_not_change_a_row_without_its_image_or_text(encoder: dict[str, Any]) -> None:
    model = shaken(make(**encoder)).eval()
    batch = make_batch(TOKENIZER, 4, has_image_B=flags(1, 0, 1, 1), has_text_B=flags(1, 1, 0, 1))
    with torch.no_grad():
        mixed = model.features(batch).pooled_BD
        for row in range(4):
            torch.testing.assert_close(
                model.features(batch.rows([row])).pooled_BD[0], mixed[row], rtol=1e-3, atol=1e-4
            )


def test_replaced_patches_equal_those_of_the_image() -> None:
    """Encoding an image's own embedded patches again changes nothing, in both libraries."""
    for name, sizes in (("timm:test_vit", {}), ("clip_vit_b16", {"width": 64, "layers": 2})):
        encoder = create_image_encoder(name, image_size=64, **sizes).eval()
        image_BCHW = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
        with encoder.record_patches() as recorded:
            whole = encoder(image_BCHW)
        again = encoder.encode_patches(recorded[0])
        torch.testing.assert_close(again.patches_BPD, whole.patches_BPD, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again.pooled_BD, whole.pooled_BD, rtol=1e-4, atol=1e-5)
        assert again.grid is None
        assert encoder(image_BCHW).grid == (4, 4)
    with raises(ConfigError, "unsupported", "replace_BKD"):
        create_image_encoder("resnet_tiny", image_size=64).encode_patches(torch.zeros(1, 2, 8))


def test_vqa_keeps_the_pools(tmp_path: Path) -> None:
    """As published; questions without an image are answered from prompts."""
    vqa = VQA.on(make(), ["yes", "no"])
    assert not any(
        parameter.requires_grad for parameter in vqa.fusion_model.image_prompts.parameters()
    )
    assert vqa.answer_logits(alone(images=False)).isfinite().all()


def test_settings_that_do_not_fit_are_rejected() -> None:
    with raises(ConfigError, "out_of_range", "image_prompts"):
        PTUnifierConfig(prompts=10)
    with raises(ConfigError, "conflict", "image_positions"):
        make(image_positions=True)
    bare = tiny_model("ptunifier", None, vocab_size=TOKENIZER.vocab_size)
    with raises(ConfigError, "missing", "tokenizer"):
        bare.features(alone(images=True))


def test_published_sizes() -> None:
    """389.3 million parameters less CLIP's text embeddings (25.3) and RoBERTa's pooler (0.6),
    both unused.
    """
    with torch.device("meta"):
        model = medvl.create_model("ptunifier")
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    unused = (77 * 512 + 49408 * 512 + 2 * 512 + 768 * 768 + 768) / 1e6
    assert math.isclose(count + unused, 389.338, abs_tol=0.002)


def rank_gradients(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return gradients of the contrastive loss; the second half of the rows has no pair."""
    batch = make_batch(
        TOKENIZER, 6, has_image_B=flags(1, 1, 1, 1, 0, 1), has_text_B=flags(1, 1, 1, 0, 1, 0)
    )
    text = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model = make(dropout=0.0, text_arguments={**TINY["ptunifier"]["text_arguments"], **text})
    module: Any = DistributedDataParallel(model) if world > 1 else model
    torch.manual_seed(0)
    result = module(batch.rows(range(rank * 6 // world, (rank + 1) * 6 // world)))
    (result.terms["itc"] + 0 * result.total).backward()  # every parameter takes part
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_contrast_on_two_ranks_equals_one_where_a_rank_has_no_pair() -> None:
    alone = rank_gradients(0, 1)
    for found in on_two_ranks(gradients_of_this_rank):
        for name, gradient in alone.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: n + text
            )


def gradients_of_this_rank() -> dict[str, torch.Tensor]:
    return rank_gradients(dist.get_rank(), 2)
