"""What the pages say alike at their top: the numbers to remember, and what was judged by which protocol."""

from collections.abc import Sequence

from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import Results, format_value


def headline(what: str, row: MetricRow) -> tuple[str, str, str]:
    """(what, number, interval), as `Page.headlines` takes them; "-" and nothing where the row has no value."""
    number, _, interval = format_value(row).partition(" ")
    return what, number, interval


def header_facts(
    results: Results,
    *,
    model: str,
    data: str,
    date: str | None,
    drawn: str,
    own: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """What was evaluated, and how, for `Page.facts`.

    Args:
        results: of the evaluation.
        model, data: what they are called; the hashes of the checkpoint and of the manifest stand behind them.
        date: shown as it stands; None leaves it out.
        drawn: what the bootstrap drew, in the plural: patients, texts, ...
        own: what is told of this kind of evaluation alone.
    """
    config = results.config
    told = [
        ("Checkpoint", hashed(model, results.inputs.get("checkpoint"))),
        ("Data", hashed(data, results.inputs.get("manifest"))),
        *own,
        ("Intervals", f"95%, {config['resamples']:,} resamples of {drawn}, seed {config['seed']}"),
        ("Protocol", f"{results.protocol}, version {results.protocol_version}"),
        ("Software", software(results)),
    ]
    return dated(date, told)


def hashed(name: str, sha256: str | None) -> str:
    """A name with the beginning of the hash of what it stands for, where that is known."""
    return f"{name} (sha256 {sha256[:12]})" if sha256 else name


def software(results: Results) -> str:
    """The versions of medvl and torch that gave the numbers."""
    return f"medvl {results.packages['medvl']}, torch {results.packages.get('torch', '?')}"


def dated(date: str | None, facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Facts with the date before them, where there is one."""
    return [("Date", date), *facts] if date else list(facts)
