"""The documentation cannot lie: every block of README and docs is run as printed, in order, page by page.

Data are generated such that learning must gain. Every index that a page makes, in Python or on the command
line, is then searched with fresh queries and must need fewer FLOPs than the best plain IVF at the same
recall; every bench must have seen that gain.
"""

import ast
import importlib
import json
import re
import shlex
from dataclasses import dataclass, replace
from types import SimpleNamespace

import click
import faiss
import numpy as np
import pytest

import amips
from amips import backends
from amips.bench import comparison, load_summary, sweep
from amips.builder import Builder
from amips.cli import cli
from amips.files import manifest_kinds
from amips.fitting import fitting
from amips.learn import loop
from amips.metrics import cost_at
from amips.search import Index, WrappedIndex, ladder, recalls
from amips.task import load_task
from helpers import ROOT, generate
from paper.__main__ import cli as experiments

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
N, M, D = 3000, 6000, 64
# In place of the minutes that a page says, because the data are small:
FIT_MINUTES, TRAIN_MINUTES, BENCH_MINUTES = 0.3, 0.15, 0.02
SLACK = 0.04  # the recall on 500 fresh queries may be so far below what was measured on val
# Blocks that show something else than what can be run here, by their first line.
SHOWN = (
    "make ",
    "pip install",
    "git clone",
    "torchrun",
    "CREATE ",
    "docker ",
    "amips data",
    "amips serve",
    "amips bench task --texts",
)
# What a `py` block speaks to that only a library of its own or a running service has; tests/backends and
# tests/serving run those blocks.
FOREIGN = {"table", "client", "schema", "connection", "connect"}
# How many gains there are to be seen on a page, at least: a page that stops making indexes is noticed.
GAINS = {"README.md": 3, "bench.md": 3, "networks.md": 2, "text.md": 1, "your-own-index.md": 5}


def blocks(page):
    """(language, text) of every fenced block of a page."""
    return BLOCK.findall(page.read_text())


@dataclass(frozen=True)
class Yardstick:
    """Fresh queries with their true top keys, and what the best plain IVF costs them."""

    x: np.ndarray
    top: np.ndarray
    flops: np.ndarray
    recall: np.ndarray

    @classmethod
    def of(cls, task, x):
        """Plain IVF of every number of cells of the sweep, every number of probes."""
        top = np.argsort(-(x @ np.asarray(task.keys[:]).T), axis=1, kind="stable")[:, :10]
        builder, points = Builder(task), []
        for cells in sweep(task.n):
            plain = builder.searcher(amips.Design.plain(cells))
            for probes in ladder(cells):
                recall = recalls(plain.search(x, probes=probes)[1], top, 10).mean()
                points.append((plain.cost(x, probes=probes).flops.mean(), recall))
                if recall > 0.995:
                    break
        return cls(x, top, *np.array(points).T)

    def gain(self, index):
        """How many times fewer FLOPs than the best plain IVF at the index's own recall; that recall."""
        recall = recalls(index.search(self.x)[1], self.top, 10).mean()
        return cost_at(self.flops, self.recall, recall) / index.cost(self.x).flops.mean(), recall


@pytest.fixture(scope="module")
def data():
    """Keys, a log, and fresh queries."""
    keys, queries = generate(N, M + 500, D, seed=3)
    return keys, queries[:M], queries[M:]


@pytest.fixture(scope="module")
def yardstick(data):
    keys, queries, x = data
    return Yardstick.of(amips.label(keys, queries), x)


