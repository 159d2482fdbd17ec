"""RadZero: its loss and similarity against the formulas, and the defects of its released code."""

import math
from pathlib import Path

import pytest
import torch
from helpers import gloria_ranks
from helpers.contrastive_systems import make_batch, radzero
from helpers.errors import raises
from helpers.largest import LargestTensor
from helpers.loss_checks import check_one_number
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import medvl
from medvl.errors import ConfigError
from medvl.eval.grounding.heatmaps import phrase_maps
from medvl.eval.zero_shot_masks import MaskLabels, PhraseSegmenter
from medvl.losses.local.within_sample import in_chunks, patch_cosine, statement_contrast
from medvl.models.dual_encoders.radzero import embed_statements
from medvl.schema import Embeddings


def naive_scores(tokens_NKE: Tensor, texts_ME: Tensor, scale: float) -> Tensor:
    """Section 3.2, one pair at a time."""
    rows = []
    for tokens_KE in tokens_NKE / tokens_NKE.norm(dim=2, keepdim=True):
        row = []
        for text_E in texts_ME / texts_ME.norm(dim=1, keepdim=True):
            weight_K = (scale * tokens_KE @ text_E).exp()
            seen_E = (weight_K[:, None] * tokens_KE).sum(dim=0) / weight_K.sum()
            row.append((seen_E / seen_E.norm()) @ text_E)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_scores_are_those_of_the_formula_in_chunks_too() -> None:
    torch.manual_seed(0)
    tokens_NKE, texts_ME = torch.randn(3, 5, 8).requires_grad_(), torch.randn(7, 8).requires_grad_()
    expected_NM = naive_scores(tokens_NKE, texts_ME, 9.0)
    (expected_NM.square().sum()).backward()
    gradients = tokens_NKE.grad.clone(), texts_ME.grad.clone()
    for chunk in (None, 3, 1):
        tokens_NKE.grad = texts_ME.grad = None
        actual_NM = patch_cosine(tokens_NKE, texts_ME, 9.0, chunk=chunk)
        torch.testing.assert_close(actual_NM, expected_NM)
        actual_NM.square().sum().backward()
        torch.testing.assert_close((tokens_NKE.grad, texts_ME.grad), gradients)


def test_the_scale_of_the_attention_is_one_number() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_NKE, texts_ME = (
        torch.randn(2, 5, 8, generator=generator),
        torch.randn(3, 8, generator=generator),
    )
    check_one_number(lambda scale: patch_cosine(tokens_NKE, texts_ME, scale), 9.0)


