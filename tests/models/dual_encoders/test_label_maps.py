"""Heat maps that train from labels of images: the loss against its formula, the term of three
systems, and two ranks.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl import losses
from medvl.errors import ConfigError
from medvl.models import ConVIRTConfig
from medvl.schema import Batch

TOKENIZER = gloria_ranks.tiny_tokenizer()
TEXTS = ("a left effusion", "Edema", "the heart is enlarged")
NAN = float("nan")
BACKBONE = "image_encoder.backbone."
GLORIA_GLOBAL = (f"{BACKBONE}stages.3.", f"{BACKBONE}norm.", "image_head.", "text_head.")
LABELS = [[1.0, 0, NAN], [NAN, NAN, NAN], [0, -1, 1], [0, 0, 1], [1, 1, 1], [NAN, 1, 0], [1, 0, 0]]
"""Of the pairs of `gloria_ranks.make_batch`: what the first one does not mention is absent; the
second one has none.
"""


def naive_loss(score_P: Tensor, label: float, sharpness: float) -> Tensor:
    """Return the loss of one label of one image: 0 where it is uncertain or unknown."""
    if not label >= 0:
        return 0 * score_P.sum()
    pooled = (sharpness * score_P).exp().mean().log() / sharpness
    p = 1 / (1 + (-pooled).exp())
    return -(label * p.log() + (1 - label) * (1 - p).log())


@pytest.mark.parametrize("sharpness", [1.0, 5.0])
def test_label_entropy_is_its_formula(sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    score_BLP = torch.randn(3, 3, 4, generator=generator, requires_grad=True)
    target_BL = torch.tensor(LABELS[:3])
    actual_BL = losses.label_entropy(score_BLP, target_BL, sharpness)
    rows = [
        [naive_loss(score_BLP[b, c], LABELS[b][c], sharpness) for c in range(3)] for b in range(3)
    ]
    expected_BL = torch.stack([torch.stack(row) for row in rows])
    torch.testing.assert_close(actual_BL, expected_BL)
    gradients = [
        torch.autograd.grad(each.sum(), score_BLP, retain_graph=True)[0]
        for each in (actual_BL, expected_BL)
    ]
    torch.testing.assert_close(*gradients)
    high_BLP = torch.full((1, 1, 4), 500.0)
    assert losses.label_entropy(high_BLP, torch.ones(1, 1), sharpness).item() == 0
    with pytest.raises(ValueError, match="expected"):
        losses.label_entropy(score_BLP, target_BL[:2])


def create(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_encoder": "resnet_tiny", "image_size": 64}
    sizes |= {"text_encoder": "tiny_bert", "text_arguments": {"num_hidden_layers": 1}}
    if name == "gloria":
        sizes |= {"margin": 0, "encoder_size": None, "text_layers": 1}
    sizes |= {"frozen_image": False} if name == "radzero" else {"frozen_text_layers": 0}
    settings = {"label_map_weight": 0.5, "label_map_texts": TEXTS, **settings}
    return medvl.create_model(name, tokenizer=TOKENIZER, **sizes, **settings).eval()


def labelled_batch(rows: list[int], **fields: Any) -> Batch:
    batch = gloria_ranks.make_batch(TOKENIZER, rows)
    batch = dataclasses.replace(
        batch,
        labels_BL=torch.tensor(LABELS)[rows],
        statement_ids_BST=batch.ids_BT[:, None],
        statement_mask_BST=batch.mask_BT[:, None],
    )
    return dataclasses.replace(batch, **fields)


def naive_term(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss of the known labels, from the cosine of each patch with each text, or
    with its best word.
    """
    patches_BPE = _patches(model, batch.image_BCHW)
    if model.name == "gloria":
        texts = model.embed_texts(TEXTS)
        words = [
            F.normalize(each_WE[mask_W], dim=-1)
            for each_WE, mask_W in zip(texts.local_NPE, texts.mask_NP, strict=True)
        ]
        scale = model.config.temp3
    else:
        words = [each_E[None] for each_E in model.encode_text(TEXTS)]
        scale = model.logit_scale.exp() if model.learns_scale else 1 / model.config.temperature
    terms = []
    for row, label_L in enumerate(batch.labels_BL.tolist()):
        has_labels = any(label == label for label in label_L)
        for column, label in enumerate(label_L):
            known = 0.0 if label != label and has_labels else label
            if known >= 0:
                score_P = scale * (words[column] @ patches_BPE[row].T).max(dim=0).values
                terms.append(naive_loss(score_P, known, model.config.label_map_sharpness))
    return torch.stack(terms).mean()


