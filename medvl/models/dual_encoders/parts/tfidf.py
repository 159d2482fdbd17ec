"""TF-IDF and PCA as a table of word vectors, so that the model's checkpoint holds them."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError

_CHUNK = 256
MAX_TERMS = 8192
"""Tokens that get a vector, the most frequent ones: the matrix of their products has this side."""


@torch.no_grad()
def fit_tfidf(encoder: TextEncoder, tokenizer: Tokenizer, read_texts: Callable[[], Iterable[str]]) -> float:
    """Fit the table of a `static` encoder with mean pooling; return the share of variance that it keeps.

    The encoder's vector of a text is then the PCA of its TF-IDF: term frequency is a token's share of the text, the
    weight is ln((1 + N) / (1 + texts with the token)), which is 0 for [CLS] and [SEP], and components are centred.

    Args:
        encoder: gets as many components as its dimension.
        tokenizer: terms are its tokens.
        read_texts: returns the training texts; called twice, so that texts are never in memory together.

    Raises ConfigError for another encoder, fewer than two texts, or fewer terms than dimensions.
    """
    if encoder.name != "static" or encoder.pool != "mean":
        message = f"TF-IDF needs text_encoder 'static' with mean pooling, got {encoder.name}, {encoder.pool}"
        raise ConfigError(message, "unsupported", field="text_encoder")
    count, found_V = 0, torch.zeros(encoder.vocab_size, dtype=torch.float64)
    for texts in _chunks(read_texts()):
        found_V += (_shares(tokenizer, texts, encoder.vocab_size) > 0).sum(dim=0)
        count += len(texts)
    term_K = found_V.argsort(descending=True, stable=True)[: min(MAX_TERMS, int((found_V > 0).sum()))]
    if count < 2 or len(term_K) < encoder.token_dim:
        message = f"expected 2 texts and {encoder.token_dim} terms or more, got {count} and {len(term_K)}"
        raise ConfigError(message, "empty", field="text_arguments")
    idf_K = ((1 + count) / (1 + found_V[term_K])).log()
    product_KK, mean_K = idf_K.new_zeros(len(term_K), len(term_K)), torch.zeros_like(idf_K)
    for texts in _chunks(read_texts()):
        tfidf_BK = _shares(tokenizer, texts, encoder.vocab_size)[:, term_K] * idf_K
        product_KK += tfidf_BK.T @ tfidf_BK
        mean_K += tfidf_BK.sum(dim=0)
    mean_K /= count
    variance_K, axes_KK = torch.linalg.eigh(product_KK / count - torch.outer(mean_K, mean_K))
    axes_KD = axes_KK[:, -encoder.token_dim :].flip(1)
    table_VD = torch.zeros(encoder.vocab_size, encoder.token_dim, dtype=torch.float64)
    table_VD[term_K] = idf_K[:, None] * axes_KD
    encoder.backbone.get_parameter("weight").copy_(table_VD - mean_K @ axes_KD)
    return float(variance_K[-encoder.token_dim :].sum() / variance_K.sum())


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        yield chunk


def _shares(tokenizer: Tokenizer, texts: list[str], vocab_size: int) -> Tensor:
    """Return (B, V) float64: the share of each token in each text."""
    ids_BT, mask_BT = tokenizer(texts)
    shares_BV = torch.zeros(len(ids_BT), vocab_size, dtype=torch.float64)
    return shares_BV.scatter_add(1, ids_BT, mask_BT.double() / mask_BT.sum(dim=1, keepdim=True))
