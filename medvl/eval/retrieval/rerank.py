"""Image-text retrieval by a fusion-encoder: a dual-encoder's shortlist of each query, put in order by matching.

Protocol "image_text_retrieval_reranked", version 1; queries, candidates, positives and intervals are those of
"image_text_retrieval" (`medvl.eval.retrieval.image_text`):

* The shortlist of a query are the candidates that the dual-encoder finds most similar, as many as asked for; at equal
  similarity a positive is left out first.
* Each pair of a query and a candidate of its shortlist gets the fusion-encoder's score: the log-odds of a match.
* A query with a positive on its shortlist has the rank of the best one among the shortlist's other candidates by that
  score, equal scores counting against it. A query without keeps the dual-encoder's rank, which is beyond the list.

Every image and every text is encoded once, and a pair that is on the lists of both directions is fused once (ALBEF,
arXiv 2107.07651, section 4; M3AE's released code encodes every image again for every text).

Shape letters: N images, M distinct texts, K candidates of a shortlist, Q pairs to fuse, B pairs of a chunk, P tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, input_hashes
from medvl.eval.core.interfaces import Loader, Model
from medvl.eval.core.results import Results, checkpoint_sha256
from medvl.eval.retrieval.image_text import (
    Gallery,
    RetrievalResult,
    Similarity,
    chance_recalls,
    check_ks,
    encode_images,
    plain_texts,
    rank_rows,
    retrieval_ranks,
    take,
)
from medvl.eval.zero_shot_classification.scores import embed_texts
from medvl.models.eval_mode import evaluating
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.schema import Embeddings

PROTOCOL, PROTOCOL_VERSION = "image_text_retrieval_reranked", 1

Ranks = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(image_rank_N, text_rank_M), from 1."""
_TEXTS = 256
"""That are encoded at a time."""
_PAIRS = 128
"""That are fused at a time."""


class Shortlister(NamedTuple):
    """A dual-encoder of another checkpoint."""

    model: Model
    loader: Loader
    """The same samples in the same order as the fusion-encoder's, prepared for this model."""
    checkpoint: str | Path | None = None


