"""What all stores share: documents, their keys, filters, fits, crashes, other processes."""

import subprocess
import sys

import numpy as np
import pytest

import amips
from amips.integrations import DocumentIndex, QueryRecorder, StoredDocument
from amips.integrations.conditions import All, Column, Matches, Not, Some, equal, one_of
from amips.integrations.document_keys import DocumentKeys
from helpers import make_world


def documents_of(keys, first=0):
    return [
        StoredDocument(f"d{i}", f"text {i}", {"part": i % 3}, key) for i, key in enumerate(keys, start=first)
    ]


def ids_of(hits):
    return [hit.document.id for hit in hits]


@pytest.fixture
def small():
    return make_world(40, 5, 8, seed=5)


def test_documents_are_there_when_the_store_is_opened_again(small, tmp_path):
    keys, x = small
    with DocumentIndex(tmp_path / "store") as store:
        store.write(documents_of(keys))
        before = ids_of(store.search(x[0], 5))
        store.delete([before[0]])
    with DocumentIndex(tmp_path / "store") as store:
        assert len(store) == 39
        assert ids_of(store.search(x[0], 4)) == before[1:]


@pytest.mark.parametrize("fitted", [False, True])
def test_a_crash_between_documents_and_keys_is_put_right(fitted, tmp_path, monkeypatch):
    keys, queries = make_world(300, 500, 8, seed=6)
    store = DocumentIndex(tmp_path / "store")
    store.write(documents_of(keys[:250]))
    if fitted:
        store.fit(queries, minutes=0.05, recall=0.9)

    def crash(self, written):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DocumentKeys, "follow", crash)
        with pytest.raises(KeyboardInterrupt):
            store.write(documents_of(keys[250:], first=250))
    store.close()
    with DocumentIndex(tmp_path / "store") as again:
        assert (again.index is not None) == fitted
        assert len(again) == 300
        assert ids_of(again.search(keys[299], 1)) == ["d299"]


def test_fitted_and_added_to_afterwards(tmp_path):
    keys, queries = make_world(300, 500, 8, seed=7)
    with DocumentIndex(tmp_path / "store") as store:
        store.write(documents_of(keys[:250]))
        store.fit(queries, minutes=0.05, recall=0.9)
        store.write(documents_of(keys[250:], first=250))
        store.delete(["d0"])
        assert ids_of(store.search(keys[260], 1)) == ["d260"]
        assert "d0" not in ids_of(store.search(keys[0], 10))
        hits = store.search(queries[0], 5, equal("part", 1))
        assert [hit.document.metadata["part"] for hit in hits] == [1] * 5
    with DocumentIndex(tmp_path / "store") as again:
        assert again.index is not None
        assert again.index.n == 299
        assert ids_of(again.search(keys[260], 1)) == ["d260"]


@pytest.fixture
def two(tmp_path):
    """A fitted store that is open twice, as by two processes."""
    keys, queries = make_world(250, 500, 8, seed=7)
    with DocumentIndex(tmp_path / "store") as one, DocumentIndex(tmp_path / "store") as other:
        one.write(documents_of(keys))
        one.fit(queries, minutes=0.05, recall=0.9)
        yield one, other


def test_a_search_between_documents_and_keys_does_not_hide_the_keys(two, monkeypatch):
    one, other = two
    key = 9 * np.eye(8, dtype=np.float32)[3]
    follow = one.keys.follow

    def slow(written):
        other.search(key, 1)
        follow(written)

    monkeypatch.setattr(one.keys, "follow", slow)
    one.write([StoredDocument("new", "", {}, key)])
    assert ids_of(other.search(key, 1, recall=1)) == ["new"]


def test_what_a_writer_left_that_was_cut_off_is_brought_in_line_by_the_next(two, monkeypatch):
    one, other = two
    key = np.eye(8, dtype=np.float32)

    def crash(written):
        raise KeyboardInterrupt

    monkeypatch.setattr(one.keys, "follow", crash)
    with pytest.raises(KeyboardInterrupt):
        one.write([StoredDocument("new", "", {}, 9 * key[3])])
    other.write([StoredDocument("next", "", {}, -9 * key[3])])
    assert ids_of(other.search(key[3], 1, recall=1)) == ["new"]


