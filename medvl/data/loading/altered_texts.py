"""The texts of a batch with left and right exchanged, or with their findings denied: hard negatives
beside the other texts of a batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from medvl.data.reports.cleaning import swap_laterality
from medvl.schema import FINDINGS, NEGATIVE, UNCERTAIN, Batch, Inputs, Sample

Fields = tuple[str, str, str]
"""Fields of a batch: ids, mask, and whether the exchange alters the text."""
_MIRRORED: Fields = ("mirrored_ids_BT", "mirrored_mask_BT", "has_mirror_B")
_DENIED: Fields = ("denied_ids_BT", "denied_mask_BT", "has_denial_B")


def alter_texts(texts: Sequence[str], inputs: Inputs) -> dict[Fields, list[str]]:
    """Return the altered texts that a system needs, by their fields of the batch."""
    altered = {}
    if inputs.mirrored_text:
        altered[_MIRRORED] = [swap_laterality(text) for text in texts]
    if inputs.denied_text:
        # Few systems read denials, so that most runs import no labeler.
        from medvl.data.reports.denials import turn_findings

        altered[_DENIED] = [turn_findings(text).text for text in texts]
    return altered


def report_findings(sample: Sample) -> tuple[int, ...]:
    """Return the values of `FINDINGS` in the report of a sample: 1, 0 (or not mentioned) or -1
    (uncertain, or without a report).
    """
    from medvl.data.reports.labeler import label_report

    report = "\n".join(sample.sections.values())
    labels = label_report(report)
    unknown = NEGATIVE if report.strip() else UNCERTAIN
    return tuple(labels.get(name, unknown) for name in FINDINGS)


def add_altered(
    batch: Batch, altered: Mapping[Fields, Sequence[str]], ids_NT: Tensor, mask_NT: Tensor
) -> None:
    """Add altered texts to a batch, of which `ids_NT` and `mask_NT` are the tokens, one kind after
    another.
    """
    rows = len(batch)
    for kind, (fields, texts) in enumerate(altered.items()):
        part = slice(kind * rows, (kind + 1) * rows)
        differs = [own != other for own, other in zip(batch.texts, texts, strict=True)]
        values = (ids_NT[part], mask_NT[part], torch.tensor(differs))
        for field, value in zip(fields, values, strict=True):
            setattr(batch, field, value)
        if fields == _DENIED:
            from medvl.data.reports.denials import turn_findings

            turned = [turn_findings(text).turned for text in batch.texts]
            batch.turned_BL = torch.tensor(turned, dtype=torch.int8)
