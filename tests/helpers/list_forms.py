"""Forms of lists in reports: marks of items, and numbers or letters."""

ITEM_FORMS = (
    "– {}", "— {}", "· {}", "• {}", "•{}", "► {}", "> {}", ">{}", "* {}", "*{}", "-{}", "- {}",
    "▪ {}", "‣ {}", "✓ {}", "→ {}", "o {}", "o\t{}", "\t{}", "\t- {}", "+ {}", "\u00a0{}", "{}",
)  # fmt: skip
NUMBER_FORMS = (
    "{n}. {}", "{n}.{}", "{n}) {}", "({n}) {}", "{n}- {}", "{n}-{}", "{n} - {}", "{n}: {}",
    "#{n} {}", "# {n} {}", "#{n}. {}", "{n} {}",
    "{a}. {}", "{a}) {}", "({a}) {}", "{i}. {}", "({i}) {}",
)  # fmt: skip


def listed(form: str, texts: tuple[str, ...]) -> str:
    """Return texts as a list, an item a line."""
    return "\n".join(
        form.format(text, n=n + 1, a="abc"[n], i=("i", "ii", "iii")[n])
        for n, text in enumerate(texts)
    )