@pytest.fixture
def place(data, tmp_path, monkeypatch):
    """A directory with the files that pages speak of, and little time to train."""
    keys, queries, x = data
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    np.save(tmp_path / "new_queries.npy", x)
    np.save(tmp_path / "new_products.npy", keys[:40])
    write_texts(tmp_path)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(D), D, 128, faiss.METRIC_INNER_PRODUCT)
    index.train(keys)
    index.add(keys)
    faiss.write_index(index, str(tmp_path / "products.faiss"))
    real = fitting.Fitting.__init__

    def little(self, work, settings, *others):
        real(self, work, replace(settings, minutes=min(settings.minutes, FIT_MINUTES)), *others)

    monkeypatch.setattr(fitting.Fitting, "__init__", little)
    monkeypatch.setattr(loop, "DEFAULT_MINUTES", TRAIN_MINUTES)
    settings = comparison.Settings

    def quick(k, batch, singles, rounds, minutes, *others):
        return settings(k, 64, 4, 1, min(minutes, BENCH_MINUTES), *others)

    monkeypatch.setattr(comparison, "Settings", quick)
    # The encoder that needs no time, so that there can be enough texts to gain on.
    (encoder,) = (option for option in cli.commands["embed"].params if option.name == "encoder")
    monkeypatch.setattr(encoder, "default", "wordllama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(place, n=4000, m=9000):
    """A corpus in made-up words, each text on one of many topics, and questions with some of their words."""
    rng = np.random.default_rng(0)
    syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, rng.integers(2, 4))) for _ in range(800)]
    topics = [rng.choice(words, 24, replace=False) for _ in range(60)]
    texts = []
    for _ in range(n):
        topic = topics[rng.integers(len(topics))]
        some = np.where(rng.random((4, 8)) < 0.75, rng.choice(topic, (4, 8)), rng.choice(words, (4, 8)))
        texts.append(" ".join(" ".join(sentence).capitalize() + "." for sentence in some))
    asked = [
        f"how do I {' '.join(rng.choice(re.findall(r'[a-z]+', texts[i].lower()), 6, replace=False))}"
        for i in rng.integers(n, size=m)
    ]
    for name, lines in (("corpus", texts), ("queries", asked)):
        rows = [{"_id": f"{name}-{i}", "title": "", "text": text} for i, text in enumerate(lines)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_commands(text):
    """Lines of a shell block: those of amips in this process, others are for people."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["amips"]:
            cli(words[1:], standalone_mode=False)
        elif words and not line.strip().startswith((*SHOWN, "python ", ". ", "#")):
            pytest.fail(f"nobody runs this line: {line}")


def stand_in():
    """`backends` for a library that is not there: settings are checked, and FAISS holds the keys instead."""

    indexes = {}

    def build(name, keys, directory, *, queries=None, cells=None, address=None, **settings):
        kind = backends.backend_class(name)
        assert set(settings) <= set(kind.settings(*keys.shape)), (name, settings)
        assert cells is None or kind.routable, name
        assert address is None or name in ("pgvector", "milvus"), name
        own = f"stand-in-{directory}"
        index = backends.build("leanvec" if kind.routable else "hnsw", keys, own, cells=cells)
        indexes[directory] = index
        return index

    def load(directory, *, address=None):
        return indexes[directory]

    return SimpleNamespace(build=build, load=load, DropIn=backends.DropIn, names={})


def run_with_stand_ins(text, names, stand_ins):
    """Run a block that needs a library, but for those that are about the library's own objects."""
    tree = ast.parse(text)
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if words.isdisjoint(FOREIGN):
        inside = {**names, **stand_ins.names, "backends": stand_ins}  # later such blocks go on with its index
        exec(compile(tree, text.splitlines()[0], "exec"), inside)
        stand_ins.names["index"] = inside["index"]


class Gains:
    """Looks at what the blocks of a page made, each thing once."""

    def __init__(self, place, yardstick):
        self.place, self.yardsticks = place, {N: yardstick}
        self.seen, self.files, self.count = [], set(), 0

    def look(self, names):
        """Every index among the variables, and every bundle and bench on disk, that was not there before."""
        for value in names.values():
            if any(value is other for other in self.seen):
                continue
            self.seen.append(value)
            if isinstance(value, Index) and value.design is not None:
                self.check(value)
            if isinstance(value, WrappedIndex) and value.target_recall is not None:
                self.check(value)
        for path in sorted(self.place.iterdir()):
            kinds = manifest_kinds(path) if path.is_dir() else set()
            mark = {"bundle": "manifest.json", "summary": "summary.json"}
            for kind in kinds & mark.keys():
                content = (path.name, (path / mark[kind]).read_bytes())
                if content not in self.files:
                    self.files.add(content)
                    self.bundle(path) if kind == "bundle" else self.bench(path)

    def bundle(self, path):
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["router"] == "own":  # which is in the page: the index that it loads with it is looked at
            return
        outside = "design" not in manifest
        self.check(amips.load(path, **({"index": "products.faiss"} if outside else {})))

    def check(self, index):
        """Fresh queries have the recall that was promised, for fewer FLOPs than the best plain IVF."""
        if index.n not in self.yardsticks:
            task = load_task(self.place / "task")
            self.yardsticks[index.n] = Yardstick.of(task, np.asarray(task.test.queries))
        factor, recall = self.yardsticks[index.n].gain(index)
        assert recall > index.target_recall - SLACK, index
        assert factor > 1, (factor, index)
        self.count += 1

    def bench(self, path):
        """The bench has seen it, too."""
        costs = {
            cost["family"]: cost["flops"]
            for cost in load_summary(path).values["costs"]
            if (cost["metric"], cost["recall"]) == ("recall@10", 0.95)
        }
        own = min(
            flops for family, flops in costs.items() if family.startswith("amips") and flops is not None
        )
        assert own < costs["centroid"], (path, costs)
        self.count += 1


@pytest.mark.slow
@pytest.mark.timeout(900)  # a page with three benches, on a machine that others use
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_as_printed_and_gains(page, data, place, yardstick, capsys):
    keys, queries, x = data
    names = {"keys": keys, "queries": queries, "x": x, "np": np}
    gains, stand_ins = Gains(place, yardstick), stand_in()
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.name}: {text.splitlines()[0]}", "exec"), names)
        elif language == "py":
            run_with_stand_ins(text, names, stand_ins)
        elif language == "toml":  # its first line may say what the file is called
            named = re.match(r"# (\S+\.toml)\n", text)
            (place / (named[1] if named else "systems.toml")).write_text(text)
        elif language in ("", "sh") and not text.startswith(SHOWN):
            run_commands(text)
        gains.look(names)
    assert gains.count >= GAINS.get(page.name, 0)


