"""TransE (Bordes et al., NeurIPS 2013): vectors of entities and relations with head + relation
close to tail.

The settings are those of ARL, which trains with OpenKE: L1 distance between unit vectors, margin
loss, 25 negatives for each triple with one of its entities replaced (the head or the tail as often
as in Wang et al., AAAI 2014, "Bernoulli"), never by a known triple; plain gradient descent with a
rate of 1 and 100 batches per epoch.

Letters: N triples, M negatives of a triple, E entities, R relations, D dimension.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.files import new_path
from medvl.data.knowledge.graph import KnowledgeGraph, TransEConfig
from medvl.errors import CorpusError

EMBEDDINGS = "entity_embeddings.safetensors"
_REPEATS = 20
"""Maximum number of attempts to replace a negative that is a known triple."""
_SCORED = 1 << 26
"""Numbers in a table of distances, which limits the memory of the evaluation."""


class TransE(nn.Module):
    """Vectors of entities (E, D) and of relations (R, D)."""

    def __init__(self, entities: int, relations: int, dim: int) -> None:
        super().__init__()
        self.entities = nn.Embedding(entities, dim)
        self.relations = nn.Embedding(relations, dim)
        nn.init.xavier_uniform_(self.entities.weight)
        nn.init.xavier_uniform_(self.relations.weight)

    def distance(self, triples_x3: Tensor) -> Tensor:
        """Return the L1 distance of head + relation and tail, all of unit length, for triples of
        any shape (..., 3).
        """
        head, relation, tail = triples_x3.unbind(-1)
        unit_ED, unit_RD = self.unit()
        return (unit_ED[head] + unit_RD[relation] - unit_ED[tail]).abs().sum(dim=-1)

    def unit(self) -> tuple[Tensor, Tensor]:
        """Return the vectors at unit length."""
        return F.normalize(self.entities.weight, dim=-1), F.normalize(self.relations.weight, dim=-1)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkPrediction:
    """Ranks of the true heads and tails of held-out triples among all entities, other known
    triples left out.
    """

    triples: int
    mrr: float
    """Mean reciprocal rank."""
    hits_at_10: float
    chance_mrr: float
    """Mean reciprocal rank of a random order."""


def train_transe(
    graph: KnowledgeGraph,
    config: TransEConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    report: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[TransE, LinkPrediction | None]:
    """Train vectors on the triples of a graph.

    Args:
        graph: entities and triples.
        config: settings; those of ARL by default.
        device: where to compute; the samples are the same on every device.
        report: called after each epoch with its number, from 0, and its mean loss.

    Returns the vectors and the evaluation on the held-out triples, None without any.
    """
    config = config or TransEConfig()
    generator = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = TransE(len(graph.identifiers), len(graph.relations), config.dim).to(device)
    known = _Known(graph.triples_N3, len(graph.identifiers), len(graph.relations))
    held_N = held_out(graph.triples_N3, config.validate_share, config.seed)
    train_N3 = torch.from_numpy(graph.triples_N3[~held_N])
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    size = -(-len(train_N3) // min(config.batches, len(train_N3)))
    for epoch in range(config.epochs):
        total = torch.zeros((), device=device)
        for index_B in torch.randperm(len(train_N3), generator=generator).split(size):
            true_B3 = train_N3[index_B]
            false_BM3 = known.corrupt(true_B3, config.negatives, generator)
            distance_B1 = model.distance(true_B3.to(device))[:, None]
            loss = F.relu(config.margin + distance_B1 - model.distance(false_BM3.to(device))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(index_B)
        report(epoch, float(total) / len(train_N3))
    held_N3 = torch.from_numpy(graph.triples_N3[held_N])
    return model, link_prediction(model, held_N3, graph.triples_N3) if len(held_N3) else None


def held_out(triples_N3: np.ndarray, share: float, seed: int) -> np.ndarray:
    """(N,) bool: a share of the pairs of related entities, with all relations of a pair.

    A relation and its inverse are between the same pair, so neither gives the other away. A pair
    stays in training if one of its entities or relations would otherwise not be trained.
    """
    pair_N2 = np.sort(triples_N3[:, [0, 2]], axis=1)
    _, pair_N = np.unique(pair_N2, axis=0, return_inverse=True)
    pair_N = pair_N.reshape(-1)
    order = np.random.default_rng(seed).permutation(pair_N.max(initial=-1) + 1)
    target = round(share * len(order))
    uses = [np.bincount(column, minlength=column.max(initial=0) + 1) for column in triples_N3.T]
    entity_uses = np.bincount(pair_N2.reshape(-1), minlength=1)
    held = np.zeros(len(order), bool)
    of_pair = np.split(
        np.argsort(pair_N, kind="stable"), np.cumsum(np.bincount(pair_N, minlength=len(order)))[:-1]
    )
    for pair in order.tolist():
        if held.sum() >= target:
            break
        rows = triples_N3[of_pair[pair]]
        relations, counts = np.unique(rows[:, 1], return_counts=True)
        if (entity_uses[rows[0, [0, 2]]] > len(rows)).all() and (uses[1][relations] > counts).all():
            held[pair] = True
            entity_uses[rows[0, [0, 2]]] -= len(rows)
            uses[1][relations] -= counts
    return held[pair_N]


@torch.no_grad()
def link_prediction(model: TransE, test_N3: Tensor, known_K3: np.ndarray) -> LinkPrediction:
    """Rank the head and the tail of each triple among all entities; those of other known triples
    are left out.

    Of equal distances half count as smaller.
    """
    unit_ED, unit_RD = model.unit()
    entities = len(unit_ED)
    known = _Known(known_K3, entities, len(unit_RD))
    ranks = []
    for rows_B3 in test_N3.split(max(1, _SCORED // (entities * unit_ED.shape[1]))):
        head_B, relation_B, tail_B = rows_B3.to(unit_ED.device).unbind(-1)
        for side, query_BD, true_B in (
            (2, unit_ED[head_B] + unit_RD[relation_B], tail_B),
            (0, unit_ED[tail_B] - unit_RD[relation_B], head_B),
        ):
            distance_BE = torch.cdist(query_BD, unit_ED, p=1)
            all_BE3 = rows_B3[:, None].repeat(1, entities, 1)
            all_BE3[:, :, side] = torch.arange(entities)
            other_BE = (
                known.contains(all_BE3).to(distance_BE.device).scatter(1, true_B[:, None], False)
            )
            true_B1 = distance_BE.gather(1, true_B[:, None])
            distance_BE = distance_BE.masked_fill(other_BE, torch.inf)
            equal_B = (distance_BE == true_B1).sum(dim=1) - 1
            ranks.append(1 + (distance_BE < true_B1).sum(dim=1) + equal_B / 2)
    rank_Q = torch.cat(ranks).double().cpu()
    return LinkPrediction(
        triples=len(test_N3),
        mrr=float((1 / rank_Q).mean()),
        hits_at_10=float((rank_Q <= 10).double().mean()),
        chance_mrr=float((1 / torch.arange(1, entities + 1).double()).mean()),
    )


class _Known:
    """Set of the known triples, and the sampling of negatives that are not among them."""

    def __init__(self, triples_N3: np.ndarray, entities: int, relations: int) -> None:
        self._entities = entities
        self._relations = relations
        triples = torch.from_numpy(triples_N3)
        self._keys = self._key(triples).sort().values
        tails_of_head, heads_of_tail = (self._mean_count(triples[:, [side, 1]]) for side in (0, 2))
        self._head_share_R = tails_of_head / (tails_of_head + heads_of_tail)

    def contains(self, triples_x3: Tensor) -> Tensor:
        """Return whether triples (..., 3) are known, of the shape without the last dimension."""
        key = self._key(triples_x3)
        place = torch.searchsorted(self._keys, key.contiguous()).clamp(max=len(self._keys) - 1)
        return self._keys[place] == key

    def corrupt(self, true_B3: Tensor, negatives: int, generator: torch.Generator) -> Tensor:
        """(B, M, 3): each triple with its head or its tail replaced."""
        false_BM3 = true_B3[:, None].repeat(1, negatives, 1)
        shape = false_BM3.shape[:2]
        head_BM = (
            torch.rand(shape, generator=generator) < self._head_share_R[true_B3[:, 1]][:, None]
        )
        side_BM1 = torch.where(head_BM, 0, 2)[..., None]
        redo_BM = torch.ones(shape, dtype=torch.bool)
        for _ in range(_REPEATS):
            entity_BM1 = torch.randint(self._entities, (*shape, 1), generator=generator)
            false_BM3 = torch.where(
                redo_BM[..., None], false_BM3.scatter(2, side_BM1, entity_BM1), false_BM3
            )
            redo_BM = self.contains(false_BM3)
            if not redo_BM.any():
                break
        return false_BM3

    def _key(self, triples_x3: Tensor) -> Tensor:
        head, relation, tail = triples_x3.unbind(-1)
        return (head * self._relations + relation) * self._entities + tail

    def _mean_count(self, pairs_N2: Tensor) -> Tensor:
        """(R,): mean number of triples of an (entity, relation) that occurs."""
        unique_U2, count_U = pairs_N2.unique(dim=0, return_counts=True)
        total_R = torch.zeros(self._relations).index_add(0, unique_U2[:, 1], count_U.float())
        return total_R / torch.bincount(unique_U2[:, 1], minlength=self._relations).clamp(min=1)


def save_embeddings(
    model: TransE, graph: KnowledgeGraph, config: TransEConfig, folder: Path
) -> Path:
    """Write the vectors beside the graph, with its hash, and return the file."""
    path = folder / EMBEDDINGS
    tensors = {"entities": model.entities.weight, "relations": model.relations.weight}
    metadata = {
        "knowledge_sha256": graph.sha256,
        "transe": json.dumps(dataclasses.asdict(config), sort_keys=True),
    }
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with new_path(path) as temporary:
        safetensors.torch.save_file(contiguous, temporary, metadata)
    return path


def load_embeddings(graph: KnowledgeGraph, folder: Path | str) -> Tensor:
    """(E, D) float32: the vectors of a graph's entities.

    Raises CorpusError when there are none, or they belong to another graph.
    """
    path = Path(folder) / EMBEDDINGS
    if not path.is_file():
        raise CorpusError(
            f"{path} is missing: train them with `medvl knowledge train --knowledge {folder}`",
            "not_found",
        )
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            entities_ED: Tensor = file.get_tensor("entities").float()
    except (safetensors.SafetensorError, OSError) as error:
        raise CorpusError(f"{path} cannot be read ({error}): it is damaged", "malformed") from error
    if metadata.get("knowledge_sha256") != graph.sha256 or len(entities_ED) != len(
        graph.identifiers
    ):
        message = (
            f"{path} belongs to another graph: train again with `medvl knowledge train "
            f"--knowledge {folder}`"
        )
        raise CorpusError(message, "mismatch")
    if not entities_ED.isfinite().all():
        raise CorpusError(f"{path} has NaN or infinite vectors: train them again", "nonfinite")
    return entities_ED
