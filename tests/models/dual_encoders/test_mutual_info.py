"""MutualInfo: loss, similarity and maps against the formulas; published shapes; rates of the
optimiser.
"""

import dataclasses
import math

import pytest
import torch
from helpers.contrastive_systems import PAIRS, STUDIES, make_batch, mutual_info
from helpers.errors import raises
from helpers.tiny_towers import TINY_BERT
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import ConfigError
from medvl.models import MutualInfo, MutualInfoConfig
from medvl.schema import Batch


def whole(name: str = "mutual_info local") -> Batch:
    return dataclasses.replace(make_batch(name), has_image_B=None)


def scored(critic: torch.nn.Module, image_D: Tensor, text_D: Tensor) -> Tensor:
    """The critic on one concatenated pair."""
    return critic.rest(critic.first(torch.cat([image_D, text_D])))[0]


def naive_scores(model: MutualInfo, batch: Batch) -> dict[str, Tensor]:
    """Global scores, and for each sentence its best region, summed, pair by pair."""
    images, text = (
        model.image_encoder(batch.image_BCHW),
        model.text_encoder(batch.ids_BT, batch.mask_BT),
    )
    scores = {"global": torch.zeros(PAIRS, PAIRS), "local": torch.zeros(PAIRS, PAIRS)}
    for i in range(PAIRS):
        for j in range(PAIRS):
            real_TD = text.tokens_BTD[j][batch.mask_BT[j]]
            vector_D = real_TD.amax(dim=0) if model.config.text_pool == "max" else real_TD[0]
            scores["global"][i, j] = scored(model.critic, images.pooled_BD[i], vector_D)
            for sentence in range(int(batch.sentence_BT[j].max()) + 1):
                vector_D = text.tokens_BTD[j][batch.sentence_BT[j] == sentence].mean(dim=0)
                best = [
                    scored(model.local_critic, region_D, vector_D)
                    for region_D in images.patches_BPD[i]
                ]
                scores["local"][i, j] += torch.stack(best).max()
    return scores


def naive_bound(scores_BB: Tensor, bound: str) -> float:
    pairs = [(i, j) for i in range(PAIRS) for j in range(PAIRS) if STUDIES[i] != STUDIES[j]]
    own_B = scores_BB.diagonal()
    if bound == "dv":
        return float(
            own_B.mean() - torch.stack([scores_BB[pair].exp() for pair in pairs]).mean().log()
        )
    values = []
    for i in range(PAIRS):
        among = torch.stack([own_B[i], *(scores_BB[i, j] for k, j in pairs if k == i)])
        values.append(math.log(len(among)) + float(own_B[i] - among.logsumexp(dim=0)))
    return sum(values) / PAIRS


@pytest.mark.parametrize(
    ("bound", "text_pool"), [("dv", "cls"), ("info_nce", "cls"), ("info_nce", "max")]
)
def test_losses_equal_the_formulas(bound: str, text_pool: str) -> None:
    """Pairs of one study are no negatives."""
    model = mutual_info(local_weight=0.5, bound=bound, text_pool=text_pool).eval()
    for critic in (model.critic, model.local_critic):
        critic.rest[-1].weight.data *= 8  # scores that differ
    batch = whole()
    with torch.no_grad():
        losses, scores = model(batch), naive_scores(model, batch)
        similarity_NM = model.similarity(
            model.embed_images(batch.image_BCHW),
            model.embed_ids(batch.ids_BT, batch.mask_BT, batch.sentence_BT),
        )
    for name, scores_BB in scores.items():
        assert losses.terms[name].item() == pytest.approx(
            -naive_bound(scores_BB, bound), rel=1e-3, abs=1e-5
        )
        assert scores_BB.std() > 1e-3
    torch.testing.assert_close(
        similarity_NM, scores["global"] + 0.5 * scores["local"], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(losses.total, losses.terms["global"] + 0.5 * losses.terms["local"])


def test_a_new_model_has_a_bound_near_zero_and_all_parameters_learn() -> None:
    model = mutual_info(local_weight=1.0)
    losses = model(whole())
    assert abs(losses.terms["global"].item()) < 0.1
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        dead = (
            "position_embeddings" in name or name.endswith("key.bias") or "word_embeddings" in name
        )
        assert dead or parameter.grad.abs().sum() > 0, name


def test_padding_changes_nothing() -> None:
    model, batch = mutual_info(local_weight=1.0).eval(), whole()
    wider = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, 5), value=value)
        for name, value in (("ids_BT", 7), ("mask_BT", False), ("sentence_BT", -1))
    }
    torch.testing.assert_close(model(dataclasses.replace(batch, **wider)).total, model(batch).total)


def test_published_sizes() -> None:
    model = medvl.create_model(
        "mutual_info", local_weight=1.0, text_arguments={**TINY_BERT, "hidden_size": 768}
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["critic.first.weight"] == (1024, 1536)
    assert [shapes[f"critic.rest.{index}.weight"] for index in (1, 3)] == [(512, 1024), (1, 512)]
    assert shapes["local_critic.first.weight"] == (1024, 128 + 768)
    assert shapes["image_encoder.backbone.conv1.weight"] == (8, 1, 3, 3)
    assert model.transform.size == 256


def test_the_text_encoder_has_its_own_rate_and_all_weight_decay() -> None:
    model = mutual_info(local_weight=1.0)
    rates = {id(p): group for group in model.parameter_groups(5e-4, 0.1) for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    text = {id(parameter) for parameter in model.text_encoder.parameters()}
    assert {(key in text, round(group["lr"], 8)) for key, group in rates.items()} == {
        (True, 2e-5),
        (False, 5e-4),
    }
    assert {key in text for key, group in rates.items() if group["weight_decay"]} == {True}


def test_strings_have_sentences_and_maps_cover_the_image() -> None:
    texts = ["There is a small effusion. No pneumothorax.", "Clear."]
    tokenizer = train_wordpiece(texts, vocab_size=60, min_frequency=1)
    model = mutual_info(local_weight=1.0, tokenizer=tokenizer, vocab_size=None).eval()
    assert model.embed_texts(texts).mask_NP.tolist() == [[True, True], [True, False]]
    image_BCHW = whole().image_BCHW[:2]
    maps = model.attention_maps(image_BCHW, texts, [(40, 32), (32, 64)])
    assert [tuple(each.shape) for each in maps] == [(40, 32), (32, 64)]
    assert model.similarity(image_BCHW, texts).shape == (2, 2)
    assert model.encode_image(image_BCHW).norm(dim=1).tolist() == pytest.approx([1, 1], abs=1e-4)
    with raises(ConfigError, "unsupported", "local_weight"):
        mutual_info().attention_maps(image_BCHW, texts)


def test_settings_are_checked() -> None:
    with raises(ConfigError, "unknown_name", "bound"):
        MutualInfoConfig(bound="nce")
    with raises(ConfigError, "out_of_range", "global_weight"):
        MutualInfoConfig(global_weight=0.0)
    assert MutualInfoConfig(global_weight=0.0, local_weight=1.0).positives == "study"
