"""Knowledge graphs from files of UMLS, their folders, and TransE."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.learning import share_of

from medvl.cli.main import main
from medvl.data import (
    KnowledgeGraph,
    TransEConfig,
    UMLSOptions,
    load_embeddings,
    read_knowledge,
    read_umls,
    save_embeddings,
    train_transe,
    write_knowledge,
)
from medvl.data.knowledge.transe import TransE, _Known, held_out, link_prediction
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import write_umls
from medvl.phantom.layouts.umls import concepts

LUNG, EFFUSION, PLEURA, LONER, OLD = "C0000001", "C0000002", "C0000003", "C0000004", "C0000005"


def conso(
    cui: str,
    name: str,
    *,
    preferred: bool = True,
    lat: str = "ENG",
    sab: str = "A",
    suppress: str = "N",
) -> str:
    status, form = ("P", "PF") if preferred else ("S", "VO")
    return f"{cui}|{lat}|{status}|L1|{form}|S1|Y|A1||||{sab}|PT|c|{name}|0|{suppress}||\n"


def rel(
    tail: str, rela: str, head: str, *, code: str = "RO", sab: str = "A", suppress: str = "N"
) -> str:
    return f"{tail}|A1|AUI|{code}|{head}|A2|AUI|{rela}|R1||{sab}|{sab}||Y|{suppress}||\n"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    meta = tmp_path / "META"
    meta.mkdir()
    names = [
        conso(LUNG, "Lung"), conso(LUNG, "Pulmo", preferred=False, lat="LAT"), conso(LUNG, "lung",
        preferred=False), conso(EFFUSION, "effusion", preferred=False, sab="B"), conso(EFFUSION,
        "Pleural  effusion"), conso(PLEURA, "Pleura"), conso(LONER, "Loner"), conso(OLD, "Old name",
        suppress="O"),
    ]  # fmt: skip
    rows = [
        rel(PLEURA, "has_finding_site", EFFUSION), rel(EFFUSION, "finding_site_of", PLEURA),
        rel(EFFUSION, "finding_site_of", PLEURA), rel(LUNG, "", PLEURA, code="RB"), rel(LUNG,
        "near", LUNG), rel(LUNG, "adjacent_to", PLEURA, sab="B"), rel(OLD, "isa", LUNG), rel(LUNG,
        "isa", PLEURA, suppress="Y"),
    ]  # fmt: skip
    (meta / "MRCONSO.RRF").write_text("".join(names))
    (meta / "MRREL.RRF").write_text("".join(rows))
    (meta / "MRSTY.RRF").write_text(
        "".join(f"{cui}|{tui}|A|x|AT1||\n" for cui, tui in ((EFFUSION, "T047"), (PLEURA, "T023")))
    )
    return tmp_path


def triples(graph: KnowledgeGraph) -> set[tuple[str, str, str]]:
    return {
        (graph.identifiers[head], graph.relations[relation], graph.identifiers[tail])
        for head, relation, tail in graph.triples_N3.tolist()
    }


def test_umls_rows_become_entities_and_triples(release: Path) -> None:
    graph = read_umls(release)
    assert dict(zip(graph.identifiers, graph.names, strict=True)) == {
        LUNG: ["Lung"], EFFUSION: ["Pleural effusion", "effusion"], PLEURA: ["Pleura"],
    }  # fmt: skip
    both = {(EFFUSION, "has_finding_site", PLEURA), (PLEURA, "finding_site_of", EFFUSION)}
    assert triples(graph) == {*both, (PLEURA, "adjacent_to", LUNG)}
    assert len(graph.triples_N3) == 3  # the repeated row counts once


@pytest.mark.parametrize(
    ("options", "entities", "relations"),
    [
        ({"sources": ("A",)}, [EFFUSION, PLEURA], ["finding_site_of", "has_finding_site"]),
        (
            {"relations": ("RB", "finding_site_of")},
            [LUNG, EFFUSION, PLEURA],
            ["RB", "finding_site_of"],
        ),
        (
            {"semantic_types": ("T047", "T023")},
            [EFFUSION, PLEURA],
            ["finding_site_of", "has_finding_site"],
        ),
        (
            {"keep_isolated": True, "sources": ("A",)},
            [LUNG, EFFUSION, PLEURA, LONER],
            ["finding_site_of", "has_finding_site"],
        ),
        ({"suppressible": True, "relations": ("isa",)}, [LUNG, PLEURA, OLD], ["isa"]),
    ],
)
def test_selections(
    release: Path, options: dict[str, object], entities: list[str], relations: list[str]
) -> None:
    graph = read_umls(release, UMLSOptions(**options))
    assert (sorted(graph.identifiers), sorted(graph.relations)) == (entities, sorted(relations))


def test_concepts_that_texts_mention_are_kept(release: Path) -> None:
    texts = ["Pleural effusion. Pleura.", "No effusion of the pleura, lung clear."]
    graph = read_umls(release, UMLSOptions(min_mentions=1), texts)
    assert graph.identifiers == [EFFUSION, PLEURA]
    with raises(CorpusError, "empty"):
        read_umls(release, UMLSOptions(min_mentions=2), texts)


def _drop_column(path: Path) -> None:
    path.write_text(path.read_text().replace("|0|N||", "|N||"))


@pytest.mark.parametrize(
    ("damage", "code", "field"),
    [
        (lambda meta: _drop_column(meta / "MRCONSO.RRF"), "malformed", "columns"),
        (lambda meta: (meta / "MRREL.RRF").write_text((meta / "MRSTY.RRF").read_text()), "malformed", "columns"),
        (lambda meta: (meta / "MRREL.RRF").write_text(rel(LUNG, "isa", "12345")), "malformed", "CUI2"),
        (lambda meta: (meta / "MRCONSO.RRF").write_text("subject_id,name\n"), "malformed", "columns"),
        (lambda meta: (meta / "MRCONSO.RRF").write_text(conso(LUNG, "Lung").rstrip()), "malformed", "columns"),
        (lambda meta: (meta / "MRCONSO.RRF").write_bytes(conso(LUNG, "Pouls "
                                                                     "é").encode("latin-1")), "undecodable", None),
        (lambda meta: (meta / "MRREL.RRF").unlink(), "not_found", None),
        (lambda meta: (meta / "MRREL.RRF").write_text(""), "empty", None),
        (lambda meta: (meta / "MRCONSO.RRF").write_text(""), "empty", None),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(
    release: Path, damage: Callable[[Path], None], code: str, field: str | None
) -> None:
    damage(release / "META")
    with raises(CorpusError, code, field):
        read_umls(release)


def test_folders_keep_the_graph_and_notice_changes(release: Path, tmp_path: Path) -> None:
    graph = write_knowledge(read_umls(release), tmp_path / "graph")
    again = read_knowledge(tmp_path / "graph")
    assert (again.sha256, again.identifiers, again.names) == (
        graph.sha256,
        graph.identifiers,
        graph.names,
    )
    assert triples(again) == triples(graph)
    write_knowledge(graph, tmp_path / "graph")
    with raises(CorpusError, "exists", "out"):
        write_knowledge(read_umls(release, UMLSOptions(sources=("A",))), tmp_path / "graph")
    with raises(CorpusError, "not_found"):
        read_knowledge(release)
    (tmp_path / "graph" / "triples.tsv").write_text("")
    with raises(CorpusError, "mismatch"):
        read_knowledge(tmp_path / "graph")


def test_names_of_several_entities_belong_to_the_one_that_prefers_them() -> None:
    graph = KnowledgeGraph(
        identifiers=["C1", "C2", "C3"], names=[["alpha", "beta"], ["beta"], ["gamma", "alpha"]],
        relations=["r"], triples_N3=np.zeros((0, 3), np.int64),
    )  # fmt: skip
    assert [entity for _, _, entity in graph.finder().find("alpha beta gamma")] == [0, 1, 2]


def ring(entities: int = 40) -> KnowledgeGraph:
    """Entities on a ring; each relation is a number of steps."""
    rows = [
        (head, r, (head + steps) % entities)
        for r, steps in enumerate((1, 7, 11))
        for head in range(entities)
    ]
    return KnowledgeGraph(
        identifiers=[f"C{n:07d}" for n in range(entities)],
        names=[[f"name {n}"] for n in range(entities)], relations=["one", "seven", "eleven"],
        triples_N3=np.array(rows),
    )  # fmt: skip


@pytest.mark.training
def test_transe_predicts_held_out_links_and_the_seed_determines_it() -> None:
    config = TransEConfig(dim=48, epochs=share_of(60), batches=4, validate_share=0.1)
    losses: list[float] = []
    _, links = train_transe(ring(), config, report=lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2
    assert links is not None
    assert links.triples == 12
    assert links.mrr > 2 * links.chance_mrr
    again, other = (
        train_transe(ring(), dataclasses.replace(config, epochs=2, seed=seed))[0] for seed in (0, 1)
    )
    assert torch.equal(
        train_transe(ring(), dataclasses.replace(config, epochs=2))[0].entities.weight,
        again.entities.weight,
    )
    assert not torch.equal(other.entities.weight, again.entities.weight)
    assert train_transe(ring(), TransEConfig(dim=4, epochs=1))[1] is None


def test_distances_and_ranks_equal_their_definitions() -> None:
    torch.manual_seed(0)
    graph, model = ring(12), TransE(12, 3, 8)
    test_N3 = torch.from_numpy(graph.triples_N3[::5])
    unit_ED, unit_RD = (
        F.normalize(model.entities.weight, dim=1),
        F.normalize(model.relations.weight, dim=1),
    )

    def distance(head: int, relation: int, tail: int) -> float:
        return (unit_ED[head] + unit_RD[relation] - unit_ED[tail]).abs().sum().item()

    expected = torch.tensor([distance(*row) for row in test_N3.tolist()])
    torch.testing.assert_close(model.distance(test_N3), expected)
    known = {tuple(row) for row in graph.triples_N3.tolist()}
    ranks = []
    for head, relation, tail in test_N3.tolist():
        for others in (
            [(head, relation, e) for e in range(12)],
            [(e, relation, tail) for e in range(12)],
        ):
            closer = [
                t
                for t in others
                if t not in known and distance(*t) < distance(head, relation, tail)
            ]
            ranks.append(1 + len(closer))
    links = link_prediction(model, test_N3, graph.triples_N3)
    assert links.mrr == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert links.hits_at_10 == pytest.approx(np.mean([rank <= 10 for rank in ranks]))


def test_negatives_differ_in_one_entity_and_are_never_known() -> None:
    graph = ring(12)
    known = _Known(graph.triples_N3, 12, 3)
    true_B3 = torch.from_numpy(graph.triples_N3)
    false_BM3 = known.corrupt(true_B3, 25, torch.Generator().manual_seed(0))
    changed_BM3 = false_BM3 != true_B3[:, None]
    assert (changed_BM3.sum(dim=2) == 1).all()
    assert not changed_BM3[..., 1].any()
    assert not known.contains(false_BM3).any()
    assert known.contains(true_B3).all()
    # one head with nine tails: its head is replaced nine times in ten
    star = np.array([(0, 0, tail) for tail in range(1, 10)])
    false_BM3 = _Known(star, 10, 1).corrupt(
        torch.from_numpy(star), 200, torch.Generator().manual_seed(0)
    )
    assert (false_BM3[..., 0] != 0).float().mean() == pytest.approx(0.9, abs=0.03)


def test_pairs_are_held_out_with_all_their_relations() -> None:
    rows = np.array([(a, r, b) for a in range(8) for b in range(8) if a != b for r in (0, 1)])
    held_N = held_out(rows, 0.25, 0)
    assert held_N.sum() == 28  # 7 of 28 pairs, two directions, two relations
    pairs = {
        held: {frozenset(row) for row in rows[held_N == held][:, [0, 2]].tolist()}
        for held in (True, False)
    }
    assert not pairs[True] & pairs[False]
    chain = np.array([(0, 0, 1), (1, 0, 2)])
    assert not held_out(chain, 0.5, 0).any()  # an entity would not be trained


def test_embeddings_belong_to_their_graph(tmp_path: Path) -> None:
    graph = write_knowledge(ring(), tmp_path)
    with raises(CorpusError, "not_found"):
        load_embeddings(graph, tmp_path)
    config = TransEConfig(dim=4, epochs=1)
    model, _ = train_transe(graph, config)
    save_embeddings(model, graph, config, tmp_path)
    assert torch.equal(load_embeddings(graph, tmp_path), model.entities.weight)
    with raises(CorpusError, "mismatch"):
        load_embeddings(dataclasses.replace(graph, sha256="other"), tmp_path)
    with raises(ConfigError, "out_of_range", "margin"):
        TransEConfig(margin=0)


def test_phantom_ontology_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_umls(tmp_path / "umls")
    graph = str(tmp_path / "graph")
    main(["knowledge", "build", "--umls", str(tmp_path / "umls"), "--out", graph])
    main(
        [
            "knowledge",
            "train",
            "--knowledge",
            graph,
            "--dim",
            "16",
            "--epochs",
            "3",
            "--batches",
            "2",
            "--validate-share",
            "0.1",
        ]
    )
    main(
        [
            "knowledge",
            "find",
            "--knowledge",
            graph,
            "--text",
            "ET tube above the carina, no pneumothorax.",
        ]
    )
    output = capsys.readouterr().out
    assert "held-out triples: MRR" in output
    found = [line.split("\t")[2:] for line in output.splitlines()[-3:]]
    assert found == [
        ["endotracheal tube", "positive"],
        ["carina", "positive"],
        ["pneumothorax", "negative"],
    ]
    for conventions, value in (("chexpert", "uncertain"), ("indexed", "positive")):
        options = ["--text", "Probable pneumothorax.", "--conventions", conventions]
        main(["knowledge", "find", "--knowledge", graph, *options])
        assert capsys.readouterr().out.split()[-1] == value
    names = [name for concept in concepts() for name in concept.names]
    assert len(names) == len(set(names))
    assert len(read_knowledge(graph).identifiers) == len(concepts())  # none is isolated
