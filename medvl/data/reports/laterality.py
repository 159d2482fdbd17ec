"""Exchange of left and right in radiology text, so that the report of a mirrored image stays true.

Exchanged: the words (left, right, left-sided, rightward, leftmost), lobes, zones, quadrants and lines that begin with
their side (RLL and LLL, RIJ and LIJ), a single L or R before a paired structure or in a comparison (`R pleural
effusion`, `L PICC`, `R > L`), and words with a Latin side (dextroscoliosis). A right middle lobe becomes a left middle
lobe, which exists only in a mirrored image.

Not exchanged: names that contain a side. Chambers, coronary arteries and bundle branches keep their names, and heart
failure stays left or right. Positions are exchanged, also those of the heart: `right heart border` becomes `left heart
border`. `left in place` has no side. Anatomy that is named without a side (the aortic knob, the gastric bubble, the
lingula) is mirrored in the image but not in the text.
"""

import re


def _both_ways(*pairs: tuple[str, str]) -> dict[str, str]:
    """Return a table of words to their counterparts, in lower case, title case and capitals."""
    table: dict[str, str] = {}
    for one, other in (*pairs, *((other, one) for one, other in pairs)):
        table |= {one: other, one.title(): other.title(), one.upper(): other.upper()}
    return table


_COUNTERPART = _both_ways(("left", "right"), ("lt", "rt"), ("dextro", "levo"), ("l", "r"))

# Matched after the side. Both sides are treated alike, so that swapping twice returns the original text.
_NAMES = (
    r"ventric\w+|atri(?:al|um|a)\b|auric\w+|bundle|coronar\w+|main coronar\w+|(?:anterior )?fascic\w+"
    r"|anterior descending|circumflex|shunt|to[- ](?:left|right)[- ]shunt"
    r"|(?:heart|cardiac) (?:failure|strain|catheter\w*|disease|enlargement|dysfunction|dilat\w+|chambers?|pressures?)"
)
_NO_SIDE = r"(?:in|as) (?:place|situ|is)\b|against|ama\b|now\b|away\b|the (?:hospital|emergency|ward)\b"
_TWO_SIDED = (
    r"sided?|lungs?|lobes?|lower|upper|mid|middle|bas(?:e|es|al|ilar)|hil(?:um|ar)|apex|apical|apices|hemi\w+|pleural"
    r"|effusions?|pneumothora\w+|ptx|chest|costophrenic|cpa?|internal|ij|subclavian|sc|picc|port|pacer|pacemaker"
    r"|axill\w+|clavic\w+|shoulder|ribs?|humer\w+|breast|paratracheal|perihilar|retrocardiac|infrahilar|suprahilar"
    r"|main|arm|pigtail|lateral|anterior|posterior|medial|diaphragm\w*|pneumonia|consolidation|atelectasis|opacit\w+"
)
_SIDE = re.compile(
    r"\b(?P<word>(?i:left|right))(?=(?:wards?|most|sided|hand)?\b)"
    rf"(?![- ]?(?i:sided)?[- ](?i:(?:(?:and|or) (?:left|right) )?(?:{_NAMES})|{_NO_SIDE}))"
    r"|\b(?P<latin>(?i:dextro|levo))(?=-?(?i:scoli|rotoscoli|rotat|curv|conv|cardia|posit))"
    r"|\b(?P<part>[LR])(?=(?:[UML]L|[UML]Z|[UL]Q|[UL]E|IJV?|SCV?|LD)\b)|\b(?P<small>[lr])(?=[uml]l\b)"
    rf"|\b(?P<short>[LR]t?|[lr]t)(?=\.?[- ](?i:{_TWO_SIDED})\b)"
    r"|(?<=\()(?P<marker>[LR])(?=\))"
    r"|\b(?P<more>[LR])(?= ?[<>=/] ?[LR]\b)|(?:(?<=[LR][<>=/])|(?<=[LR] [<>=] ))(?P<less>[LR])\b"
)


_PLACE = re.compile(
    r"\b(?:upper|lower|middle|mid|top|bottom|superior\w*|inferior\w*|api(?:x|cal|ces)|bas(?:al|ilar|e|es|ally)|above|below"
    r"|clockwise|horizontal\w*|vertical\w*)\b",
    re.IGNORECASE,
)


def names_side(text: str) -> bool:
    """Return whether a text names a side, so that it contradicts a mirrored image."""
    return _SIDE.search(text) is not None


def names_place(text: str) -> bool:
    """Return whether a text names a side or a height, so that it contradicts an image turned by a right angle."""
    return names_side(text) or _PLACE.search(text) is not None


def swap_laterality(text: str) -> str:
    """Return `text` with left and right exchanged (see the module docstring). Swapping twice returns `text`."""
    return _SIDE.sub(lambda match: _COUNTERPART.get(match[0], match[0]), text)
