"""The base of all contrastive systems: incomplete rows, ranks without pairs, and operations on
pairs.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contrastive_ranks
from helpers.contrastive_ranks import FIRST, flat, sample_pairs
from helpers.contrastive_systems import PAIRS, SYSTEMS, fvlm, images_of, make_batch
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor, nn

from medvl.errors import ConfigError
from medvl.models import ConVIRTConfig
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.schema import Batch, Losses


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_other_positives_are_refused() -> None:
    with raises(ConfigError, "unknown_name", "positives"):
        ConVIRTConfig(positives="patient")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_pairs(left: Pairs, right: Pairs) -> None:
    first, second = flat(left), flat(right)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "medclip"])
def test_rows_without_image_or_text_are_left_out(name: str) -> None:
    model = SYSTEMS[name]().eval()
    batch = make_batch(name)
    partial = dataclasses.replace(
        batch, has_text_B=flags(1, 1, 0, 1, 1, 1, 0)
    )  # and the fourth has no image
    kept = torch.tensor([0, 1, 4, 5])
    everything = dataclasses.replace(batch, has_image_B=None, has_text_B=None)
    expected = model.pair_losses(model.encode_pairs(everything).rows(kept))
    torch.testing.assert_close(model(partial).total, expected.total)


@pytest.mark.parametrize("name", SYSTEMS)
def test_losses_and_gradients_under_autocast_are_close(name: str) -> None:
    model, batch = SYSTEMS[name]().eval(), make_batch(name)
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(batch)
    for key, term in expected.terms.items():
        assert actual.terms[key].dtype == torch.float32
        torch.testing.assert_close(actual.terms[key], term, rtol=0.1, atol=0.1, msg=key)
    actual.total.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("name", ["convirt", "mgca", "biovil_t"])
def test_rows_that_are_left_out_do_not_enter_batch_norms(name: str) -> None:
    statistics = []
    for kept in (None, [0, 1, 4, 5]):
        model, batch = SYSTEMS[name]().train(), make_batch(name)
        batch = dataclasses.replace(
            batch, has_text_B=flags(1, 1, 0, 1, 1, 1, 0)
        )  # and the fourth has no image
        model(batch if kept is None else batch.rows(kept))
        statistics.append({key: value for key, value in model.named_buffers() if "running_" in key})
    left, right = statistics
    assert left
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], msg=key)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "medclip"])
@pytest.mark.parametrize("complete", [0, 1])
def test_one_complete_row_and_none_leave_the_statistics_of_batch_norms(
    name: str, complete: int
) -> None:
    model, batch = SYSTEMS[name]().train(), make_batch(name)
    before = {key: value.clone() for key, value in model.named_buffers() if "running_" in key}
    flags_B = torch.arange(len(batch)) < complete
    pairs = model.encode_pairs(dataclasses.replace(batch, has_text_B=flags_B))
    assert all(tensor.isfinite().all() for tensor in pairs.tensors())
    for key, value in model.named_buffers():
        assert key not in before or torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_batch_without_pairs_has_zero_losses_and_zero_gradients(name: str) -> None:
    model = SYSTEMS[name]().eval()
    batch = make_batch(name)
    terms = model(batch).terms.keys()
    losses = model(dataclasses.replace(batch, has_text_B=torch.zeros(PAIRS, dtype=torch.bool)))
    losses.total.backward()
    assert losses.terms.keys() == terms
    assert all(value.item() == 0 for value in (losses.total, *losses.terms.values()))
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
        assert parameter.grad is None or not parameter.grad.any(), key


def losses_and_gradients(model: Any, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    losses = model(batch)
    losses.total.backward()
    terms = {f"loss/{key}": term.detach() for key, term in losses.terms.items()}
    return {**gradients(model), **terms, "loss": losses.total.detach()}


@pytest.mark.fault("N1")
def test_two_ranks_compute_what_one_does() -> None:
    """With unequal numbers of pairs, with pairs on one rank alone, and with none, whose losses
    are zero.
    """
    found = on_two_ranks(contrastive_ranks.losses_and_gradients)
    for name, create in SYSTEMS.items():
        model = create().eval()
        first = make_batch(name, FIRST)
        if not model.needs_pairs:  # the images of the other rank count
            first = dataclasses.replace(
                make_batch(name), has_text_B=torch.arange(PAIRS) < FIRST.stop
            )
        for case, batch in (("both", make_batch(name)), ("one", first)):
            expected = losses_and_gradients(model, batch)
            for results, (key, tensor) in itertools.product(found, expected.items()):
                actual = results.pop(f"{name}/{case}/{key}")
                near = {"rtol": 1e-4, "atol": 1e-6 + 1e-5 * tensor.abs().max().item()}
                place = f"{name} {case} {key}"
                torch.testing.assert_close(
                    actual, tensor, **near, msg=lambda text, place=place: f"{place}: {text}"
                )
        for results, key in itertools.product(found, expected):
            assert not results.pop(f"{name}/none/{key}").any(), key
    for results in found:
        gathered = {key: results.pop(f"pairs/{key}") for key in flat(sample_pairs(slice(None)))}
        for key, tensor in flat(sample_pairs(slice(None))).items():
            assert torch.equal(gathered[key], tensor), key
        assert not results


def test_pairs_gather_is_the_identity_on_one_rank() -> None:
    pairs = sample_pairs(slice(None))
    assert_equal_pairs(pairs.gather(), pairs)


def test_pairs_keep_their_rows_of_every_side() -> None:
    pairs = sample_pairs(slice(None))
    assert len(pairs) == 7
    some = pairs.rows(torch.tensor([5, 2]))
    assert len(some) == 2
    assert torch.equal(some.images.global_NE, pairs.images.global_NE[[5, 2]])
    assert torch.equal(some.texts.weight_NP, pairs.texts.weight_NP[[5, 2]])
    sentences = some.others["sentences"]
    assert torch.equal(
        sentences.global_NE, pairs.others["sentences"].global_NE[[6, 7, 8, 15, 16, 17]]
    )
    assert sentences.pair_N.tolist() == [1, 1, 1, 0, 0, 0]
    assert some.groups[0].tolist() == [2, 1]
    assert some.labels_BL.flatten().tolist() == [5, 2]
    none = pairs.rows(torch.tensor([], dtype=torch.long))
    assert len(none) == 0
    assert [len(side) for side in none.sides.values()] == [0, 0, 0]


@pytest.mark.parametrize("cuts", [(2, 5), (0, 7), (7, 7)])
def test_pairs_of_parts_are_the_pairs_of_the_whole(cuts: tuple[int, int]) -> None:
    parts = [slice(0, cuts[0]), slice(*cuts), slice(cuts[1], 7)]
    assert_equal_pairs(Pairs.cat([sample_pairs(rows) for rows in parts]), sample_pairs(slice(None)))


def test_the_placeholder_of_pairs_has_their_sides_and_zero_gradients() -> None:
    pairs = sample_pairs(slice(0, 0))
    tensors = [tensor.requires_grad_() for tensor in pairs.tensors()]
    constant = pairs.placeholder()
    assert constant.sides.keys() == pairs.sides.keys()
    assert [len(side) for side in constant.sides.values()] == [2, 2, 2]
    assert constant.texts.mask_NP is not None
    assert constant.texts.mask_NP.all()
    torch.testing.assert_close(constant.images.global_NE.norm(dim=1), torch.ones(2))
    torch.stack([tensor.sum() for tensor in constant.tensors()]).sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)


def test_losses_are_summed_with_their_weights() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert Losses.sum(a=one, b=two).total.item() == 3
    weighted = Losses.weighted(a=(one, 0.5), b=(two, 2.0))
    assert weighted.total.item() == 4.5
    assert weighted.terms == {"a": one, "b": two}
    for combine in (Losses.sum, Losses.weighted):
        with pytest.raises(ValueError, match="at least one term"):
            combine()


def test_grad_cache_takes_any_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words with weights and a side of several rows a pair give the gradient of the batch at
    once.
    """
    from medvl.train.loop.step import GradCache
    from medvl.train.optim.optimizer import Precision

    model, batch = SYSTEMS["clip"]().eval(), make_batch("clip")
    embed = type(model).embed_pairs

    def embed_pairs(batch: Any) -> Pairs:
        pairs = embed(model, batch)
        halves_NE = torch.cat([pairs.images.global_NE, pairs.texts.global_NE]) * 0.5
        numbers_N = torch.arange(len(pairs)).repeat(2)
        words_NWE = model.text_head(
            model.text_encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
        ).float()
        texts = dataclasses.replace(
            pairs.texts, local_NPE=words_NWE, mask_NP=batch.mask_BT, weight_NP=words_NWE.mean(dim=2)
        )
        halves = dataclasses.replace(pairs.images, global_NE=halves_NE, pair_N=numbers_N)
        return Pairs(images=pairs.images, texts=texts, others={"halves": halves})

    def compare_pairs(pairs: Pairs) -> Losses:
        halves, texts = pairs.others["halves"], pairs.texts
        own_N = (halves.global_NE * pairs.images.global_NE[halves.pair_N]).sum(dim=1)
        words_B = (texts.local_NPE.square().sum(dim=2) * texts.weight_NP * texts.mask_NP).sum(dim=1)
        return Losses.weighted(halves=(own_N.square().mean(), 1.0), words=(words_B.mean(), 0.1))

    monkeypatch.setattr(model, "embed_pairs", embed_pairs)
    monkeypatch.setattr(model, "compare_pairs", compare_pairs)
    model(batch).total.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    cache = GradCache(model, 2, Precision("fp32", torch.device("cpu")))
    cache(batch, 1, lambda part: None)
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=1e-4, atol=1e-6 + 1e-5 * tensor.abs().max().item()
        )


@pytest.mark.parametrize("name", SYSTEMS)
def test_vectors_with_and_without_normalisation(name: str) -> None:
    """fVLM encodes volumes without masks of organs in this setting alone."""
    create = SYSTEMS[name] if name != "fvlm" else lambda: fvlm(organ_tokens="all")
    model, batch = create().eval(), make_batch(name)
    with torch.no_grad():
        for encode, arguments in (
            (model.encode_image, [images_of(batch)]),
            (model.encode_text, [batch.ids_BT, batch.mask_BT]),
        ):
            raw_BE, unit_BE = encode(*arguments, normalize=False), encode(*arguments)
            torch.testing.assert_close(F.normalize(raw_BE, dim=1), unit_BE)
            torch.testing.assert_close(unit_BE.norm(dim=1), torch.ones(len(unit_BE)))
            assert not torch.allclose(raw_BE.norm(dim=1), torch.ones(len(unit_BE)))
        vector_BE = model.embed_images(images_of(batch)).global_NE
        torch.testing.assert_close(
            model.encode_image(images_of(batch)), F.normalize(vector_BE, dim=1)
        )
