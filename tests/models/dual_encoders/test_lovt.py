"""LoVT and the analysis of local losses: sentences, pooling, losses written out, maps, padding
and published sizes.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.learning import fit
from torch import Tensor

import medvl
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import Item
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError
from medvl.eval.grounding.heatmaps import choose_maps, phrase_maps
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.eval.zero_shot_classification.protocol import PromptScorer
from medvl.models import LocalAnalysisConfig, LoVT, LoVTConfig
from medvl.schema import Batch

REPORTS = [
    "There is a small left effusion. No pneumothorax is seen. The heart is enlarged.",
    "The lungs are clear.",
    "Bibasilar atelectasis, unchanged. No new consolidation. No effusion is seen. The heart is "
    "normal.",
    "The heart is enlarged. The lungs are clear.",
    "No pneumothorax is seen. There is a small left effusion.",
]
TINY = {
    "image_encoder": "resnet_tiny",
    "image_size": 64,
    "text_encoder": "tiny_bert",
    "text_arguments": {"num_hidden_layers": 1},
    "frozen_text_layers": 0,
    "projection_dim": 16,
    "hidden_dim": 24,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece(REPORTS, vocab_size=60, min_frequency=1)


def create(tokenizer: Tokenizer | None, name: str = "lovt", **settings: Any) -> LoVT:
    torch.manual_seed(0)
    model = medvl.create_model(name, tokenizer=tokenizer, **{**TINY, **settings})
    assert isinstance(model, LoVT)
    return model


def make_batch(tokenizer: Tokenizer, rows: list[int] | None = None) -> Batch:
    rows = list(range(len(REPORTS))) if rows is None else rows
    pixels = torch.randint(
        0, 256, (len(REPORTS), 64, 64, 1), generator=torch.Generator().manual_seed(1)
    )
    items = [
        Item(
            str(row), "s", pixels[row].to(torch.uint8).numpy(), REPORTS[row], torch.zeros(0).numpy()
        )
        for row in rows
    ]
    batch, _ = Collate(tokenizer, LoVT.inputs)(items)
    assert batch is not None
    return batch


def pooled(pool: Any, items_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Multi-head attention of the mean over the items of one sample, head by head."""
    attention, width = pool.attention, items_ND.shape[1]
    parts = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    inputs = (items_ND.mean(dim=0, keepdim=True), items_ND, items_ND)
    query, key, value = (F.linear(x, *part) for x, part in zip(inputs, parts, strict=True))
    out, weights = [], []
    for q, k, v in zip(
        *(x.chunk(attention.num_heads, dim=1) for x in (query, key, value)), strict=True
    ):
        share = (q @ k.T / (width // attention.num_heads) ** 0.5).softmax(dim=1)
        out.append(share @ v)
        weights.append(share[0])
    return attention.out_proj(torch.cat(out, dim=1))[0], torch.stack(weights).mean(dim=0)


def projected(head: Any, x: Tensor) -> Tensor:
    """The head with running statistics."""
    return head.outer(F.relu(normed(head.norm, head.inner(x))))


def normed(norm: Any, x: Tensor) -> Tensor:
    return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias


def sentences_of(model: LoVT, batch: Batch, row: int) -> Tensor:
    tokens_TD = model.text_encoder(batch.ids_BT, batch.mask_BT).tokens_BTD[row]
    assert batch.sentence_BT is not None
    numbers = range(int(batch.sentence_BT[row].max()) + 1)
    return torch.stack(
        [tokens_TD[batch.sentence_BT[row] == number].amax(dim=0) for number in numbers]
    )


def naive_local(items_NE: Tensor, other_NE: Tensor, weight_N: Tensor, near_NN: Tensor) -> Tensor:
    """Equation of one direction for one sample, item by item."""
    terms = []
    for i, item_E in enumerate(items_NE):
        cosine_N = F.cosine_similarity(item_E[None], other_NE, dim=1) / 0.3
        terms.append(-(near_NN[i] * cosine_N).sum() + cosine_N.exp().sum().log())
    return (weight_N / weight_N.sum() * torch.stack(terms)).sum()


def naive_near(side: int) -> Tensor:
    share = torch.zeros(side * side, side * side)
    for i in range(side * side):
        for j in range(side * side):
            distance = math.dist(divmod(i, side), divmod(j, side)) / math.hypot(side, side)
            share[i, j] = math.exp(-distance) if distance <= 0.5 else 0.0
    return share / share.sum(dim=1, keepdim=True)


def naive_terms(model: LoVT, batch: Batch) -> dict[str, Tensor]:
    """All losses, sample by sample and in eval mode, from the encoders' outputs."""
    patches = model.image_encoder(batch.image_BCHW).patches_BPD
    cross, near = model.cross_attention, naive_near(math.isqrt(patches.shape[1]))
    images, reports = [], []
    sums: dict[str, list[Tensor]] = {"regions": [], "sentences": [], "align": [], "spread": []}
    for row in range(len(batch)):
        sentences_SD = sentences_of(model, batch, row)
        image_D, weight_P = pooled(model.region_pool, patches[row])
        report_D, weight_S = pooled(model.sentence_pool, sentences_SD)
        images.append(projected(model.image_head, image_D))
        reports.append(projected(model.text_head, report_D))
        regions, sentences = (
            projected(model.region_head, patches[row]),
            projected(model.word_head, sentences_SD),
        )
        scores_SP = cross.key(sentences) @ cross.key(regions).T / regions.shape[1] ** 0.5
        for_s = normed(cross.norm, cross.out(scores_SP.softmax(dim=1) @ cross.value(regions)))
        for_p = normed(cross.norm, cross.out(scores_SP.T.softmax(dim=1) @ cross.value(sentences)))
        eye = torch.eye(len(sentences))
        for name, a, b, weight, shares in (
            ("regions", regions, for_p, weight_P, near),
            ("sentences", sentences, for_s, weight_S, eye),
        ):
            sums[name].append(naive_local(a, b, weight, shares) + naive_local(b, a, weight, shares))
            unit = F.normalize(a, dim=1)
            sums["align"].append(
                (weight * (unit - F.normalize(b, dim=1)).square().sum(dim=1)).sum() / weight.sum()
            )
            if len(a) > 1:
                apart = [
                    (unit[i] - unit[j]).square().sum()
                    for i in range(len(a))
                    for j in range(len(a))
                    if i != j
                ]
                sums["spread"].append(torch.stack([(-2 * x).exp() for x in apart]).mean().log())
            else:
                sums["spread"].append(torch.tensor(torch.nan))
    cosine = (
        F.normalize(torch.stack(images), dim=1) @ F.normalize(torch.stack(reports), dim=1).T / 0.1
    )
    target = torch.arange(len(batch))
    means = {name: torch.stack(sums[name]).mean() for name in ("regions", "sentences")}
    both = {name: torch.stack(sums[name]) for name in ("align", "spread")}
    return {
        "global": 0.75 * F.cross_entropy(cosine, target) + 0.25 * F.cross_entropy(cosine.T, target),
        **means,
        "align regions": both["align"][0::2].mean(),
        "align sentences": both["align"][1::2].mean(),
        "spread": both["spread"][0::2].mean() + both["spread"][1::2].nanmean(),
    }


def randomize(model: LoVT) -> None:
    """Give batch norms other statistics and weights than 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if hasattr(module, "running_var") and type(module).__name__ == "MaskedBatchNorm":
            for tensor in (module.running_mean, module.bias.data):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            for tensor in (module.running_var, module.weight.data):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))


def test_lovt_has_the_published_defaults_and_shapes() -> None:
    config = LoVTConfig()
    assert (config.image_encoder, config.text_encoder, config.image_size) == (
        "resnet50",
        "bioclinicalbert",
        224,
    )
    assert (config.projection_dim, config.hidden_dim, config.pool_heads, config.max_tokens) == (
        512,
        2048,
        8,
        512,
    )
    assert (
        config.temperature,
        config.image_weight,
        config.local_temperature,
        config.local_weight,
    ) == (*(0.1, 0.75, 0.3, 0.375),)
    assert (config.frozen_text_layers, config.uniformity_weight) == (6, 0.0)
    analysis = LocalAnalysisConfig()
    assert (analysis.local_temperature, analysis.local_weight, analysis.uniformity_weight) == (
        None,
        1.25,
        0.75,
    )
    with torch.device("meta"):
        model = LoVT.build(config, pretrained=False, tokenizer=None)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if "encoder" not in name
    }
    assert model.near_PP.shape == (49, 49)
    assert shapes["region_pool.attention.in_proj_weight"] == (6144, 2048)
    assert shapes["sentence_pool.attention.in_proj_weight"] == (2304, 768)
    assert shapes["region_head.inner.weight"] == shapes["image_head.inner.weight"] == (2048, 2048)
    assert shapes["word_head.inner.weight"] == shapes["text_head.inner.weight"] == (2048, 768)
    assert shapes["word_head.outer.weight"] == (512, 2048)
    assert shapes["cross_attention.value.weight"] == (512, 512)
    assert "near_PP" not in shapes
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert all("embeddings" in name or "layer." in name for name in frozen)
    assert any("layer.5." in name for name in frozen)
    assert not any("layer.6." in name for name in frozen)


@pytest.mark.parametrize("name", ["lovt", "local_analysis"])
def test_losses_equal_the_equations(tokenizer: Tokenizer, name: str) -> None:
    """Also their gradients, which do not go through the weights of items."""
    model, batch = create(tokenizer, name).eval(), make_batch(tokenizer)
    randomize(model)
    actual, expected = model(batch), naive_terms(model, batch)
    if name == "lovt":
        assert list(actual.terms) == ["global", "regions", "sentences"]
        for term, value in actual.terms.items():
            torch.testing.assert_close(value, expected[term], rtol=1e-4, atol=1e-5)
        total = expected["global"] + 0.375 * (expected["regions"] + expected["sentences"])
    else:
        torch.testing.assert_close(
            actual.terms["regions"], expected["align regions"], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            actual.terms["sentences"], expected["align sentences"], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            actual.terms["uniformity"], expected["spread"], rtol=1e-4, atol=1e-5
        )
        aligned = expected["align regions"] + expected["align sentences"]
        total = expected["global"] + 1.25 * aligned + 0.75 * expected["spread"]
    torch.testing.assert_close(actual.total, total, rtol=1e-4, atol=1e-5)
    (key,) = torch.autograd.grad(actual.total, [model.cross_attention.key.weight])
    (naive_key,) = torch.autograd.grad(total, [model.cross_attention.key.weight])
    torch.testing.assert_close(key, naive_key, rtol=1e-3, atol=1e-6)


def test_losses_start_near_their_expectation(tokenizer: Tokenizer) -> None:
    """InfoNCE of independent items: the logarithm of their number, and a little more for the
    spread of cosines.
    """
    terms = create(tokenizer).train()(make_batch(tokenizer)).terms
    regions, sentences = math.log(4), sum(map(math.log, (3, 1, 4, 2, 2))) / 5
    assert terms["global"].item() == pytest.approx(math.log(5), abs=1.5)
    assert terms["regions"].item() == pytest.approx(2 * regions, abs=0.7)
    assert terms["sentences"].item() == pytest.approx(2 * sentences, abs=0.7)


@pytest.mark.training
@pytest.mark.parametrize("name", ["lovt", "local_analysis"])
def test_every_parameter_learns_and_the_loss_falls(tokenizer: Tokenizer, name: str) -> None:
    model, batch = create(tokenizer, name).train(), make_batch(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = fit(model, batch, optimizer, 10, every_gradient=model.parameters())
    assert seen[-1]["total"] < seen[0]["total"] - 0.5


def test_embeddings_do_not_depend_on_the_batch(tokenizer: Tokenizer) -> None:
    """The released code divides the query of a report by the longest report's number of
    sentences.
    """
    model, batch = create(tokenizer).eval(), make_batch(tokenizer)
    together = model.embed_texts(REPORTS)
    assert together.mask_NP is not None
    assert together.mask_NP.sum(dim=1).tolist() == [3, 1, 4, 2, 2]
    for row, report in enumerate(REPORTS):
        alone = model.embed_texts([report])
        torch.testing.assert_close(
            alone.global_NE[0], together.global_NE[row], rtol=1e-4, atol=1e-5
        )
        assert alone.local_NPE is not None
        assert together.local_NPE is not None
        count = alone.local_NPE.shape[1]
        torch.testing.assert_close(
            alone.local_NPE[0], together.local_NPE[row, :count], rtol=1e-4, atol=1e-5
        )
    pairs = model.encode_pairs(batch)
    torch.testing.assert_close(pairs.texts.global_NE, together.global_NE)
    torch.testing.assert_close(pairs.images.global_NE, model.encode_image(batch.image_BCHW))
    torch.testing.assert_close(model.encode_text(REPORTS), together.global_NE)


def test_padding_changes_no_loss(tokenizer: Tokenizer) -> None:
    """Longer padding, and in train mode: statistics of batch norm are those of real sentences."""
    model, batch = create(tokenizer).train(), make_batch(tokenizer)
    model.text_encoder.eval()  # no dropout
    assert batch.sentence_BT is not None
    padded = dataclasses.replace(
        batch,
        ids_BT=F.pad(batch.ids_BT, (0, 5)),
        mask_BT=F.pad(batch.mask_BT, (0, 5)),
        sentence_BT=F.pad(batch.sentence_BT, (0, 5), value=-1),
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(batch)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(before)
    actual = model(padded)
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-4, atol=1e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, after[key], rtol=1e-4, atol=1e-5)


def test_a_prompt_is_a_report_of_one_sentence(tokenizer: Tokenizer) -> None:
    model = create(tokenizer).eval()
    prompts = ["effusion", "No effusion is seen.", "12", ""]
    texts = model.embed_texts(prompts)
    assert texts.mask_NP is not None
    assert texts.mask_NP.tolist() == [[True]] * 4
    ids_BT, mask_BT = tokenizer(prompts)
    tokens_BTD = model.text_encoder(ids_BT, mask_BT).tokens_BTD
    sentence_BD = torch.stack([x[1 : max(int(m.sum()) - 1,
        1)].amax(dim=0) if m.sum() > 2 else x[:2].amax(dim=0)
                               for x, m in zip(tokens_BTD, mask_BT, strict=True)])  # fmt: skip
    report_BD = torch.stack([pooled(model.sentence_pool, x[None])[0] for x in sentence_BD])
    expected = F.normalize(projected(model.text_head, report_BD), dim=1)
    torch.testing.assert_close(texts.global_NE, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.encode_text(ids_BT, mask_BT), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.encode_text("effusion"), model.encode_text(["effusion"]))
    images = model.embed_images(make_batch(tokenizer).image_BCHW)
    scores = PromptScorer(model, load_prompts("chexpert_ensemble"))(images)
    assert scores.isfinite().all()


@pytest.mark.parametrize("maps", ["attention", "similarity"])
def test_maps_of_phrases(tokenizer: Tokenizer, maps: Any) -> None:
    """Attention: the sentence over its regions. Similarity: the best sentence of the phrase with
    each region.
    """
    model, batch = create(tokenizer).eval(), make_batch(tokenizer)
    randomize(model)
    assert choose_maps(model, None) == "attention"
    sizes = [(64, 64)] * len(REPORTS)
    found = torch.stack(phrase_maps(model, batch.image_BCHW, REPORTS, sizes, maps=maps))
    assert found.isfinite().all()
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(REPORTS)
    assert images.local_NPE is not None
    assert texts.local_NPE is not None
    regions, sentences = images.local_NPE[2], texts.local_NPE[2]
    if maps == "similarity":
        expected = (F.normalize(sentences, dim=1) @ F.normalize(regions, dim=1).T).amax(dim=0)
        corner = found[2, 0, 0]
    else:
        key = model.cross_attention.key
        expected = (key(sentences) @ key(regions).T / 4).softmax(dim=1).mean(dim=0)
        corner = found[2, 0, 0]
    torch.testing.assert_close(corner, expected[0], rtol=1e-4, atol=1e-5)


def test_a_batch_without_sentences_is_refused(tokenizer: Tokenizer) -> None:
    model, batch = create(tokenizer), make_batch(tokenizer)
    with raises(ConfigError, "missing", "sentence_BT"):
        model(dataclasses.replace(batch, sentence_BT=None))
    with raises(ConfigError, "out_of_range", "local_temperature"):
        LoVTConfig(local_temperature=0.0)


@pytest.mark.parametrize("name", ["lovt", "local_analysis"])
def test_autocast_gives_the_same_losses(tokenizer: Tokenizer, name: str) -> None:
    model, batch = create(tokenizer, name).eval(), make_batch(tokenizer)
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(batch)
    actual.total.backward()
    assert actual.total.dtype == torch.float32
    torch.testing.assert_close(actual.total, expected.total, rtol=0.05, atol=0.05)
