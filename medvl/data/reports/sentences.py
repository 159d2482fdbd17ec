"""Sentence splitter for dictated text: decimals, titles, masks, numbered lists and missing
spaces.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from medvl.data.reports.cleaning import clean_spaces

# Lines of a report: which begin a statement, and which continue the line before.
#
# Prose that was wrapped and lists of statements without full stops look alike: "There is
# no⏎pneumothorax" is one statement, "No pneumothorax⏎Small left effusion" are two. `units`
# decides for each line by what it begins with (a list mark, a heading such as `Heart:`, a
# capital, a word such as "small" that cannot follow a noun), by the last word of the line before
# ("no", "of", "pleural" want a noun), and by whether its first word would have fitted there.


def words(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


_NARROW = 45
"""Width below which lines are hardly those of wrapped prose."""

_MARK = re.compile(
    r"[ \t]*(?:(?P<kept>[-*•☐☑☒✗✘][ \t]+(?=\S)|[*•][ \t]*(?=\w)|-(?=(?!sided|side|like|type|based"
    r"|shaped|old|year|day)[A-Za-z_]{2})"
    r"|\(?(?P<number>\d{1,2})[.)](?:[ \t]+(?=\S)|(?=[^\W\d])))"
    r"|[·●○◦▪▫■□►▶▸‣⁃∙✓✔→⇒»§¶–—−][ \t]*(?=[\w(\"'])|[>+=~][ \t]*(?=[^\W\d])|o(?:\t[ \t]*|[ "
    r"]+)(?=\w)"
    r"|\(?(?P<dashed>\d{1,2})(?:[ \t]?[-–:][ \t]+(?=[^\d\s])|[-–:](?=(?!XXX)[A-Z]))"
    r"|\#[ \t]?(?P<hash>\d{1,2})(?:[.:)-][ \t]*|[ \t]+)(?=\S)|[①-⑳][ \t]*(?=\S)"
    r"|\(?(?P<letter>[A-Za-z])[.)][ \t]+(?=\S)|\(?(?P<roman>[ivxIVX]{1,5})[.)][ \t]+(?=\S)"
    r"|(?P<bare>\d{1,2})[ \t]+(?=[A-Z]))"
)
"""The mark of a list item; `kept` are those that a sentence may have within a line as well."""
_SIGNS = "+>=~✓✔"
"""Marks that mean something else unless several lines begin with them."""
_ROMAN = (
    "",
    "i",
    "ii",
    "iii",
    "iv",
    "v",
    "vi",
    "vii",
    "viii",
    "ix",
    "x",
    "xi",
    "xii",
    "xiii",
    "xiv",
    "xv",
)
_LABEL = re.compile(r"[ \t]*(?P<label>[A-Z][A-Za-z/&,()' -]{1,40}[A-Za-z)])[ \t]?:(?=[ \t]|$)")
_MOST_LABEL_WORDS = 5
ORGAN = re.compile(
    r"(?:visualized |upper |right |left )?(?:lungs?|pleura|pleural "
    r"(?:spaces?|cavities)|heart|heart size|cardiac"
    r"|cardiovascular|cardiac silhouette|cardiomediastinal "
    r"silhouette|mediastinum|hila|airways?|vessels"
    r"|(?:pulmonary )?vasculature|bones?|skeleton|chest wall|abdomen|diaphragms?|soft "
    r"tissues|osseous structures"
    r"|(?:support )?devices|lines|tubes|ett?|e[nt]t? tube|ng tube|other)(?:(?: and | & |, "
    r"|/)(?:airways?|pleura"
    r"|mediastinum|heart|bones|soft tissues|tubes|lines|devices|hila|vessels))*",
    re.IGNORECASE,
)
"""Headings of a template's parts of the findings, complete."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_FINAL = re.compile(r"[.!?][)\]\"'’”]*$")
_STOP_WITHIN_LINE = re.compile(r"[.!?][)\]\"']*[ \t]+\S")

