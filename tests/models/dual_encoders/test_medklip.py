"""MedKLIP and the base of entity queries: losses against the formulas, the book, queries of
unseen texts.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises
from helpers.published import shapes_of

import medvl
from medvl.data import ConVIRTAugmentation, WholeText, statement
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.reports.statements import PLACES, describe, mirrored_positions, positions_of
from medvl.encoders import create_image_encoder
from medvl.errors import CheckpointError, ConfigError
from medvl.models import MedKLIP
from medvl.models.dual_encoders.bases import queries
from medvl.models.dual_encoders.bases.queries import QueryDecoder, QueryDecoderConfig
from medvl.models.dual_encoders.medklip import _with_negatives
from medvl.schema import Batch, Inputs, Sample
from medvl.train.fault_tolerance.guards import BufferGuard

ENTITIES = ("Edema", "Pneumothorax", "Pleural Effusion")


def medklip(**settings: Any) -> MedKLIP:
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_arguments": {},
        "image_size": 64,
        "projection_dim": 16,
    }
    text = {"text_encoder": "tiny_bert", "text_arguments": {"num_hidden_layers": 1}}
    decoder = {"decoder_layers": 2, "decoder_heads": 2, "decoder_hidden": 24}
    options = {**sizes, **text, **decoder, "entities": ENTITIES, "max_tokens": 64, **settings}
    return medvl.create_model("medklip", tokenizer=gloria_ranks.tiny_tokenizer(), **options)


def make_batch() -> Batch:
    batch = gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer(), [0, 1, 2, 3])
    nan = torch.nan
    labels_BL = torch.tensor([[1, 0, nan], [-1, 1, 1], [nan, nan, nan], [0, 0, 1]])
    position_BL = torch.tensor([[3, -1, -1], [-1, -1, 8], [-1, -1, -1], [-1, 5, 2]])
    return dataclasses.replace(batch, labels_BL=labels_BL, position_BL=position_BL)


def test_losses_are_cross_entropies_over_what_the_report_says() -> None:
    """Uncertain and unmentioned entities, and places that are not named or of absent entities,
    do not count.
    """
    model, batch = medklip(negative_places=None).eval(), make_batch()
    losses = model(batch)
    states_BQD, _ = model.ask(model.embed_images(batch.image_BCHW).local_NPE)
    known = [(0, 0, 1), (0, 1, 0), (1, 1, 1), (1, 2, 1), (3, 0, 0), (3, 1, 0), (3, 2, 1)]
    presence = [
        F.cross_entropy(model.presence(states_BQD[b, q]), torch.tensor(value))
        for b, q, value in known
    ]
    places = [(0, 0, 3), (1, 2, 8), (3, 2, 2)]
    logits_BQP = model.place(states_BQD) @ model.places.vectors_QD.T
    place = [F.cross_entropy(logits_BQP[b, q], torch.tensor(target)) for b, q, target in places]
    torch.testing.assert_close(losses.terms["presence"], torch.stack(presence).mean())
    torch.testing.assert_close(losses.terms["place"], torch.stack(place).mean())
    torch.testing.assert_close(losses.total, losses.terms["presence"] + losses.terms["place"])
    without = dataclasses.replace(batch, has_image_B=torch.tensor([False, True, True, True]))
    torch.testing.assert_close(model(without).terms["presence"], torch.stack(presence[2:]).mean())
    nothing = model(
        dataclasses.replace(batch, labels_BL=torch.full_like(batch.labels_BL, torch.nan))
    )
    assert nothing.total.item() == 0


@pytest.mark.parametrize("images", [0, 1, 3])
def test_placeholders_of_missing_images_do_not_enter_batch_norms(images: int) -> None:
    """The statistics of two or more images are theirs; one and none leave them unchanged."""
    batch, model, other = make_batch(), medklip().train(), medklip().train()
    before = {name: value.clone() for name, value in other.named_buffers() if "running_" in name}
    losses = model(dataclasses.replace(batch, has_image_B=torch.arange(4) < images))
    losses.total.backward()
    assert all(
        p.grad is not None
        for name, p in model.named_parameters()
        if not name.startswith("text_encoder.")
    )
    if images > 1:
        other(batch.rows(range(images)))
        before = dict(other.named_buffers())
    for name, value in model.named_buffers():
        if "running_" in name:
            torch.testing.assert_close(value, before[name], msg=name)


def test_masked_entities_have_no_gradient_and_all_trained_parameters_have_one() -> None:
    model, batch = medklip().train(), make_batch()
    losses = model(batch)
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("text_encoder.")), name
    states_BQD = torch.randn(4, 3, 16, requires_grad=True)
    model.presence_loss(states_BQD, batch.labels_BL).backward()
    counted_BL = (batch.labels_BL == 0) | (batch.labels_BL == 1)
    assert torch.equal(states_BQD.grad.abs().sum(dim=2) > 0, counted_BL)


def test_losses_under_autocast_are_close() -> None:
    model, batch = medklip(negative_places=None).eval(), make_batch()
    expected = model(batch).terms
    with torch.autocast("cpu", torch.bfloat16):
        actual = medklip().train()(batch)
        terms = model(batch).terms
    assert actual.total.isfinite()
    torch.testing.assert_close(dict(terms), dict(expected), rtol=0.05, atol=0.05)


def test_sentences_of_places_are_english() -> None:
    sentences = medklip().places.sentences
    assert sentences[PLACES.index("both sides")] == "It is located on both sides."
    assert sentences[PLACES.index("left lower lung")] == "It is located at the left lower lung."


def test_checkpoints_with_other_sentences_of_places_are_refused(tmp_path: Path) -> None:
    medvl.models.save(medklip(), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["model"]["version"] == 2
    described["model"]["version"] = 1
    (tmp_path / "config.json").write_text(json.dumps(described))
    with raises(CheckpointError, "version"):
        medvl.load(tmp_path)


def test_the_true_place_is_compared_with_seven_others() -> None:
    logits_NP, target_N = torch.randn(50, len(PLACES)), torch.arange(50) % len(PLACES)
    chosen_NP = _with_negatives(logits_NP, target_N, 7) > -1e30
    assert chosen_NP.sum(dim=1).tolist() == [8] * 50
    assert chosen_NP.gather(1, target_N[:, None]).all()
    assert chosen_NP.any(dim=0).all()


def test_named_entities_ask_the_book_and_others_do_not_change_each_other() -> None:
    model, batch = medklip().eval(), make_batch()
    images = model.embed_images(batch.image_BCHW)
    asked = [
        statement("Edema"),
        "Pneumothorax",
        describe("Pleural Effusion"),
        "There is a wire.",
        "The heart is large.",
    ]
    scores_NM = model.similarity(images, model.embed_texts(asked))
    logits_NQ2 = model.presence(model.ask(images.local_NPE)[0])
    torch.testing.assert_close(scores_NM[:, :3], logits_NQ2[..., 1] - logits_NQ2[..., 0])
    torch.testing.assert_close(
        model.similarity(images, model.embed_texts(asked[4:])), scores_NM[:, 4:]
    )
    pairs_N = model.pair_similarity(images, model.embed_texts(asked[1:5]))
    torch.testing.assert_close(pairs_N, scores_NM[:, 1:5].diagonal())
    maps = model.attention_maps(
        batch.image_BCHW[:2], ["Edema", "There is a wire."], [(64, 64), (70, 64)]
    )
    assert [tuple(map_HW.shape) for map_HW in maps] == [(64, 64), (70, 64)]


def test_entities_are_found_by_name_in_any_book() -> None:
    """Also where the text encoder makes other vectors now, and where two entities have almost
    one vector.
    """
    model = medklip().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        book_QD = model.queries().clone()
        found_QD = model.embed_texts(list(ENTITIES)).global_NE
    torch.testing.assert_close(book_QD, model.sentence_vectors(model.book.sentences))
    assert torch.equal(found_QD, book_QD)
    with torch.no_grad():
        model.book.vectors_QD *= 1.1
        model.book.vectors_QD[1] = model.book.vectors_QD[0] * (1 + 1e-6)
    asked = [ENTITIES[1], "A wire.", statement(ENTITIES[2]), describe(ENTITIES[0]), ENTITIES[1]]
    vectors_MD = model.embed_texts(asked).global_NE
    assert model._rows(vectors_MD).tolist() == [1, -1, 2, 0, 1]
    assert torch.equal(vectors_MD[0], model.book.vectors_QD[1])
    assert torch.equal(vectors_MD[1:2], model.sentence_vectors(["A wire."]))
    assert model._rows(model.embed_texts("A wire.").global_NE).tolist() == [-1]


def test_further_texts_read_the_book_and_the_book_does_not_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in several passes, with known texts between them and with none."""
    model, batch = medklip().eval(), make_batch()
    images = model.embed_images(batch.image_BCHW)
    texts = [f"There is sign {number}." for number in range(7)]
    vectors_MD = model.embed_texts(texts).global_NE
    alone_BQD = model.ask(images.local_NPE)[0]
    states_BQD = model.ask(images.local_NPE, vectors_MD[None])[0]
    torch.testing.assert_close(states_BQD[:, :-7], alone_BQD)
    for number in range(7):
        one_BQD = model.ask(images.local_NPE, vectors_MD[None, number : number + 1])[0]
        torch.testing.assert_close(states_BQD[:, number - 7], one_BQD[:, -1])
    with torch.no_grad():
        model.book.vectors_QD += 1.0  # the others follow the book
    assert not torch.allclose(
        model.ask(images.local_NPE, vectors_MD[None])[0][:, -7:], states_BQD[:, -7:]
    )
    with torch.no_grad():
        model.book.vectors_QD -= 1.0
    asked = [*texts[:3], "Edema", *texts[3:], "Pneumothorax"]
    expected_NM = model.similarity(images, model.embed_texts(asked))
    monkeypatch.setattr(queries, "_QUERIES", 3)
    torch.testing.assert_close(model.similarity(images, model.embed_texts(asked)), expected_NM)
    torch.testing.assert_close(
        model.similarity(images, model.embed_texts(asked[3:4])), expected_NM[:, 3:4]
    )


