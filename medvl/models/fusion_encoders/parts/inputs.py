"""Input tokens of a fusion-encoder, also for samples without an image or a text.

The grid of a CNN, the tokens of a vision Transformer and the regions of a detector all come as
`ImageFeatures`. The pooled vector (a Transformer's class token) becomes the first token; the
regions follow.

Letters: B batch, K samples that have the modality, N tokens, P regions, T text tokens, D width.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.losses.common import full_precision
from medvl.losses.masked import blank
from medvl.losses.pairs.blockwise import name_ids, same_pairs, text_ids
from medvl.losses.pairs.image_text import MatchingPairs, random_pairs
from medvl.models.base import INIT_STD, complete_rows, init_weights
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import Batch, ImageFeatures

FirstToken = Literal["pooled", "learned", "none"]


ImageSource = ImageEncoder | RegionEncoder


def encode_visible(encoder: ImageEncoder, image_BCHW: Tensor, keep_BK: Tensor) -> ImageFeatures:
    """Encode some patches of each image without information about the others.

    A vision Transformer encodes the kept patches only. A CNN has no tokens to remove: the pixels of
    the others (a patch is a cell of its last grid) are replaced by the mean, and their features are
    dropped.
    """
    if encoder.can_drop_patches:
        return encoder(image_BCHW, keep_BK)
    height, width = image_BCHW.shape[2:]
    grid = encoder.grid(height, width)
    masked_BP = torch.ones(len(keep_BK), grid[0] * grid[1], dtype=torch.bool, device=keep_BK.device)
    blanked = blank(
        encoder.normalize(image_BCHW), masked_BP.scatter(1, keep_BK, False), height // grid[0]
    )
    features = encoder(blanked)
    patches_BPD = features.patches_BPD
    visible_BKD = patches_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, patches_BPD.shape[2]))
    return ImageFeatures(features.pooled_BD, visible_BKD, None)


class ImageInput(nn.Module):
    """Projection of image features to tokens of the fusion-encoder's width.

    Args:
        source: the encoder of the features.
        width: D of the tokens.
        positions: learn one for every region of the source's grid.
        sampled: number of grid cells that are sampled for each image in training; None, or a grid
            with no more: all.
        first: token before the regions: the pooled vector, a learned one (a class token with its
            position), or none.

    Raises ConfigError for positions or samples of a source without a grid.
    """

    def __init__(
        self,
        source: ImageSource,
        width: int,
        *,
        positions: bool,
        sampled: int | None = None,
        first: FirstToken = "pooled",
    ) -> None:
        super().__init__()
        self.sampled = sampled
        self.first = first
        self.project = nn.Linear(source.patch_dim, width)
        same = first != "pooled" or source.feature_dim == source.patch_dim
        self.project_pooled = None if same else nn.Linear(source.feature_dim, width)
        init_weights(self)
        for field, value in (("image_positions", positions), ("image_tokens", sampled)):
            if value and isinstance(source, RegionEncoder):
                message = f"precomputed regions have no grid: leave {field} out"
                raise ConfigError(message, "conflict", field=field)
        self.positions: nn.Parameter | None = None
        if positions and not isinstance(source, RegionEncoder):
            height, columns = source.grid(*source.image_size)
            self.positions = nn.Parameter(
                torch.empty(height * columns, width).normal_(std=INIT_STD)
            )
        self.class_token: nn.Parameter | None = None
        if first == "learned":
            self.class_token = nn.Parameter(torch.empty(width).normal_(std=INIT_STD))

    def forward(
        self,
        features: ImageFeatures,
        *,
        keep_BK: Tensor | None = None,
        real_BP: Tensor | None = None,
    ) -> Tokens:
        """Return the first token, if any, then the regions.

        Args:
            features: output of any image encoder.
            keep_BK: indices of the regions in the grid, if some were removed.
            real_BP: bool, False for padding; None: all are real.

        Raises ConfigError if the numbers of regions and positions differ, and for an encoder
        without regions where no pooled vector is read.
        """
        first_B1D = self._first_token(features.pooled_BD)
        if features.patches_BPD is None:
            if self.first != "pooled":
                raise ConfigError(
                    "the image encoder has no local features", "unsupported", field="image_encoder"
                )
            return Tokens(first_B1D, None)
        cells_BPD = features.patches_BPD
        count = features.patches_BPD.shape[1]
        if keep_BK is None and self.positions is not None and count != len(self.positions):
            message = (
                f"expected images of image_size, with {len(self.positions)} regions; got "
                f"{count} regions"
            )
            raise ConfigError(message, "mismatch", field="image_size")
        if keep_BK is None and self.training and self.sampled is not None and self.sampled < count:
            keep_BK = sample_cells(count, self.sampled, len(cells_BPD)).to(cells_BPD.device)
            cells_BPD = cells_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, cells_BPD.shape[2]))
        regions_BPD = self.project(cells_BPD)
        if self.positions is not None:
            regions_BPD = regions_BPD + (
                self.positions if keep_BK is None else self.positions[keep_BK]
            )
        states_BND = torch.cat([first_B1D, regions_BPD], dim=1)
        if real_BP is None:
            return Tokens(states_BND, None)
        return Tokens(
            states_BND, torch.cat([real_BP.new_ones(first_B1D.shape[:2]), real_BP], dim=1)
        )

    def _first_token(self, pooled_BD: Tensor) -> Tensor:
        """(B, 1, D), or (B, 0, D) without a first token."""
        if self.class_token is not None:
            return self.class_token.expand(len(pooled_BD), 1, -1)
        if self.first == "none":
            return self.project.weight.new_empty(len(pooled_BD), 0, self.project.out_features)
        project_pooled = self.project if self.project_pooled is None else self.project_pooled
        first_B1D: Tensor = project_pooled(pooled_BD)[:, None]
        return first_B1D


def sample_cells(cells: int, count: int, rows: int) -> Tensor:
    """Sample cells of a grid without replacement, from torch's CPU generator.

    Returns:
        (rows, count) int64 on the CPU, sorted in each row.
    """
    # Without its name, as torch.compile cannot trace a generator.
    order_RP = torch.rand(rows, cells, device="cpu").argsort(dim=1)
    return order_RP[:, :count].sort(dim=1).values


def sample_tokens(tokens_BPD: Tensor, count: int | None, leading: int = 0) -> Tensor:
    """(B, leading + count, D): a random part of each row's tokens, in order, after the first
    `leading` ones.

    All of them if there are no more than `count`, or if it is None.
    """
    cells = tokens_BPD.shape[1] - leading
    if count is None or count >= cells:
        return tokens_BPD
    keep_BK = leading + sample_cells(cells, count, len(tokens_BPD)).to(tokens_BPD.device)
    sampled_BKD = tokens_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, tokens_BPD.shape[2]))
    return torch.cat([tokens_BPD[:, :leading], sampled_BKD], dim=1)


def encode_present(
    has_B: Tensor | None, width: int, encode: Callable[..., Tokens], *inputs_B: Tensor | None
) -> Tokens:
    """Encode the samples that have the modality.

    Placeholders are never encoded: they would cost time and change batch-norm statistics. A sample
    without the modality gets one token of zeros, to which the modality embedding is added later,
    and padding.

    Args:
        has_B: bool; None: all samples have it.
        width: D of the tokens.
        encode: function from `inputs_B` to tokens.
        inputs_B: one row for each sample; None stays None.
    """
    if has_B is None:
        return encode(*inputs_B)
    index_K = has_B.nonzero().squeeze(1)
    if len(index_K) == 0:
        return Tokens(torch.zeros(len(has_B), 1, width, device=has_B.device), None)
    present = encode(*(None if input_B is None else input_B[index_K] for input_B in inputs_B))
    tokens = present.states_BND.shape[1]
    states_BND = present.states_BND.new_zeros(len(has_B), tokens, width).index_copy(
        0, index_K, present.states_BND
    )
    mask_BN = torch.arange(tokens, device=has_B.device).expand(len(has_B), -1) == 0
    return Tokens(states_BND, mask_BN.index_copy(0, index_K, present.real_BN()))


# Random corruption of a training batch: image-text pairs that do not match.
#
# Everything is sampled before any arithmetic, from torch's CPU generator, which the training step
# seeds. A batch is thus corrupted alike on every device, and a test can repeat a step in another
# way. Masked words are sampled by `medvl.models.base`, masked patches by
# `medvl.losses.masked.mask_patches`.
#
# B batch, N pairs.


def sample_pairs(batch: Batch, *groups_B: Tensor) -> MatchingPairs:
    """Keep the image of half of the complete samples; give the others a wrong image of the batch.

    Rows of `same_rows(batch, *groups_B)` are never each other's negatives.
    """
    row_N = complete_rows(batch)
    pairs = random_pairs(same_rows(batch, *groups_B)[row_N][:, row_N], torch.default_generator)
    return pairs_of_rows(pairs, row_N)


def same_rows(batch: Batch, *groups_B: Tensor) -> Tensor:
    """(B, B) bool: samples with equal texts, of one study, or equal in any of `groups_B`
    (int64).
    """
    if batch.studies is not None:
        groups_B = (*groups_B, name_ids(batch.studies))
    return same_pairs(text_ids(batch.ids_BT, batch.mask_BT), *groups_B)


def pairs_of_rows(pairs: MatchingPairs, row_N: Tensor) -> MatchingPairs:
    """Convert pairs sampled among some rows of a batch to rows of the batch."""
    return MatchingPairs(row_N[pairs.image_N], row_N[pairs.text_N], pairs.matched_N)


# Learned prompts in place of a missing image or text (PTUnifier).
#
# Letters: B batch, Q width of a query, R prompts in the pool, K selected prompts, D width.


class PromptPool(nn.Module):
    """A pool of learned vectors. Each sample gets the vectors that are most similar to its query.

    Gradients reach the selected vectors; the selection itself has none. A query of another width is
    mapped by a fixed random matrix.

    Args:
        size: R.
        width: D.
        selected: K, at most R.
        query_width: Q.
    """

    def __init__(self, size: int, width: int, selected: int, query_width: int) -> None:
        super().__init__()
        self.selected = selected
        self.prompts_RD = nn.Parameter(torch.empty(size, width).normal_(std=INIT_STD))
        self.map_QD: Tensor | None
        same = query_width == width
        self.register_buffer(
            "map_QD", None if same else torch.randn(query_width, width) / query_width**0.5
        )

    def forward(self, query_BQ: Tensor) -> Tensor:
        """(B, K, D): the prompts with the largest dot products, largest first."""
        with torch.no_grad(), full_precision(query_BQ):
            query_BD = query_BQ.float() if self.map_QD is None else query_BQ.float() @ self.map_QD
            chosen_BK = (query_BD @ self.prompts_RD.float().T).topk(self.selected, dim=1).indices
        return F.embedding(chosen_BK, self.prompts_RD)


def mean_of_tokens(states_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """(B, D): mean of the real tokens, zeros if there is none."""
    weight_BN1 = mask_BN[:, :, None].to(states_BND.dtype)
    return (states_BND * weight_BN1).sum(dim=1) / weight_BN1.sum(dim=1).clamp(min=1)


def lacking(has_B: Tensor | None, has_other_B: Tensor | None) -> Tensor | None:
    """Return bool: samples without the one and with the other; None: there is none."""
    if has_B is None:
        return None
    return ~has_B if has_other_B is None else ~has_B & has_other_B


def fill(
    tokens: Tokens, lacking_B: Tensor | None, make: Callable[[Tensor], Tokens], query_BQ: Tensor
) -> Tokens:
    """Put what `make` returns for the queries of some rows in place of these rows."""
    index_M = None if lacking_B is None else lacking_B.nonzero().squeeze(1)
    if index_M is None or len(index_M) == 0:
        return tokens
    return tokens.replaced(index_M, make(query_BQ[index_M]))


def mean_words(encoder: TextEncoder, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, D): mean of each text's embedded tokens without the first."""
    return mean_of_tokens(encoder.embed(ids_BT, mask_BT)[:, 1:], mask_BT[:, 1:])


