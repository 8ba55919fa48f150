"""A light sentence splitter for prose and docstrings: spans of a text, none of its characters changed."""

import re

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han: written without spaces
CJK_STOPS = "\u3002\uff01\uff1f\uff61"  # the full stop, ! and ? of those scripts
QUOTES_BEFORE, QUOTES_AFTER = "\"'\u2018\u201c", "\"'\u2019\u201d"

# Words that end in a full stop without ending a sentence; single letters (initials) are known by shape.
_ABBREVIATIONS = """
    a.m al approx apr art aug ca cf ch co col corp dec dept dr e.g ed eds eg eq eqs esp est et etc feb
    fig figs gen gov i.e ie inc jan jr jul jun lt ltd mar mr mrs ms mt no nov nr oct op p.m pp prof ref
    refs rep resp sec sect sen sep sept sr st tab u.k u.s viz vol vs w.r.t
"""
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())

# A paragraph ends at an empty line, at a line of dashes or the like (it underlines a heading), and before a
# line that opens a list item, a field or a doctest: within it, a newline is only where a line was wrapped.
_OPENER = r"(?:[-*+•]\s|\d{1,3}[.)]\s|:\w[^:\n]*:|@\w|>>>|\.\.\s|#+\s)"
_PARAGRAPH = re.compile(rf"\n[ \t]*(?:[-=~^`*]{{3,}}[ \t]*(?:\n\s*|$)|\n\s*|(?={_OPENER}))")
_STOP = re.compile(rf"[.!?…]+[{QUOTES_AFTER})\]]*(?=\s)|[{CJK_STOPS}]+[\u300d\u300f\u201d\uff09]*")
_WORD = re.compile(r"\w+(?:['\u2019.\-]\w+)*")
_CJK = re.compile(f"[{CJK}]")
_NEXT = re.compile(r"\s*(\S?)")


def words(text: str) -> int:
    """How many words there are; where none are set apart by spaces (Chinese, Japanese), characters."""
    apart, characters = _CJK.subn(" ", text)
    return characters + len(_WORD.findall(apart))


def sentences(text: str) -> list[tuple[int, int]]:
    """Where the sentences of a text are: (start, end) in order, without the white space around them."""
    spans: list[tuple[int, int]] = []
    start = 0
    breaks = [*((m.start(), m.end()) for m in _PARAGRAPH.finditer(text)), (len(text), len(text))]
    for end, following in breaks:
        for stop in [*(m.end() for m in _STOP.finditer(text, start, end) if _ends(text, m, end)), end]:
            part = text[start:stop]
            if kept := part.strip():
                first = start + len(part) - len(part.lstrip())
                spans.append((first, first + len(kept)))
            start = stop
        start = following
    return spans


def _ends(text: str, stop: re.Match[str], end: int) -> bool:
    """Whether a stop ends a sentence: not after an abbreviation or an initial, nor before small letters."""
    if stop[0][0] in CJK_STOPS:
        return True
    following = _NEXT.match(text, stop.end(), end)
    if following is not None and following[1].islower():
        return False
    if stop[0][0] != ".":
        return True
    before = text[max(0, stop.start() - 20) : stop.start()]
    word = before.split()[-1].lstrip("([" + QUOTES_BEFORE) if before.strip() else ""
    if word.isdigit() and before.removesuffix(word).rstrip(" \t")[-1:] in ("", "\n"):
        return False  # the number of a list item
    return word.lower() not in ABBREVIATIONS and not (len(word) == 1 and word.isalpha() and word != "I")
