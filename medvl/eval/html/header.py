"""Header of the pages: headline numbers, and the facts about data, model and protocol."""

from collections.abc import Sequence

from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.publish import PageHeader
from medvl.eval.core.results import Results, format_value


def headline(title: str, row: MetricRow) -> tuple[str, str, str]:
    """Return (title, number, interval) for `Page.headlines`; "-" without an interval if the row has no value."""
    number, _, interval = format_value(row).partition(" ")
    return title, number, interval


def header_facts(
    results: Results, header: PageHeader, *, units: str, extra: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return (name, value) pairs about data, model and protocol, for `Page.facts`.

    Args:
        results: results of the evaluation.
        header: names of model and data, and the date.
        units: units that the bootstrap resampled, in the plural: patients, texts, ...
        extra: facts of this kind of evaluation.
    """
    config = results.config
    facts = [
        ("Checkpoint", hashed(header.model, results.inputs.get("checkpoint"))),
        ("Data", hashed(header.data, results.inputs.get("manifest"))),
        *extra,
        ("Intervals", f"95%, {config['resamples']:,} resamples of {units}, seed {config['seed']}"),
        ("Protocol", f"{results.protocol}, version {results.protocol_version}"),
        ("Software", software(results)),
    ]
    return dated(header.date, facts)


def hashed(name: str, sha256: str | None) -> str:
    """Return a name followed by the start of its hash, if known."""
    return f"{name} (sha256 {sha256[:12]})" if sha256 else name


def software(results: Results) -> str:
    """Return the versions of medvl and torch of the evaluation."""
    return f"medvl {results.packages['medvl']}, torch {results.packages.get('torch', '?')}"


def dated(date: str | None, facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the facts, with the date first if there is one."""
    return [("Date", date), *facts] if date else list(facts)