def encode_between(
    encoder: TextEncoder, prompts_BKD: Tensor, first_id: int, last_id: int
) -> Tensor:
    """(B, 1 + K + 1, D): states of prompts as a text between two real tokens, which both have
    the first position.
    """
    ends_B1D = []
    for token_id in (first_id, last_id):
        ids_B1 = torch.full(prompts_BKD.shape[:1], token_id, device=prompts_BKD.device)[:, None]
        ends_B1D.append(encoder.embed(ids_B1, torch.ones_like(ids_B1, dtype=torch.bool)))
    hidden_BTD = torch.cat([ends_B1D[0], prompts_BKD.to(ends_B1D[0].dtype), ends_B1D[1]], dim=1)
    return encoder.encode(hidden_BTD, torch.ones_like(hidden_BTD[:, :, 0], dtype=torch.bool))[-1]


def with_mean_patches(
    encoder: ImageEncoder, has_image_B: Tensor | None, encode: Callable[[], Tokens]
) -> tuple[Tokens, Tensor]:
    """Run `encode`; return its tokens and the mean of each image's embedded patches (B, D),
    zeros without an image.
    """
    with encoder.record_patches() as recorded:
        image = encode()
    mean_BD = image.states_BND.new_zeros(len(image.states_BND), encoder.patch_dim)
    if not recorded:  # no sample has an image
        return image, mean_BD
    (patches_KPD,) = recorded
    mean_KD = patches_KPD.mean(dim=1).to(mean_BD.dtype)
    return image, mean_KD if has_image_B is None else mean_BD.index_copy(
        0, has_image_B.nonzero().squeeze(1), mean_KD
    )
