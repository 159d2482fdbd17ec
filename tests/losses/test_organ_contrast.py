"""The contrast by organ against the formula written out, in value and gradient, under masks."""

import pytest
import torch
import torch.nn.functional as F

from medvl import losses

N, ORGANS, E = 6, 3, 4


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    present = torch.ones(N, ORGANS, dtype=torch.bool)
    present[2, 0] = present[4, 1] = False
    normal = torch.rand(N, ORGANS, generator=generator) < 0.5
    normal[:, 2] = True  # an organ without an abnormal row
    ids = torch.arange(N)[:, None].repeat(1, ORGANS)
    ids[5, 0] = ids[1, 0]
    return {"present_NO": present, "normal_NO": normal, "text_id_NO": ids}


def formula(
    image: torch.Tensor, text: torch.Tensor, temperature: torch.Tensor, flags: dict
) -> list[torch.Tensor]:
    """Row by row, as in the paper."""
    present, normal, ids = flags.values()
    found = []
    for organ in range(ORGANS):
        rows = [row for row in range(N) if present[row, organ]]
        loss = torch.zeros(())
        if any(not normal[row, organ] for row in rows):
            for one, other in ((image, text), (text, image)):
                for i in rows:
                    logits = torch.stack(
                        [one[i, organ] @ other[j, organ] / temperature for j in rows]
                    )
                    same = torch.tensor(
                        [
                            j == i
                            or bool(normal[i, organ] and normal[j, organ])
                            or bool(ids[i, organ] == ids[j, organ])
                            for j in rows
                        ]
                    ).float()
                    loss = loss - (same / same.sum() * logits.log_softmax(0)).sum() / len(rows) / 2
        found.append(loss)
    return found


def test_the_loss_is_the_formula_in_value_and_gradient() -> None:
    flags = inputs()
    generator = torch.Generator().manual_seed(1)
    results = []
    for naive in (True, False):
        generator.manual_seed(1)
        raw = [torch.randn(N, ORGANS, E, generator=generator, requires_grad=True) for _ in range(2)]
        image, text = (F.normalize(each, dim=2) for each in raw)
        temperature = torch.tensor(0.3, requires_grad=True)
        if naive:
            loss_O = torch.stack(formula(image, text, temperature, flags))
        else:
            loss_O = losses.organ_contrast(image, text, 1 / temperature, **flags)
        loss_O.sum().backward()
        results.append([loss_O.detach(), *(each.grad for each in (*raw, temperature))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert results[1][0][2] == 0, "no row has the organ abnormal"
    image_gradient = results[1][1]
    assert not image_gradient[2, 0].any()
    assert not image_gradient[4, 1].any()
    assert image_gradient[0, 0].any()


def test_a_batch_without_organs_has_no_loss() -> None:
    flags = {**inputs(), "present_NO": torch.zeros(N, ORGANS, dtype=torch.bool)}
    image = torch.randn(N, ORGANS, E, requires_grad=True)
    loss_O = losses.organ_contrast(image, image.detach(), 10.0, **flags)
    loss_O.sum().backward()
    assert not loss_O.any()
    assert not image.grad.any()


def test_other_shapes_are_refused() -> None:
    flags = inputs()
    vectors = torch.ones(N, ORGANS, E)
    for image, text in ((vectors[0], vectors[0]), (vectors, vectors[:5])):
        with pytest.raises(ValueError, match="expected images and texts"):
            losses.organ_contrast(image, text, 1.0, **flags)
