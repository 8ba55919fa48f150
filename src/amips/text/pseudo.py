"""Pseudo-queries from a corpus alone, by inverse cloze: a sentence asks for the passage it was taken from.

A query that stands verbatim in its passage is too easy: it is found by its own words. So a sentence that
became a query is, with probability `remove`, taken out of the passage. One corpus is indexed, and every
query of a passage meets the same one; hence a rule for the passage as a whole:

1. The sentences of useful length (4 to 40 words, mostly letters) are drawn without replacement.
2. One draw after another, a sentence that is to be removed is removed, wherever it stands in the text, if at
   least half of the words of the original text are left after it and all that were removed before.
   Otherwise it stays, and is a query all the same; so a passage of a single sentence keeps it.
3. Titles and headings are queries too, beside the `per_text` sentences. They are never removed: they are
   how people name things, and what is indexed would be poorer without them.

What is drawn for a text depends on the seed, on its id and on its own words, so the queries of one text do
not change when others are added. After that, a query that some text before has asked is left out.
"""

import random
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from amips.errors import AmipsError
from amips.files import check_output_file
from amips.progress import Bar
from amips.text.digests import SIZE, Digests, digest
from amips.text.lines import line, writing
from amips.text.sentences import CJK_STOPS, sentences, words
from amips.text.texts import Text, read_texts

Kind = Literal["sentence", "title", "heading"]

SHORTEST, LONGEST = 4, 40  # words of a sentence that is useful as a query
LONGEST_TITLE = 20  # a longer one is prose
KEPT = 0.5  # of the words of a text, at least, after every removal
ID_KEY = 10  # bytes of an id's digest; those after it are of its text
LETTERS = 0.6  # of the characters of a query, at least: the rest is code and tables

_OPEN_ENDED = ".!?…,;:" + CJK_STOPS  # what no heading ends in
_HEADING = re.compile(r"[#=* \t]*(\w[^\n]*?)[#=* \t]*(?:\n|$)")

_NOT_LETTERS = re.compile(r"[\W\d_]+")
_MARK = re.compile(r"^(?:[-*+•#=]+|\d{1,3}[.)])\s+")


@dataclass(frozen=True)
class PseudoQuery:
    """A query and the passage it came from; `removed` if its words are no longer in that passage."""

    id: str
    text: str
    source: str
    kind: Kind
    removed: bool


@dataclass(frozen=True)
class Cloze:
    """A passage as it is to be indexed, and the queries that ask for it."""

    passage: Text
    queries: list[PseudoQuery]


@dataclass(frozen=True)
class Counts:
    """How many texts there were, how many queries they gave, and how many of these were removed."""

    texts: int
    queries: int
    removed: int
    duplicates: int


def cloze(text: Text, *, per_text: int = 3, remove: float = 0.9, seed: int = 0) -> Cloze:
    """Draw the queries of one text and take out of it what is removed."""
    rng = random.Random(int.from_bytes(digest(f"{seed}\0{text.id}"), "big"))
    names = dict(_names(text))
    spans: dict[str, list[tuple[int, int]]] = {}
    for start, end in sentences(text.text):
        spans.setdefault(_said(text.text[start:end]), []).append((start, end))
    useful = [sentence for sentence in spans if sentence not in names and _useful(sentence)]
    # random() alone, of all methods, is promised to draw the same in every version of Python.
    drawn = sorted(useful, key=lambda _: rng.random())[:per_text]
    passage, gone = text, list[tuple[int, int]]()
    fewest = max(1.0, KEPT * words(text.text))
    removed: set[str] = set()
    for sentence in drawn:
        if rng.random() < remove:
            left = Text(text.id, text.title, _without(text.text, gone + spans[sentence]))
            # Words that also stand in the title or within a longer sentence would remain: they all stay.
            if words(left.text) >= fewest and sentence not in _flat(left.whole):
                passage, gone = left, gone + spans[sentence]
                removed.add(sentence)
    # Two removals join what stood around them, which might spell what one of them took out.
    whole = _flat(passage.whole)
    kinds: dict[str, Kind] = names | dict.fromkeys(drawn, "sentence")
    queries = [
        PseudoQuery(f"{text.id}#{i}", query, text.id, kind, query in removed and query not in whole)
        for i, (query, kind) in enumerate(kinds.items())
    ]
    return Cloze(passage, queries)


def pseudo_queries(
    texts: Iterable[Text], *, per_text: int = 3, remove: float = 0.9, seed: int = 0
) -> Iterator[PseudoQuery]:
    """The queries of all texts in their order, each query once; memory for a digest of each."""
    for one, _ in _all(texts, per_text, remove, seed):
        yield from one.queries


