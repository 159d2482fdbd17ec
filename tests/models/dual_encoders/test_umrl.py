"""UMRL: its losses against the formulas, frozen encoders, known pairs, orthogonal maps; TF-IDF
against scikit-learn.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import STUDIES, make_batch, umrl
from helpers.errors import raises
from sklearn.decomposition import PCA

import medvl
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import ConfigError
from medvl.losses.pairs.blockwise import in_share
from medvl.models import UMRLConfig, fit_tfidf, save
from medvl.schema import Batch

FINDINGS = ("effusion", "consolidation", "edema", "pneumothorax")
TEXTS = [
    f"There is {size} {side} {finding}."
    for finding in FINDINGS
    for side in ("left", "right")
    for size in ("a", "no")
]


def whole() -> Batch:
    return dataclasses.replace(make_batch("umrl"), has_image_B=None)


@pytest.mark.parametrize("distance", ["cosine", "squared"])
def test_losses_equal_the_formulas(distance: str) -> None:
    """The distance is that of the known pairs, the discriminator sees all vectors."""
    model, batch = umrl(distance=distance, paired_share=0.5, adversarial_weight=0.3).eval(), whole()
    known = in_share(STUDIES, 0.5).nonzero()[:, 0].tolist()
    assert 0 < len(known) < len(STUDIES)
    with torch.no_grad():
        losses = model(batch)
        image_BE = model.image_head(model.image_encoder(batch.image_BCHW).pooled_BD)
        words = [
            model.text_encoder.backbone.weight[ids_T[mask_T]]
            for ids_T, mask_T in zip(batch.ids_BT, batch.mask_BT, strict=True)
        ]
        text_BE = model.text_head(torch.stack([words_TD.mean(dim=0) for words_TD in words]))
        squared_B, cosine_B = (
            (image_BE - text_BE).square().sum(dim=1),
            F.cosine_similarity(image_BE, text_BE),
        )
        logits = [model.discriminator(each_BE)[:, 0].sigmoid() for each_BE in (image_BE, text_BE)]
    expected = (squared_B if distance == "squared" else 1 - cosine_B)[known].mean()
    torch.testing.assert_close(losses.terms["alignment"], expected, rtol=1e-4, atol=1e-5)
    adversarial = -(logits[0].log().mean() + (1 - logits[1]).log().mean()) / 2
    torch.testing.assert_close(losses.terms["adversarial"], adversarial, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.total, expected + 0.3 * adversarial, rtol=1e-4, atol=1e-5)


def test_texts_are_means_of_their_sentences() -> None:
    """In batches, for strings and however far they are padded; a text without a sentence is one."""
    tokenizer = train_wordpiece(TEXTS, vocab_size=120, min_frequency=1)
    model = umrl(text_unit="sentence", tokenizer=tokenizer, vocab_size=None).eval()
    texts = ["There is a left effusion. There is no edema.", "effusion", ""]
    vectors = [
        torch.stack(
            [
                model.text_encoder.backbone.weight[tokenizer([each])[0][0, 1:-1]].mean(dim=0)
                for each in parts
            ]
        )
        for parts in (["There is a left effusion.", "There is no edema."], ["effusion"])
    ]
    expected = model.text_head(torch.stack([vectors_SD.mean(dim=0) for vectors_SD in vectors]))
    actual = model.encode_text(texts, normalize=False)
    torch.testing.assert_close(actual[:2], expected)
    assert actual.isfinite().all()
    torch.testing.assert_close(model.embed_texts(texts).global_NE, F.normalize(actual, dim=1))
    torch.testing.assert_close(model.encode_text(texts[:1], normalize=False), actual[:1])
    batch = whole()
    wider = {
        name: F.pad(getattr(batch, name), (0, 4), value=value)
        for name, value in (("ids_BT", 7), ("mask_BT", False), ("sentence_BT", -1))
    }
    padded = dataclasses.replace(batch, **wider)
    torch.testing.assert_close(model(padded).total, model(batch).total)
    assert model(batch).total != umrl(tokenizer=tokenizer, vocab_size=None).eval()(batch).total
    assert (model.inputs.sentences, umrl().inputs.sentences) == (True, False)
    with raises(ConfigError, "missing", "sentence_BT"):
        model(dataclasses.replace(batch, sentence_BT=None))
    with raises(ConfigError, "unknown_name", "text_unit"):
        UMRLConfig(text_unit="word")


def test_the_name_alone_is_enough() -> None:
    with torch.device("meta"):
        model: Any = medvl.create_model("umrl")
    assert model.text_encoder.backbone.weight.shape == (30_522, 300)
    assert (model.image_head.weight.shape, model.text_head.weight.shape) == (
        (128, 1024),
        (128, 300),
    )


def test_a_file_of_word_vectors_fills_a_table_of_the_tokenizers_words(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=120, min_frequency=1)
    (tmp_path / "glove.txt").write_text("left 0.5 1 -2\nedema 3 4 5\n")
    settings = {
        "text_weights": str(tmp_path / "glove.txt"),
        "text_arguments": {"dimension": 3},
        "vocab_size": None,
    }
    model: Any = umrl(tokenizer=tokenizer, projection_dim=2, **settings)
    table_VD = model.text_encoder.backbone.weight
    assert len(table_VD) == tokenizer.vocab_size
    assert table_VD[tokenizer.vocabulary["left"]].tolist() == [0.5, 1, -2]
    save(model, tmp_path)
    assert torch.equal(
        medvl.load(tmp_path).encode_text(["left edema"]), model.eval().encode_text(["left edema"])
    )


def test_maps_learn_against_the_discriminator_and_encoders_do_not() -> None:
    model = umrl(alignment_weight=0.0).train()
    losses = model(whole())
    assert losses.terms["adversarial"].item() == pytest.approx(math.log(2), abs=0.3)
    losses.total.backward()
    learns = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name.split(".")[0] for name in learns} == {"image_head", "text_head", "discriminator"}
    assert not any(
        module.training
        for module in model.image_encoder.backbone.modules()
        if list(module.parameters())
    )
    weight, step = model.image_head.weight, 1e-3
    with torch.no_grad():
        weight -= step * weight.grad  # as the optimiser does it
    assert model(whole()).terms["adversarial"] > losses.terms["adversarial"]


def test_known_pairs_depend_on_the_study_only_and_grow_with_the_share() -> None:
    names = [str(number) for number in range(2000)]
    shares = (0.0, 0.01, 0.3, 1.0)
    known = [{names[place] for place in in_share(names, share).nonzero()[:, 0]} for share in shares]
    assert known[0] < known[1] < known[2] < known[3] == set(names)
    assert len(known[2]) == pytest.approx(600, abs=80)


def test_the_update_makes_maps_orthogonal() -> None:
    model = umrl(orthogonality=0.1)
    with torch.no_grad():
        model.image_head.weight.add_(0.05 * torch.randn_like(model.image_head.weight))
    for step in range(80):
        model.after_step(step)
    weight_ED = model.image_head.weight
    torch.testing.assert_close(
        weight_ED @ weight_ED.T, torch.eye(len(weight_ED)), rtol=0, atol=1e-4
    )


def test_tfidf_and_pca_equal_scikit_learn_and_stay_in_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=120, min_frequency=1)
    model = umrl(
        tokenizer=tokenizer, vocab_size=None, text_arguments={"dimension": 6}, projection_dim=4
    ).eval()
    kept = fit_tfidf(model.text_encoder, tokenizer, lambda: iter(TEXTS))
    ids_BT, mask_BT = tokenizer(TEXTS)
    shares = np.zeros((len(TEXTS), tokenizer.vocab_size))
    for row, (ids_T, mask_T) in enumerate(zip(ids_BT, mask_BT, strict=True)):
        np.add.at(shares[row], ids_T[mask_T].numpy(), 1 / int(mask_T.sum()))
    idf = np.log((1 + len(TEXTS)) / (1 + (shares > 0).sum(axis=0)))
    pca = PCA(6).fit(shares * idf)
    expected = torch.from_numpy(pca.transform(shares * idf)).float()
    actual = model.text_encoder(ids_BT, mask_BT).pooled_BD
    torch.testing.assert_close(
        actual @ actual.T, expected @ expected.T, rtol=1e-3, atol=1e-5
    )  # up to rotation
    assert kept == pytest.approx(pca.explained_variance_ratio_.sum(), abs=1e-5)
    save(model, tmp_path)
    torch.testing.assert_close(medvl.load(tmp_path).encode_text(TEXTS), model.encode_text(TEXTS))


def test_tfidf_and_settings_are_checked() -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=120, min_frequency=1)
    model = umrl(
        tokenizer=tokenizer, vocab_size=None, text_arguments={"dimension": 90}, projection_dim=4
    )
    with raises(ConfigError, "empty", "text_arguments"):
        fit_tfidf(model.text_encoder, tokenizer, lambda: iter(TEXTS))
    bert = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", frozen_text_layers=0
    )
    with raises(ConfigError, "unsupported", "text_encoder"):
        fit_tfidf(bert.text_encoder, tokenizer, lambda: iter(TEXTS))
    with raises(ConfigError, "out_of_range", "adversarial_weight"):
        UMRLConfig(alignment_weight=0.0, adversarial_weight=0.0)
