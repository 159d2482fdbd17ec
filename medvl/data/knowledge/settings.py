"""Settings of reading UMLS and of training embeddings, which the command line shows."""

import dataclasses

from medvl.common.checks import check_within


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMLSOptions:
    """Selection of concepts, names and relations. An empty selection of a kind keeps everything."""

    language: str = "ENG"
    """language of the names (column LAT)"""
    sources: tuple[str, ...] = ()
    """source vocabularies of names and relations (column SAB), such as SNOMEDCT_US; default all"""
    semantic_types: tuple[str, ...] = ()
    """semantic types of the concepts (TUI), such as T047 for diseases; default all"""
    relations: tuple[str, ...] = ()
    """relations (RELA, or the code REL of rows without one), such as finding_site_of; default all with a RELA"""
    suppressible: bool = False
    """also read names and relations that UMLS marks as suppressible or obsolete"""
    min_mentions: int = 20
    """where texts are given: keep concepts that they mention more often than this"""
    keep_isolated: bool = False
    """keep concepts without a relation to another kept one"""

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "min_mentions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransEConfig:
    """Settings of a training; ARL's by default."""

    dim: int = 256
    margin: float = 5.0
    negatives: int = 25
    epochs: int = 1000
    batches: int = 100
    """batches of an epoch, or as many as there are triples"""
    lr: float = 1.0
    valid_share: float = 0.0
    """share of the related pairs of entities that are held out and predicted; 0 trains on all, as published"""
    seed: int = 0

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "dim", "margin", "negatives", "epochs", "batches", "lr")
        check_within(self, "[0, 1)", "valid_share")
