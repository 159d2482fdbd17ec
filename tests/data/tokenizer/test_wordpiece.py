"""The WordPiece trainer on a worked example and compared with a naive trainer."""

import itertools

from hypothesis import given, settings, strategies as st

from medvl.data.tokenizer.wordpiece import learn_pieces


def test_learn_pieces_worked_example() -> None:
    """With hug 10, pug 5, pun 12, bun 4, the pair u-g occurs 15 times, u-n 16, p-u 17."""
    words = {"hug": 10, "pug": 5, "pun": 12, "bun": 4}
    characters = ["##g", "##n", "##u", "b", "h", "p"]
    assert learn_pieces(words, 6, 1) == characters
    assert learn_pieces(words, 7, 1) == [*characters, "pu"]  # 17
    assert learn_pieces(words, 8, 1) == [
        *characters,
        "pu",
        "pun",
    ]  # 12; u-g is down to 10, and h-u has 10
    assert learn_pieces(words, 9, 1) == [
        *characters,
        "pu",
        "pun",
        "##ug",
    ]  # 10, before h-u in the alphabet
    assert learn_pieces(words, 10, 1)[-1] == "hug"
    assert learn_pieces(words, 100, 1)[-1] == "bun"
    assert learn_pieces(words, 100, 6) == [
        "##g",
        "##n",
        "##u",
        "h",
        "p",
        "pu",
        "pun",
        "##ug",
        "hug",
    ]


def test_learn_pieces_repeated_letters() -> None:
    """The pair a-##a occurs 3 times, ##a-##a 6 times; then ##aa-##a and a-##aa 3 times each, and
    # sorts before a.
    """
    assert learn_pieces({"aaaa": 3}, 10, 1) == ["##a", "a", "##aa", "##aaa", "aaaa"]


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=6), st.integers(1, 9), min_size=1, max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_learn_pieces_matches_a_naive_trainer(words: dict[str, int]) -> None:
    """The naive trainer counts all pairs again before every merge."""

    def naive(size: int) -> list[str]:
        spelled = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in words}
        pieces = sorted({piece for parts in spelled.values() for piece in parts})
        while len(pieces) < size:
            counts: dict[tuple[str, str], int] = {}
            for word, parts in spelled.items():
                for pair in itertools.pairwise(parts):
                    counts[pair] = counts.get(pair, 0) + words[word]
            if not counts:
                break
            best = min(counts, key=lambda pair: (-counts[pair], pair))
            joined = best[0] + best[1].removeprefix("##")
            for parts in spelled.values():
                index = 0
                while index < len(parts) - 1:
                    if (parts[index], parts[index + 1]) == best:
                        parts[index : index + 2] = [joined]
                    index += 1
            if joined not in pieces:
                pieces.append(joined)
        return pieces

    assert learn_pieces(words, 25, 1) == naive(25)
