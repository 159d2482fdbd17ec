"""fVLM: its loss against the formula, its organs, and what it refuses."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import BERT, fvlm, make_batch
from helpers.errors import raises

import medvl
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import ConfigError
from medvl.models.checkpoint import load, save
from medvl.models.volumes.fvlm import FVLM, cut_organs
from medvl.schema import ORGANS


def of_words() -> FVLM:
    """Return a model with a tokenizer."""
    words = "the heart is enlarged there no effusion lung aorta calcified normal emphysema"
    return fvlm(tokenizer=train_wordpiece([words] * 3), vocab_size=None).eval()


def test_the_loss_is_the_formula() -> None:
    """Of whole organs of all layers, row by row; the third organ is normal in all rows."""
    model = fvlm().eval()
    batch = make_batch("fvlm")
    volumes, organs = batch.image_BCDHW, batch.organ_mask_BDHW
    patches = model.image_encoder(volumes).patches_BPD.unflatten(1, (3, -1))
    head = model.image_head
    expected = 0
    for number in (1, 2, 4):
        rows = [row for row in range(7) if (organs[row] == number).any() and row != 3]
        rows = [row for row in rows if not cut_organs(organs)[row, number - 1]]
        images, texts = [], []
        for row in rows:
            cells = organs[row].unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).unflatten(0, (-1, 2))
            inside = (cells == number).permute(0, 2, 4, 1, 3, 5).flatten(3).any(3).flatten()
            keys = patches[row][:, inside].flatten(0, 1)[None]
            query = head.query_tokens[number - 1][None, None]
            seen = head.attention(query, keys, keys)[0][0, 0]
            images.append(F.normalize(head.projections[number - 1](seen), dim=0))
            ids = batch.organ_ids_BOT[row : row + 1, number - 1]
            text = model.text_encoder(ids, batch.organ_mask_BOT[row : row + 1, number - 1])
            texts.append(F.normalize(model.text_head(text.pooled_BD)[0], dim=0))
        logits = torch.stack(images) @ torch.stack(texts).T * model.logit_scale.exp()
        normal = batch.organ_normal_BO[rows, number - 1]
        equal = torch.tensor([[{i, j} == {1, 6} for j in rows] for i in rows])
        target = torch.eye(len(rows)).bool() | equal | normal[:, None] & normal
        share = target / target.sum(1, keepdim=True)
        both = logits.log_softmax(1) + logits.T.log_softmax(1)
        expected = expected - (share * both).sum() / len(rows) / 2
    torch.testing.assert_close(model(batch).total, expected)


def test_every_parameter_of_a_trained_organ_learns() -> None:
    model = fvlm().train()
    losses = model(make_batch("fvlm"))
    losses.total.backward()
    assert set(losses.terms) == set(ORGANS)
    assert not losses.terms["esophagus"], "normal in all rows"
    for name, parameter in model.named_parameters():
        learns = "projections.2" not in name
        assert bool(parameter.grad.any()) == learns, name


def test_organs_on_the_border_are_cut() -> None:
    organs = torch.zeros(3, 4, 5, 6, dtype=torch.uint8)
    organs[0, 1:3, 1:4, 1:5] = 1
    organs[1, 3, 2, 2] = 2
    organs[2, 1, 1, 0], organs[2, 2, 4, 2] = 3, 4
    assert cut_organs(organs).tolist() == [
        [False] * 4,
        [False, True] + [False] * 2,
        [False, False, True, True],
    ]


def test_a_text_is_compared_with_the_organs_that_it_names() -> None:
    model = of_words()
    batch = make_batch("fvlm")
    with torch.no_grad():
        images = model.embed_images(batch.image_BCDHW, batch.organ_mask_BDHW)
        vectors, present = model.organ_vectors(batch.image_BCDHW, batch.organ_mask_BDHW)
        texts = ["The heart is enlarged.", "The heart is normal. The aorta is calcified.", "normal"]
        found = model.similarity(images, texts)
        parts = [[None, texts[0], None, None], [None, "The heart is normal.", None,
                 "The aorta is calcified."], ["normal"] * 4]  # fmt: skip
        for column, of_organs in enumerate(parts):
            cosines = []
            for organ, part in enumerate(of_organs):
                if part is not None:
                    ids, mask = model.tokenize([part])
                    text = model.text_head(model.text_encoder(ids, mask).pooled_BD)[0]
                    cosines.append(vectors[:, organ] @ F.normalize(text, dim=0) * present[:, organ])
            expected = torch.stack(cosines).mean(dim=0)
            torch.testing.assert_close(found[:, column], expected)
    assert not present[2, 3]
    assert not images.global_NE[2, -16:].any(), "without an aorta"


def test_maps_are_shares_within_the_organ() -> None:
    model = fvlm().eval()
    batch = make_batch("fvlm")
    with torch.no_grad():
        maps = model.organ_maps(batch.image_BCDHW, batch.organ_mask_BDHW)
    assert maps.shape == (7, 4, 2, 3, 3)
    inside = model._organ_patches(batch.organ_mask_BDHW).unflatten(2, (2, 3, 3))
    assert not maps[~inside].any()
    total = maps.sum(dim=(2, 3, 4))
    torch.testing.assert_close(total, inside.any(dim=4).any(dim=3).any(dim=2).float())


@pytest.mark.parametrize("organ_tokens", ["mask", "all"])
def test_regions_are_shares_of_the_similarity(organ_tokens: str) -> None:
    model = fvlm(organ_tokens=organ_tokens).eval()
    head = model.image_head
    with torch.no_grad():
        head.attention.in_proj_bias.normal_()
        head.attention.out_proj.bias.normal_()
    batch = make_batch("fvlm")
    organs = batch.organ_mask_BDHW if organ_tokens == "mask" else None
    with torch.no_grad():
        regions = model.embed_regions(batch.image_BCDHW, organs)
        torch.testing.assert_close(
            regions.sum(dim=1), model.unnormalized_image(batch.image_BCDHW, organs)
        )
        inside = model._organ_patches(organs)
        shares = regions.unflatten(2, (4, -1)).transpose(1, 2)
        # One patch of the second row for the heart, head by head and layer by layer.
        row, organ = 1, 1
        patches = model.image_encoder(batch.image_BCDHW).patches_BPD[row]
        mask = patches.new_ones(18) > 0 if inside is None else inside[row, organ]
        read = mask.repeat(3)
        query, key, value = (
            F.linear(each, weight, bias).unflatten(-1, (4, -1))
            for each, weight, bias in zip(
                (head.query_tokens[organ], patches, patches),
                head.attention.in_proj_weight.chunk(3),
                head.attention.in_proj_bias.chunk(3),
                strict=True,
            )
        )
        logits = torch.einsum("hk,phk->ph", query, key) / query.shape[1] ** 0.5
        weights = logits.masked_fill(~read[:, None], -torch.inf).softmax(dim=0)
        part = (weights[..., None] * value).flatten(1) @ head.attention.out_proj.weight.T
        part = part + weights.mean(1, keepdim=True) * head.attention.out_proj.bias
        layer = head.projections[organ]
        part = part @ layer.weight.T + weights.mean(1, keepdim=True) * layer.bias
        expected = part.unflatten(0, (3, 18)).sum(dim=0) / part.sum(dim=0).norm()
    torch.testing.assert_close(shares[row, organ], expected)
    if inside is not None:
        assert not shares[~inside].any()


def test_volumes_without_organs_need_a_model_that_reads_all_patches(tmp_path: Path) -> None:
    model = of_words()
    volume = make_batch("fvlm").image_BCDHW
    with raises(ConfigError, "missing", "organ_masks"):
        model.embed_images(volume)
    with raises(ConfigError, "missing", "organ_ids_BOT"):
        model(make_batch("hlip"))
    model.transform = dataclasses.replace(model.transform, organs=False)
    vectors = model.embed_images(volume).global_NE
    assert (vectors.unflatten(1, (4, -1)).norm(dim=2) - 1).abs().max() < 1e-5
    (tmp_path / "run").mkdir()
    save(model, tmp_path / "run")
    assert load(tmp_path / "run").transform.organs, "that of the configuration"
    whole = fvlm(organ_tokens="all").eval()
    assert not whole.transform.organs
    assert whole.embed_images(volume).global_NE.shape == (7, 64)
    for settings in ({"organ_tokens": "some"}, {"temperature": 0.6}):
        with pytest.raises(ConfigError):
            medvl.create_model("fvlm", **BERT, **settings)
