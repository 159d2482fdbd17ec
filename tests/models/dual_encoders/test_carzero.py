"""CARZero and the decoder of queries: scores and loss against the formulas, padding, chunks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import carzero, make_batch
from helpers.largest import LargestTensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from medvl.models.dual_encoders.bases.local import (
    pair_scores,
    score_head,
    unnormalized,
    with_global,
)
from medvl.models.dual_encoders.bases.queries import QueryDecoder, QueryDecoderConfig
from medvl.schema import Embeddings

SMALL = QueryDecoderConfig(decoder_layers=2, decoder_hidden=24)


def padded(side: Embeddings, more: int) -> Embeddings:
    """The same texts with padding that is not a number."""
    local_NPE = F.pad(side.local_NPE, (0, 0, 0, more), value=torch.nan)
    return dataclasses.replace(
        side, local_NPE=local_NPE, mask_NP=F.pad(side.mask_NP, (0, more)), weight_NP=None
    )


def test_a_score_is_the_decoder_written_out() -> None:
    model, batch = carzero().eval(), make_batch("carzero")
    images, texts = (
        model.embed_images(batch.image_BCHW),
        model.embed_ids(batch.ids_BT, batch.mask_BT),
    )
    decoder, scores_NM = model.decoder, model.score_pairs(texts, images.global_NE)
    image_NE = model.encode_image(batch.image_BCHW, normalize=False)
    text_NE = model.encode_text(batch.ids_BT, batch.mask_BT, normalize=False)
    for text, image in ((0, 0), (5, 3)):
        words_WE = texts.local_NPE[text][texts.mask_NP[text]]
        memory_1KE = decoder.norm(torch.cat([text_NE[text][None], words_WE]))[None]
        x_11E = decoder.norm(image_NE[image])[None, None]
        for layer in decoder.layers:
            x_11E = x_11E + layer.multihead_attn(layer.norm2(x_11E), memory_1KE, memory_1KE)[0]
            x_11E = x_11E + layer.linear2(layer.linear1(layer.norm3(x_11E)).relu())
        torch.testing.assert_close(
            scores_NM[text, image], model.score(decoder.norm(x_11E))[0, 0, 0], rtol=1e-3, atol=1e-4
        )
    both_NM = (model.score_pairs(images, texts.global_NE) + scores_NM.T) / 2
    torch.testing.assert_close(model.similarity(images, texts), both_NM)


def test_the_norm_of_unit_vectors_is_that_of_published_ones() -> None:
    """Unit vectors of this width have a variance of 1/768, of which LayerNorm's epsilon is 0.8
    %.
    """
    vector_NE = 3 * torch.randn(4, 768)
    read = carzero(projection_dim=768).decoder.norm
    torch.testing.assert_close(
        read(unnormalized(F.normalize(vector_NE, dim=-1))), read(vector_NE), rtol=1e-4, atol=1e-4
    )
    memory_NKE, _ = with_global(
        F.normalize(vector_NE, dim=-1), torch.zeros(4, 1, 768), torch.ones(4, 1).bool()
    )
    torch.testing.assert_close(read(memory_NKE[:, 0]), read(vector_NE), rtol=1e-4, atol=1e-4)


def test_the_loss_is_four_cross_entropies_without_a_temperature() -> None:
    model = carzero(positives="own").eval()
    batch = dataclasses.replace(make_batch("carzero"), has_image_B=None)
    images, texts = (
        model.embed_images(batch.image_BCHW),
        model.embed_ids(batch.ids_BT, batch.mask_BT),
    )
    target_N = torch.arange(len(batch))
    both = model.score_pairs(images, texts.global_NE), model.score_pairs(texts, images.global_NE)
    terms = [
        (F.cross_entropy(x_NN, target_N) + F.cross_entropy(x_NN.T, target_N)) / 2 for x_NN in both
    ]
    losses = model(batch)
    torch.testing.assert_close(tuple(losses.terms.values()), tuple(terms))
    torch.testing.assert_close(losses.total, sum(terms))
    assert losses.total.item() == pytest.approx(2 * torch.tensor(len(batch)).log().item(), rel=0.2)


def test_equal_statements_are_positives() -> None:
    model, batch = carzero().eval(), dataclasses.replace(make_batch("carzero"), has_image_B=None)
    rows = batch.rows([0, 1, 2])
    rows.ids_BT[1], rows.mask_BT[1] = rows.ids_BT[0], rows.mask_BT[0]
    terms = model(rows).terms
    published = carzero(positives="own").eval()
    published.load_state_dict(model.state_dict())
    assert all(terms[name] < value for name, value in published(rows).terms.items())
    images, texts = model.embed_images(rows.image_BCHW), model.embed_ids(rows.ids_BT, rows.mask_BT)
    others = {0: [2], 1: [2], 2: [0, 1]}
    for name, scores_NN in (
        ("image_memory", model.score_pairs(images, texts.global_NE)),
        ("text_memory", model.score_pairs(texts, images.global_NE)),
    ):
        row_means = [
            torch.stack(
                [
                    each_NN[i, [j, *others[i]]].logsumexp(dim=0) - each_NN[i, j]
                    for j in others
                    if j not in others[i]
                ]
            ).mean()
            for each_NN in (scores_NN, scores_NN.T)
            for i in others
        ]
        torch.testing.assert_close(terms[name], torch.stack(row_means).mean())
    rows.ids_BT[2], rows.mask_BT[2] = rows.ids_BT[0], rows.mask_BT[0]
    assert model(rows).total.item() == 0  # nothing is a negative


def test_padding_of_words_changes_no_score() -> None:
    """The released code attends to 97 slots: its scores move by a tenth to a third of their
    spread.
    """
    model, batch = carzero().eval(), make_batch("carzero")
    images, texts = (
        model.embed_images(batch.image_BCHW),
        model.embed_ids(batch.ids_BT, batch.mask_BT),
    )
    scores_NM = model.similarity(images, texts)
    torch.testing.assert_close(model.similarity(images, padded(texts, 60)), scores_NM)
    alone = model.embed_ids(batch.ids_BT[:1], batch.mask_BT[:1])
    torch.testing.assert_close(model.similarity(images, alone), scores_NM[:, :1])


def test_chunks_are_the_whole_in_value_and_gradient() -> None:
    model, batch = carzero().eval(), make_batch("carzero")
    images = model.embed_images(batch.image_BCHW)
    query_ME = torch.randn(5, 24, requires_grad=True)
    results = []
    for chunk in (5, 2):
        model.zero_grad()
        query_ME.grad = None
        scores_NM = model.score_pairs(images, query_ME, chunk)
        scores_NM.square().sum().backward(retain_graph=True)
        weight = model.decoder.layers[0].linear1.weight.grad.clone()
        results.append((scores_NM, query_ME.grad, weight))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("queries", [256, 1024])
def test_scores_have_bounded_memory_at_published_size(queries: int) -> None:
    """256 images of 224 pixels: the widest states of 1,024 statements at once are 1.1 GB a
    tensor.
    """
    with FakeTensorMode(), torch.no_grad():
        decoder = QueryDecoder(
            768, QueryDecoderConfig(), self_attention=False, shared_norm=True
        ).eval()
        score = score_head(768, (1024, 512, 256), 0.1).eval()
        memory_NKE, query_ME = torch.empty(256, 197, 768), torch.empty(queries, 768)
        with LargestTensor(memory_NKE) as largest:
            scores_NM = pair_scores(
                lambda *inputs: score(decoder(*inputs)),
                memory_NKE,
                torch.ones(256, 197).bool(),
                query_ME,
                width=1024,
            )
    assert scores_NM.shape == (256, queries)
    assert largest.bytes <= 2**29


def test_maps_are_the_attention_of_the_statement() -> None:
    model = carzero().eval()
    images = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    maps = model.attention_maps(
        images, ["No pneumothorax.", "There is a small left effusion."], [(64, 64), (80, 90)]
    )
    assert [tuple(map_HW.shape) for map_HW in maps] == [(64, 64), (80, 90)]
    assert all((map_HW[~map_HW.isnan()] >= 0).all() for map_HW in maps)
    attention_BWhw, mask_BW = model.word_attention(images, ["No pneumothorax.", "effusion"])
    assert attention_BWhw.shape[:2] == mask_BW.shape


@pytest.mark.parametrize("self_attention", [True, False])
def test_queries_know_each_other_only_by_self_attention(self_attention: bool) -> None:
    torch.manual_seed(0)
    decoder = QueryDecoder(16, SMALL, self_attention=self_attention).eval()
    query_BQD, memory_BKD = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    mask_BK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]) > 0
    states_BQD, attention_BQK = decoder.with_attention(query_BQD, memory_BKD, mask_BK)
    fewer_BQD = decoder(query_BQD[:, :2], memory_BKD, mask_BK)
    assert torch.allclose(fewer_BQD, states_BQD[:, :2], atol=1e-5) == (not self_attention)
    swapped_BQD = decoder(query_BQD.flip(1), memory_BKD, mask_BK)
    torch.testing.assert_close(swapped_BQD, states_BQD.flip(1))
    torch.testing.assert_close(attention_BQK[0].sum(dim=1), torch.ones(3))
    assert not attention_BQK[0, :, 3:].any()
    other_BKD = memory_BKD.masked_fill(~mask_BK[:, :, None], torch.nan)
    torch.testing.assert_close(decoder(query_BQD, other_BKD, mask_BK), states_BQD)
    assert states_BQD.isfinite().all()


def test_with_self_attention_a_decoder_is_torchs() -> None:
    torch.manual_seed(0)
    ours = QueryDecoder(16, SMALL).eval()
    layer = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True, norm_first=True)
    theirs = nn.TransformerDecoder(layer, 2, nn.LayerNorm(16)).eval()
    theirs.load_state_dict(ours.state_dict())
    query_BQD, memory_BKD = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(query_BQD, memory_BKD), theirs(query_BQD, memory_BKD))


def test_the_decoders_output_has_dropout_in_training() -> None:
    """As in the released code of MedKLIP, KAD and CARZero: a dropout after the last norm, whose
    output has no zeros.
    """
    decoder = QueryDecoder(16, dataclasses.replace(SMALL, dropout=0.5))
    inputs = torch.randn(2, 50, 16), torch.randn(2, 5, 16)
    assert (decoder.train()(*inputs) == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (decoder.eval()(*inputs) != 0).all()
