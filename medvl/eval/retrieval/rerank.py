"""Re-ranked image-text retrieval: a fusion-encoder orders the shortlist that a dual-encoder makes
for each query.

Protocol "image_text_retrieval_reranked", version 3; queries, candidates, positives and intervals
are those of "image_text_retrieval" (`medvl.eval.retrieval.image_text`):

* The shortlist of a query are the candidates that the dual-encoder finds most similar. At equal
  similarity, positives are left out first.
* Each pair of a query and a candidate of its shortlist gets the fusion-encoder's score: the
  log-odds of a match.
* A query with a positive on its shortlist gets the rank of the best one among the shortlist's
  negatives by that score; ties count against the positive. A query without keeps the dual-encoder's
  rank, which is beyond the shortlist.

Every image and every text is encoded once, and a pair that is on the shortlists of both directions
is fused once (ALBEF, arXiv 2107.07651, section 4; M3AE's released code encodes every image again
for every text).

Shape letters: N images, M distinct texts, K candidates of a shortlist, Q pairs to fuse, B pairs of
a chunk, P tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, Model, embed_texts, input_hashes
from medvl.eval.core.results import Results, checkpoint_sha256
from medvl.eval.retrieval import image_text
from medvl.eval.retrieval.image_text import Gallery, Ranks, RetrievalResult
from medvl.eval.retrieval.similarity import Similarity, encode_images, normalized_texts, take
from medvl.models.base import evaluating
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.parts.encoder import Tokens, stack
from medvl.schema import Batch, Embeddings

PROTOCOL = "image_text_retrieval_reranked"
PROTOCOL_VERSION = 3

_TEXTS = 256  # texts encoded at a time
_PAIRS = 128  # pairs fused at a time


class ShortlistModel(NamedTuple):
    """A dual-encoder of another checkpoint, which makes the shortlists."""

    model: Model
    loader: Loader
    """The same samples in the same order as the fusion-encoder's loader, prepared for this
    model.
    """
    checkpoint: str | Path | None = None


@runtime_checkable
class ComparesTokens(Protocol):
    """A fusion-encoder that is also a dual-encoder, and makes its own shortlists from the same
    encodings.
    """

    def embed_image_tokens(self, image: Tokens) -> Embeddings:
        """Return embeddings of the first tokens of encoded images."""

    def embed_text_tokens(self, text: Tokens) -> Embeddings:
        """Return embeddings of the first tokens of encoded texts."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return similarity_NM."""


class Encoded(NamedTuple):
    """Images and texts encoded by a fusion-encoder, in host memory."""

    image: Tokens
    text: Tokens


def reranked_retrieval(
    model: FusionModel,
    loader: Loader,
    *,
    shortlist: int = 256,
    shortlist_model: ShortlistModel | None = None,
    ks: Sequence[int] = (1, 5, 10),
    resamples: int = 1000,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | None = None,
) -> RetrievalResult:
    """Evaluate a fusion-encoder on the image-text pairs of a loader; the module docstring describes
    the protocol.

    The tokens of all images are kept in host memory: 1 MB per image at 325 tokens of 768 float32
    numbers.

    Args:
        model: scores pairs.
        loader: every sample once, prepared for `model`.
        shortlist: K, 256 in ALBEF.
        shortlist_model: the dual-encoder that makes the shortlists; None if `model` is also a
            dual-encoder.
        ks, resamples, seed: as for `image_text_retrieval`.
        autocast: dtype of encoders and fusion-encoder; similarities and scores stay in float32.
        checkpoint: checkpoint of `model`; its hash goes into the results.

    Raises:
        EvaluationError: a loader does not give every sample once, the two loaders differ, there are
            fewer than two distinct texts, a score is not finite, no model makes shortlists, or
            `model` was not trained to match.
    """
    image_text.check_ks(ks)
    check_matching(model)
    if shortlist < 1:
        raise EvaluationError(
            f"expected a shortlist of 1 or more, got {shortlist}", "out_of_range", field="shortlist"
        )
    if shortlist_model is None and not isinstance(model, ComparesTokens):
        message = f"{model.name} is not a dual-encoder: give one that makes the shortlists"
        raise EvaluationError(message, "missing", field="shortlist_model")
    inputs = input_hashes(checkpoint, manifest=loader)
    other = None if shortlist_model is None else shortlist_model.checkpoint
    inputs["shortlist_checkpoint"] = None if other is None else checkpoint_sha256(other)
    gallery, before, after = _rank(model, loader, shortlist, shortlist_model, autocast)
    on_shortlist = [float((rank <= shortlist).mean()) for rank in before]
    details = {
        **gallery.counts,
        "chance": image_text.chance_recalls(gallery, ks),
        "dual_encoder_alone": {
            row.name: row.value for row in image_text.rank_rows(gallery, before, ks, 0, seed)
        },
        "positive_on_shortlist": dict(
            zip(("image_to_text", "text_to_image"), on_shortlist, strict=True)
        ),
    }
    config = {
        "ks": list(ks),
        "shortlist": shortlist,
        "own_shortlist": shortlist_model is None,
        "resamples": resamples,
    }
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=image_text.rank_rows(gallery, after, ks, resamples, seed),
        config={**config, "seed": seed, "autocast": autocast and str(autocast)},
        inputs=inputs,
        details=details,
    )
    return RetrievalResult.from_ranks(gallery, after, results, loader.source)


