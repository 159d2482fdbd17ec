"""Table of the `medvl shards` commands."""

from collections.abc import Callable
from typing import Any

from medvl.cli.shards import corpora, generated, labels, masks, text, vqa, webdataset

COMMANDS: dict[str, Callable[..., Any]] = {
    "mimic-cxr": corpora.mimic_cxr,
    "chexpert": corpora.chexpert,
    "roco": corpora.roco,
    "medicat": corpora.medicat,
    "melinda": masks.melinda,
    "openi": corpora.openi,
    "r2gen-annotation": corpora.r2gen_annotation,
    "medvill-jsonl": corpora.medvill_jsonl,
    "m3ae-arrow": corpora.m3ae_arrow,
    "padchest": corpora.padchest,
    "vqa-rad": vqa.vqa_rad,
    "slake": vqa.slake,
    "vqa-med": vqa.vqa_med,
    "path-vqa": vqa.path_vqa,
    "rsna": labels.rsna,
    "siim": labels.siim,
    "qata": masks.qata,
    "mosmed": masks.mosmed,
    "monuseg": masks.monuseg,
    "ms-cxr": labels.ms_cxr,
    "ms-cxr-t": labels.ms_cxr_t,
    "nih-cxr14": labels.nih_cxr14,
    "covidx": labels.covidx,
    "vindr-cxr": labels.vindr_cxr,
    "chestxdet10": labels.chestxdet10,
    "object-cxr": labels.object_cxr,
    "text": text.text,
    "concepts": text.concepts,
    "webdataset": webdataset.webdataset,
    "generated": generated.generated,
    "table": corpora.table,
}
"""Name after `medvl shards` -> function, in the order of the help."""
