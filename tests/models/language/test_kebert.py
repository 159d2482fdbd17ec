"""KAD's knowledge encoder: facts of a release of UMLS, pairs, the loss against the formula, and
its use in KAD.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises
from helpers.learning import fit
from helpers.text_shards import text_vocabulary

from medvl.common.seeding import seeded
from medvl.data import KnowledgeGraph, UMLSOptions, read_umls
from medvl.data.corpora.concepts import plan_facts
from medvl.data.knowledge.graph import read_definitions
from medvl.data.loading.text_loader import open_text_loader
from medvl.data.privacy import Deidentifier
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.masked_text import ConceptPairs
from medvl.errors import ConfigError, CorpusError
from medvl.models import ConceptScore, create_model, save
from medvl.phantom import write_umls
from medvl.schema import Batch, Sample

TINY = {"text_encoder": "tiny_bert", "text_arguments": {"num_hidden_layers": 1}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return text_vocabulary()


@pytest.fixture(scope="module")
def umls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_umls(tmp_path_factory.mktemp("umls"))


@pytest.fixture(scope="module")
def graph(umls: Path) -> KnowledgeGraph:
    return read_umls(umls, UMLSOptions(keep_isolated=True))


class Facts(list[Sample]):
    """A source in memory."""

    manifest = None

    def sample(self, position: int) -> Sample:
        return self[position]


def facts_of(graph: KnowledgeGraph, definitions: dict[str, list[str]]) -> Facts:
    planned = plan_facts(
        graph,
        Deidentifier(bytes(32)),
        definitions,
        fractions={"train": 0.8, "validate": 0.2},
    )
    return Facts(record.sample for record in planned.records)


def test_facts_are_both_ends_of_each_relation_and_each_definition(
    graph: KnowledgeGraph, umls: Path
) -> None:
    definitions = read_definitions(umls, graph.identifiers)
    facts = facts_of(graph, definitions)
    texts = [sample.sections["text"] for sample in facts]
    place = {names[0]: number for number, names in enumerate(graph.names)}
    effusion = graph.names[place["pleural effusion"]]
    assert "\n".join(["blunting\tmanifestation of", *effusion]) in texts
    assert "\n".join(["has manifestation\tblunting", *effusion]) in texts
    (definition,) = definitions[graph.identifiers[place["pleural effusion"]]]
    assert "\n".join([definition, *effusion]) in texts
    assert len(texts) == 2 * len(graph.triples_N3) + sum(map(len, definitions.values()))
    concepts = {
        split: {fact.patient for fact in facts if fact.split == split}
        for split in ("train", "validate")
    }
    assert not concepts["train"] & concepts["validate"]


def test_a_release_without_definitions_and_a_damaged_one_are_refused(
    umls: Path, tmp_path: Path
) -> None:
    with raises(CorpusError, "not_found", names="MRDEF.RRF"):
        read_definitions(tmp_path, ["C9000000"])
    (tmp_path / "MRDEF.RRF").write_text("C9000000||AT1||PHANTOM|cut off")
    with raises(CorpusError, "malformed", "columns", names="line 1"):
        read_definitions(tmp_path, ["C9000000"])
    assert read_definitions(umls, ["C0000001"]) == {}


def test_segments_are_separated_and_long_facts_are_cut(tokenizer: Tokenizer) -> None:
    pairs, rng = ConceptPairs(tokenizer, 8), np.random.default_rng(0)
    row = pairs("key", "concept", "edema\tpart of\nlung\nlungs", str, rng)
    ends = [tokenizer.sep_id]
    expected = [
        tokenizer.cls_id,
        *tokenizer.encode_whole("edema")[0],
        *ends,
        *tokenizer.encode_whole("part of")[0],
    ]
    assert row.fact == [*expected, *ends][:7] + ([*expected, *ends][7:8] and ends)
    assert row.name[1:-1] in [tokenizer.encode_whole(name)[0] for name in ("lung", "lungs")]
    with raises(ConfigError, "wrong_type", "data.train"):
        pairs("key", "concept", "A report.", str, rng)
    assert len(pairs("key", "concept", "edema " * 20 + "\nlung", str, rng).fact) == 8


def model_of(tokenizer: Tokenizer, **settings: Any) -> Any:
    with seeded(0):
        return create_model(
            "kebert",
            tokenizer=tokenizer,
            projection_dim=16,
            **{"max_tokens": 24, **TINY, **settings},
        )


def batch_of(model: Any, facts: Facts, rows: int = 6) -> Batch:
    source: Any = facts
    return next(iter(open_text_loader(source, model.sequences, batch=rows, train=False)))


def test_loss_is_info_nce_with_all_facts_of_a_concept_as_positives(
    tokenizer: Tokenizer, graph: KnowledgeGraph
) -> None:
    model = model_of(tokenizer).eval()
    batch = batch_of(model, Facts(facts_of(graph, {})[:6]))
    batch.studies = ["a", "b", "a", "c", "d", "e"]
    losses = model(batch)
    fact_BE = F.normalize(
        model.text_head(model.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD), dim=1
    )
    names = model.text_encoder(batch.second_ids_BT, batch.second_mask_BT)
    logits_BB = fact_BE @ F.normalize(model.text_head(names.pooled_BD), dim=1).T / 0.07
    target_BB = torch.eye(6)
    target_BB[0, 2] = target_BB[2, 0] = 1
    target_BB = target_BB / target_BB.sum(dim=1, keepdim=True)
    expected = (F.cross_entropy(logits_BB, target_BB) + F.cross_entropy(logits_BB.T, target_BB)) / 2
    torch.testing.assert_close(losses.total, expected)
    losses.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    batch.second_ids_BT = None
    with raises(ConfigError, "wrong_type", "batch"):
        model(batch)


@pytest.mark.training
def test_names_are_found_from_facts_after_training(
    tokenizer: Tokenizer, graph: KnowledgeGraph
) -> None:
    """Without dropout, so that nothing is random."""
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model = model_of(tokenizer, text_arguments={"num_hidden_layers": 1, **dropout})
    facts = Facts(facts_of(graph, {})[:12])
    batch = batch_of(model, facts, 12)
    start = ConceptScore([batch])(model.eval())
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-4)
    fit(model, batch, optimizer, 40)
    found = ConceptScore([batch])(model.eval())
    assert found["concepts/mrr"] > start["concepts/mrr"] + 0.2


class Vectors:
    """A knowledge encoder that returns given vectors of facts and names, one pair for each
    concept.
    """

    device = "cpu"

    def __init__(self, fact_NE: torch.Tensor, name_NE: torch.Tensor) -> None:
        self.pairs = fact_NE, name_NE, torch.arange(len(fact_NE))

    def embed_pairs(self, batch: Any) -> Any:
        return self.pairs


def score_of(fact_NE: torch.Tensor, name_NE: torch.Tensor) -> tuple[float, float]:
    batch: Any = SimpleNamespace(to=lambda device: None)
    found = ConceptScore([batch])(Vectors(fact_NE, name_NE))
    return found["concepts/recall@1"], found["concepts/mrr"]


def test_names_with_equal_scores_or_none_are_not_found() -> None:
    """An encoder that collapsed or diverged scores below chance."""
    equal_NE = torch.full((50, 4), 0.5)
    assert score_of(equal_NE, equal_NE) == (0.0, pytest.approx(1 / 25.5))
    assert score_of(equal_NE * torch.nan, equal_NE) == (0.0, pytest.approx(1 / 50))
    assert score_of(torch.eye(3), torch.eye(3)) == (1.0, 1.0)
    names_NE = torch.eye(3)[[0, 1, 1]]  # the names of the last two concepts are equal
    assert score_of(names_NE, names_NE) == (pytest.approx(1 / 3), pytest.approx((1 + 2 / 1.5) / 3))
    names_NE = torch.eye(3).index_fill(0, torch.tensor(2), torch.nan)
    assert score_of(torch.eye(3), names_NE) == (
        pytest.approx(2 / 3),
        pytest.approx((1 + 1 + 1 / 3) / 3),
    )


def test_kad_starts_from_its_encoder_and_head_and_other_systems_from_the_encoder(
    tmp_path: Path,
) -> None:
    tokenizer = gloria_ranks.tiny_tokenizer()
    knowledge = model_of(tokenizer, max_tokens=64)
    save(knowledge, tmp_path)
    towers = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        "projection_dim": 16,
        "max_tokens": 64,
        **TINY,
    }
    options = {**towers, "tokenizer": tokenizer, "init_from": tmp_path, "entities": ("Edema",)}
    for name in ("kad", "medklip"):
        started = create_model(
            name, **options, **({"image_arguments": {}} if name == "medklip" else {})
        )
        for key, tensor in knowledge.text_encoder.state_dict().items():
            torch.testing.assert_close(started.text_encoder.state_dict()[key], tensor)
        if name == "kad":
            for key, tensor in knowledge.text_head.state_dict().items():
                torch.testing.assert_close(started.text_head.state_dict()[key], tensor)
