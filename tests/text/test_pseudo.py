"""Pseudo-queries: sentences are found where they are, and what is removed is gone."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amips import AmipsError
from amips.cli import cli
from amips.text.pseudo import LONGEST, SHORTEST, cloze, pseudo_queries, queries
from amips.text.sentences import sentences, words
from amips.text.texts import Text, read_texts


def split(text):
    return [text[start:end] for start, end in sentences(text)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One thing. Another thing! A third?", ["One thing.", "Another thing!", "A third?"]),
        ("It costs 3.14 dollars. Fine.", ["It costs 3.14 dollars.", "Fine."]),
        ("See e.g. Smith et al. 2019 for this. Next.", ["See e.g. Smith et al. 2019 for this.", "Next."]),
        ("Dr. J. R. Smith came. He left.", ["Dr. J. R. Smith came.", "He left."]),
        ("So did I. Then we went.", ["So did I.", "Then we went."]),
        ('He said "stop." Then he left.', ['He said "stop."', "Then he left."]),
        ("He asked why? she answered.", ["He asked why? she answered."]),
        ("Wait... No.", ["Wait...", "No."]),
        (
            "今日は晴れ。明日は雨\uff01「本当\uff1f」はい。",
            ["今日は晴れ。", "明日は雨\uff01", "「本当\uff1f」", "はい。"],
        ),
        ("A line that\n    was wrapped. Two.", ["A line that\n    was wrapped.", "Two."]),
        ("A summary\n\nA paragraph", ["A summary", "A paragraph"]),
        ("Items:\n- one\n- two\n1. three", ["Items:", "- one", "- two", "1. three"]),
        ("Heading\n=======\nBody text.", ["Heading", "Body text."]),
        ("Doc.\n:param x: a number\n:return: none\n>>> f(1)", None),
        ("  \n \n", []),
        ("", []),
    ],
)
def test_sentences(text, parts):
    if parts is None:
        parts = ["Doc.", ":param x: a number", ":return: none", ">>> f(1)"]
    assert split(text) == parts


@given(st.text(alphabet=st.sampled_from(list("aB1 .!?\n-=:。日\t\"'#")), max_size=200))
def test_sentences_are_spans_in_order_and_leave_out_white_space_and_underlines_only(text):
    spans = sentences(text)
    assert all(start < end for start, end in spans)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    rest = text
    for start, end in reversed(spans):
        assert text[start:end] == text[start:end].strip()
        rest = rest[:start] + rest[end:]
    assert set(rest) <= set(" \t\n-=")


def test_a_long_text_without_an_end_takes_no_time():
    assert len(sentences("word. " * 50_000)) == 1
    assert len(sentences("Word. " * 50_000)) == 50_000


@pytest.mark.parametrize(
    ("text", "count"), [("it's a well-known e.g 3.14", 5), ("今日は晴れ。", 5), ("AI は good", 3), ("!?", 0)]
)
def test_words(text, count):
    assert words(text) == count


NOUNS = ["river", "bank", "money", "tree", "stone", "paper", "window", "garden", "engine", "music"]


@st.composite
def passages(draw):
    """Texts of sentences, some of them twice, some too short or too long, some within others."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    made = []
    for _ in range(draw(st.integers(0, 8))):
        size = rng.choice([1, 2, 5, 6, 7, 12, 45])
        sentence = " ".join(rng.choice(NOUNS) for _ in range(size)).capitalize() + "."
        made.append(sentence)
        if rng.random() < 0.2:
            made.append(sentence)
        if rng.random() < 0.2:
            made.append(f"They say: {sentence}")
    text = draw(st.sampled_from([" ", "\n\n", "\n- "])).join(made)
    title = draw(st.sampled_from(["", "Rivers and banks", *made]))
    return Text(draw(st.text(max_size=5)), title, text)


@settings(deadline=None)
@given(passages(), st.integers(0, 6), st.floats(0, 1), st.integers(0, 5))
def test_what_is_removed_is_gone_and_half_is_left(text, per_text, remove, seed):
    made = cloze(text, per_text=per_text, remove=remove, seed=seed)
    whole = " ".join(made.passage.whole.split())
    original = " ".join(text.whole.split())
    drawn = [query for query in made.queries if query.kind == "sentence"]
    assert len(drawn) <= per_text
    assert len({query.text for query in made.queries}) == len(made.queries)
    assert (made.passage.id, made.passage.title) == (text.id, text.title)
    assert words(made.passage.text) >= words(text.text) / 2
    for query in made.queries:
        assert query.text in original
        assert query.source == text.id
        assert (query.text in whole) != query.removed
    for query in drawn:
        assert SHORTEST <= words(query.text) <= LONGEST
    if not any(query.removed for query in made.queries):
        assert made.passage == text
    assert made == cloze(text, per_text=per_text, remove=remove, seed=seed)


@settings(deadline=None, max_examples=50)
@given(st.lists(passages(), max_size=6, unique_by=lambda t: t.id), passages())
def test_other_texts_do_not_change_the_queries_of_a_text(texts, extra):
    alone = list(pseudo_queries(texts))
    if extra.id in {text.id for text in texts}:
        return
    assert list(pseudo_queries([*texts, extra]))[: len(alone)] == alone
    # Before the others too, but for what both ask.
    asked = {query.text for query in pseudo_queries([extra])}
    before = [q for q in pseudo_queries([extra, *texts]) if q.source != extra.id]
    assert before == [query for query in alone if query.text not in asked]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(tmp_path):
    rng = random.Random(0)
    texts = [
        Text(str(i), "", " ".join(" ".join(rng.sample(NOUNS, 6)).capitalize() + "." for _ in range(9)))
        for i in range(40)
    ]
    made = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        queries(texts, out=tmp_path / name, corpus_out=tmp_path / f"{name}.corpus", seed=seed)
        made[name] = (tmp_path / name).read_bytes(), (tmp_path / f"{name}.corpus").read_bytes()
    assert made["a"] == made["b"]
    assert made["a"][0] != made["c"][0]
    assert made["a"][1] != made["c"][1]


