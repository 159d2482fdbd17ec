"""KAD: its losses against the formulas, and incomplete samples."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from helpers import gloria_ranks

import medvl
from medvl.models import KAD
from medvl.schema import Batch

ENTITIES = ("Edema", "Pneumothorax", "Pleural Effusion")


def kad(**settings: Any) -> KAD:
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        "projection_dim": 16,
        "entities": ENTITIES,
    }
    text = {
        "text_encoder": "tiny_bert",
        "text_arguments": {"num_hidden_layers": 1},
        "max_tokens": 64,
    }
    decoder = {"decoder_layers": 2, "decoder_heads": 2, "decoder_hidden": 24}
    return medvl.create_model(
        "kad", tokenizer=gloria_ranks.tiny_tokenizer(), **{**sizes, **text, **decoder, **settings}
    )


def make_batch() -> Batch:
    batch = gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer(), [0, 1, 2, 3])
    nan = torch.nan
    return dataclasses.replace(
        batch, labels_BL=torch.tensor([[1, 0, nan], [-1, 1, 1], [nan] * 3, [0, nan, 1]])
    )


def entropy(
    model: KAD, states_BQD: torch.Tensor, known: list[tuple[int, int, int]]
) -> torch.Tensor:
    logits_BQ2 = model.presence(states_BQD)
    return torch.stack(
        [F.cross_entropy(logits_BQ2[b, q], torch.tensor(value)) for b, q, value in known]
    ).mean()


def test_the_loss_is_presence_in_image_and_report_and_their_contrast() -> None:
    """With a scale of 14.3 and vectors of unit length; unmentioned entities of a labelled report
    are absent.
    """
    model, batch = kad().eval(), make_batch()
    losses = model(batch)
    images = model.embed_images(batch.image_BCHW)
    states_BQD, _ = model.ask(images.local_NPE)
    known = [(0, 0, 1), (0, 1, 0), (0, 2, 0), (1, 1, 1), (1, 2, 1), (3, 0, 0), (3, 1, 0), (3, 2, 1)]
    torch.testing.assert_close(losses.terms["presence"], entropy(model, states_BQD, known))
    report_BD = model.text_head(model.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD)
    query_BQD = model.text_head(model.book.vectors_QD).expand(4, -1, -1)
    torch.testing.assert_close(
        losses.terms["report"], entropy(model, model.decoder(query_BQD, report_BD[:, None]), known)
    )
    logits_BB = images.global_NE @ F.normalize(report_BD, dim=1).T / 0.07
    target_B = torch.arange(4)
    contrast = (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2
    torch.testing.assert_close(losses.terms["contrast"], contrast)
    ignored = kad(unmentioned="ignored").eval()
    ignored.load_state_dict(model.state_dict())
    mentioned = [(0, 0, 1), (0, 1, 0), (1, 1, 1), (1, 2, 1), (3, 0, 0), (3, 2, 1)]
    torch.testing.assert_close(
        ignored(batch).terms["presence"], entropy(model, states_BQD, mentioned)
    )


def test_statements_about_other_findings_are_asked_by_their_names() -> None:
    """As the entities are, and as the released code asks for classes that training did not have."""
    model = kad().eval()
    asked_ME = model.embed_texts(
        ["There is clear heart.", "clear heart", "There is no heart."]
    ).global_NE
    expected_ME = model.sentence_vectors(["clear heart", "There is no heart."])
    torch.testing.assert_close(asked_ME, expected_ME[[0, 0, 1]])
    assert not torch.allclose(expected_ME[0], model.sentence_vectors(["There is clear heart."])[0])


def test_the_heat_map_is_the_attention_of_the_last_layer() -> None:
    """As the released script draws it, averaged over heads; MedKLIP's and MAVL's are the mean
    over layers.
    """
    model, batch = kad().eval(), make_batch()
    seen: list[torch.Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda _layer, _inputs, outputs: seen.append(outputs[1]))
    with torch.no_grad():
        maps_BP = model.cell_maps(
            batch.image_BCHW[:2], ["There is pneumothorax.", "There is edema."]
        )
    first_BQP, last_BQP = seen
    expected_BP = torch.stack([last_BQP[0, 1], last_BQP[1, 0]])
    torch.testing.assert_close(maps_BP, expected_BP)
    assert not torch.allclose(maps_BP, torch.stack([first_BQP[0, 1], first_BQP[1, 0]]))
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        "projection_dim": 16,
        "entities": ENTITIES,
    }
    small = {
        "text_encoder": "tiny_bert",
        "text_arguments": {"num_hidden_layers": 1},
        "decoder_layers": 2,
        "image_arguments": {},
    }
    for name in ("medklip", "mavl"):
        other: Any = medvl.create_model(
            name, tokenizer=gloria_ranks.tiny_tokenizer(), **sizes, **small, decoder_hidden=24
        ).eval()
        seen.clear()
        for layer in other.decoder.layers:
            layer.register_forward_hook(lambda _layer, _inputs, outputs: seen.append(outputs[1]))
        with torch.no_grad():
            maps_BP = other.cell_maps(batch.image_BCHW[:1], ["There is edema."])
        queries = slice(0, other.aspects)  # those of the first entity
        mean_BP = torch.stack(seen).mean(dim=0)[:, queries].mean(dim=1)
        torch.testing.assert_close(maps_BP, mean_BP)


def test_samples_without_an_image_or_a_text_are_left_out() -> None:
    model, batch = kad().eval(), make_batch()
    model(batch)
    some = dataclasses.replace(
        batch, has_image_B=torch.tensor([1, 1, 1, 0]) > 0, has_text_B=torch.tensor([1, 1, 0, 1]) > 0
    )
    torch.testing.assert_close(
        model(some).terms["contrast"], model(batch.rows([0, 1])).terms["contrast"]
    )
    nothing = dataclasses.replace(
        batch, has_text_B=torch.zeros(4, dtype=torch.bool), labels_BL=torch.full((4, 3), torch.nan)
    )
    losses = model(nothing)
    assert losses.total.item() == 0
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("text_encoder.")), name


def test_every_trained_parameter_has_a_gradient_under_autocast() -> None:
    model = kad().train()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(make_batch())
    losses.total.backward()
    assert losses.total.isfinite()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("text_encoder.")), name
