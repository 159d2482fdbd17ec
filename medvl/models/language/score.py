"""Masked words on held-out text: accuracy, with the most frequent token as a baseline."""

from collections.abc import Iterable
from typing import Any

import torch

from medvl.losses.masked.mlm import masked_positions
from medvl.models.language.base import check_text_batch
from medvl.schema import Batch


class MaskedWordScore:
    """Evaluator of a language model for training runs.

    Args:
        batches: validation batches, of an `open_text_loader` with `train=False`: masks are the same in every pass.

    Calling it with a model returns

        masked/accuracy        share of the masked tokens that get the highest score
        masked/unigram         share of the most frequent one among them: accuracy of a constant prediction
        masked/perplexity      exponential of the mean cross-entropy
        pairs/accuracy         of the task on pairs, if the model has one
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        counts_V = torch.zeros(model.text_encoder.vocab_size, dtype=torch.int64)
        totals_5 = torch.zeros(5, dtype=torch.float64)  # right, masked, entropy, pairs right, pairs
        for held_out in self.batches:
            batch = check_text_batch(held_out.to(model.device))
            masked = model.mask(batch)
            position_N = masked_positions(masked.labels_BT)
            target_N = masked.labels_BT.flatten()[position_N]
            states_BTD = model.text_encoder(masked.ids_BT, batch.mask_BT, types_BT=batch.types_BT).tokens_BTD
            logits_NV = model.score_words(states_BTD.flatten(0, 1)[position_N]).float()
            right = (logits_NV.argmax(dim=1) == target_N).sum()
            entropy = torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="sum")
            row = [right, torch.tensor(len(target_N)), entropy, torch.tensor(0), torch.tensor(0)]
            if model.pair_head is not None:
                has_B = batch.pair_B >= 0
                answer_B = model.score_pairs(states_BTD[:, 0]).argmax(dim=1)
                row[3:] = [(answer_B == batch.pair_B)[has_B].sum(), has_B.sum()]
            totals_5 += torch.stack([value.double().cpu() for value in row])
            counts_V += torch.bincount(target_N, minlength=len(counts_V)).cpu()
        right, masked_count, entropy, pairs_right, pairs = totals_5.tolist()
        scores = {
            "masked/accuracy": right / max(masked_count, 1),
            "masked/unigram": int(counts_V.max()) / max(masked_count, 1),
            "masked/perplexity": float(torch.tensor(entropy / max(masked_count, 1)).exp()),
        }
        return scores | ({"pairs/accuracy": pairs_right / max(pairs, 1)} if model.pair_head is not None else {})