def test_swapped_entities_have_swapped_scores() -> None:
    model, other = medklip().eval(), medklip(entities=ENTITIES[::-1]).eval()
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith("book.")
    }
    other.load_state_dict(state, strict=False)
    grid_BPD = model.embed_images(make_batch().image_BCHW).local_NPE
    torch.testing.assert_close(other.ask(grid_BPD)[0].flip(1), model.ask(grid_BPD)[0])


def test_the_book_is_saved_and_belongs_to_its_sentences(tmp_path: Path) -> None:
    model, batch = medklip().eval(), make_batch()
    total = model(batch).terms["presence"]
    medvl.models.save(model, tmp_path)
    again = medvl.models.load(tmp_path).eval()
    for parameter in again.text_encoder.parameters():
        parameter.data.zero_()  # the book does not need it any more
    torch.testing.assert_close(again(batch).terms["presence"], total)
    other = medklip(descriptions={"Edema": "Fluid."})
    other.load_state_dict(model.state_dict())
    with raises(CheckpointError, "mismatch", "entities"):
        other(batch)


def test_a_skipped_first_step_leaves_the_books_and_an_empty_one_that_is_loaded_is_filled() -> None:
    """A checkpoint from before the first step has no vectors yet; a run can roll back to it."""
    model, batch = medklip().train(), make_batch()
    empty = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    guard = BufferGuard(model)
    guard.save()
    model(batch)
    guard.restore()
    filled = model.book.vectors_QD.clone(), model.places.vectors_QD.clone()
    assert all(vectors_QD.any(dim=1).all() for vectors_QD in filled)
    model.load_state_dict(empty)
    model(batch)
    for book, vectors_QD in zip((model.book, model.places), filled, strict=True):
        torch.testing.assert_close(book.vectors_QD, vectors_QD)