def test_an_index_that_does_not_gain_is_noticed(data, place, yardstick):
    keys, queries, _ = data
    gains = Gains(place, yardstick)
    with pytest.raises(AssertionError):
        gains.look({"index": amips.build(amips.label(keys, queries, cells=35), storage="flat")})


def test_a_block_that_fails_is_noticed(data, place):
    with pytest.raises((click.ClickException, amips.AmipsError, SystemExit)):
        run_commands("amips search nowhere keys.npy")
    with pytest.raises(pytest.fail.Exception):
        run_commands("rm -r everything")
    text = 'backends.build("scann", keys, "my-scann", leafs=1000)'
    with pytest.raises(AssertionError):
        run_with_stand_ins(text, {"keys": data[0]}, stand_in())


def test_pages_have_blocks_to_run():
    known = {"python", "py", "", "sh", "toml", "sql"}
    assert {language for page in PAGES for language, _ in blocks(page)} <= known
    counts = {page.name: len([b for b in blocks(page) if b[0] in ("python", "", "sh")]) for page in PAGES}
    assert counts["README.md"] >= 2
    assert counts["your-own-index.md"] >= 2
    assert sum(counts.values()) >= 10


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_options_and_names_that_pages_mention_exist():
    commands = [*cli.commands.values(), *experiments.commands.values()]
    known = {
        option for command in commands for p in command.params for option in (*p.opts, *p.secondary_opts)
    }
    known |= {"--strict", "--nproc-per-node", "--help"}  # of mypy, of torchrun, of every command
    known |= {"--head", "--address"}  # of ray start
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "paper" / "README.md"]:
        text = page.read_text()
        assert (
            set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"`python bench.*?`", "", text))) <= known
        ), page
        for name in set(re.findall(r"\bamips((?:\.[a-zA-Z_]\w*)+)", text)):
            if not name.endswith((".faiss", ".work")):
                assert has(name[1:].split(".")), f"{page.name}: amips{name}"


def has(parts):
    """Whether amips has such a module, class or function, however deep."""
    value = amips
    for i, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(("amips", *parts[: i + 1])))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def test_the_map_is_the_house():
    """docs/architecture.md names every room, and only files that there are."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "amips"
    table = re.findall(r"^\| ((?:`\w+` ?)+)\|", text[text.index("## Rooms") :], re.MULTILINE)
    rooms = {room for row in table for room in re.findall(r"`(\w+)`", row)}
    there = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms == there - {"__init__", "__main__", "__pycache__", "version"}
    files = re.findall(r"`(\w+(?:/\w+)?\.py)`", text)
    assert len(files) > 20
    assert [file for file in files if not (package / file).exists()] == []