def queries(
    corpus: str | Path | Iterable[Text],
    *,
    out: str | Path,
    corpus_out: str | Path | None = None,
    per_text: int = 3,
    remove: float = 0.9,
    seed: int = 0,
    progress: bool = False,
) -> Counts:
    """Write the pseudo-queries of a corpus as JSON lines: _id, text, source, kind, removed.

    `source` is the id of the passage that a query came from: split by it.

    Args:
        corpus: A file of texts, or texts.
        out: The file of queries to make.
        corpus_out: The corpus to index, without the sentences that were removed. When it is not given the
            corpus is to be indexed as it is, and nothing is removed.
        per_text: Sentences drawn from each text, beside its title and heading.
        remove: The probability with which a sentence is removed, where the rule above allows it.
    """
    _check(per_text, remove)
    paths = [check_output_file(p, AmipsError).resolve() for p in (out, corpus_out) if p is not None]
    if isinstance(corpus, str | Path):
        paths.append(Path(corpus).resolve())
    if len(set(paths)) < len(paths):
        raise AmipsError("the corpus, out and corpus_out must be different files")
    texts = read_texts(corpus, empty=True) if isinstance(corpus, str | Path) else corpus
    count = asked = removed = duplicates = 0
    with ExitStack() as stack:
        shown = stack.enter_context(Bar(0, "queries", "texts", progress))
        # Entered in this order, closed in the other: the corpus is in place before the queries that need it.
        to = stack.enter_context(writing(out))
        kept = None if corpus_out is None else stack.enter_context(writing(corpus_out))
        for one, lost in _all(texts, per_text, remove if kept is not None else 0.0, seed):
            for query in one.queries:
                record = {"_id": query.id, "text": query.text, "source": query.source}
                to.write(line({**record, "kind": query.kind, "removed": query.removed}))
            if kept is not None:
                passage = one.passage
                kept.write(line({"_id": passage.id, "title": passage.title, "text": passage.text}))
            count, asked, duplicates = count + 1, asked + len(one.queries), duplicates + lost
            removed += sum(query.removed for query in one.queries)
            shown.update()
        if asked == 0:
            raise AmipsError(
                f"none of {count:,} texts has a title or a sentence of {SHORTEST} to {LONGEST} words: "
                "no queries can be made of them"
            )
    return Counts(count, asked, removed, duplicates)


def _all(texts: Iterable[Text], per_text: int, remove: float, seed: int) -> Iterator[tuple[Cloze, int]]:
    """Each text with the queries that no text before it had, and how many were left out."""
    _check(per_text, remove)
    asked, ids = Digests(), Digests(key=ID_KEY)
    for text in texts:
        entry = digest(text.id, ID_KEY) + digest(f"{text.title}\n{text.text}", SIZE - ID_KEY)
        if (before := ids.put(entry)) is not None:
            if before == entry:  # the same text again has nothing more to ask
                continue
            raise AmipsError(f"two texts have the id {text.id!r}: give every text its own")
        one = cloze(text, per_text=per_text, remove=remove, seed=seed)
        new = [query for query in one.queries if asked.put(digest(query.text)) is None]
        yield Cloze(one.passage, new), len(one.queries) - len(new)


def _check(per_text: int, remove: float) -> None:
    if per_text < 0:
        raise AmipsError(f"per_text is {per_text}; it must be 0 or more")
    if not 0 <= remove <= 1:
        raise AmipsError(f"remove is {remove}; it is a probability, from 0 to 1")


def _flat(text: str) -> str:
    return " ".join(text.split())


def _said(sentence: str) -> str:
    """A sentence as a query: on one line, without the mark of a list item or of a heading before it."""
    return _MARK.sub("", _flat(sentence))


def _useful(text: str) -> bool:
    if not SHORTEST <= words(text) <= LONGEST:
        return False
    return len(_NOT_LETTERS.sub("", text)) >= LETTERS * len(text.replace(" ", ""))


def _names(text: Text) -> Iterator[tuple[str, Kind]]:
    """The title, and the first line where it looks like a heading: short, no full stop, more below it."""
    title = _flat(text.title)
    if 0 < words(title) <= LONGEST_TITLE:
        yield title, "title"
    top = text.text.lstrip()
    match = _HEADING.match(top)
    if match is None or not (below := top[match.end() :]).strip():
        return
    name = _flat(match[1])
    # A heading stands alone: marked (# ...), above an underline or an empty line. Else a line was wrapped.
    alone = top[0] in "#=" or re.match(r"[ \t]*(?:\n|[-=~^*]{3,}[ \t]*\n)", below) is not None
    if alone and 0 < words(name) <= LONGEST_TITLE and name[-1] not in _OPEN_ENDED:
        yield name, "heading"


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """A text without some of its sentences; of the white space around each, the part with more newlines."""
    ends = [(0, 0), *sorted(spans), (len(text), len(text))]
    kept = ""
    for (_, end), (start, _) in pairwise(ends):
        before, after = kept.rstrip(), text[end:start].lstrip()
        gaps = kept[len(before) :], text[end : start - len(after)]
        kept = before + max(gaps, key=lambda gap: gap.count("\n")) + after
    return kept.strip()
