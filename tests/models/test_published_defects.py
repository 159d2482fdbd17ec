"""Defects that were measured in public code of systems of 2023 to 2025, and do not exist here.

There are thirteen; those of one system are beside its tests:

1. RadZero, exponentials without a log-sum-exp: `test_radzero.py`, hard pairs have their gradient.
2. CARZero, padded words are attended to: `test_carzero.py`, padding of words changes no score.
3. IMITATE, a trainer that fails in every step, also without similar texts. It is no system here;
   its loss runs on any number of samples: `test_losses_soft_targets.py`, soft targets of a missing
   side.
4. IMITATE, targets that sum to more than 1: below.
5. MAVL, targets of several entities that are not normalised: `test_mavl.py`, a row weighs the same.
6. MAVL, epoch and scoring chosen by test sets: below; thresholds in `test_zero_shot.py` and
   `test_zero_shot_masks.py`, patients of the training in `test_spine.py`.
7. MRM and ECAMP, padding in the loss of words: `test_mrm.py`, the loss of words does not depend on
   padding.
8. MaCo, a weight that is read and not used: `test_mrm.py`, the weight of the contrast is used.
9. CT-CLIP, a scale of e at the start: below. It is no system here.
10. fVLM, public files that do not give the published figure: below. It is no system here.
11. GREEN, a parser of language that drops counts: below. It is no metric here; statements are
    parsed by the labeler.
12. Seven systems for radiographs, mirrored images that keep their sides:
    `test_published_presets.py` for the presets, `test_statements.py`, `test_medklip.py` and
    `test_mirroring.py` for texts, places, labels, boxes and masks.
13. MedSigLIP's notebook, equal captions as negatives: below; batches in parts in
    `test_train_grad_cache.py`.
"""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import clip
from helpers.eval_fakes import FakeSource
from helpers.gloria_ranks import tiny_tokenizer
from torch import Tensor

import medvl
from medvl import losses
from medvl.data import WholeText
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.reports.statements import statements_of
from medvl.eval import ZeroShotEval, zero_shot
from medvl.models import CLIPConfig
from medvl.models.checkpoint import save
from medvl.schema import Sample

RECIPES = Path(__file__).parents[2] / "recipes"
ENTITIES = ("Edema", "Pneumothorax", "Pleural Effusion")
_TINY = {
    "image_encoder": "resnet_tiny",
    "image_size": 32,
    "text_encoder": "tiny_bert",
    "max_tokens": 48,
}
_DECODER = {"decoder_layers": 1, "decoder_hidden": 24}
_QUERIES = {**_DECODER, "decoder_heads": 2, "projection_dim": 16, "entities": ENTITIES}
SETTINGS: dict[str, dict[str, Any]] = {
    "radzero": {"frozen_image": False},
    "carzero": {**_DECODER, "projection_dim": 24, "head_dims": (16,), "text_layers": 1},
    "medklip": {**_QUERIES, "image_arguments": {}},
    "kad": _QUERIES,
    "mavl": {**_QUERIES, "image_arguments": {}},
    "cxrclip": {"projection_dim": 16},
    "siglip": {"projection_dim": 16},
}
"""Small models of the systems whose zero-shot figures are published."""


def aligned(count: int) -> Tensor:
    """Return embeddings of pairs that match and are orthogonal to all others."""
    return torch.eye(count, 64)


@pytest.mark.parametrize("count", [8, 64])
def test_aligned_pairs_have_hardly_a_loss_at_the_initial_scale(count: int) -> None:
    """CT-CLIP starts at a scale of e, where they have 0.38 with 8 pairs and 1.64 with 64."""
    assert losses.clip(aligned(count), aligned(count), torch.e) > 0.3
    scale = clip().logit_scale.exp()
    torch.testing.assert_close(scale, torch.tensor(1 / CLIPConfig().temperature))
    assert losses.clip(aligned(count), aligned(count), scale) < 1e-3


