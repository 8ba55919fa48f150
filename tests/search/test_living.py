"""Keys that come and go: found when a call returns, on disk when a call returns, never half."""

import errno
import gc
import pickle
import shutil
import threading
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import amips
from amips.cli import main
from amips.search import GraphSearcher, Index
from helpers import make_world

N, D, C = 900, 16, 12
CELLS = ["flat", "sq8", "pq", "lean"]
KINDS = [*CELLS, "graph"]


@pytest.fixture(scope="module")
def data():
    keys, queries = make_world(N + 300, 900, D, seed=4)
    return keys[:N], keys[N:], queries


@pytest.fixture(scope="module")
def bundles(data, tmp_path_factory):
    """A bundle of each kind."""
    folder = tmp_path_factory.mktemp("bundles")
    keys, _, queries = data
    task = amips.label(keys, queries, cells=C, val=150, test=100, k=10, out=folder / "task")
    for kind in KINDS:
        options = {"structure": "graph"} if kind == "graph" else {"storage": kind}
        amips.build(task, out=folder / kind, **options)
    return folder


@pytest.fixture(params=KINDS)
def bundle(request, bundles, tmp_path):
    """A bundle of one's own."""
    shutil.copytree(bundles / request.param, tmp_path / "bundle")
    return tmp_path / "bundle"


class Adapted:
    """An adaptation that changes nothing."""

    def fits(self, snapshot):
        return True

    def on(self, snapshot):
        return snapshot


def every(index, x, k=10):
    """All keys scored."""
    return index.search(x, k, recall=1.0)


def check(index, present, queries):
    """The index has these keys, by id, and no others: compared with numpy, every key scored."""
    assert index.n == len(present)
    ids, keys = list(present), np.array(list(present.values()))
    scores, found = every(index, queries[:40])
    true = np.sort(queries[:40] @ keys.T, axis=1)[:, ::-1][:, :10]
    np.testing.assert_allclose(scores[:, : true.shape[1]], true, rtol=1e-4, atol=1e-5)
    place = {one: row for row, one in enumerate(ids)}
    for row, (line, values) in enumerate(zip(found.tolist(), scores, strict=True)):
        known = [one for one in line if one not in (-1, "")]
        assert len(set(known)) == len(known)
        for one, score in zip(known, values, strict=False):
            assert score == pytest.approx(float(queries[row] @ keys[place[one]]), rel=1e-4, abs=1e-5)


def test_added_removed_updated_and_opened_again(bundle, data):
    keys, more, queries = data
    index = amips.load(bundle)
    present = dict(enumerate(keys))
    ids = index.add(more[:200])
    np.testing.assert_array_equal(ids, np.arange(N, N + 200))
    present |= dict(zip(ids.tolist(), more[:200], strict=True))
    check(index, present, queries)
    assert index.remove([3, 4, N + 7]) == 3
    for one in (3, 4, N + 7):
        del present[one]
    check(index, present, queries)
    index.update([10, N + 1], more[200:202])
    present |= {10: more[200], N + 1: more[201]}
    check(index, present, queries)
    index.add(more[202], ids=[10**12])
    present[10**12] = more[202]
    check(index, present, queries)
    again = amips.load(bundle)
    check(again, present, queries)
    np.testing.assert_array_equal(every(again, queries)[1], every(index, queries)[1])
    index.compact()
    check(index, present, queries)
    assert [path.name for path in bundle.glob("changes-*")] == []
    check(amips.load(bundle), present, queries)
    assert again.refresh()
    check(again, present, queries)
    index.close()
    assert again.add(more[203:205]).tolist() == [10**12 + 1, 10**12 + 2]


def test_answers_at_the_recall_asked_for(bundle, data):
    """As many keys again as there were a third of: the recall of the index is nearly what it was."""
    keys, more, queries = data
    index = amips.load(bundle)
    index.add(more)
    whole = np.concatenate([keys, more])
    true = np.argsort(-(queries[-300:] @ whole.T), axis=1)[:, :10]
    for x in (queries[-300:], None):  # many at a time, and one by one
        if x is None:
            ids = np.concatenate([index.search(one)[1] for one in queries[-300:-200]])
        else:
            ids = index.search(x)[1]
        hits = (ids[:, :, None] == true[: len(ids), None]).any(axis=2)
        assert hits.mean() > 0.93