def _rank(
    model: FusionModel,
    loader: Loader,
    shortlist: int,
    shortlist_model: ShortlistModel | None,
    autocast: torch.dtype | None,
) -> tuple[Gallery, Ranks, Ranks]:
    """Return the gallery, the ranks of the dual-encoder alone, and the ranks after matching."""
    with evaluating(model):
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            encoded, gallery = _encode(model, loader)
            own = _own_embeddings(model, encoded) if shortlist_model is None else None
        dual_encoder, images, texts = own or _other_embeddings(shortlist_model, gallery, autocast)
        before = image_text.retrieval_ranks(dual_encoder, images, texts, gallery.text_of_N)
        similarity_NM = Similarity(dual_encoder, images, texts).matrix()

        def score(image_Q: Tensor, text_Q: Tensor) -> Tensor:
            return match_scores(model, encoded, image_Q, text_Q, autocast)

        return (
            gallery,
            before,
            reranked_ranks(similarity_NM, gallery.text_of_N, shortlist, before, score),
        )


def reranked_ranks(
    similarity_NM: Tensor,
    text_of_N: Tensor,
    shortlist: int,
    before: Ranks,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Ranks:
    """Return the ranks as the protocol defines them.

    Args:
        similarity_NM: similarity by the dual-encoder.
        text_of_N: index of each image's text; every text must have an image.
        shortlist: K.
        before: ranks of the dual-encoder alone.
        score: function from indices (image_Q, text_Q) to the scores of these pairs; called once.

    Raises EvaluationError if a score is not finite.
    """
    images, texts = similarity_NM.shape
    positive_NM = text_of_N[:, None] == torch.arange(texts)
    # allows to lower a positive below its ties and above all smaller values
    order_NM = similarity_NM.double()
    order_NM = torch.where(
        positive_NM, order_NM.nextafter(torch.tensor(-torch.inf).double()), order_NM
    )
    text_NK = order_NM.topk(min(shortlist, texts), dim=1).indices
    image_MK = order_NM.topk(min(shortlist, images), dim=0).indices.T
    pair_NK = torch.arange(images)[:, None] * texts + text_NK
    pair_MK = image_MK * texts + torch.arange(texts)[:, None]
    pair_Q = torch.cat([pair_NK.flatten(), pair_MK.flatten()]).unique()
    score_Q = score(pair_Q // texts, pair_Q % texts)
    if not score_Q.isfinite().all():
        message = "the model's match scores are not finite: check its weights, or disable autocast"
        raise EvaluationError(message, "nonfinite")
    sides = []
    for pair, rank in ((pair_NK, before[0]), (pair_MK, before[1])):
        positive = positive_NM.flatten()[pair]
        scores = score_Q[torch.searchsorted(pair_Q, pair.contiguous())]
        best = scores.masked_fill(~positive, -torch.inf).amax(dim=1, keepdim=True)
        among = 1 + ((scores >= best) & ~positive).sum(dim=1)
        sides.append(np.where(positive.any(dim=1).numpy(), among.numpy(), rank))
    return sides[0], sides[1]


def check_matching(model: FusionModel) -> None:
    """Raise EvaluationError for a model that was trained without image-text matching."""
    if not model.can_match:
        message = (
            f"this {model.name} was trained without image-text matching, so it scores no pairs"
        )
        raise EvaluationError(message, "unsupported", field="model")


def match_scores(
    model: FusionModel,
    encoded: Encoded,
    image_Q: Tensor,
    text_Q: Tensor,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Return the log-odds of a match (Q,) of each pair of indices, float32 on the CPU.

    `autocast` applies to the fusion-encoder; the head is in float32, so that close scores stay
    distinct.
    """
    scores = []
    for image_B, text_B in zip(image_Q.split(_PAIRS), text_Q.split(_PAIRS), strict=True):
        text = _rows(encoded.text, text_B, model.device)
        image = _rows(encoded.image, image_B, model.device)
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            pooled_BD = model.fuse(text, image).pooled_BD
        logits_B2 = model.itm_head(pooled_BD.float())
        scores.append((logits_B2[:, 1] - logits_B2[:, 0]).cpu())
    return torch.cat(scores)


def _rows(tokens: Tokens, index_B: Tensor, device: torch.device) -> Tokens:
    """Return rows on the device, cut to the longest of them; repeated rows are transferred once."""
    unique, inverse_B = index_B.unique(return_inverse=True)
    rows = tokens.rows(unique)
    if rows.mask_BN is not None:
        longest = int(rows.mask_BN.any(dim=0).nonzero().max()) + 1
        rows = rows.cut(longest)
    return rows.to(device).rows(inverse_B.to(device))


def _encode(model: FusionModel, loader: Loader) -> tuple[Encoded, Gallery]:
    """Return the tokens of the images with text and of the distinct texts, and the gallery."""
    batches = FullPass(loader)
    image, texts = encode_images_with_text(model, batches)
    gallery = Gallery.from_texts(batches.keys, texts, batches.unreadable, loader.source)
    return Encoded(image, encode_texts(model, gallery.texts)), gallery


def encode_images_with_text(
    model: FusionModel, batches: Iterable[Batch]
) -> tuple[Tokens, list[str]]:
    """Return the tokens of the images that have a text, in host memory, and the text of every
    image, "" for none.

    White space in texts is collapsed. Raises EvaluationError if no image has a text.
    """
    parts = []
    texts = list[str]()
    for batch in batches:
        batch_texts = normalized_texts(batch)
        texts += batch_texts
        has_text_B = torch.tensor([bool(text) for text in batch_texts])
        if has_text_B.any():
            on_device = batch.to(model.device, non_blocking=True)
            image = model.image_tokens(model.image_input_of(on_device), on_device.has_image_B)
            parts.append(
                image.rows(has_text_B.nonzero().squeeze(1).to(model.device)).to(torch.device("cpu"))
            )
    if not parts:
        raise EvaluationError("no image has a text; choose other sections", "empty", field="data")
    return stack(parts), texts


def encode_texts(model: FusionModel, texts: Sequence[str]) -> Tokens:
    """Return the tokens of texts in host memory."""
    chunks = (texts[start : start + _TEXTS] for start in range(0, len(texts), _TEXTS))
    return stack(
        [model.text_tokens(*model.tokenize(chunk)).to(torch.device("cpu")) for chunk in chunks]
    )


def _own_embeddings(
    model: FusionModel, encoded: Encoded
) -> tuple[ComparesTokens, Embeddings, Embeddings]:
    assert isinstance(model, ComparesTokens)
    image, text = (
        Tokens(tokens.states_BND[:, :1].to(model.device), None)
        for tokens in (encoded.image, encoded.text)
    )
    return model, model.embed_image_tokens(image), model.embed_text_tokens(text)


def _other_embeddings(
    shortlist_model: ShortlistModel | None, gallery: Gallery, autocast: torch.dtype | None
) -> tuple[Model, Embeddings, Embeddings]:
    assert shortlist_model is not None, "checked by reranked_retrieval"
    with evaluating(shortlist_model.model):
        images, keys, _ = encode_images(
            shortlist_model.model, FullPass(shortlist_model.loader), autocast
        )
        if (
            tuple(keys[index] for index in gallery.index_N.tolist() if index < len(keys))
            != gallery.keys
        ):
            message = (
                "the dual-encoder's loader gives other images: open both loaders on the same data"
            )
            raise EvaluationError(message, "mismatch")
        return (
            shortlist_model.model,
            take(images, gallery.index_N),
            embed_texts(shortlist_model.model, gallery.texts),
        )