def test_the_share_of_removed_sentences_is_what_was_asked_for():
    rng = random.Random(0)
    text = " ".join(" ".join(rng.choices(NOUNS, k=8)).capitalize() + "." for _ in range(30))
    made = list(pseudo_queries([Text(f"{i}", "", text + f" Number {i}.") for i in range(200)], remove=0.7))
    assert len(made) == 30  # they all say the same
    share = (
        sum(query.removed for i in range(200) for query in cloze(Text(f"{i}", "", text), remove=0.7).queries)
        / 600
    )
    assert 0.64 < share < 0.76


def test_titles_and_headings_are_asked_and_stay():
    body = "The river runs past the old bank. The stone bridge crosses it near the garden."
    made = cloze(Text("a", "The Thames", f"# Where the great river runs\n\n{body}"), remove=1.0)
    kinds = {query.text: query.kind for query in made.queries}
    assert kinds["The Thames"] == "title"
    assert kinds["Where the great river runs"] == "heading"
    assert "Where the great river runs" in made.passage.text
    assert sum(query.removed for query in made.queries) == 1  # both would leave less than half
    underlined = cloze(Text("a", "", f"Rivers\n------\n{body}")).queries
    assert [query.text for query in underlined if query.kind == "heading"] == ["Rivers"]
    wrapped = cloze(Text("a", "", "The river runs\npast the old bank.")).queries
    assert [query.kind for query in wrapped] == ["sentence"]


def test_a_passage_of_one_sentence_keeps_it():
    text = Text("a", "", "The river runs past the old bank.")
    made = cloze(text, remove=1.0)
    assert made.passage == text
    assert [(query.text, query.removed) for query in made.queries] == [(text.text, False)]


REST = "Stones and paper. Trees or music. Windows again. Gardens at last. Money and engines. Paper too."


def test_a_sentence_that_stands_twice_is_removed_twice():
    text = f"The river runs past the bank. {REST} The river\nruns past the bank. {REST}"
    made = cloze(Text("a", "", text), remove=1.0)
    assert [(query.text, query.removed) for query in made.queries] == [
        ("The river runs past the bank.", True)
    ]
    assert made.passage.text == f"{REST} {REST}"


@pytest.mark.parametrize(
    ("title", "quoted"),
    [("The river runs past the bank. A tale", ""), ("", "Say: The river runs past the bank.")],
)
def test_a_sentence_whose_words_would_remain_elsewhere_is_not_removed(title, quoted):
    text = Text("a", title, f"The river runs past the bank. {quoted} {REST}")
    for i in range(5):
        made = cloze(text, per_text=1, remove=1.0, seed=i)
        (query,) = [query for query in made.queries if query.kind == "sentence"]
        if query.text == "The river runs past the bank.":
            assert not query.removed
            assert made.passage == text
            return
    raise AssertionError("it was never drawn")


def test_removal_keeps_paragraphs_apart():
    text = (
        "One river and its bank.\n\nTwo rivers and their banks. Three rivers and many banks.\n\nFour of them."
    )
    seen = {cloze(Text(f"{i}", "", text), per_text=1, remove=1.0).passage.text for i in range(30)}
    assert "One river and its bank.\n\nThree rivers and many banks.\n\nFour of them." in seen
    assert "One river and its bank.\n\nTwo rivers and their banks.\n\nFour of them." in seen


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    records = [
        {
            "_id": "x",
            "title": "Rivers",
            "text": "A river runs past the bank. It is wide and deep. It is old too.",
        },
        {"_id": "y", "title": "", "text": "A river runs past the bank."},
        {"_id": "z", "title": "", "text": "Short."},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_writes_queries_and_the_corpus_to_index(corpus, tmp_path, capsys):
    out, index = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    options = ["--out", str(out), "--corpus-out", str(index), "--remove", "1"]
    cli(["queries", str(corpus), *options], standalone_mode=False)
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [row["source"] for row in rows] == ["x"] * 4  # what y asks, x has asked before
    assert {row["text"] for row in rows} >= {"Rivers", "A river runs past the bank."}
    assert len({row["_id"] for row in rows}) == len(rows)
    passages = {text.id: text for text in read_texts(index)}
    assert list(passages) == ["x", "y", "z"]
    for row in rows:
        assert (row["text"] in passages["x"].whole) != row["removed"]
    assert any(row["removed"] for row in rows)
    assert "4 queries of 3 texts, 1 duplicates" in capsys.readouterr().out


def test_without_a_corpus_to_write_nothing_is_removed(corpus, tmp_path):
    made = queries(corpus, out=tmp_path / "q.jsonl", remove=1.0)
    assert made.removed == 0
    assert "true" not in (tmp_path / "q.jsonl").read_text()


def test_mistakes_are_one_line_and_leave_no_file(corpus, tmp_path):
    out = tmp_path / "q.jsonl"
    with pytest.raises(AmipsError, match="different files"):
        queries(corpus, out=out, corpus_out=corpus)
    with pytest.raises(AmipsError, match="probability"):
        queries(corpus, out=out, remove=1.5)
    with pytest.raises(AmipsError, match="id 'a'"):
        queries([Text("a", "T", "x"), Text("a", "T", "y")], out=out)
    with pytest.raises(AmipsError, match="none of 1 texts"):
        queries([Text("a", "", "x")], out=out)
    with pytest.raises(AmipsError, match="not a directory"):
        queries(corpus, out=tmp_path / "no" / "q.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