def test_strings_as_ids(bundles, data, tmp_path):
    keys, more, queries = data
    names = [f"key {i}" for i in range(N)]
    index = amips.build(
        amips.label(keys, queries, cells=C, k=10, out=tmp_path / "t"), ids=names, storage="flat"
    )
    index.save(tmp_path / "b")
    with pytest.raises(amips.AmipsError, match="ids of this index are strings"):
        index.add(more[:2])
    index.add(more[:2], ids=["a rather long name for a key", "ü"])
    index.remove(["key 3"])
    index.update(["key 5"], more[5:6])
    again = amips.load(tmp_path / "b")
    for one in (index, again):
        assert every(one, more[0], 1)[1].item() == "a rather long name for a key"
        assert every(one, more[5], 1)[1].item() == "key 5"
    index.compact()
    assert every(index, more[1], 1)[1].item() == "ü"
    with pytest.raises(amips.AmipsError, match="'key 3' is not in this index"):
        index.remove(["key 3"])
    index.add(keys[3], ids=["key 3"])
    assert every(index, keys[3], 1)[1].item() == "key 3"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda index: index.add(np.ones((2, D + 1), np.float32)), f"dimension {D + 1}, this index has {D}"),
        (lambda index: index.add(np.full((2, D), np.nan)), "row 0 has a value that is NaN"),
        (lambda index: index.add(np.ones((2, D)), ids=[1, 10_000]), "id 1 is in this index already"),
        (lambda index: index.add(np.ones((2, D)), ids=[10_000]), "1 ids for 2 keys"),
        (lambda index: index.add(np.ones((2, D)), ids=[10_000, 10_000]), "same id"),
        (lambda index: index.add(np.ones((2, D)), ids=["a", "b"]), "are whole numbers"),
        (lambda index: index.add(np.ones((1, D)), ids=[-1]), "no result"),
        (lambda index: index.add("nothing.npy"), "nothing.npy"),
        (lambda index: index.remove([5, 10_000]), "id 10000 is not in this index"),
        (lambda index: index.remove([5, 5]), "same id"),
        (lambda index: index.remove(["a"]), "are whole numbers, not strings"),
        (lambda index: index.remove([0.5]), "expected whole numbers or strings"),
        (lambda index: index.update([5], np.ones((2, D))), "2 keys for 1 ids"),
        (lambda index: index.update([10_000], np.ones((1, D))), "not in this index"),
        (lambda index: index.update([5], np.full((1, D), np.inf)), "that is infinite"),
    ],
)
def test_what_is_wrong_changes_nothing(bundle, data, call, said):
    index = amips.load(bundle)
    before = every(index, data[2])
    with pytest.raises(amips.AmipsError, match=said) as caught:
        call(index)
    assert "\n" not in str(caught.value)
    for part, expected in zip(every(index, data[2]), before, strict=True):
        np.testing.assert_array_equal(part, expected)
    assert amips.load(bundle).n == index.n == N