@pytest.mark.parametrize("chunk", [None, 2])
def test_one_scale_serves_attention_and_logits(chunk: int | None) -> None:
    """Its gradient is that of both, also through chunks; in float64, with equal statements of
    unequal counts.
    """
    torch.manual_seed(0)
    tokens_NKE, texts_UE = (
        torch.randn(3, 4, 6, dtype=torch.float64),
        torch.randn(5, 6, dtype=torch.float64),
    )
    positive_NU = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 1]]) > 0
    step = 1e-4

    def total(scale: float) -> Tensor:
        logits_NU = scale * naive_scores(tokens_NKE, texts_UE, scale)
        terms = [
            torch.cat([logits_NU[i, m][None], others]).logsumexp(dim=0) - logits_NU[i, m]
            for i, m in positive_NU.nonzero().tolist()
            for others in (logits_NU[:, m][~positive_NU[:, m]], logits_NU[i][~positive_NU[i]])
        ]
        return torch.stack(terms).sum() / positive_NU.sum()

    scale = torch.tensor(9.0, requires_grad=True)
    loss = sum(
        statement_contrast(
            scale * patch_cosine(tokens_NKE, texts_UE, scale, chunk=chunk), positive_NU
        )
    )
    loss.backward()
    torch.testing.assert_close(loss.double(), total(9.0), rtol=1e-5, atol=1e-5)
    expected = (total(9.0 + step) - total(9.0 - step)) / (2 * step)
    torch.testing.assert_close(scale.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("statements", [100, 1651, 20_000])
def test_the_comparison_has_bounded_memory_at_published_size(statements: int) -> None:
    """256 images of 518 pixels: all scores of 1,651 statements at once are 2.3 GB a tensor."""
    with FakeTensorMode(), torch.no_grad():
        tokens_NKE, texts_ME = torch.empty(256, 1370, 768), torch.empty(statements, 768)
        with LargestTensor(tokens_NKE) as largest:
            scores_NM = patch_cosine(tokens_NKE, texts_ME, 14.3)
    assert scores_NM.shape == (256, statements)
    assert 2**27 < largest.bytes < 2**29


@pytest.mark.parametrize("temperature", [0.01, 0.03, 0.2])
def test_the_contrast_is_the_log_sum_exp_written_out(temperature: float) -> None:
    """In float64; equal statements are positives of all their images, and each positive is alone
    in its denominator.
    """
    torch.manual_seed(0)
    cosine_NM = (torch.rand(4, 6, dtype=torch.float64) * 2 - 1).requires_grad_()
    positive_NM = (
        torch.tensor(
            [[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]
        )
        > 0
    )
    terms: list[list[Tensor]] = [[], []]
    for i, m in positive_NM.nonzero().tolist():
        logits_NM = cosine_NM / temperature
        for dim, others_M in (
            (0, logits_NM[:, m][~positive_NM[:, m]]),
            (1, logits_NM[i][~positive_NM[i]]),
        ):
            everything = torch.cat([logits_NM[i, m][None], others_M])
            terms[dim].append(everything.logsumexp(dim=0) - logits_NM[i, m])
    expected = [torch.stack(each).mean() for each in terms]
    (gradient,) = torch.autograd.grad(sum(expected), cosine_NM)
    single_NM = cosine_NM.detach().float().requires_grad_()
    actual = statement_contrast(single_NM / temperature, positive_NM)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    (found,) = torch.autograd.grad(sum(actual), single_NM)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-4, atol=1e-5)


def test_hard_pairs_have_their_gradient_and_aligned_ones_no_nan() -> None:
    """Without a log-sum-exp: NaN at a temperature of 0.01, and 4e-7 in place of the gradient of
    a hard pair.
    """
    aligned = statement_contrast(torch.eye(4) * 100 * 20, torch.eye(4) > 0)
    assert [loss.item() for loss in aligned] == [0, 0]
    cosine = torch.tensor([[-0.9, 0.15], [0.15, -0.9]]).requires_grad_()
    loss, _ = statement_contrast(cosine / 0.03, torch.eye(2) > 0)
    loss.backward()
    assert loss.item() == pytest.approx(1.05 / 0.03)
    assert cosine.grad[0, 0].item() == pytest.approx(-0.5 / 0.03)


def test_without_a_negative_or_a_positive_the_contrast_is_zero() -> None:
    logits_NM = torch.randn(3, 2).requires_grad_()
    for positive_NM in (torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.bool)):
        losses = statement_contrast(logits_NM, positive_NM)
        assert [loss.item() for loss in losses] == [0, 0]
        (gradient,) = torch.autograd.grad(sum(losses), logits_NM)
        assert not gradient.any()


def test_equal_statements_are_positives_of_all_their_images() -> None:
    """Published, an image is a negative of a statement that is true of it; the order of
    statements means nothing.
    """
    model, batch = radzero().eval(), make_batch("radzero")
    terms = model(batch).terms
    everyone = model.encode_pairs(batch)
    statements = everyone.texts
    logits_NM = model.logit_scale.exp() * model.similarity(everyone.images, statements)
    same_MM = statements.group_N[:, None] == statements.group_N
    own_NM = torch.arange(len(everyone))[:, None] == statements.pair_N
    positive_NM = (own_NM.float() @ same_MM.float()) > 0
    first_M = same_MM.float().argmax(dim=1) == torch.arange(len(same_MM))
    expected = statement_contrast(logits_NM[:, first_M], positive_NM[:, first_M])
    torch.testing.assert_close(tuple(terms.values()), expected)
    batch.statement_ids_BST = batch.statement_ids_BST.flip(1)
    batch.statement_mask_BST = batch.statement_mask_BST.flip(1)
    torch.testing.assert_close(model(batch).terms, terms)
    published = radzero(equal_are_positives=False).eval()
    published.load_state_dict(model.state_dict())
    expected = statement_contrast(logits_NM, own_NM)
    torch.testing.assert_close(tuple(published(make_batch("radzero")).terms.values()), expected)


def test_one_image_and_one_statement_keep_their_axes() -> None:
    """A squeeze of the released code removes the axis of one image, or of one statement."""
    model, batch = radzero().eval(), make_batch("radzero").rows([1])
    assert model(batch).total.item() == 0
    assert model.similarity(
        model.embed_images(batch.image_BCHW), model.embed_ids(batch.ids_BT, batch.mask_BT)
    ).shape == (
        1,
        1,
    )