@runtime_checkable
class ComparesTokens(Protocol):
    """A fusion-encoder that is a dual-encoder too: it makes its own shortlists, from the same encodings."""

    def embed_image_tokens(self, image: Tokens) -> Embeddings:
        """Of the first tokens of encoded images."""

    def embed_text_tokens(self, text: Tokens) -> Embeddings:
        """Of the first tokens of encoded texts."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """similarity_NM."""


class Encoded(NamedTuple):
    """Images and texts of a fusion-encoder, each encoded once, in host memory."""

    image: Tokens
    text: Tokens


def reranked_retrieval(
    model: FusionModel,
    loader: Loader,
    *,
    shortlist: int = 256,
    by: Shortlister | None = None,
    ks: Sequence[int] = (1, 5, 10),
    resamples: int = 1000,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | None = None,
) -> RetrievalResult:
    """Judge a fusion-encoder on the pairs of a loader; the protocol is at the top of this module.

    Args:
        model: scores pairs.
        loader: every sample once, prepared for `model`.
        shortlist: K, 256 in ALBEF.
        by: who makes the shortlists; None is the model itself, where it is a dual-encoder too.
        ks, resamples, seed: as for `image_text_retrieval`.
        autocast: of encoders and fusion-encoder; similarities and scores stay in float32.
        checkpoint: of `model`, for its hash in the results.

    The tokens of all images are kept in host memory: 1 MB an image at 325 tokens of 768 float32 numbers.

    Raises EvaluationError when a loader does not give every sample once, both do not give the same ones, there are
    fewer than two distinct texts, a score is not finite, or nobody makes shortlists.
    """
    check_ks(ks)
    if shortlist < 1:
        raise EvaluationError(f"shortlist is {shortlist}: it must hold a candidate")
    if by is None and not isinstance(model, ComparesTokens):
        raise EvaluationError(f"{model.name} is no dual-encoder: give one that makes the shortlists")
    inputs = input_hashes(checkpoint, manifest=loader)
    inputs["shortlist_checkpoint"] = None if by is None or by.checkpoint is None else checkpoint_sha256(by.checkpoint)
    gallery, before, after = _rank(model, loader, shortlist, by, autocast)
    listed = [float((rank <= shortlist).mean()) for rank in before]
    details = {
        **gallery.counts,
        "chance": chance_recalls(gallery, ks),
        "dual_encoder_alone": {row.name: row.value for row in rank_rows(gallery, *before, ks, 0, seed)},
        "positive_on_shortlist": dict(zip(("image_to_text", "text_to_image"), listed, strict=True)),
    }
    config = {"ks": list(ks), "shortlist": shortlist, "own_shortlist": by is None, "resamples": resamples}
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rank_rows(gallery, *after, ks, resamples, seed),
        config={**config, "seed": seed, "autocast": autocast and str(autocast)},
        inputs=inputs,
        details=details,
    )
    return RetrievalResult.of(gallery, after, results)


def _rank(
    model: FusionModel, loader: Loader, shortlist: int, by: Shortlister | None, autocast: torch.dtype | None
) -> tuple[Gallery, Ranks, Ranks]:
    """What was searched, the ranks that the dual-encoder alone gives, and those after matching."""
    with evaluating(model):
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            encoded, gallery = _encode(model, loader)
            own = _own(model, encoded) if by is None else None
        compares, images, texts = own or _others(by, gallery, autocast)
        before = retrieval_ranks(compares, images, texts, gallery.text_of_N)
        similarity_NM = torch.cat([block for _, block in Similarity(compares, images, texts)])

        def score(image_Q: Tensor, text_Q: Tensor) -> Tensor:
            return match_scores(model, encoded, image_Q, text_Q, autocast)

        return gallery, before, reranked_ranks(similarity_NM, gallery.text_of_N, shortlist, before, score)


def reranked_ranks(
    similarity_NM: Tensor,
    text_of_N: Tensor,
    shortlist: int,
    before: Ranks,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Ranks:
    """(image_rank_N, text_rank_M), from 1, as the protocol defines them.

    Args:
        similarity_NM: the dual-encoder's.
        text_of_N: the text of each image; every text must have one.
        shortlist: K.
        before: the ranks that the dual-encoder alone gives.
        score: (image_Q, text_Q), positions, to the scores of those pairs. Called once.

    Raises EvaluationError when a score is not finite.
    """
    images, texts = similarity_NM.shape
    positive_NM = text_of_N[:, None] == torch.arange(texts)
    order_NM = similarity_NM.double()  # there a positive can lose a tie without falling behind anything else
    order_NM = torch.where(positive_NM, order_NM.nextafter(torch.tensor(-torch.inf).double()), order_NM)
    text_NK = order_NM.topk(min(shortlist, texts), dim=1).indices
    image_MK = order_NM.topk(min(shortlist, images), dim=0).indices.T
    pair_NK = torch.arange(images)[:, None] * texts + text_NK
    pair_MK = image_MK * texts + torch.arange(texts)[:, None]
    pair_Q = torch.cat([pair_NK.flatten(), pair_MK.flatten()]).unique()
    score_Q = score(pair_Q // texts, pair_Q % texts)
    if not score_Q.isfinite().all():
        raise EvaluationError("the model's match scores are not finite: look at its weights, or leave autocast out")
    sides = []
    for pair, rank in ((pair_NK, before[0]), (pair_MK, before[1])):
        positive = positive_NM.flatten()[pair]
        scores = score_Q[torch.searchsorted(pair_Q, pair.contiguous())]
        best = scores.masked_fill(~positive, -torch.inf).amax(dim=1, keepdim=True)
        among = 1 + ((scores >= best) & ~positive).sum(dim=1)
        sides.append(np.where(positive.any(dim=1).numpy(), among.numpy(), rank))
    return sides[0], sides[1]


def match_scores(
    model: FusionModel, encoded: Encoded, image_Q: Tensor, text_Q: Tensor, autocast: torch.dtype | None = None
) -> Tensor:
    """(Q,) float32 on the CPU: log-odds of a match of each pair of positions.

    `autocast` is for the fusion-encoder; the head is in float32, so that near scores are not made equal.
    """
    scores = []
    for image_B, text_B in zip(image_Q.split(_PAIRS), text_Q.split(_PAIRS), strict=True):
        text, image = _rows(encoded.text, text_B, model.device), _rows(encoded.image, image_B, model.device)
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            pooled_BD = model.fuse(text, image).pooled_BD
        logits_B2 = model.itm_head(pooled_BD.float())
        scores.append((logits_B2[:, 1] - logits_B2[:, 0]).cpu())
    return torch.cat(scores)


def _rows(tokens: Tokens, index_B: Tensor, device: torch.device) -> Tokens:
    """On the device, cut to the longest of them. What is asked for more than once travels once."""
    once, place_B = index_B.unique(return_inverse=True)
    rows = tokens.rows(once)
    if rows.mask_BN is not None:
        longest = int(rows.mask_BN.any(dim=0).nonzero().max()) + 1
        rows = Tokens(rows.states_BND[:, :longest], rows.mask_BN[:, :longest])
    return _to(rows, device).rows(place_B.to(device))


def _encode(model: FusionModel, loader: Loader) -> tuple[Encoded, Gallery]:
    """Tokens of the images with text and of the distinct texts."""
    given = FullPass(loader)
    parts, texts = [], list[str]()
    for batch in given:
        plain = plain_texts(batch)
        texts += plain
        kept_B = torch.tensor([bool(text) for text in plain])
        if kept_B.any():
            on_device = batch.to(model.device, non_blocking=True)
            image = model.image_tokens(model.image_input_of(on_device), on_device.has_image_B)
            parts.append(_to(image.rows(kept_B.nonzero().squeeze(1).to(model.device)), torch.device("cpu")))
    gallery = Gallery.of(given.keys, texts, given.unreadable)
    text_parts = [
        _to(model.text_tokens(*model.tokenize(gallery.texts[start : start + _TEXTS])), torch.device("cpu"))
        for start in range(0, len(gallery.texts), _TEXTS)
    ]
    return Encoded(_joined(parts), _joined(text_parts)), gallery


def _own(model: FusionModel, encoded: Encoded) -> tuple[ComparesTokens, Embeddings, Embeddings]:
    """The model's own embeddings, from the tokens that it has encoded."""
    assert isinstance(model, ComparesTokens)
    image, text = (Tokens(tokens.states_BND[:, :1].to(model.device), None) for tokens in (encoded.image, encoded.text))
    return model, model.embed_image_tokens(image), model.embed_text_tokens(text)


