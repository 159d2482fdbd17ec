"""Fine-tuning of matching for retrieval: the loss, the head, and its use in evaluation."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TINY, flags, make_batch, tiny_model, tiny_tokenizer
from torch.nn.functional import cross_entropy

from medvl.errors import ConfigError
from medvl.models import FusionModel, RetrievalModel, create_retrieval, load, save
from medvl.models.downstream.ranking import as_matcher, sample_texts

RECIPES = Path(__file__).parents[3] / "recipes"
TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_fusion_encoder_learns_to_rank(name: str) -> None:
    """Four distinct texts: three false ones for each image."""
    model = RetrievalModel.on(tiny_model(name, TOKENIZER))
    fusion = model.fusion_model
    losses = model(make_batch(TOKENIZER, 8))
    assert losses.total.item() == pytest.approx(
        np.log(7), abs=0.4
    )  # the own text and six that differ
    losses.total.backward()
    assert all(
        p.grad is not None and p.grad.any() for p in model.rank_head.parameters() if p.ndim > 1
    )
    assert not any(p.requires_grad for p in fusion.itm_head.parameters())
    learning = [p for p in fusion.parameters() if p.requires_grad]
    assert sum(p.grad is not None and bool(p.grad.any()) for p in learning) > len(learning) // 2


def test_loss_is_cross_entropy_over_own_and_false_texts() -> None:
    model = RetrievalModel.on(tiny_model("dual_stream", TOKENIZER)).eval()
    has_text_B = flags(1, 1, 0, 1, 1)
    batch = make_batch(TOKENIZER, 5, has_text_B=has_text_B)
    fusion, rows = model.fusion_model, [0, 1, 3, 4]
    with torch.no_grad():
        expected = []
        for row in rows:
            image = fusion.image_tokens(batch.image_BCHW[row : row + 1])
            others = [other for other in rows if batch.texts[other] != batch.texts[row]]
            scores = []
            for text_row in [row, *others]:
                length = int(batch.mask_BT[text_row].sum())
                text = fusion.text_tokens(
                    batch.ids_BT[None, text_row, :length], batch.mask_BT[None, text_row, :length]
                )
                logits = fusion.match(text, image)[0]
                scores.append(logits[1])  # the head starts as this row
            expected.append(cross_entropy(torch.stack(scores)[None], torch.tensor([0])))
        torch.testing.assert_close(model(batch).total, torch.stack(expected).mean())


@pytest.mark.parametrize("name", ["dual_stream", "medvill", "visualbert"])
def test_batch_without_a_pair_has_a_loss_and_gradients_of_zero(name: str) -> None:
    model = RetrievalModel.on(tiny_model(name, TOKENIZER))
    total = model(make_batch(TOKENIZER, 3, has_text_B=flags(0, 0, 0))).total
    total.backward()
    assert total == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_false_texts_are_distinct_and_never_equal_to_the_own() -> None:
    ids_NT = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 4], [1, 5]])
    text_NK, allowed_NK = sample_texts(ids_NT, 3)
    assert text_NK[:, 0].tolist() == list(range(5))
    for row, texts in enumerate(text_NK.tolist()):
        assert len(set(texts[1:])) == 3
        for text, allowed in zip(texts[1:], allowed_NK[row, 1:].tolist(), strict=True):
            assert allowed == (ids_NT[text].tolist() != ids_NT[row].tolist())
    assert allowed_NK.all()


def test_matcher_scores_with_the_trained_head(tmp_path: Path) -> None:
    model = RetrievalModel.on(tiny_model("m3ae", TOKENIZER)).eval()
    torch.nn.init.normal_(next(model.rank_head.parameters()))
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, RetrievalModel)
    matcher, batch = as_matcher(loaded), make_batch(TOKENIZER)
    assert isinstance(matcher, FusionModel)
    with torch.no_grad():
        text, image = (
            matcher.text_tokens(batch.ids_BT, batch.mask_BT),
            matcher.image_tokens(batch.image_BCHW),
        )
        logits_B2 = matcher.match(text, image)
        expected = model.rank_head(model.fusion_model.fuse(text, image).pooled_BD)[:, 0]
    torch.testing.assert_close(logits_B2[:, 1] - logits_B2[:, 0], expected)
    again = create_retrieval(tmp_path, negatives=3)  # a new head from the same ITM head
    torch.testing.assert_close(again.rank_head.weight[0], model.fusion_model.itm_head.weight[1])
    groups = again.parameter_groups(1e-3, 0.1)
    assert {group["lr"] for group in groups if group["name"].startswith("rank_head")} == {5e-3}
    with raises(ConfigError, "out_of_range", "negatives"):
        create_retrieval(tmp_path, negatives=0)


def test_paper_preset_warms_up_for_a_tenth_of_its_run() -> None:
    """ROCO has 65,448 training figures."""
    recipe = runpy.run_path(str(RECIPES / "retrieval_finetune.py"))["PRESETS"]["paper"]
    steps = recipe.train.epochs * 65_448 / recipe.train.global_batch
    assert recipe.optim.schedule.warmup_steps == pytest.approx(steps / 10, rel=0.01)