_NEVER_LAST = words(
    "otherwise additionally however a an the no not nor or and but with without within of in"
    " on at to from for by as than that "
    "which who whose this these those there is are was were be been being am has have had do does "
    "did can could may might must should would will shall if when while because although since "
    "until into onto between among through across along near around about against after before "
    "during per via versus vs every any some its their his her our your it we they he she i dr mr "
    "mrs ms prof shows show demonstrates demonstrate reveals reveal suggests suggest represents "
    "represent reflects reflect contains contain includes include measures measure indicates "
    "indicate remains remain appears appear overlies overlie obscures obscure projects project "
    "terminates terminate measuring showing demonstrating involving containing including "
    "representing suggesting indicating reflecting obscuring revealing projecting terminating "
    "causing dated approximately very nil"
)
"""Words that no statement ends with."""
_WANTS_NOUN = words(
    "slight slightly stable normal otherwise unremarkable sided appearing appear low "
    "left right bilateral both either neither each all other another such upper lower middle mid "
    "small large mild moderate severe minimal trace tiny marked significant definite new old "
    "acute subtle diffuse patchy possible probable questionable borderline likely probably "
    "possibly presumably mildly moderately slightly markedly severely relatively grossly newly "
    "partially partly essentially only also more most less least further again still even just "
    "nearly almost over under above below behind lung heart chest rib airspace air space lobe "
    "base apex zone disc disk free secondary status post suspicious consistent compatible due "
    "evidence signs sign rather level grade type stage segment class category number image series "
    "ribs multifocal bibasilar basal enlarged increased decreased prominent underlying overlying "
    "adjacent"
)
"""Words that are followed by a noun or number within a statement, but may end one."""
_ADJECTIVE = re.compile(r".{3,}(?:al|ar|ic|ian|ous|ary|ory|ive|oid)")
_END_LIKE_ADJECTIVES = words(
    "normal hospital removal symmetric typical negative positive atelectatic"
)
_SIDE_LAST = re.compile(r"\b(?:on|to) the (?:left|right)$", re.IGNORECASE)
_CONTINUES = words(
    "and or nor but with without of in on at to from for by as than that which who is are was "
    "were be been being has have had may might could can should would will into onto over under "
    "between through across along behind near around against after before during per via versus "
    "vs if when while because although since until consistent suggesting suggestive representing "
    "compatible likely probably possibly due measuring measures extending extends overlying "
    "overlies projecting projects terminating terminates ending ends seen noted identified "
    "present again appears appear remains remain unchanged"
)
"""Words that a statement hardly begins with, where capitals do not help."""
_SURELY_BEGINS = frozenset(("no", "nil", "there"))
_EXTENTS = words(
    "small mild moderate large minimal trace tiny minor subtle marked severe patchy hazy diffuse "
    "faint mildly moderately"
)
_BEGINS = _SURELY_BEGINS | _EXTENTS
"""Words that begin a statement after a noun: prose would have a comma or a verb between them."""
_BEGINS_LIST = _BEGINS | words(
    "heart lungs cardiac cardiomediastinal mediastinal mediastinum cardiomegaly "
    "the a an this left right bilateral bibasilar pleural pulmonary atelectasis effusion "
    "effusions consolidation pneumothorax pneumonia edema oedema opacity opacities infiltrate "
    "infiltrates nodule mass fracture fractures emphysema fibrosis scarring granuloma calcified "
    "old new stable interval trachea aorta hila hilar bones bony osseous soft tube picc et ng ett "
    "chest degenerative normal clear hyperinflated low increased decreased enlarged tortuous "
    "prominent possible probable question questionable suspected status post s/p median "
    "sternotomy surgical clips pacemaker lines tubes visualized otherwise unremarkable negative "
    "diaphragm costophrenic vascular"
)
"""Further words that do so in lists of statements."""
_NAMES = words(
    "January February March April May June July August September October November December Monday "
    "Tuesday Wednesday Thursday Friday Saturday Sunday Swan Swan-Ganz Ganz Port Port-A-Cath "
    "Hickman Dobhoff Dobbhoff Kerley Bochdalek Morgagni Hill-Sachs Bankart Schatzki Nissen "
    "Whipple Groshong Broviac Quinton Salem Chilaiditi Ghon Hampton Westermark Pancoast Parkinson "
    "Crohn Down Marfan Hodgkin Kaposi Wegener Scheuermann Schmorl Harrington Cobb Foley Blakemore "
    "Minnesota Impella Medtronic Watchman Ivor Billroth Roux-en-Y Heimlich Thora-Vent Pleurx "
    "PleurX Gram Mycobacterium Pneumocystis Aspergillus Dr Mr Mrs Ms Prof Valsalva Carl Mueller "
    "Doppler Hounsfield Fleischner"
)
"""Names that begin with a capital within a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A statement, list item or paragraph that stands on separate lines, without its line wraps."""

    text: str
    mark: int = 0
    """Length of the list mark that it begins with."""
    keeps_mark: bool = True
    """Whether `split_sentences` recognises the mark within a line too: `1.` and `-`, not `a.` or
    `►`.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class _Style:
    """How a text is written."""

    width: int
    case: str
    """"mixed", or "upper" or "lower" where capitals tell nothing."""
    prose: bool
    """Whether it has full stops within its lines."""
    listed: bool
    """Whether all lines but the last end with a comma or semicolon."""


def units(text: str, width: int = 0) -> list[Unit]:
    """Return the units of a text, whose lines end with `\\n`, in order.

    `width` is the length of the longest line of the report that `text` is a part of, where it is
    known.
    """
    lines = text.split("\n")
    firsts = [line.lstrip()[:1] for line in lines]
    style = _style(text, lines, width) if len(lines) > 1 else None  # of no use to a single line
    groups: list[list[str]] = []
    marks: list[tuple[int, bool]] = []
    item: str | None = None
    open_unit = False
    for line in lines:
        if not line.strip():
            open_unit = False
            continue
        before = groups[-1][-1] if open_unit else None
        mark = _list_mark(line, before, item)
        if mark is not None and line.lstrip()[0] in _SIGNS and firsts.count(line.lstrip()[0]) == 1:
            mark = None  # "+PPD", "> 3 cm"
        if (
            before is None
            or mark is not None
            or style is None
            or _begins_statement(before, line, style)
        ):
            groups.append([])
            length = 0 if mark is None else len(line[: mark.end()].strip())
            marks.append((length, mark is None or mark["kept"] is not None))
        if mark is not None:
            item = (
                mark["number"]
                or mark["dashed"]
                or mark["hash"]
                or mark["letter"]
                or mark["roman"]
                or mark["bare"]
            )
        groups[-1].append(line)
        open_unit = True
    return [
        Unit(" ".join(" ".join(lines).split()), *mark)
        for lines, mark in zip(groups, marks, strict=True)
    ]


def one_line(text: str, width: int = 0) -> str:
    """Return a text on one line: wraps are undone, and statements on separate lines end with a full
    stop.

    The last one, and what ends with a colon, stays as it is. `width` is as for `units`.
    """
    texts = [
        unit.text if unit.keeps_mark else unit.text[unit.mark :].lstrip()
        for unit in units(text, width)
    ]
    ended = [text if text[-1:] == ":" else end_statement(text) for text in texts[:-1]]
    return " ".join(filter(None, [*ended, *texts[-1:]]))


def end_statement(text: str) -> str:
    """Return a text that ends as a sentence: with a full stop unless it has final punctuation."""
    text = text.rstrip()
    if not text or _FINAL.search(text):
        return text
    return text.rstrip(",;: \t") + "."


def label_of(line: str) -> str | None:
    """Return the words before the colon of a line that begins like `Heart: ...`; None for other
    lines.
    """
    match = _LABEL.match(line)
    if match is None or len(match["label"].split()) > _MOST_LABEL_WORDS:
        return None
    return match["label"]


def _style(text: str, lines: Sequence[str], width: int) -> _Style:
    width = max([width, *(len(line.rstrip()) for line in lines)])
    # Marks and abbreviations have capitals in texts of lower case as well.
    firsts = [
        word[0]
        for line in lines
        if (word := _WORD.search(line)) is not None and not word[0].isdigit()
    ]
    if not any(character.islower() for character in text):
        case = "upper"
    else:
        case = "mixed" if any(word[:1].isupper() for word in firsts) else "lower"
    ends = [line.rstrip()[-1] for line in lines if line.strip()][:-1]
    return _Style(
        width,
        case,
        _STOP_WITHIN_LINE.search(text) is not None,
        len(ends) > 1 and set(ends) <= {",", ";"},
    )


def _list_mark(line: str, before: str | None, item: str | None) -> re.Match[str] | None:
    """Return the list mark at the start of a line; `item` is the number or letter of the item
    before.
    """
    mark = _MARK.match(line)
    if mark is None:
        return None
    following = line[mark.end() : mark.end() + 1]
    numbered = mark["number"] or mark["dashed"] or mark["hash"] or mark["bare"]
    if numbered is not None:
        in_order = int(numbered) == (int(item) + 1 if item is not None and item.isdecimal() else 1)
        if not in_order and (following.islower() or mark["number"] is None):
            return None  # "rib⏎7. no fracture"
        if not in_order and before is not None and _wants_more(before):
            return None
    elif mark["letter"] or mark["roman"]:
        value = (mark["letter"] or mark["roman"]).lower()
        roman = mark["roman"] or (value if value in _ROMAN else "")
        if not _follows(value, roman.lower(), (item or "").lower()):
            return None
        if before is not None and _wants_more(before):
            return None  # "read by⏎A. Miller"
    return mark


def _follows(letter: str, roman: str, item: str) -> bool:
    """Return whether a letter or Roman number begins a list, or follows the item before."""
    if letter == "a" or roman == "i":
        return True
    if len(letter) == 1 and len(item) == 1 and item.isalpha() and ord(letter) == ord(item) + 1:
        return True
    return roman in _ROMAN and item in _ROMAN and _ROMAN.index(roman) == _ROMAN.index(item) + 1


def _begins_statement(before: str, line: str, style: _Style) -> bool:
    """Return whether a line without a list mark begins a statement, and does not continue the
    line before.
    """
    before = before.rstrip()
    if before.endswith(":"):
        return label_of(line) is not None and label_of(before) is not None
    if _FINAL.search(before) or before[-1] in "-–/(&+":
        return False  # the splitter of sentences reads full stops
    if _wants_more(before):
        return False
    if label_of(line) is not None:
        return True
    if ORGAN.fullmatch(before.strip()) is not None and before.lstrip()[0].isupper():
        # a heading without a colon: "HEART⏎Enlarged"
        return ORGAN.fullmatch(line.strip()) is not None
    if (
        ORGAN.fullmatch(line.strip()) is not None
        and line.strip().isupper()
        and style.case == "mixed"
    ):
        return True
    word = _WORD.match(line.lstrip(" \t\"'(["))
    if word is None or word[0].startswith("XXX"):
        return False  # a mask
    first = word[0]
    if before[-1] in ",;":
        is_capital = style.case == "mixed" and first.istitle() and first not in _NAMES
        return (is_capital or (style.listed and not style.prose)) and first.lower() in _BEGINS_LIST
    fits = len(before) + 1 + len(line.split()[0]) <= style.width and "_" not in before
    if style.case == "mixed" and first[0].isupper():
        is_name = (
            first in _NAMES
            or first.isupper()
            or first[1:2] == "-"
            or any(character.isdigit() for character in first)
        )
        return not is_name or (not _wants_noun(before, first.lower()) and (fits or not style.prose))
    if _wants_noun(before, first.lower()):
        return False
    if first[0].isdigit():
        return fits and not style.prose
    return _begins_without_capital(before, first.lower(), style, fits=fits)


def _begins_without_capital(before: str, first: str, style: _Style, *, fits: bool) -> bool:
    """Return whether `first` begins a statement, in a text or line whose capitals do not tell."""
    if first in _CONTINUES:
        return False
    last = _last_word(before)
    is_complete = not last.endswith("ed") and last not in ("seen", "shown")
    is_narrow = style.width < _NARROW
    begins = first in _BEGINS and is_complete and (fits or (is_narrow and not style.prose))
    if style.case == "mixed":
        return begins or (not style.prose and is_narrow and fits and first in _BEGINS_LIST)
    if style.prose:
        return begins or first in _SURELY_BEGINS or (fits and first in _BEGINS_LIST)
    return (
        (fits and " " in before.strip())
        or first in _BEGINS
        or (is_narrow and first in _BEGINS_LIST)
    )


def _wants_more(line: str) -> bool:
    """Return whether a line ends with a word that no statement ends with, such as "no" or "of"."""
    return line.rstrip()[-1:] not in "_)]" and _last_word(line) in _NEVER_LAST


def _wants_noun(line: str, first: str) -> bool:
    """Return whether a line ends with a word such as "pleural", which a noun follows, and
    `first` may be that noun.
    """
    last = _last_word(line)
    if first in _SURELY_BEGINS or line[-1] in "_)]":
        return False
    if first in _EXTENTS and _SIDE_LAST.search(line) is not None:
        return False
    is_adjective = _ADJECTIVE.fullmatch(last) is not None and last not in _END_LIKE_ADJECTIVES
    return last in _WANTS_NOUN or is_adjective


def _last_word(line: str) -> str:
    parts: Sequence[str] = line.lower().split()
    return parts[-1].strip("\"'([").rpartition("-")[2] if parts else ""


_STOP = re.compile(r"[.!?]+[)\]\"']*")
_LEADER = re.compile(r"(?:[-*•]+\s*|\(?\d{1,2}[.)]\s*(?=\D)|#\s?\d{1,2}[.:)]?\s+)+")
_SPACES = re.compile(r"\s*")
_LETTER = re.compile(r"[^\W\d_]")
_LONGEST_WORD = 40

_BEFORE_NAMES = re.compile(r"drs?|mrs?|ms|prof|st|vs?|e\.?g|i\.?e|cf|fig|approx|ca|viz")
"""Abbreviations that never end a sentence."""

_SHORT_FORMS = re.compile(
    r"[cm]m|ml|cc|ft|[km]g|yrs?|hrs?|mins?|sec|wks?|mos?|etc|inc|dept|resp|lat|ant|sup|inf|rt|lt"
    r"|vol|pts?|bilat|al|md|jr|sr"
)
"""Units and abbreviations that end a sentence only before a capital."""

_LONGEST_SHORT = 6
"""Length of the longest entry in the two lists above, to skip the match for longer words."""

_NUMBERED = re.compile(
    r"grade|type|stage|level|segment|zone|class|category|number|image|series|phase|ribs?"
)
"""Words whose number is part of the sentence, not of a list."""


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, with their punctuation.

    Line wraps are undone; blank lines, list items, and statements on lines of their own end
    sentences, with or without a full stop. List numbers and dashes are removed. Masks (`___`,
    `XXXX`) are kept as words, but sentences of only masks and numbers are left out.
    """
    sentences = []
    for unit in units(clean_spaces(text)):
        content = unit.text if unit.keeps_mark else unit.text[unit.mark :].lstrip()
        for sentence in _split_block(content):
            sentence = sentence[_leader_end(sentence) :].strip()
            is_plain = sentence[:1].isalpha() and "XXXX" not in sentence  # spares a search
            if is_plain or _LETTER.search(sentence.replace("XXXX", "")):
                sentences.append(sentence)
    return sentences


