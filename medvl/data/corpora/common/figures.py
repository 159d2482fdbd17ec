"""Figures of the literature: their texts, and splits that keep the figures of one article
together.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.reports.cleaning import clean_text
from medvl.data.splits import DEFAULT_FRACTIONS, hash_split
from medvl.errors import CorpusError, SplitError

MIN_WORDS = 3
"""Shorter captions and references do not describe the image ("see text"); M3AE leaves out the
same.
"""

SplitRule = Literal["official", "repaired", "by-article"]


def figure_sections(
    caption: str | None, references: Iterable[str] | None, warnings: Counter[str]
) -> dict[str, str]:
    """Return the texts of a figure: `caption`, then `reference-1`, `reference-2`, ... in the order
    of the article.

    Texts are cleaned as by `clean_text`, and white space is collapsed. Blank texts, short texts and
    repeats are left out and counted in `warnings`; the remaining references are numbered without
    gaps.
    """
    sections: dict[str, str] = {}
    text = _clean(caption or "")
    if _is_long_enough(text):
        sections["caption"] = text
    else:
        warnings["short_caption" if text else "blank_caption"] += 1
    seen = set(sections.values())
    count = 0
    for reference in references or ():
        text = _clean(reference)
        if text in seen:
            warnings["repeated_reference"] += 1
        elif not _is_long_enough(text):
            warnings["short_reference"] += 1
        else:
            seen.add(text)
            count += 1
            sections[f"reference-{count}"] = text
    return sections


def _clean(text: str) -> str:
    return " ".join(clean_text(text).split())


def read_references(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Return a field that is null or a list of texts as a list. Raises CorpusError on any other
    value.
    """
    sentences = row.get(field) or []
    if not isinstance(sentences, list) or not all(
        isinstance(sentence, str) for sentence in sentences
    ):
        raise CorpusError(
            f"{where}: expected null or a list of texts for {field}", "wrong_type", field=field
        )
    return sentences


def apply_split_rule(plan: Plan, rule: SplitRule, order: Sequence[str]) -> Plan:
    """Return the plan with splits that are disjoint by article.

    Args:
        plan: records in their published splits; `patient` is the article.
        rule: "official" takes the published splits and raises where they share an article;
            "repaired" assigns such an article to the last split of `order` that has it and leaves
            out its other figures, counted as `article_in_<split>`, so that the published test set
            stays complete; "by-article" makes new splits from a hash of the article.
        order: names of the published splits, training splits first.

    Raises SplitError when `rule` is "official" and an article is in two splits; ConfigError when
    `rule` is none of the three.
    """
    check_choice(rule, get_args(SplitRule), "splits")
    if rule == "by-article":
        shares = dict(zip(order, DEFAULT_FRACTIONS.values(), strict=True))
        return dataclasses.replace(
            plan, records=Records(_with_hash_split(record, shares) for record in plan.records)
        )
    owner: dict[str, str] = {}
    shared: set[str] = set()
    for record in plan.records:
        split = record.sample.split
        article = record.sample.patient
        first = owner.setdefault(article, split)
        if first != split:
            shared.add(article)
            owner[article] = max(first, split, key=order.index)
    misplaced = Counter(
        owner[r.sample.patient] for r in plan.records if owner[r.sample.patient] != r.sample.split
    )
    if shared and rule == "official":
        message = (
            f"{plan.corpus}: {len(shared)} articles or patients have images in several published "
            f"splits. --splits repaired leaves out {misplaced.total()} of {len(plan.records)} "
            "figures; --splits by-article makes new splits"
        )
        raise SplitError(message, "leak", field="splits")
    excluded = Counter({f"article_in_{split}": count for split, count in misplaced.items()})
    records = Records(
        record for record in plan.records if owner[record.sample.patient] == record.sample.split
    )
    return dataclasses.replace(plan, records=records, rows=plan.rows.excluding(excluded))


def _with_hash_split(record: Record, shares: Mapping[str, float]) -> Record:
    sample = record.sample
    return dataclasses.replace(
        record, sample=dataclasses.replace(sample, split=hash_split(sample.patient, shares))
    )


def _is_long_enough(text: str) -> bool:
    return len(text.split()) >= MIN_WORDS
