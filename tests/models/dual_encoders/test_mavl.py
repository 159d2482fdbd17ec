"""MAVL: losses against the formulas, aspects of named and unknown entities; query systems on two
ranks.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import medvl
from medvl import losses
from medvl.data import statement
from medvl.data.reports.statements import ASPECTS, describe_aspects
from medvl.errors import CheckpointError, ConfigError
from medvl.models import KAD, MAVL, MedKLIP, checkpoint, load_weights
from medvl.models.dual_encoders.bases.queries import QueryEncoder
from medvl.schema import FINDINGS, Batch

ENTITIES = ("Edema", "Pneumothorax", "Pleural Effusion")
NAN = torch.nan
LABELS = torch.tensor(
    [[1, 0, NAN], [-1, 1, 1], [NAN, NAN, NAN], [0, 0, 1], [0, 1, 0], [1, 1, 1], [NAN, 0, NAN]]
)
POSITIONS = torch.tensor(
    [[3, -1, -1], [-1, -1, 8], [-1] * 3, [-1, 5, 2], [-1] * 3, [1, -1, 4], [-1] * 3]
)


def create(name: str = "mavl", **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        "projection_dim": 16,
        "entities": ENTITIES,
    }
    sizes |= {} if name == "kad" else {"image_arguments": {}}
    text = {
        "text_encoder": "tiny_bert",
        "text_arguments": {"num_hidden_layers": 1},
        "max_tokens": 64,
    }
    decoder = {"decoder_layers": 2, "decoder_heads": 2, "decoder_hidden": 24}
    options = {**sizes, **text, **decoder, **settings}
    return medvl.create_model(name, tokenizer=gloria_ranks.tiny_tokenizer(), **options)


def make_batch(rows: list[int] | None = None) -> Batch:
    rows = [0, 1, 2, 3] if rows is None else rows
    batch = gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer(), rows)
    batch.labels_BL, batch.position_BL = LABELS[rows], POSITIONS[rows]
    return batch


def test_grid_is_projected_through_a_layer_of_its_own_width() -> None:
    """Two convolutions of width 1 in the released code, 1024 to 1024 and 1024 to 256."""
    with torch.device("meta"):
        model: Any = medvl.create_model("mavl", vocab_size=100)
    assert [tuple(layer.weight.shape) for layer in model.image_head] == [
        (1024, 1024),
        (1,),
        (256, 1024),
    ]


@pytest.mark.parametrize("version", [None, 2])
def test_checkpoints_of_earlier_versions_are_refused(version: int | None, tmp_path: Path) -> None:
    """They neither load, nor start or resume a training; their encoders start other systems. The
    first had no version.
    """
    model = create()
    medvl.models.save(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["model"].pop("version") == 3
    if version is not None:
        described["model"]["version"] = version
    (tmp_path / "config.json").write_text(json.dumps(described))
    for load in (
        medvl.load,
        functools.partial(checkpoint.warm_start, model),
        functools.partial(load_weights, model),
    ):
        with raises(CheckpointError, "version", names="expected version 3"):
            load(tmp_path)
    checkpoint.load_towers(model, tmp_path)


def naive_contrast(logits_NM: Tensor, positive_NM: Tensor, ignored_NM: Tensor) -> Tensor:
    """Cross-entropy with equal shares, pair by pair and in both directions."""
    directions = []
    for logits, positive, ignored in (
        (logits_NM, positive_NM, ignored_NM),
        (logits_NM.T, positive_NM.T, ignored_NM.T),
    ):
        rows = []
        for row in range(len(logits)):
            kept = positive[row] | ~ignored[row]
            log_probability = logits[row] - logits[row][kept].exp().sum().log()
            if positive[row].any():
                rows.append(-log_probability[positive[row]].mean())
        directions.append(torch.stack(rows).mean())
    return torch.stack(directions).mean()


def test_contrast_of_several_positives_is_the_formula_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NM = 4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    positive_NM = torch.rand(5, 4, generator=generator) < 0.4
    positive_NM[1] = False
    ignored_NM = torch.rand(5, 4, generator=generator) < 0.3
    values, gradients = [], []
    for loss in (losses.multi_positive, naive_contrast):
        leaf = logits_NM.clone().requires_grad_()
        value = loss(leaf, positive_NM, ignored_NM)
        value.backward()
        values.append(value.detach().double())
        gradients.append(leaf.grad)
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert losses.multi_positive(logits_NM, torch.zeros(5, 4, dtype=torch.bool)) == 0
    with pytest.raises(ValueError, match="expected logits"):
        losses.multi_positive(logits_NM, positive_NM.T)


@pytest.mark.parametrize("present", [1, 3, 10])
def test_a_row_weighs_the_same_with_one_entity_and_with_ten(present: int) -> None:
    """MAVL's released targets are not normalised: 7.1, 12.9 and 55.7 of 75 entities at a scale
    of 14.
    """
    logits_1M = torch.zeros(1, 75)
    positive_1M = torch.arange(75)[None] < present
    rows_only = 2 * losses.multi_positive(
        logits_1M, positive_1M
    )  # columns of a single image have a loss of 0
    torch.testing.assert_close(rows_only, torch.tensor(75.0).log())


def test_the_released_contrast_weighs_an_image_with_three_of_75_entities_a_twelfth() -> None:
    """As `MAVLConfig.contrast_weight` says: it is the sum of both directions, means over all
    images and entities.
    """
    generator = torch.Generator().manual_seed(0)
    logits_NM = 5 * torch.randn(64, 75, generator=generator)
    positive_NM = torch.rand(64, 75, generator=generator).argsort(dim=1) < 3
    released = -sum((positive_NM * logits_NM.log_softmax(dim)).mean() for dim in (0, 1))
    ours = losses.multi_positive(logits_NM, positive_NM)
    assert (released / ours).item() == pytest.approx(2 * 3 / 75, rel=0.1)
    torch.testing.assert_close(losses.multi_hot(logits_NM, positive_NM), released)


def released_contrast(logits_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """MAVL's loss of both directions, as its training code has it: means over entities, then
    over images.
    """
    target_BL = (labels_BL == 1).float()
    rows = (-target_BL * F.log_softmax(logits_BL, dim=-1)).mean(dim=-1).sum() / len(logits_BL)
    columns = (-target_BL.T * F.log_softmax(logits_BL.T, dim=-1)).mean(
        dim=-1
    ).sum() / logits_BL.shape[1]
    return rows + columns


def test_multi_hot_targets_have_the_released_contrast_at_the_published_weight() -> None:
    """Of images with labels; the default differs from it by 75 / (2 P) with P entities, in
    `contrast_weight`'s words.
    """
    model, batch = create(negative_places=None, contrast_targets="multi_hot").eval(), make_batch()
    found = model(batch)
    assert model.config.contrast_weight == 0.1
    rows, images = [0, 1, 3], model.embed_images(batch.image_BCHW)
    query_QD = F.normalize(model.text_head(model.book.vectors_QD), dim=1)
    logits = [images.global_NE[rows] @ query_QD[aspect::8].T / 0.07 for aspect in range(8)]
    expected = torch.stack(
        [released_contrast(each, batch.labels_BL[rows]) for each in logits]
    ).mean()
    torch.testing.assert_close(found.terms["contrast"], expected)
    one = torch.eye(75)[:64].bool()
    logits_NM = torch.randn(64, 75, generator=torch.Generator().manual_seed(0))
    ratio = losses.multi_positive(logits_NM, one) / losses.multi_hot(logits_NM, one)
    assert ratio.item() == pytest.approx(75 / 2, rel=0.05)
    with raises(ConfigError, "unknown_name", "contrast_targets"):
        create(contrast_targets="sum")


@pytest.mark.parametrize("unmentioned", ["absent", "ignored"])
def test_losses_are_presence_place_and_the_contrast_of_every_aspect(unmentioned: str) -> None:
    model, batch = create(negative_places=None, unmentioned=unmentioned).eval(), make_batch()
    found = model(batch)
    images = model.embed_images(batch.image_BCHW)
    query_QD = model.text_head(model.book.vectors_QD)
    states_BQD = model.decoder(query_QD.expand(4, -1, -1), images.local_NPE)
    by_entity_BLD = torch.stack(
        [states_BQD[:, 8 * n : 8 * n + 8].flatten(1) for n in range(3)], dim=1
    )
    known = [(0, 0, 1), (0, 1, 0), (1, 1, 1), (1, 2, 1), (3, 0, 0), (3, 1, 0), (3, 2, 1)]
    presence = [
        F.cross_entropy(model.presence(by_entity_BLD[b, q]), torch.tensor(value))
        for b, q, value in known
    ]
    torch.testing.assert_close(found.terms["presence"], torch.stack(presence).mean())
    places = [(0, 0, 3), (1, 2, 8), (3, 2, 2)]
    logits_BLP = model.place(by_entity_BLD) @ model.places.vectors_QD.T
    place = [F.cross_entropy(logits_BLP[b, q], torch.tensor(target)) for b, q, target in places]
    torch.testing.assert_close(found.terms["place"], torch.stack(place).mean())
    rows = [0, 1, 3]  # the third report has no label
    labels_NL = batch.labels_BL[rows]
    ignored_NL = ((labels_NL != 0) & (labels_NL != 1)) & (unmentioned == "ignored")
    contrasts = []
    for aspect in range(8):
        cosine_NL = images.global_NE[rows] @ F.normalize(query_QD[aspect::8], dim=1).T
        contrasts.append(naive_contrast(cosine_NL / 0.07, labels_NL == 1, ignored_NL))
    torch.testing.assert_close(found.terms["contrast"], torch.stack(contrasts).mean())
    terms = found.terms
    torch.testing.assert_close(
        found.total, terms["presence"] + terms["place"] + 0.1 * terms["contrast"]
    )


def test_the_image_vector_is_attention_of_the_mean_over_mean_and_cells() -> None:
    model = create()
    pool, width = model.pool.eval(), model.image_encoder.patch_dim
    grid_BPD = torch.randn(2, pool.position.shape[0] - 1, width)
    tokens_BKD = torch.cat([grid_BPD.mean(dim=1, keepdim=True), grid_BPD], dim=1) + pool.position
    weight, bias = pool.attention.in_proj_weight.chunk(3), pool.attention.in_proj_bias.chunk(3)
    query, key, value = (
        (tokens_BKD @ w.T + b).unflatten(2, (8, width // 8)).transpose(1, 2)
        for w, b in zip(weight, bias, strict=True)
    )
    attention = (query[:, :, :1] @ key.transpose(2, 3) / (width / 8) ** 0.5).softmax(dim=3)
    pooled_BD = pool.attention.out_proj((attention @ value).transpose(1, 2).flatten(2).squeeze(1))
    torch.testing.assert_close(pool(grid_BPD), pooled_BD)
    image_BCHW = make_batch().image_BCHW
    patches_BPD = model.eval().image_encoder(image_BCHW).patches_BPD
    torch.testing.assert_close(model.encode_image(image_BCHW, normalize=False), pool(patches_BPD))


def test_every_trained_parameter_has_a_gradient_also_without_labels_and_under_autocast() -> None:
    batch = make_batch()
    for labels_BL in (batch.labels_BL, torch.full_like(batch.labels_BL, NAN)):
        model = create().train()
        batch.labels_BL = labels_BL
        with torch.autocast("cpu", torch.bfloat16):
            total = model(batch).total
        total.backward()
        assert total.isfinite()
        assert labels_BL.isnan().all() == (total.item() == 0)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (not name.startswith("text_encoder.")), name


def test_images_that_are_missing_are_no_negatives() -> None:
    model, batch = create(negative_places=None).eval(), make_batch([0, 1, 3])
    batch.has_image_B = torch.tensor([True, False, True])
    expected = model(make_batch([0, 3])).terms
    torch.testing.assert_close(dict(model(batch).terms), dict(expected))


def test_texts_ask_all_aspects_of_the_entity_that_they_name_or_of_themselves() -> None:
    model, batch = create(descriptions={"Edema": "Wet lungs."}).eval(), make_batch()
    images = model.embed_images(batch.image_BCHW)
    asked = [
        "Wet lungs.",
        statement("Edema"),
        "Pleural Effusion",
        "There is a wire.",
        "The heart is large.",
    ]
    scores_NM = model.similarity(images, model.embed_texts(asked))
    states_BLD, attention_BLP = model.ask(images.local_NPE)
    logits_BL2 = model.presence(states_BLD)
    torch.testing.assert_close(
        scores_NM[:, :3], (logits_BL2[..., 1] - logits_BL2[..., 0])[:, [0, 0, 2]]
    )
    torch.testing.assert_close(
        model.similarity(images, model.embed_texts(asked[4:])), scores_NM[:, 4:]
    )
    pairs_N = model.pair_similarity(images, model.embed_texts(asked[1:5]))
    torch.testing.assert_close(pairs_N, scores_NM[:, 1:5].diagonal())
    torch.testing.assert_close(attention_BLP.sum(dim=2), torch.ones(4, 3))
    (map_HW,) = model.attention_maps(batch.image_BCHW[:1], ["There is a wire."], [(70, 64)])
    assert map_HW.shape == (70, 64)


def test_one_query_of_a_text_counts_as_all_its_aspects() -> None:
    """Against eight equal queries beside those of the book, each of which reads the book and all
    eight.
    """
    model, batch = create(decoder_layers=3).eval(), make_batch()
    grid_BPD, vectors_1D = (
        model.embed_images(batch.image_BCHW).local_NPE,
        model.sentence_vectors(["There is a wire."]),
    )
    rows_QD = torch.cat([model.queries(), vectors_1D.expand(model.aspects, -1)])
    x_BQD = model.text_head(rows_QD).expand(len(grid_BPD), -1, -1)
    book, scale = 3 * model.aspects, (x_BQD.shape[2] // 2) ** -0.5
    weights = []
    for layer in model.decoder.layers:
        normed_BQD, own = layer.norm1(x_BQD), layer.self_attn
        q, k, v = (
            part_BQD.unflatten(2, (2, -1)).transpose(1, 2)
            for part_BQD in F.linear(normed_BQD, own.in_proj_weight, own.in_proj_bias).chunk(
                3, dim=2
            )
        )
        scores = q @ k.transpose(2, 3) * scale
        scores[:, :, :book, book:] = -torch.inf
        x_BQD = x_BQD + own.out_proj((scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2))
        read_BQD, weight_BQP = layer.multihead_attn(layer.norm2(x_BQD), grid_BPD, grid_BPD)
        x_BQD = x_BQD + read_BQD
        x_BQD = x_BQD + layer.linear2(torch.relu(layer.linear1(layer.norm3(x_BQD))))
        weights.append(weight_BQP)
    expected_BED = model.decoder.norm(x_BQD).unflatten(1, (4, model.aspects)).flatten(2)
    states_BED, attention_BEP = model.ask(grid_BPD, vectors_1D.repeat(1, model.aspects)[None])
    torch.testing.assert_close(states_BED, expected_BED)
    torch.testing.assert_close(
        attention_BEP, torch.stack(weights).mean(dim=0).unflatten(1, (4, -1)).mean(dim=2)
    )


def test_every_finding_has_eight_sentences_and_others_repeat_theirs() -> None:
    assert {len(describe_aspects(name)) for name in FINDINGS} == {1 + len(ASPECTS)}
    assert len({text for name in FINDINGS for text in describe_aspects(name)}) == len(FINDINGS) * 8
    assert set(describe_aspects("Hernia")) == {"There is hernia."}
    own = create(aspects={"Edema": tuple("abcdefg")})
    assert own.book.sentences[1:8] == tuple("abcdefg")
    with raises(ConfigError, "mismatch", "aspects"):
        create(aspects={"Edema": ("The opacity of edema is hazy.",)})


QUERY_SYSTEMS: dict[str, Callable[[], QueryEncoder]] = {
    "medklip": lambda: create("medklip", negative_places=None),
    "kad": lambda: create("kad"),
    "mavl": lambda: create("mavl", negative_places=None),
}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Tensor]]:
    return on_two_ranks(losses_and_gradients)


@pytest.mark.parametrize("name", QUERY_SYSTEMS)
def test_two_ranks_equal_one(name: str, by_rank: list[dict[str, Tensor]]) -> None:
    """With three and four rows: losses and gradients are those of one process."""
    model = QUERY_SYSTEMS[name]().eval()
    assert isinstance(model, MedKLIP | KAD | MAVL)
    expected = model(make_batch(list(range(7))))
    expected.total.backward()
    for found in by_rank:
        torch.testing.assert_close(found[f"{name}/loss"], expected.total.detach())
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    found[f"{name}/{key}"], parameter.grad, rtol=1e-3, atol=1e-5
                )


def losses_and_gradients() -> dict[str, Tensor]:
    """Return the losses and gradients of every system on this rank, after DDP's average."""
    rank, results = dist.get_rank(), {}
    for name, build in QUERY_SYSTEMS.items():
        model = build().eval()
        parallel = DistributedDataParallel(model)
        total = parallel(make_batch([[0, 1, 2], [3, 4, 5, 6]][rank])).total
        total.backward()
        results |= {
            f"{name}/{key}": p.grad.clone()
            for key, p in model.named_parameters()
            if p.grad is not None
        }
        results[f"{name}/loss"] = total.detach()
    return results