def join_texts(texts: Iterable[str], separator: str = " ") -> str:
    """Return texts, such as the sections of a report, as one text in which no two of them share a
    sentence.

    A text without final punctuation gets a full stop where another one follows. Where that is not
    enough, as after "4 cm." before a small letter, a blank line is between them.
    """
    joined = ""
    for text in texts:
        if not text.strip():
            continue
        if joined:
            joined = end_statement(joined)
            end = " ".join(joined[-_LONGEST_WORD:].split())
            start = " ".join(text[:_LONGEST_WORD].split())
            is_divided = len(end) in itertools.accumulate(map(len, _split_block(f"{end} {start}")))
            joined += separator if is_divided else "\n\n"
        joined += text
    return joined


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return (start, end) in characters of the sentences of `split_sentences` within the text."""
    spans = []
    start = 0
    for sentence in split_sentences(text):
        place = re.compile(r"\s+".join(map(re.escape, sentence.split()))).search(text, start)
        if place is not None:
            spans.append(place.span())
            start = place.end()
    return spans


def _split_block(text: str) -> list[str]:
    """Split text with single blanks into sentences."""
    pieces = []
    start = 0
    leader = _leader_end(text)
    for stop in _STOP.finditer(text):
        word = (
            text[max(start, stop.start() - _LONGEST_WORD) : stop.start()]
            .rpartition(" ")[2]
            .lstrip("([\"'")
        )
        if word.isdecimal() and _opens_next_item(text, start, stop, word):
            end = stop.start() - len(word)
        elif _ends_sentence(text, leader, stop, word):
            end = stop.end()
        else:
            continue
        pieces.append(text[start:end])
        start = end
        leader = _leader_end(text, end)
    return [*pieces, text[start:]]


def _ends_sentence(text: str, leader: int, stop: re.Match[str], word: str) -> bool:
    """Return whether a sentence with a leader up to `leader` ends with the punctuation `stop`,
    which follows `word`.
    """
    after = text[stop.end() : stop.end() + 3]
    if not after:
        return True
    if not word[-1:].isalpha() and leader >= stop.end():
        return False  # the number of a list item
    if not word and stop[0] == "?":
        return False  # a doubt about what follows: "opacity, ? pneumonia"
    if not after.startswith(" "):
        return _lacks_space(word, after)
    if stop[0][0] in "!?" or (len(word) > _LONGEST_SHORT and "." not in word):
        return True
    lower = word.lower()
    following = after[1:2]
    if _BEFORE_NAMES.fullmatch(lower) or _is_initial(text, stop, word):
        return False
    if lower in ("no", "nos") and following.isdigit():
        return False
    if _SHORT_FORMS.fullmatch(lower) or _is_dotted(lower):
        return following.isupper() or following.isdigit()
    return True


def _lacks_space(word: str, after: str) -> bool:
    """Return whether a space is missing: `effusion.No pneumothorax`, `3 cm.No`; not `3.2`,
    `a.m.`, `Ph.D`, `L4.L5`.
    """
    if not after[0].isupper() or _BEFORE_NAMES.fullmatch(word.lower()):
        return False
    if word[-1:].isdigit():
        return after[1:2].islower()
    return word.endswith(("_", ")")) or (
        len(word) > 1 and word[-2:].islower() and not _is_dotted(word.lower())
    )


def _is_dotted(lower: str) -> bool:
    """Return whether a word is single letters with dots: `a.m`, `p.o`, `m.d`."""
    return len(lower) > 1 and all(len(part) == 1 for part in lower.split("."))


def _is_initial(text: str, stop: re.Match[str], word: str) -> bool:
    """Return whether a word is an initial: `Dr. A. Miller`, `A. Miller`; not `hepatitis C. No
    ...`.
    """
    if len(word) != 1 or not word.isupper():
        return False
    before = text[max(0, stop.start() - _LONGEST_WORD) : stop.start() - 1].rstrip()
    previous = before.rpartition(" ")[2]
    return bool(re.fullmatch(r"(?:(?:[A-Z]|drs?|mrs?|ms|prof)\.)?", previous, re.IGNORECASE))


def _opens_next_item(text: str, start: int, stop: re.Match[str], word: str) -> bool:
    """Return whether a number is the next one of a list without full stops: `1. No effusion 2.
    Clear lungs`.
    """
    current = re.match(r"\s*\(?(\d{1,2})[.)]\s", text[start : start + 8])
    if current is None or int(word) != int(current[1]) + 1:
        return False
    if not re.match(r" [A-Z_]", text[stop.end() : stop.end() + 2]):
        return False
    previous = text[max(start, stop.start() - _LONGEST_WORD) : stop.start() - len(word)].split()
    return bool(previous) and not _NUMBERED.fullmatch(previous[-1].lower())


def _leader_end(text: str, start: int = 0) -> int:
    """Return the start of the text after the white space, list number or dash at `start`."""
    first = start + text.startswith(" ", start)
    if text[first : first + 1].isalpha():
        return first  # as most sentences begin
    stripped = _SPACES.match(text, start)
    start = stripped.end() if stripped else start
    leader = _LEADER.match(text, start)
    return leader.end() if leader else start