def _patches(model: Any, image_BCHW: Tensor) -> Tensor:
    if model.name == "radzero":
        regions_BPE: Tensor = model.embed_regions(image_BCHW)
        return regions_BPE
    if model.name == "gloria":
        return F.normalize(model.embed_images(image_BCHW).local_NPE, dim=-1)
    return F.normalize(model.image_head(model.image_encoder(image_BCHW).patches_BPD), dim=-1)


@pytest.mark.parametrize("name", ["convirt", "gloria", "radzero"])
def test_term_is_the_mean_loss_of_known_labels(name: str) -> None:
    model = create(name)
    batch = labelled_batch(list(range(7)))
    result, without = model(batch), create(name, label_map_weight=0.0)
    assert model.inputs == dataclasses.replace(without.inputs, labels=True)
    expected = naive_term(model, batch)
    torch.testing.assert_close(result.terms["labels"], expected)
    torch.testing.assert_close(result.total, without(batch).total + 0.5 * expected)
    learning = {key: each for key, each in model.named_parameters() if each.requires_grad}
    names, parameters = list(learning), list(learning.values())
    own, naive = (
        torch.autograd.grad(
            value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for value in (result.terms["labels"], expected)
    )
    torch.testing.assert_close(own, naive)
    idle = {key for key, each in zip(names, own, strict=True) if not each.any()}
    if name == "gloria":  # its regions are of an earlier stage, its words have their own head
        idle = {each for each in idle if not each.startswith(GLORIA_GLOBAL)}
    assert idle == set()
    result.total.backward()
    assert all(each.grad is not None for each in parameters)


def test_rows_without_images_and_wrong_columns() -> None:
    model = create("convirt")
    has_image_B = torch.tensor([True, True, True, False])
    partial = model(labelled_batch([0, 1, 2, 3], has_image_B=has_image_B))
    whole = model(labelled_batch([0, 1, 2]))
    torch.testing.assert_close(partial.terms["labels"], whole.terms["labels"])
    unlabelled = model(labelled_batch([1, 1]))
    assert unlabelled.terms["labels"].item() == 0
    with raises(ConfigError, "mismatch", "label_map_texts"):
        model(labelled_batch([0, 1], labels_BL=torch.zeros(2, 14)))
    with raises(ConfigError, "out_of_range", "label_map_weight"):
        ConVIRTConfig(label_map_weight=-1.0)
    with raises(ConfigError, "out_of_range", "label_map_sharpness"):
        ConVIRTConfig(label_map_sharpness=0.0)


def term_of_rank() -> list[Tensor]:
    """Return the term and its gradient for two pairs on rank 0 and five on rank 1."""
    rank = torch.distributed.get_rank()
    model = create("convirt")
    term = model(labelled_batch([0, 2] if rank == 0 else [1, 3, 4, 5, 6])).terms["labels"]
    (gradient,) = torch.autograd.grad(term, [model.image_head[2].weight])
    return [term.detach(), gradient]


def test_two_ranks_equal_one() -> None:
    ranks = on_two_ranks(term_of_rank)
    model = create("convirt")
    expected = naive_term(model, labelled_batch(list(range(7))))
    (gradient,) = torch.autograd.grad(expected, [model.image_head[2].weight])
    for term, _ in ranks:
        torch.testing.assert_close(term, expected.detach())
    mean = (ranks[0][1] + ranks[1][1]) / 2  # as DDP does
    torch.testing.assert_close(mean, gradient, rtol=1e-3, atol=1e-6)
