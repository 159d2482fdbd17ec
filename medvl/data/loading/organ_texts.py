"""Texts of organs in a loader."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medvl.data.reports.organs import PARTS, template_of
from medvl.data.reports.sentences import join_texts
from medvl.data.transforms.text import TextPolicy
from medvl.schema import ORGANS, Batch, Sample


class OrganText(NamedTuple):
    """What a report states about an organ."""

    text: str
    """Empty for a sample without a report."""
    normal: bool


def organ_texts(
    sample: Sample, policy: TextPolicy, rng: Callable[[str], np.random.Generator]
) -> tuple[OrganText, ...]:
    """Return the text of each organ: what a policy selects of its stored parts
    (`medvl.data.reports.organs`), or the sentence that it shows nothing, where it has none.

    Args:
        sample: with `extra["organs"]["texts"]`, unless it has no report.
        policy: reads the parts of an organ in place of the sections of a report.
        rng: generator of a purpose.
    """
    organs = sample.extra.get("organs")
    texts = organs.get("texts") if isinstance(organs, Mapping) else None
    if not isinstance(texts, Mapping):
        return (OrganText("", False),) * len(ORGANS)
    return tuple(_of_organ(organ, texts.get(organ), policy, rng) for organ in ORGANS)


def _of_organ(
    organ: str, entry: Any, policy: TextPolicy, rng: Callable[[str], np.random.Generator]
) -> OrganText:
    parts = {part: entry[part] for part in PARTS if entry.get(part)} if entry else {}
    if not parts:
        return OrganText(template_of(organ), True)
    text = policy(parts, rng(f"text of {organ}")) or join_texts(parts.values())
    return OrganText(text, bool(entry.get("normal")))


def add_organ_texts(
    batch: Batch,
    rows: Sequence[Sequence[OrganText]],
    tokenizer: Callable[[Sequence[str]], tuple[Tensor, Tensor]],
) -> None:
    """Add the tokens of the texts of each sample's organs, and which are normal."""
    texts = [each.text for row in rows for each in row]
    ids_NT, mask_NT = tokenizer(texts)
    has_text_N = torch.tensor([bool(text) for text in texts])
    sides = (len(rows), len(ORGANS))
    batch.organ_ids_BOT = ids_NT.unflatten(0, sides)
    batch.organ_mask_BOT = (mask_NT & has_text_N[:, None]).unflatten(0, sides)
    batch.organ_normal_BO = torch.tensor([[each.normal for each in row] for row in rows])