def test_statements_are_encoded_once_and_padding_changes_nothing() -> None:
    model, batch = radzero().eval(), make_batch("radzero")
    lengths: list[int] = []
    model.text_encoder.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    side = embed_statements(batch, model.embed_ids)
    assert len(side) == 12
    assert lengths == [len(side.group_N.unique())]
    batch.statement_ids_BST = torch.nn.functional.pad(
        batch.statement_ids_BST, (0, 4, 0, 3), value=9
    )
    batch.statement_mask_BST = torch.nn.functional.pad(batch.statement_mask_BST, (0, 4, 0, 3))
    torch.testing.assert_close(embed_statements(batch, model.embed_ids).global_NE, side.global_NE)


def test_a_frozen_image_encoder_has_no_gradient_and_everything_else_one() -> None:
    model = radzero(frozen_image=True, image_encoder="resnet_tiny").train()
    assert not model.image_encoder.training
    model(make_batch("radzero")).total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("image_encoder.")), name


def test_images_are_the_class_token_and_the_patches_behind_the_trained_layers() -> None:
    model, pixels_BCHW = (
        radzero(trained_layers=1).eval(),
        torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8),
    )
    features = model.image_encoder(pixels_BCHW)
    tokens_BKD = model.norm(
        model.layers[0](torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1))
    )
    torch.testing.assert_close(model.unnormalized_image(pixels_BCHW), tokens_BKD[:, 0])
    unit_BKD = tokens_BKD / tokens_BKD.norm(dim=2, keepdim=True)
    torch.testing.assert_close(model.embed_images(pixels_BCHW).local_NPE, unit_BKD)
    torch.testing.assert_close(model.embed_regions(pixels_BCHW), unit_BKD[:, 1:])
    with raises(ConfigError, "out_of_range", "trained_layers"):
        radzero(trained_layers=-1)


def test_equal_patches_have_a_flat_map_and_a_saved_model_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = radzero(tokenizer=gloria_ranks.tiny_tokenizer(), vocab_size=None).eval()
    pixels_BCHW = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    (_, map_HW) = model.attention_maps(
        pixels_BCHW, ["edema", "left effusion"], [(40, 32), (40, 50)]
    )
    assert map_HW.shape == (40, 50)
    medvl.models.save(model, tmp_path)
    again = medvl.models.load(tmp_path).eval()
    torch.testing.assert_close(
        again.similarity(pixels_BCHW, ["edema"]), model.similarity(pixels_BCHW, ["edema"])
    )
    flat = Embeddings(torch.ones(1, 256), torch.ones(1, 5, 256))
    monkeypatch.setattr(model, "embed_images", lambda _: flat)
    monkeypatch.setattr(model.image_encoder, "grid", lambda *_: (2, 2))
    (map_HW,) = model.attention_maps(pixels_BCHW[:1], ["edema"])
    assert map_HW.std() < 1e-6


def test_maps_are_log_odds_whose_maximum_is_kept_at_any_scale() -> None:
    """Published: cosines are interpolated, and the sigmoid is for masks; at a scale of 60 that of a
    cosine of 0.3 is 1 in float32.
    """
    model = radzero(tokenizer=gloria_ranks.tiny_tokenizer(), vocab_size=None).eval()
    with torch.no_grad():
        model.logit_scale.fill_(math.log(60))
    pixels_BCHW = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    texts, sizes = ["edema", "left effusion"], [(32, 32), (32, 32)]
    maps = phrase_maps(model, pixels_BCHW, texts, sizes, maps="attention")
    for map_HW, cosine_HW in zip(
        maps, phrase_maps(model, pixels_BCHW, texts, sizes, maps="similarity"), strict=True
    ):
        torch.testing.assert_close(map_HW, 60 * cosine_HW)
    segmenter = PhraseSegmenter(
        model=model,
        config=MaskLabels(labels=("A",)),
        phrases=("edema",),
        kind="attention",
        scale="sigmoid",
    )
    masks = segmenter.maps(make_batch("radzero").rows([0, 1]), sizes)
    everything = segmenter.model.attention_maps(
        make_batch("radzero").image_BCHW[:2], ["edema"] * 2, sizes
    )
    for mask_LHW, logits_HW in zip(masks, everything, strict=True):
        torch.testing.assert_close(mask_LHW[0], logits_HW.sigmoid())


def test_in_chunks_gives_dropout_the_same_numbers_in_both_passes() -> None:
    drop = torch.nn.Dropout(0.5)
    rows, columns = torch.ones(2, 3, requires_grad=True), torch.ones(40, 3, requires_grad=True)
    torch.manual_seed(0)
    scores_NM = in_chunks(lambda a, b: drop(a @ b.T), rows, columns, chunk=20)
    scores_NM.sum().backward()
    expected_M = (
        scores_NM.detach().sum(dim=0) / 3
    )  # each kept score is 6, the gradient of its column 2
    torch.testing.assert_close(columns.grad[:, 0], expected_M)
