"""Multiple choice on a fusion-encoder: the texts of options, their scores, the loss and the head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.choice_shards import LEVELS, choice_shards
from helpers.errors import raises
from helpers.fusion_samples import SIDE, tiny_model, tiny_tokenizer
from torch.nn.functional import cross_entropy

from medvl.data.annotations import Question
from medvl.data.loading.studies import OptionSource
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError, CorpusError
from medvl.eval.vqa.option_scores import TEMPLATES, Templates, option_scorer
from medvl.eval.vqa.protocol import get_protocol
from medvl.models import ChoiceModel, create_choices, load, save
from medvl.schema import Batch
from medvl.train import VQADataConfig, open_choices

WORDS = train_words([f"Which image is it? {level} image" for level in LEVELS] * 2, min_frequency=1)


def choice_model(name: str) -> ChoiceModel:
    model = ChoiceModel.on(tiny_model(name, WORDS))
    torch.nn.init.normal_(next(iter(model.rank_head.parameters())))
    return model


def config_of(**changes: Any) -> VQADataConfig:
    folder = choice_shards()
    fields = {"train": folder / "train", "valid": folder / "test", "valid_split": "test",
              "image": EvalTransform(size=SIDE), "workers": 0}  # fmt: skip
    return VQADataConfig(**{**fields, **changes})


def batch_of(model: ChoiceModel) -> Batch:
    """Return four questions, of which the first has two options and the second has none."""
    batch: Batch = next(iter(open_choices(config_of(), model, 4).train))
    assert batch.statement_mask_BST is not None
    batch.labels_BL[0, 2:] = torch.nan
    batch.labels_BL[0, :2] = torch.tensor([0.0, 1.0])
    batch.statement_mask_BST[0, 2:] = False
    batch.labels_BL[1] = torch.nan
    return batch


def test_source_gives_the_question_with_each_option() -> None:
    source = OptionSource(ShardSource(choice_shards() / "train"), "train")
    assert len(source) == 16  # the question without options is left out
    assert source.label_names == ("A", "B", "C", "D")
    question = source.questions[5].question
    sample = source.sample(5)
    assert sample.sections == {
        "question": "Which image is it?",
        **{"ABCD"[n]: f"Which image is it? {option}" for n, option in enumerate(question.options)},
    }
    assert sample.labels == {"ABCD"[n]: int(n == question.right[0]) for n in range(4)}
    assert [question.with_option("left")] == Templates({"": TEMPLATES}).statements(question, "left")
    with raises(CorpusError, "unknown_name", "split"):
        OptionSource(ShardSource(choice_shards() / "train"), "validate")


@pytest.mark.parametrize("name", ["dual_stream", "medvill", "albef"])
def test_loss_is_cross_entropy_over_the_options_of_each_question(name: str) -> None:
    model = choice_model(name)
    batch = batch_of(model)
    assert batch.statement_ids_BST is not None
    assert batch.statement_mask_BST is not None
    fusion = model.eval().fusion_model
    entropies = []
    with torch.no_grad():
        for row in (0, 2, 3):
            image = fusion.image_tokens(batch.image_BCHW[row : row + 1])
            scores = []
            for place in range(2 if row == 0 else 4):
                real_T = batch.statement_mask_BST[row, place]
                ids_T = batch.statement_ids_BST[row, place][real_T]
                text = fusion.text_tokens(
                    ids_T[None], torch.ones_like(ids_T, dtype=torch.bool)[None]
                )
                scores.append(model.rank_head(fusion.fuse(text, image).pooled_BD)[0, 0])
            right_1 = (batch.labels_BL[row] == 1).nonzero()[0]
            entropies.append(cross_entropy(torch.stack(scores)[None], right_1))
        losses = model(batch)
    torch.testing.assert_close(losses.total, torch.stack(entropies).mean())
    assert model.loss_counts(batch).tolist() == [3]
    model(batch).total.backward()
    unused = [n for n, p in model.named_parameters() if p.requires_grad and not (
        p.grad is not None and p.grad.any())]  # fmt: skip
    # equal for all options: the bias of the head, and what reads positions that no text has
    assert [name for name in unused if not name.endswith("bias")] == []


def test_questions_about_an_image_share_it() -> None:
    model = choice_model("dual_stream").eval()
    loaders = open_choices(config_of(together=2), model, 4)
    batch = next(iter(loaders.train))
    rows = torch.tensor([0, 0, 1, 1])
    shared = batch.rows([0, 1, 2, 3]) if batch.image_of_B is None else batch
    expected = model.option_scores(shared)[rows]
    shared.image_of_B = rows
    shared.statement_ids_BST = shared.statement_ids_BST[rows]
    shared.statement_mask_BST = shared.statement_mask_BST[rows]
    torch.testing.assert_close(model.option_scores(shared), expected)
    assert loaders.valid is not None
    assert len(list(loaders.valid)) == 1


def test_saved_model_scores_options_as_the_evaluation_does(tmp_path: Path) -> None:
    model = choice_model("m3ae").eval()
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, ChoiceModel)
    image_BCHW = torch.randint(0, 256, (2, 1, SIDE, SIDE), dtype=torch.uint8)
    options = [("black image", "dark image", "grey image"), ("dark image", "bright image")]
    texts = ["Which image is it?", "Which image?"]
    found = loaded.score_options(image_BCHW, texts, options)
    assert [len(scores_O) for scores_O in found] == [3, 2]
    questions = [
        Question(id=text, question=text, answer=each[0], answer_type="closed", split="test",
                 options=each, right=(0,))
        for text, each in zip(texts, options, strict=True)
    ]  # fmt: skip
    ids_BT, mask_BT = model.tokenize(texts)
    batch = Batch(keys=texts, image_BCHW=image_BCHW, ids_BT=ids_BT, mask_BT=mask_BT,
                  labels_BL=torch.empty(2, 0), texts=texts)  # fmt: skip
    scorer = option_scorer(loaded, Templates(), get_protocol("medvl"))
    assert scorer.name == "matching"
    with torch.no_grad():
        judged = scorer.score(batch, questions)
    for own_O, given in zip(found, judged, strict=True):
        assert given.scores == pytest.approx(own_O.tolist(), abs=1e-4)
    with raises(ConfigError, "mismatch", "options"):
        loaded.score_options(image_BCHW, texts, options[:1])
    with raises(ConfigError, "empty", "options"):
        loaded.score_options(image_BCHW, texts, [(), ("left",)])
    with raises(ConfigError, "missing", "statement_ids_BST"):
        loaded(batch)
    groups = create_choices(tmp_path).parameter_groups(1e-3, 0.1)
    assert {group["lr"] for group in groups if group["name"].startswith("rank_head")} == {5e-3}


def test_options_that_are_equal_to_the_model_are_refused() -> None:
    with raises(ConfigError, "too_small", "max_tokens"):
        open_choices(config_of(), ChoiceModel.on(tiny_model("dual_stream", tiny_tokenizer())), 4)