OTHER = """
import sys, numpy as np
from amips.integrations import DocumentIndex, StoredDocument
with DocumentIndex(sys.argv[1]) as store:
    store.delete(["d1"])
    store.write([StoredDocument("other", "", {}, np.eye(8, dtype=np.float32)[3])])
"""


def test_what_another_process_writes_is_seen(small, tmp_path):
    with DocumentIndex(tmp_path / "store") as store:
        store.write(documents_of(small[0]))
        subprocess.run([sys.executable, "-c", OTHER, str(tmp_path / "store")], check=True, timeout=60)
        assert ids_of(store.search(np.eye(8)[3], 1)) == ["other"]
        assert store.select(["d1"]) == []
        store.write(documents_of(small[0][:1], first=100))
        assert len(store) == 41


@pytest.mark.parametrize("name", ["queries.fvecs", "queries.npy"])
def test_the_log_is_bounded_and_fit_reads_it(name, tmp_path):
    keys, queries = make_world(200, 400, 8, seed=8)
    store = DocumentIndex(log=tmp_path / name, log_size=300)
    store.write(documents_of(keys))
    for x in queries:
        store.search(x, 1)
    recorded = store.recorder.read()
    assert len(recorded) == 300
    np.testing.assert_allclose(recorded, queries[-300:], atol=1e-6)
    assert (tmp_path / name).stat().st_size <= 1.25 * 300 * 4 * 9
    if name.endswith(".npy"):
        np.testing.assert_array_equal(np.load(tmp_path / name)[-300:], recorded)
    store.fit(minutes=0.05, recall=0.9)
    assert store.index is not None
    store.close()


@pytest.mark.parametrize("name", ["queries.fvecs", "queries.npy"])
def test_a_part_of_a_row_in_the_log_is_dropped(name, tmp_path):
    path = tmp_path / name
    recorder = QueryRecorder(path, 10)
    recorder.note(np.ones((2, 3)))
    with path.open("ab") as file:
        file.write(b"\x03\x00")
    recorder.note(np.full(3, 2.0))
    assert recorder.read().tolist() == [[1, 1, 1], [1, 1, 1], [2, 2, 2]]
    recorder.close()


@pytest.mark.parametrize("name", ["queries.fvecs", "queries.npy"])
def test_queries_of_another_dimension_are_not_recorded_and_fail_no_search(name, tmp_path, caplog):
    path = tmp_path / name
    with DocumentIndex(log=path) as store:
        store.write([StoredDocument("a", "", {}, np.ones(3, np.float32))])
        store.search(np.ones(3))
        store.clear()
        store.write([StoredDocument("b", "", {}, np.ones(5, np.float32))])
        assert ids_of(store.search(np.ones(5))) == ["b"]
        assert ids_of(store.search(np.ones(5))) == ["b"]
    assert len(caplog.records) == 1
    assert "dimension 3, this store has 5" in caplog.text
    recorder = QueryRecorder(path)
    np.testing.assert_allclose(recorder.read(), [np.full(3, 3**-0.5)], rtol=1e-6)
    recorder.close()


def test_a_log_that_numpy_saved_is_continued(tmp_path):
    np.save(tmp_path / "queries.npy", np.ones((2, 3), np.float32))
    recorder = QueryRecorder(tmp_path / "queries.npy")
    recorder.note(np.full(3, 2.0))
    recorder.close()
    assert np.load(tmp_path / "queries.npy").tolist() == [[1, 1, 1], [1, 1, 1], [2, 2, 2]]


VALUES = [*range(40_000), 0.1, 1e300, 1e999, -(2**63), 2**70, "a", "b\0", "é", True, float("nan")]


@pytest.mark.parametrize("value", [7, 7.0, 0.1, 1e300, 2**70, -(2**63), "a", "b\0", "é", True])
def test_a_list_of_a_condition_may_be_long(value):
    with DocumentIndex() as store:
        store.write([StoredDocument("in", "", {"f": value}), StoredDocument("out", "", {"f": "c"})])
        assert [one.id for one in store.select(condition=one_of("f", VALUES))] == ["in"]
        assert store.count(Not(one_of("f", VALUES))) == 1
        assert store.count(one_of(Column("id"), [*map(str, range(40_000)), "out"])) == 1


