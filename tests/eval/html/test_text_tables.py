"""Tables as text for a terminal."""

from medvl.eval.html.tables import Cell, Table, as_text


def test_a_table_is_aligned_and_not_escaped() -> None:
    table = Table(
        title="Results",
        columns=["", "kind", "AUROC_x"],
        rows=[
            ["a|b", "one", Cell(text="0.5", small="[0.4, 0.6]", interval=(0.4, 0.5, 0.6))],
            ["c", "three"],
        ],
        caption="Of a_b.",
    )
    assert as_text(table).splitlines() == [
        "Results. Of a_b.",
        "",
        "     kind          AUROC_x",
        "a|b  one    0.5 [0.4, 0.6]",
        "c    three",
    ]


def test_columns_beyond_the_width_follow_below() -> None:
    columns = ["", *(f"column {number}" for number in range(6))]
    table = Table(
        title="T", columns=columns, rows=[["first", *("0.123 [0.1, 0.2]" for _ in range(6))]]
    )
    lines = as_text(table, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("first") for line in lines) == 2
    assert [line for line in lines if "column 5" in line]
    assert as_text(Table(title="Empty", columns=["", "a"], rows=[])).splitlines()[-1].split() == [
        "a"
    ]
