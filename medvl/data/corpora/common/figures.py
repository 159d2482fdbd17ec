"""Figures of the literature: their texts, and splits that keep the figures of one article together."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.splits import DEFAULT_FRACTIONS, hash_split
from medvl.errors import ConfigError, SplitError

MIN_WORDS = 3
"""Shorter captions and references say nothing about the image ("see text"); M3AE leaves out the same."""

SplitRule = Literal["official", "repaired", "by-article"]


def figure_sections(caption: str | None, references: Iterable[str] | None, noticed: Counter[str]) -> dict[str, str]:
    """The texts of a figure: `caption`, then `reference-1`, `reference-2`, ... in the order of the article.

    White space is collapsed. Blank and short texts and repeats are left out and counted in `noticed`; the remaining
    references are numbered without gaps. A figure without any text gives no section.
    """
    sections: dict[str, str] = {}
    text = " ".join((caption or "").split())
    if _enough(text):
        sections["caption"] = text
    else:
        noticed["short_caption" if text else "blank_caption"] += 1
    known = set(sections.values())
    kept = 0
    for reference in references or ():
        text = " ".join(reference.split())
        if text in known:
            noticed["repeated_reference"] += 1
        elif not _enough(text):
            noticed["short_reference"] += 1
        else:
            known.add(text)
            kept += 1
            sections[f"reference-{kept}"] = text
    return sections


def settle_splits(plan: Plan, rule: SplitRule, order: Sequence[str]) -> Plan:
    """The plan with splits that are disjoint by article.

    Args:
        plan: records in their published splits, `patient` being the article.
        rule: "official" takes the published splits and refuses them where they share an article; "repaired" gives such
            an article to the last split of `order` that has it and leaves its other figures out, counted as
            `article_in_<split>`: the published test set stays whole; "by-article" draws all splits anew by a hash of
            the article.
        order: the published splits, those that are trained on first.

    Raises:
        SplitError: `rule` is "official" and an article stands in two splits.
        ConfigError: `rule` is none of the three.
    """
    if rule not in get_args(SplitRule):
        raise ConfigError(f"splits must be one of {', '.join(get_args(SplitRule))}, got {rule!r}")
    if rule == "by-article":
        names = dict(zip(order, DEFAULT_FRACTIONS.values(), strict=True))
        return dataclasses.replace(plan, records=Records(_drawn(record, names) for record in plan.records))
    owner: dict[str, str] = {}
    shared: set[str] = set()
    for record in plan.records:
        split, article = record.sample.split, record.sample.patient
        first = owner.setdefault(article, split)
        if first != split:
            shared.add(article)
            owner[article] = max(first, split, key=order.index)
    misplaced = Counter(owner[r.sample.patient] for r in plan.records if owner[r.sample.patient] != r.sample.split)
    if shared and rule == "official":
        raise SplitError(
            f"{plan.corpus}: {len(shared)} articles have figures in more than one published split. --splits repaired "
            f"leaves {misplaced.total()} of {len(plan.records)} figures out and keeps the held-out splits whole; "
            "--splits by-article draws all splits anew"
        )
    excluded = plan.excluded + Counter({f"article_in_{split}": count for split, count in misplaced.items()})
    kept = Records(record for record in plan.records if owner[record.sample.patient] == record.sample.split)
    return dataclasses.replace(plan, records=kept, excluded=excluded)


def _drawn(record: Record, shares: Mapping[str, float]) -> Record:
    sample = record.sample
    return dataclasses.replace(record, sample=dataclasses.replace(sample, split=hash_split(sample.patient, shares)))


def _enough(text: str) -> bool:
    return len(text.split()) >= MIN_WORDS