def test_info_says_when_to_compact(bundle, data, monkeypatch, capsys):
    """Added keys are worked in again at each load, a graph's link by link."""
    with amips.load(bundle) as index:
        for count, advised in ((N // 20, False), (N // 20, True)):
            index.add(np.tile(data[1][:10], (N // 200 + 1, 1))[:count])
            monkeypatch.setattr("sys.argv", ["amips", "info", str(bundle)])
            assert main() in (0, None)
            out = " ".join(capsys.readouterr().out.split())
            assert (f"{N // 10} keys were added, and are" in out) == advised
            if advised:
                linked = isinstance(index.snapshot, GraphSearcher)
                assert ("linked into its graph" if linked else "placed in its cells") in out
        index.compact()
    assert main() in (0, None)
    assert "amips compact" not in capsys.readouterr().out


def test_nothing_to_do_is_no_change(bundle):
    index = amips.load(bundle)
    assert len(index.add(np.empty((0, D), np.float32))) == 0
    assert len(index.add([])) == 0
    assert index.remove([]) == 0
    index.update([], np.empty((0, D), np.float32))
    assert list(bundle.glob("changes-*")) == []


def test_keys_far_longer_than_all_others_are_named(bundle, data):
    """Queries everywhere want them, and they are in two cells: recall may fall, and is said to."""
    index = amips.load(bundle)
    long = np.concatenate([data[1][:5], 10 * data[1][5:7]])
    if isinstance(index.snapshot, GraphSearcher):  # it visits by score, so long keys are found
        index.add(long)
    else:
        with pytest.warns(UserWarning, match="^2 added keys are more than 2 times as long") as caught:
            index.add(long)
        assert caught[0].filename == __file__
    assert index.n == N + 7


@pytest.mark.parametrize("bundle", CELLS, indirect=True)  # a graph lists nothing
def test_what_was_made_ready_is_brought_up_to_date(bundle, data, monkeypatch):
    """Where many keys were removed, a change does not list anew what is left."""
    index = amips.load(bundle)
    few = index.snapshot._few
    index.remove([5])
    assert index.snapshot._few is few
    index.remove(np.arange(100, 300))
    monkeypatch.setattr("amips.index.matches.Matches.of", lambda *_: 1 / 0)
    index.add(data[1][:20])
    index.remove([N + 3, 7])
    index.update([8], data[1][30:31])
    gone = [5, 7, N + 3, *range(100, 300)]
    keys = np.concatenate([data[0], data[1][:20]])
    keys[8] = data[1][30]
    present = {one: keys[one] for one in range(N + 20) if one not in gone}
    check(index, present, data[2])
    if index.snapshot.store.storage == "flat":
        scores = index.search(data[2][:40], probes=C)[0]
        np.testing.assert_allclose(scores, every(index, data[2][:40])[0], rtol=1e-5, atol=1e-6)


def test_every_key_may_go_and_others_come(bundle, data):
    _, more, queries = data
    index = amips.load(bundle)
    index.remove(np.arange(N))
    assert index.n == 0
    assert (index.search(queries[:5], 3)[1] == -1).all()
    assert (index.search(queries[0], 3)[1] == -1).all()
    for call in (index.compact, lambda: index.audit(queries)):
        with pytest.raises(amips.AmipsError, match="every key was removed"):
            call()
    assert index.explain(queries[0]).n == 0
    index.add(more[:20])
    check(index, dict(zip(range(N, N + 20), more[:20], strict=True)), queries)
    index.compact()
    check(amips.load(bundle), dict(zip(range(N, N + 20), more[:20], strict=True)), queries)


def test_an_id_that_was_removed_never_comes_again_by_itself(bundle, data):
    index = amips.load(bundle)
    (last,) = index.add(data[1][:1])
    index.remove([last])
    index.compact()
    index.close()
    index = amips.load(bundle)
    assert index.add(data[1][:1]).tolist() == [last + 1]
    index.remove([last + 1])
    index.compact()
    assert index.add(data[1][:2]).tolist() == [last + 2, last + 3]


def test_the_largest_id_that_there_is(bundle, data):
    largest = 2**63 - 1
    with amips.load(bundle) as index:
        index.add(data[1][0], ids=[largest])
        with pytest.raises(amips.AmipsError, match="no numbers left"):
            index.add(data[1][1])
        index.compact()
    with amips.load(bundle) as index:
        assert every(index, data[1][0], 1)[1].item() == largest
        index.remove([largest])
        index.compact()
    with amips.load(bundle) as index:
        with pytest.raises(amips.AmipsError, match="no numbers left"):
            index.add(data[1][1])
        index.add(data[1][1], ids=[7 * N])
    with pytest.raises(amips.AmipsError, match="does not fit"):
        amips.load(bundle).add(data[1][2], ids=[2**63])


def test_a_snapshot_that_was_replaced_is_let_go_of(bundles, data):
    """What was worked out for it (as adapted, the log beside it) does not keep its keys."""
    index = Index(amips.load(bundles / "flat").snapshot)
    index._adaptation = Adapted()
    assert index.serving is not None
    index._compare(data[2][:300] + 0.01)  # not those of the log
    before = weakref.ref(index.snapshot)
    index.add(data[1][:1])
    gc.collect()
    assert before() is None


def test_an_index_that_nobody_has_is_let_go_of_at_once(bundles, data):
    """Not when Python next looks for cycles: a service that reloads would hold many."""
    for kind in KINDS:
        index = Index(amips.load(bundles / kind).snapshot)
        index.remove(np.arange(N // 2))
        index.search(data[2][:20], filter=np.arange(N) % 3 == 0)
        before = weakref.ref(index.snapshot)
        gc.disable()
        try:
            del index
            assert before() is None, kind
        finally:
            gc.enable()


def test_a_second_writer_is_refused_until_the_first_is_closed(bundle, data):
    one, other = amips.load(bundle), amips.load(bundle)
    one.add(data[1][:3])
    for call in (lambda: other.add(data[1][3:5]), lambda: other.remove([1]), other.compact):
        with pytest.raises(amips.BundleError, match="is being changed by another") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(amips.BundleError, match="is being changed"):
        amips.load(bundle).save(bundle)
    one.close()
    other.add(data[1][3:5])  # sees what the first has done
    assert other.n == N + 5
    other.close()
    forgotten = amips.load(bundle)
    forgotten.remove([1])
    del forgotten  # lets go by itself
    one.remove([0])
    assert amips.load(bundle).n == N + 3


def test_readers_see_a_newer_state_when_they_refresh(bundle, data):
    writer, reader = amips.load(bundle), amips.load(bundle)
    assert not reader.refresh()
    writer.add(data[1][:5])
    assert reader.n == N
    assert reader.refresh()
    assert reader.n == N + 5
    writer.compact()
    writer.remove([2])
    assert reader.refresh()
    assert reader.n == N + 4
    assert not reader.refresh()


def test_a_torn_last_record_is_dropped_and_a_damaged_one_named(bundle, data):
    with amips.load(bundle) as index:
        index.add(data[1][:5])
        index.remove([1])
    (log,) = bundle.glob("changes-*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    torn = amips.load(bundle)
    assert torn.n == N + 5
    torn.remove([7])  # goes where the torn record was
    torn.close()
    assert amips.load(bundle).n == N + 4
    log.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(amips.BundleError, match="record 1 is damaged"):
        amips.load(bundle)


def test_threads_that_search_see_all_of_an_addition_or_nothing(bundle, data):
    """Each addition brings ten copies of one vector: a search for it finds ten or none, at any moment."""
    index = amips.load(bundle)
    marks = np.linalg.qr(np.random.default_rng(0).standard_normal((D, D)))[0][:8].astype(np.float32) * 50
    stop, problems = threading.Event(), []

    def look():
        rng = np.random.default_rng(threading.get_ident() % 1000)
        while not stop.is_set():
            mark = marks[rng.integers(len(marks))]
            snapshot = index.snapshot
            scores, ids = snapshot.search(mark, 10, recall=1.0)
            count = int((scores > 2000).sum())
            if count not in (0, 10) or len(set(ids[0].tolist())) != 10:
                problems.append((count, ids))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for mark in marks:
            ids = index.add(np.tile(mark, (10, 1)))
            index.remove(ids)
            index.add(np.tile(mark, (10, 1)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []


def test_an_index_in_memory_lives_on_disk_once_it_is_saved(bundles, data, tmp_path):
    index = Index(amips.load(bundles / "lean").snapshot)
    index.add(data[1][:4])
    index.save(tmp_path / "b")
    assert amips.load(tmp_path / "b").n == N + 4
    index.remove([0])
    assert amips.load(tmp_path / "b").n == N + 3
    index.save(tmp_path / "copy")
    index.remove([1])
    assert amips.load(tmp_path / "copy").n == N + 3
    assert amips.load(tmp_path / "b").n == index.n == N + 2


def test_an_audit_of_keys_that_have_changed_since_is_not_adopted(bundle, data):
    index = amips.load(bundle)
    audit = index.audit(data[2][:200])
    index.add(data[1][:5])
    with pytest.raises(amips.AmipsError, match="audit it again"):
        index.adopt(audit)
    assert amips.load(bundle).n == index.n == N + 5
    index.adopt(index.audit(data[2][:200]))
    assert amips.load(bundle).n == index.n == N + 5


def test_an_interrupted_write_leaves_what_was_acknowledged(bundle, data, monkeypatch):
    index = amips.load(bundle)
    index.add(data[1][:3])

    def stop(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("amips.search.changes.os.fdatasync", stop)
        with pytest.raises(KeyboardInterrupt):
            index.add(data[1][3:6])
    assert index.n == amips.load(bundle).n == N + 3
    index.remove([0])
    assert index.add(data[1][6:8]).tolist() == [N + 3, N + 4]
    assert amips.load(bundle).n == N + 4


def test_a_save_to_its_own_place_keeps_what_others_changed(bundle, data):
    one, other = amips.load(bundle), amips.load(bundle)
    with other:
        other.add(data[1][:7])
    one.save(bundle)
    assert one.n == amips.load(bundle).n == N + 7


def test_pickled_with_its_changes(bundle, data):
    index = amips.load(bundle)
    index.add(data[1][:30])
    index.remove([5])
    again = pickle.loads(pickle.dumps(index))
    np.testing.assert_array_equal(every(again, data[2])[1], every(index, data[2])[1])
    assert again.n == index.n


def test_keys_left_on_disk(bundle, data):
    index = amips.load(bundle, mmap=True)
    index.add(data[1][:50])
    index.remove([1])
    check(
        index,
        {**{i: k for i, k in enumerate(data[0]) if i != 1}, **dict(enumerate(data[1][:50], N))},
        data[2],
    )
    index.compact()
    assert amips.load(bundle).n == N + 49


def test_a_signed_bundle_is_not_changed(bundle, data, tmp_path):
    from amips.signing import new_key

    new_key(tmp_path / "key")
    amips.sign(bundle, tmp_path / "key")
    with pytest.raises(amips.AmipsError, match="is signed"):
        amips.load(bundle).add(data[1][:1])


def test_a_disk_that_is_only_read_is_one_line(bundle, data, monkeypatch):
    def refuse(path, *_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    index = amips.load(bundle)
    monkeypatch.setattr("amips.locks.open_lock", refuse)
    with pytest.raises(amips.BundleError, match="only read: save a copy"):
        index.add(data[1][:1])
    check(index, dict(enumerate(data[0])), data[2])


def test_commands(bundle, data, tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["amips", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return end.code or 0
        return 0

    np.save(tmp_path / "more.npy", data[1][:6])
    (tmp_path / "ids.txt").write_text("7\n8\n")
    assert run("add", bundle, tmp_path / "more.npy") == 0
    assert "6 keys added, 906 in all" in capsys.readouterr().out
    assert run("remove", bundle, 3, 4) == 0
    assert run("remove", bundle, "--ids", tmp_path / "ids.txt") == 0
    assert "2 keys removed, 902 left" in capsys.readouterr().out
    np.save(tmp_path / "two.npy", data[1][6:8])
    (tmp_path / "ids.txt").write_text("9\n10\n")
    assert run("update", bundle, tmp_path / "two.npy", "--ids", tmp_path / "ids.txt") == 0
    pq.write_table(pa.table({"price": np.arange(902)}), tmp_path / "prices.parquet")
    assert run("set-attributes", bundle, tmp_path / "prices.parquet") == 0
    assert "attributes of 902 keys: price int64" in capsys.readouterr().out
    assert amips.load(bundle).search(data[1][6], 3, where="price = 5")[1].tolist() == [[9, -1, -1]]
    assert run("compact", bundle) == 0
    assert "902 keys" in capsys.readouterr().out
    assert every(amips.load(bundle), data[1][6], 1)[1].item() == 9
    for words, said in [
        (("remove", bundle), "give ids"),
        (("remove", bundle, 3), "id 3 is not in this index"),
        (("remove", bundle, "x"), "'x' is not an id"),
        (("remove", bundle, "9" * 30), "is not an id"),
        (("remove", bundle, "1_0"), "'1_0' is not an id"),
        (("remove", bundle, "5", "05"), "same id 5"),
        (("remove", bundle, "--", "-3"), "id -3 is not in this index"),
        (("remove", bundle, "--", "--5"), "'--5' is not an id"),
        (("remove", bundle, "--ids", tmp_path), "not a readable text file"),
        *(
            (("remove", bundle, "--ids", written(tmp_path, name, value)), said)
            for name, value, said in (
                ("floats", np.array([1.0, 2.0]), "expected whole numbers or strings"),
                ("mask", np.array([True, False]), "expected whole numbers or strings"),
                ("lone", np.array("5x"), "'5x' is not an id"),
                ("table", np.array([["5", "6"]]), "ids of shape [1, 2]"),
                ("large", np.array([2**63], np.uint64), "does not fit in int64"),
                ("nulls", np.array(["a\0b"]), "is not an id"),
            )
        ),
        (("add", bundle, tmp_path / "nothing.npy"), "does not exist"),
        (("set-attributes", bundle, tmp_path / "nothing.parquet"), "does not exist"),
        (("set-attributes", bundle, tmp_path / "ids.txt"), "cannot be read as a table"),
        (("add", tmp_path, tmp_path / "more.npy"), "manifest.json"),
    ]:
        assert run(*words) == 1
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def written(folder, name, array):
    np.save(folder / f"{name}.npy", array)
    return folder / f"{name}.npy"


@pytest.fixture(scope="module")
def named(bundles, tmp_path_factory):
    """A bundle with strings for ids."""
    path = tmp_path_factory.mktemp("named") / "bundle"
    amips.build(bundles / "task", ids=[f"sku-{i}" for i in range(N)], out=path, storage="flat")
    return path


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["\ud800"], "characters that do not exist"),
        (["x" * 5000], "5,000 characters; 256 at most"),
        (["a\0"], "NUL"),
        (["q", 1.5], "expected whole numbers or strings"),
        (["q", True], "expected whole numbers or strings"),
    ],
)
def test_ids_that_could_not_be_kept_are_refused(named, data, ids, said):
    with pytest.raises(amips.AmipsError, match=said), amips.load(named) as index:
        index.add(data[1][: len(ids)], ids)


def test_one_string_is_an_id(named, data, tmp_path, monkeypatch):
    index = amips.load(shutil.copytree(named, tmp_path / "b"))
    assert index.remove("sku-6") == 1
    (tmp_path / "sku-9").write_text("sku-1\nsku-2\n")
    monkeypatch.chdir(tmp_path)
    assert index.remove("sku-9") == 1  # whatever files there are
    assert index.add(data[1][0], ids="sku-9").tolist() == ["sku-9"]
    index.update("sku-9", data[1][1])
    assert index.n == N - 1
    assert index.search(data[1][1], 1, filter="sku-9")[1].item() == "sku-9"
    assert index.remove(tmp_path / "sku-9") == 2
    with pytest.raises(amips.AmipsError, match=r"'sku-9.txt' is not in this index"):
        index.remove("sku-9.txt")
    (tmp_path / "empty.txt").write_text("")
    assert index.remove(tmp_path / "empty.txt") == 0
    (tmp_path / "holes.txt").write_text("sku-3\n\nsku-4\n")
    with pytest.raises(amips.AmipsError, match=r"holes.txt: line 2 has no id"):
        index.remove(tmp_path / "holes.txt")