def test_soft_targets_of_correlated_samples_sum_to_one() -> None:
    """IMITATE's targets, 1 on the diagonal and more elsewhere, sum to 2.55 at 128 samples with
    correlations of 0.95.
    """
    similarity_NN = torch.full((128, 128), 0.95).fill_diagonal_(1.0)
    nothing_NE = torch.zeros(128, 4)
    loss = losses.soft_targets(nothing_NE, nothing_NE, similarity_NN, 1.0)
    torch.testing.assert_close(loss, torch.tensor(128.0).log())


def test_equal_captions_are_no_negatives() -> None:
    """With nine class names as captions, 11 % of the negatives of MedSigLIP's notebook are true
    pairs.
    """
    caption_B = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5])
    text_BE, image_BE = aligned(8)[caption_B], aligned(8)[caption_B].requires_grad_()
    with_groups = losses.siglip(image_BE, text_BE, 100.0, -10.0, groups=(caption_B,))
    without = losses.siglip(image_BE, text_BE, 100.0, -10.0)
    assert with_groups < 0.01 < 40 < without
    pushed_BE, kept_BE = (torch.autograd.grad(loss, image_BE)[0] for loss in (without, with_groups))
    assert (pushed_BE[0] @ text_BE[0]) > 10  # away from the caption that is its own as well
    assert kept_BE[0].norm() < 0.01


@pytest.mark.parametrize("name", [*SETTINGS, "mrm", "chexzero"])
def test_no_preset_selects_a_checkpoint_on_test_images(name: str) -> None:
    """MAVL's configurations name five epochs of one run, one for each group of test sets."""
    presets = runpy.run_path(str(RECIPES / f"{name}_mimic.py"))["PRESETS"]
    for preset in presets.values():
        valid = Path(preset.data.valid)
        folders = [valid, Path(preset.data.train), *preset.data.extra_train]
        assert valid.name == "validate"
        assert len(set(folders)) == len(folders)
        assert not any("test" in folder.name for folder in folders)


def labelled_images(model: Any) -> Loader:
    """Return images with labels, read as the model reads them."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(key=f"k{row}", corpus="c", split="validate", patient=f"p{row}", study="s",
               labels={name: int(value) for name, value in zip(ENTITIES, rng.integers(0, 2, 3),
               strict=True)})
        for row in range(12)
    ]  # fmt: skip
    source = FakeSource(samples, list(rng.integers(0, 256, (12, 40, 36), dtype=np.uint8)), ENTITIES)
    options: dict[str, Any] = {"text": WholeText(), "tokenizer": model.tokenizer, "train": False}
    return open_loader(source, batch=5, image=model.transform, **options)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_files_of_a_run_give_the_figure_of_its_training(name: str, tmp_path: Path) -> None:
    """fVLM's public files have an AUROC of 0.627, published with 0.778."""
    torch.manual_seed(0)
    model: Any = medvl.create_model(name, tokenizer=tiny_tokenizer(), **{**_TINY, **SETTINGS[name]})
    with torch.no_grad():  # away from the initial weights, as after a training
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    validation = ZeroShotEval(labelled_images(model), "statements")(model.eval())
    save(model, tmp_path)
    loaded: Any = medvl.load(tmp_path)
    results = zero_shot(loaded.eval(), labelled_images(loaded), "statements", resamples=0).results
    found = {f"zero_shot/auroc/{name}": results.row("auroc", name).value for name in ENTITIES}
    assert found == {key: value for key, value in validation.items() if key in found}
    assert len(set(found.values())) > 1


@pytest.mark.parametrize(
    "text",
    [
        "Edema; effusion.",
        "1. Edema. 2. Effusion.",
        "1 edema; effusion",
        "1) Edema 2) Effusion",
        "Lines; 2. edema, effusion",
    ],
)
def test_findings_of_numbered_clauses_are_counted(text: str) -> None:
    """GREEN's counts of "3 a; b" and of "Normal heart; 2. clear" are 0."""
    assert {"There is edema.", "There is pleural effusion."} <= set(statements_of(text))
