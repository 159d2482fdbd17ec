"""CXR-CLIP: its loss against the formula, and what counts as the second view and text."""

import dataclasses

import torch
import torch.nn.functional as F
from helpers.contrastive_systems import PAIRS, cxrclip, make_batch
from helpers.errors import raises
from torch import Tensor

from medvl.errors import ConfigError


def cross_entropies(one_NE: Tensor, other_NE: Tensor, scale: Tensor) -> Tensor:
    logits_NN, target_N = scale * one_NE @ other_NE.T, torch.arange(len(one_NE))
    return (F.cross_entropy(logits_NN, target_N) + F.cross_entropy(logits_NN.T, target_N)) / 2


def test_the_loss_is_six_contrasts() -> None:
    model = cxrclip().eval()
    batch = dataclasses.replace(make_batch("cxrclip"), has_image_B=None)
    view_B, text_B = torch.arange(PAIRS) % 3 == 1, torch.arange(PAIRS) != 1
    images = model.encode_image(batch.image_BCHW), model.encode_image(batch.second_image_BCHW)
    images = (
        images[0],
        torch.where(view_B[:, None], model.encode_image(batch.other_views_BVCHW[:, 0]), images[1]),
    )
    texts = (
        model.encode_text(batch.ids_BT, batch.mask_BT),
        model.encode_text(batch.second_ids_BT, batch.second_mask_BT),
    )
    texts = texts[0], torch.where(text_B[:, None], texts[1], texts[0])
    scale = model.logit_scale.exp()
    torch.testing.assert_close(scale.item(), 1 / 0.07)
    losses = model(batch)
    across = torch.stack(
        [cross_entropies(image, text, scale) for image in images for text in texts]
    ).mean()
    torch.testing.assert_close(losses.terms["image_text"], across)
    torch.testing.assert_close(losses.terms["image_image"], cross_entropies(*images, scale))
    torch.testing.assert_close(losses.terms["text_text"], cross_entropies(*texts, scale))
    expected = across + losses.terms["image_image"] + 0.5 * losses.terms["text_text"]
    torch.testing.assert_close(losses.total, expected)


def test_views_are_those_of_the_study_or_augmented() -> None:
    model, batch = cxrclip(views="augmented").eval(), make_batch("cxrclip")
    assert model.inputs.second_image
    assert not model.inputs.drawn_view
    total = model(batch).total
    changed = dataclasses.replace(batch, other_views_BVCHW=batch.other_views_BVCHW.flip(4))
    assert model(changed).total == total
    assert cxrclip().inputs.drawn_view
    assert cxrclip().eval()(batch).total != cxrclip().eval()(changed).total
    with raises(ConfigError, "missing", "second_image_BCHW"):
        model(dataclasses.replace(batch, second_image_BCHW=None))


def test_the_image_is_its_first_patch_where_it_is_so_published() -> None:
    model, batch = (
        cxrclip(image_pool="first", image_encoder="resnet_tiny", image_arguments={}).eval(),
        make_batch(),
    )
    patches_BPD = model.image_encoder(batch.image_BCHW).patches_BPD
    expected = F.normalize(model.image_head(patches_BPD[:, 0]), dim=1)
    torch.testing.assert_close(model.encode_image(batch.image_BCHW), expected)
    with raises(ConfigError, "unknown_name", "image_pool"):
        cxrclip(image_pool="last")