def test_without_places_every_trained_parameter_has_a_gradient() -> None:
    """DDP waits for the gradient of each."""
    model, batch = medklip(place_weight=0.0).train(), make_batch()
    model(batch).total.backward()
    assert [
        name for name, p in model.named_parameters() if p.requires_grad and p.grad is None
    ] == []
    frozen = {name.partition(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"text_encoder", "place"}


def test_a_batch_with_other_labels_or_without_positions_is_refused() -> None:
    model, batch = medklip(), make_batch()
    with raises(ConfigError, "mismatch", "entities"):
        model(dataclasses.replace(batch, labels_BL=batch.labels_BL[:, :2]))
    with raises(ConfigError, "missing", "position_BL"):
        model(dataclasses.replace(batch, position_BL=None))
    assert (
        "place" not in medklip(place_weight=0.0)(dataclasses.replace(batch, position_BL=None)).terms
    )


@pytest.mark.parametrize(
    "text", ["Edema of the left lower lung.", "Right effusion. No left pneumothorax."]
)
def test_places_change_their_sides_with_the_image(text: str) -> None:
    """Published systems mirror images, and 25 of MedKLIP's 51 places name a side."""
    maker = ItemMaker(
        ConVIRTAugmentation(size=16), WholeText(), ENTITIES, 0, Inputs(labels=True, positions=True)
    )
    expected = positions_of(text, ENTITIES)
    assert any(position >= 0 for position in expected)
    seen = set()
    for key in map(str, range(12)):
        sample = Sample(
            key=key, corpus="c", split="train", patient="p", study="s", sections={"findings": text}
        )
        item = maker(sample, np.zeros((20, 20), np.uint8), 0)
        seen.add(item.positions)
        assert list(item.positions) == (
            expected if item.text == text else mirrored_positions(expected)
        )
    assert len(seen) == 2
    batch, _ = Collate(gloria_ranks.tiny_tokenizer(), maker.inputs)([item, item])
    assert batch is not None
    assert batch.position_BL.tolist() == [list(item.positions)] * 2


def test_first_stages_of_a_published_resnet(tmp_path: Path) -> None:
    """As the presets `paper` of MedKLIP and MAVL have them: the last stage of the file is left
    out.
    """
    whole = create_image_encoder("timm:resnet18", layers=(1, 1, 1, 1), patch_level=-2).eval()
    torch.save(whole.backbone.state_dict(), tmp_path / "resnet.pt")
    stages = create_image_encoder(
        "timm:resnet18", layers=(1, 1, 1, 0), pretrained=str(tmp_path / "resnet.pt")
    ).eval()
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(stages(pixels).patches_BPD, whole(pixels).patches_BPD)
    assert not any(name.startswith("backbone.layer4") for name, _ in stages.named_parameters())
    with torch.device("meta"):
        published = medvl.create_model("medklip", vocab_size=100)
    grid = published.image_encoder.grid(224, 224)
    assert (grid, published.image_encoder.patch_dim, published.image_encoder.feature_dim) == (
        (14, 14),
        1024,
        1024,
    )


def test_published_shapes() -> None:
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in QueryDecoder(256, QueryDecoderConfig()).state_dict().items()
    }
    of_decoder = {
        name.partition("decoder.")[2]: shape for name, shape in shapes_of("medklip").items()
    }
    of_decoder.pop("")
    assert shapes == of_decoder


def test_weights_around_the_decoder_start_as_released() -> None:
    heads = medklip(projection_dim=128, decoder_hidden=256)
    wide = (
        heads.decoder.layers[0].multihead_attn.in_proj_weight,
        heads.decoder.layers[0].linear1.weight,
    )
    for weight in (*wide, heads.text_head.weight, heads.image_head[0].weight, heads.place.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    assert float(heads.presence.weight.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_findings_are_found_by_the_names_of_published_entities() -> None:
    """The authors score pleural effusion by "effusion"; an entity of the finding's own name
    comes first.
    """
    published = medklip(entities=("Edema", "effusion", "thicken")).eval()
    asked = [
        statement("Pleural Effusion"),
        statement("Pleural Thickening"),
        statement("Lung Opacity"),
    ]
    assert published._rows(published.embed_texts(asked).global_NE).tolist() == [1, 2, -1]
    both = medklip(entities=("effusion", "Pleural Effusion")).eval()
    assert both._rows(both.embed_texts(asked[:1]).global_NE).tolist() == [1]
