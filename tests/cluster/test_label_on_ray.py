"""Labelling on a Ray cluster: the same bytes as by one process, whatever is lost meanwhile."""

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

import amips
from amips import exact
from amips.cli import cli
from amips.cluster import Cluster
from amips.exact import ranges
from helpers import journal_rows, make_world

OPTIONS = {"cells": 24, "val": 300, "test": 300, "cell_targets": True, "memory": 4_000_000}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """5,000 keys, some of them equal, and 3,000 queries in files."""
    folder = tmp_path_factory.mktemp("files")
    keys, queries = make_world(5000, 3000, 16, seed=5)
    keys[[7, 4000]] = keys[2500]
    np.save(folder / "keys.npy", keys)
    np.save(folder / "queries.npy", queries)
    return folder


@pytest.fixture(scope="module")
def here(files):
    """The task by one process."""
    amips.label(files / "keys.npy", files / "queries.npy", out=files / "here", **OPTIONS)
    return files / "here"


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Ranges of 1,024 keys, or of what is left of a block: dozens of tasks."""
    monkeypatch.setattr(ranges, "TASK_PRODUCTS", 1)


def content(task):
    return {path.relative_to(task): path.read_bytes() for path in task.rglob("*") if path.is_file()}


def label(files, out, **options):
    return amips.label(files / "keys.npy", files / "queries.npy", out=out, **{**OPTIONS, **options})


class TestTheSameBytes:
    def test_of_files(self, joined, files, here, tmp_path):
        assert len(list(ranges._bounds(5000, 2000, 1024))) > 4
        label(files, tmp_path / "there", ray="auto")
        assert content(tmp_path / "there") == content(here)

    def test_of_arrays_that_are_handed_over(self, joined, files):
        keys, queries = np.load(files / "keys.npy"), np.load(files / "queries.npy")[:700]
        cells = np.random.default_rng(0).integers(0, 40, len(keys))
        cells[cells == 0] = 1  # an empty cell before the others, one among them, and one behind
        cells[cells == 20] = 21
        import ray

        for wanted in (
            lambda **where: exact.top_k(keys, queries, 7, **where),
            lambda **where: exact.top_k(keys[:1030], queries, 1028, memory=10**8, **where),
            lambda **where: exact.cell_maxima(keys, cells, queries, count=41, **where),
        ):
            for a, b in zip(wanted(), wanted(cluster=Cluster(ray)), strict=True):
                np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("ending", [".npy", ".parquet"])
    def test_of_keys_at_an_address(self, joined, files, here, tmp_path, monkeypatch, ending):
        """Workers read them there, and nothing of them is handed over but what cells need."""
        path = files / "keys.npy"
        if ending == ".parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            path = tmp_path / "keys.parquet"
            pq.write_table(pa.table({"vector": list(np.load(files / "keys.npy"))}), path, row_group_size=900)
        sources = []
        swept = ranges.shared_source
        monkeypatch.setattr(ranges, "shared_source", lambda *a: sources.append(swept(*a)) or sources[-1])
        amips.label(path.as_uri(), files / "queries.npy", out=tmp_path / "there", ray="auto", **OPTIONS)
        assert content(tmp_path / "there") == content(here)
        assert [source.name for source in sources] == [path.as_uri()] * 6

    def test_what_was_begun_there_is_continued_here(self, joined, files, here, tmp_path, monkeypatch):
        """And the other way round: an error ends the first call in the middle."""
        merged, calls = Cluster.merged, []

        def ends_early(self, *arguments):
            for result in merged(self, *arguments):
                calls.append(1)
                if len(calls) == 3:
                    raise KeyboardInterrupt
                yield result

        monkeypatch.setattr(Cluster, "merged", ends_early)
        with pytest.raises(KeyboardInterrupt):
            label(files, tmp_path / "there", ray="auto")
        assert journal_rows(tmp_path / "there" / "train" / "top") > 0
        label(files, tmp_path / "there")
        assert content(tmp_path / "there") == content(here)


class TestWhatIsLost:
    def test_a_worker_is_killed_in_the_middle(self, joined, files, here, tmp_path, monkeypatch):
        """Two of them, each within a task."""
        sweep, marks = ranges.sweep_range, str(tmp_path)

        def killed_at_first(one, x, *rows):
            mark = os.path.join(marks, f"killed-{one.start}")  # noqa: PTH118
            if one.start in (0, 1024) and not os.path.exists(mark):  # noqa: PTH110
                with open(mark, "w"):  # noqa: PTH123
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
            return sweep(one, x, *rows)

        monkeypatch.setattr(ranges, "sweep_range", killed_at_first)
        label(files, tmp_path / "there", ray="auto")
        assert len(list(tmp_path.glob("killed-*"))) == 2
        assert content(tmp_path / "there") == content(here)

    def test_a_node_is_removed_in_the_middle(self, joined, files, here, tmp_path, monkeypatch):
        """With the results that it holds: they are made again elsewhere."""
        sweep, marks = ranges.sweep_range, str(tmp_path)

        def slow(one, x, *rows):
            import ray

            node = ray.get_runtime_context().get_node_id()
            with open(os.path.join(marks, f"ran-{node}"), "a") as file:  # noqa: PTH118, PTH123
                file.write("x")
            time.sleep(0.02)
            return sweep(one, x, *rows)

        monkeypatch.setattr(ranges, "sweep_range", slow)
        extra = joined.add_node(num_cpus=2, object_store_memory=100 << 20)
        joined.wait_for_nodes()
        ran = tmp_path / f"ran-{extra.node_id}"

        def remove():
            end = time.monotonic() + 60
            while not (ran.exists() and ran.stat().st_size >= 3) and time.monotonic() < end:
                time.sleep(0.01)
            joined.remove_node(extra, allow_graceful=False)

        remover = threading.Thread(target=remove)
        remover.start()
        try:
            label(files, tmp_path / "there", ray="auto")
        finally:
            remover.join()
        assert ran.stat().st_size >= 3
        assert content(tmp_path / "there") == content(here)


class TestBackPressure:
    def test_inputs_are_asked_for_as_tasks_end(self, joined):
        import ray

        asked, most = [], []

        def groups():
            for number in range(30):
                asked.append(number)
                yield [(slowly, number)]

        slowly = make_slowly()
        results = []
        for result in Cluster(ray).merged(groups(), lambda parts: parts[0]):
            results.append(result)
            most.append(len(asked) - len(results))
        assert results == list(range(30))
        assert max(most) <= 10

    def test_a_tree_merges_neighbours_in_order(self, joined):
        import ray

        slowly = make_slowly()
        jobs = [[(slowly, [number]) for number in range(count)] for count in (1, 70, 9)]
        merged = Cluster(ray).merged(jobs, lambda parts: [one for part in parts for one in part])
        assert list(merged) == [list(range(1)), list(range(70)), list(range(9))]


def make_slowly():
    def slowly(value):
        import time

        time.sleep(0.01)
        return value

    return slowly


class TestTheCommand:
    def test_it_joins_by_itself_and_shows_nodes_and_rate(self, nodes, files, here, tmp_path, monkeypatch):
        import ray

        ray.shutdown()
        monkeypatch.setattr("amips.progress.SECONDS", 0.0)
        words = ["label", str(files / "keys.npy"), str(files / "queries.npy"), "--out", str(tmp_path / "t")]
        words += ["--cells", "24", "--val", "300", "--test", "300", "--cell-targets", "--memory", "4M"]
        done = CliRunner().invoke(cli, [*words, "--ray", nodes.address], catch_exceptions=False)
        assert done.exit_code == 0
        assert re.search(r"2 nodes, [\d,]+ queries/s", done.stderr)
        assert re.search(r"k-means: .* points, .*, 2 nodes, [\d,]+ points/s", done.stderr)
        assert re.search(r"cells of keys: 100 % of 5,000 keys", done.stderr)
        assert len(set(re.findall(r"top keys: (\d+ %) of 2,400", done.stderr))) > 3  # within one shard, too
        assert content(tmp_path / "t") == content(here)
        assert not ray.is_initialized()

    @pytest.mark.parametrize("ray", ["", "a b", "x\ny", 5, "ray://h:1", "host"])
    def test_what_is_no_address(self, files, ray):
        with pytest.raises(amips.AmipsError, match=r'^ray=.*: expected "auto", "local" or HOST:PORT$'):
            label(files, None, ray=ray)

    def test_nobody_answers(self, files, tmp_path):
        pytest.importorskip("ray").shutdown()
        with pytest.raises(
            amips.AmipsError, match=r"^no Ray cluster can be joined at 127.0.0.1:1: .*ray start"
        ):
            label(files, tmp_path / "t", ray="127.0.0.1:1")
        assert not (tmp_path / "t").exists()

    def test_a_device_beside_it(self, files):
        with pytest.raises(amips.AmipsError, match=r"^device and ray: "):
            label(files, None, ray="auto", device="cpu")

    def test_without_ray(self, files, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(amips.AmipsError, match=r"^ray= needs ray; pip install 'amips\[ray\]'$"):
            label(files, None, ray="auto")


def test_an_error_of_a_task_is_one_line(joined, files, tmp_path, monkeypatch):
    def fails(*job):
        raise ValueError("first\nsecond")

    monkeypatch.setattr(ranges, "sweep_range", fails)
    with pytest.raises(amips.AmipsError, match=r"^a task of the Ray cluster failed: ValueError: first$"):
        label(files, tmp_path / "t", ray="auto")
