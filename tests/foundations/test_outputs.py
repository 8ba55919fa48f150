"""Where output may go: one contract for every directory and file that amips writes."""

import re

import numpy as np
import pytest

import amips
from amips.errors import AmipsError, TaskError
from amips.extras import check_extra, needs_extra
from amips.files import begin_output, check_output, check_output_file, check_same, is_address, partial
from amips.search import save
from amips.text import embed, get_data, make_queries


def check(path):
    return check_output(
        path, TaskError, what="a task", marks=["task.json", "plan.json"], own=re.compile("data-.")
    )


class TestCheckOutput:
    def test_what_is_free_or_its_own(self, tmp_path):
        assert check(tmp_path / "new") == tmp_path / "new"
        assert check(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"
        assert not (tmp_path / "new").exists()
        (tmp_path / ".hidden").write_text("")
        (tmp_path / "data-a").mkdir()
        assert check(tmp_path) == tmp_path
        (tmp_path / "thesis.tex").write_text("")
        (tmp_path / "plan.json").write_text("")
        assert check(tmp_path) == tmp_path

    def test_what_is_something_else(self, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
            with pytest.raises(
                TaskError, match=f"^{path} exists and is not a task; choose another directory"
            ):
                check(path)

    def test_a_link_to_a_free_directory(self, tmp_path):
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "target")
        assert check(tmp_path / "link") == tmp_path / "link"


class TestCheckOutputFile:
    def test_a_file_that_can_be_written(self, tmp_path):
        assert check_output_file(tmp_path / "hits.npz", AmipsError) == tmp_path / "hits.npz"
        assert check_output_file("hits.npz", AmipsError).name == "hits.npz"

    def test_what_cannot(self, tmp_path):
        with pytest.raises(AmipsError, match="is not a directory"):
            check_output_file(tmp_path / "no" / "hits.npz", AmipsError)
        with pytest.raises(AmipsError, match="it is a directory; name a file"):
            check_output_file(tmp_path, AmipsError)
        with pytest.raises(AmipsError, match=r"^gs://b/hits\.npz is an address, not a file: write locally"):
            check_output_file("gs://b/hits.npz", AmipsError)


class TestBeginOutput:
    def test_begins_continues_and_refuses(self, tmp_path):
        out = tmp_path / "a" / "b"
        plan = {"k": 10, "splits": ("train", "val")}
        for _ in range(2):
            assert begin_output(out, plan, TaskError, what="a task", mark="plan.json") == out
        with pytest.raises(
            TaskError, match=r"holds a task of other inputs or options \(k, seed\); choose another"
        ):
            begin_output(out, {**plan, "k": 9, "seed": 1}, TaskError, what="a task", mark="plan.json")
        with pytest.raises(TaskError, match="a exists and is not a task"):
            begin_output(tmp_path / "a", plan, TaskError, what="a task", mark="plan.json")

    def test_the_same_is_let_through(self, tmp_path):
        check_same(tmp_path, {"a": 1}, {"a": 1, "b": None}, TaskError, "a task")


class TestPartial:
    def test_a_file_appears_whole(self, tmp_path):
        path = tmp_path / "x.npy"
        with partial(path) as temporary:
            np.lib.format.open_memmap(temporary, "w+", np.float32, (2, 3))[:] = 1
            assert not path.exists()
        assert np.load(path).tolist() == [[1, 1, 1], [1, 1, 1]]
        assert list(tmp_path.iterdir()) == [path]

    def test_a_directory_never_takes_the_place_of_another(self, tmp_path):
        """That takes two renames: killed between them, neither would be there."""
        path = tmp_path / "texts"

        def write(content):
            with partial(path) as temporary:
                temporary.mkdir()
                (temporary / content).write_text("")

        write("old")
        with pytest.raises(OSError, match="not empty"):
            write("new")
        assert [file.name for file in path.iterdir()] == ["old"]
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("kind", ["file", "directory"])
    def test_a_failure_leaves_what_was_there(self, tmp_path, kind):
        path = tmp_path / "x"
        path.write_text("before")

        def fail():
            with partial(path) as temporary:
                temporary.write_text("half") if kind == "file" else temporary.mkdir()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["s3://bucket/b", "gs://b", "http://host/x", "hf://datasets/x", "s3:/bucket/b"]
)
def test_addresses(text):
    assert is_address(text)


@pytest.mark.parametrize("text", ["a/b", "/a/b", "./s3", "C:/a", "keys.parquet:id", "a:b", "~/x"])
def test_paths(text):
    assert not is_address(text)


@pytest.mark.parametrize(
    "write",
    [
        lambda task, out: amips.label(task.keys, task.train.queries, out=out),
        lambda task, out: amips.train(task, amips.Linear(), out=out),
        lambda task, out: amips.build(task, out=out),
        lambda task, out: amips.fit(task.keys, task.train.queries, out=out),
        lambda task, out: save(None, out),
        lambda task, out: embed([], out=out),
        lambda task, out: get_data("beir/fiqa", out, source="nowhere"),
        lambda task, out: make_queries("nowhere.jsonl", out=out),
    ],
    ids=["label", "train", "build", "fit", "save", "embed", "data", "queries"],
)
def test_an_address_as_output_is_refused_in_one_line(task, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        AmipsError, match=r"^s3://bucket/b is an address, not a (directory|file): write locally"
    ) as caught:
        write(task, "s3://bucket/b")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class TestExtras:
    def test_says_which_extra_brings_a_module(self):
        with pytest.raises(AmipsError, match=r"^it needs no-such-module; pip install 'amips\[formats\]'$"):  # noqa: SIM117
            with needs_extra("it", "formats", "no_such_module"):
                import no_such_module  # noqa: F401
        with pytest.raises(AmipsError, match=r"^it needs no-such-module; pip install 'amips\[text\]'$"):
            check_extra("it", "text", "json", "no_such_module")

    def test_other_modules_are_not_its_matter(self):
        """A module of amips itself that is missing is not the fault of the library."""
        with pytest.raises(ModuleNotFoundError), needs_extra("it", "formats", "h5py"):
            import amips.no_such_module  # noqa: F401
        check_extra("it", "text", "json")