def _others(
    by: Shortlister | None, gallery: Gallery, autocast: torch.dtype | None
) -> tuple[Model, Embeddings, Embeddings]:
    """The other dual-encoder's embeddings of the same images and texts."""
    assert by is not None, "a model without one has its own"
    with evaluating(by.model):
        images, keys, _ = encode_images(by.model, by.loader, autocast)
        if tuple(keys[place] for place in gallery.place_N.tolist() if place < len(keys)) != gallery.keys:
            raise EvaluationError("the dual-encoder's loader gives other images: open both on the same data")
        return by.model, take(images, gallery.place_N), embed_texts(by.model, gallery.texts)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    """One after another, padded to the longest."""
    longest = max(part.states_BND.shape[1] for part in parts)
    if all(part.mask_BN is None and part.states_BND.shape[1] == longest for part in parts):
        return Tokens(torch.cat([part.states_BND for part in parts]), None)
    short = [longest - part.states_BND.shape[1] for part in parts]
    states = [F.pad(part.states_BND, (0, 0, 0, missing)) for part, missing in zip(parts, short, strict=True)]
    masks = [F.pad(part.real_BN(), (0, missing)) for part, missing in zip(parts, short, strict=True)]
    return Tokens(torch.cat(states), torch.cat(masks))


def _to(tokens: Tokens, device: torch.device) -> Tokens:
    mask_BN = None if tokens.mask_BN is None else tokens.mask_BN.to(device)
    return Tokens(tokens.states_BND.to(device), mask_BN)