def test_nothing_is_deleted_for_a_filter_that_says_nothing(small):
    with DocumentIndex() as store:
        store.write(documents_of(small[0]))
        empty = [None, All(()), All((All(()),)), Not(Some(())), Some((Not(Some(())), equal("part", 1)))]
        for condition in empty:
            with pytest.raises(amips.AmipsError, match="would delete all"):
                store.delete(condition=condition)
        assert store.delete(["d1", "none"], All(())) == 1
        assert store.delete([]) == 0
        assert len(store) == 39


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("e%", "en", True),
        ("e%", "fen", False),
        ("%n", "en", True),
        ("%n", "ens", False),
        ("e_s", "ens", True),
        ("e_s", "es", False),
        ("%", "", True),
        ("", "", True),
        ("", "a", False),
        ("a%a", "a", False),
        ("a%b%c", "axxbyyc", True),
        ("a%b%c", "axxcyyb", False),
        ("%b_%", "abab", True),
        ("a.c", "abc", False),
        ("a\n%", "a\nb", True),
    ],
)
def test_like(pattern, text, expected):
    with DocumentIndex() as store:
        store.write([StoredDocument("a", "", {"f": text})])
        assert store.count(Matches("f", pattern, like=True)) == expected
        assert store.count(Matches("f", pattern.upper(), ignore_case=True, like=True)) == expected


def test_no_pattern_takes_long():
    with DocumentIndex() as store:
        store.write([StoredDocument("a", "", {"f": "a" * 5000})])
        assert store.count(Matches("f", "%a" * 40 + "b", like=True)) == 0


def test_nothing_is_recorded_unless_asked_for(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with DocumentIndex() as store:
        store.write(documents_of(small[0]))
        store.search(small[1][0])
        with pytest.raises(amips.AmipsError, match="no queries to learn from"):
            store.fit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.search(np.ones(5)), "needs numbers"),
        (lambda store: store.search(np.full(8, np.nan)), "not finite; repair it$"),
        (lambda store: store.search(np.ones(8), recall=5), "recall=5"),
        (lambda store: store.search(np.ones(8), k=-1), "k=-1"),
        (lambda store: store.write([StoredDocument("a", "", {}, np.ones(3, np.float32))]), "shape"),
        (lambda store: store.write([StoredDocument("a", "", {"x": object()})]), "JSON"),
        (lambda store: store.fit(np.ones((9, 8), np.float32)), "40 documents"),
        (lambda store: store.write([], duplicates="maybe"), "duplicates='maybe'"),
    ],
    ids=["dimension", "nan", "recall", "k", "shape", "metadata", "few", "duplicates"],
)
def test_errors_are_one_line_and_change_nothing(small, call, message):
    with DocumentIndex() as store:
        store.write(documents_of(small[0]))
        with pytest.raises(amips.AmipsError, match=message) as caught:
            call(store)
        assert "\n" not in str(caught.value)
        assert len(store) == 40


def test_a_store_has_one_similarity(tmp_path):
    DocumentIndex(tmp_path / "store", similarity="dot").close()
    with pytest.raises(amips.BundleError, match="similarity='dot'"):
        DocumentIndex(tmp_path / "store")
    (tmp_path / "file").write_text("")
    with pytest.raises(amips.BundleError, match="cannot be made: Not a directory"):
        DocumentIndex(tmp_path / "file" / "store")


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("langchain", "langchain_core", "langchain"),
        ("llama_index", "llama_index", "llama-index"),
        ("haystack", "haystack", "haystack"),
        ("sklearn", "sklearn", "sklearn"),
    ],
)
def test_a_missing_library_is_named(module, library, extra):
    code = (
        f"import sys; sys.modules[{library!r}] = None\nimport amips\n"
        f"try: import amips.integrations.{module}\n"
        "except amips.AmipsError as problem: print(problem)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 1
    assert f"pip install 'amips[{extra}]'" in printed


def test_searching_leaves_torch_out():
    code = (
        "import sys, numpy as np, amips.integrations.sklearn\n"
        "from amips.integrations import DocumentIndex, StoredDocument\n"
        "with DocumentIndex() as store:\n"
        "    store.write([StoredDocument('a', '', {}, np.ones(3, np.float32))]); store.search(np.ones(3))\n"
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
