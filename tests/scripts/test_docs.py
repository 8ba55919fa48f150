"""The documentation cannot lie: every block of README and docs is run as printed, in order, page by page.

Data are generated such that learning must gain; a page that promises a gain must have one.
"""

import json
import re
import shlex
from dataclasses import replace

import click
import faiss
import numpy as np
import pytest

import amips
from amips.bench import comparison
from amips.cli import cli
from amips.fitting import fitting
from amips.search import Searcher, recalls
from helpers import ROOT, generate

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
N, M, D = 5000, 9000, 64
FIT_MINUTES = 0.3  # in place of what a page says: the data are small
BENCH_MINUTES = 0.02  # ... and a bench trains several routers
# Blocks that show something else than what can be run here, by their first line.
SHOWN = (
    "make ",
    "pip install",
    "git clone",
    "torchrun",
    "CREATE ",
    "docker ",
    "amips data",
    "amips bench task --texts",
)


def blocks(page):
    """(language, text) of every fenced block of a page."""
    return BLOCK.findall(page.read_text())


@pytest.fixture(scope="module")
def data():
    """Keys, a log, and fresh queries."""
    keys, queries = generate(N, M + 500, D, seed=3)
    return keys, queries[:M], queries[M:]


@pytest.fixture
def place(data, tmp_path, monkeypatch):
    """A directory with the files that pages speak of, and little time for a fit."""
    keys, queries, x = data
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "queries.npy", queries)
    np.save(tmp_path / "new_queries.npy", x)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "keys.npy", keys)
    np.save(tmp_path / "data" / "queries.npy", queries)
    write_texts(tmp_path)
    quantizer = faiss.IndexFlatIP(D)
    index = faiss.IndexIVFFlat(quantizer, D, 140, faiss.METRIC_INNER_PRODUCT)
    index.train(keys)
    index.add(keys)
    faiss.write_index(index, str(tmp_path / "products.faiss"))
    real = fitting.Fitting.__init__

    def little(self, work, settings, quiet):
        real(self, work, replace(settings, minutes=min(settings.minutes, FIT_MINUTES)), quiet)

    monkeypatch.setattr(fitting.Fitting, "__init__", little)
    settings = comparison.Settings

    def quick(k, batch, singles, rounds, minutes, *others):
        return settings(k, 64, 4, 1, min(minutes, BENCH_MINUTES), *others)

    monkeypatch.setattr(comparison, "Settings", quick)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(place):
    """A corpus of short texts, and questions about them."""
    rng = np.random.default_rng(0)
    words = ["read", "write", "csv", "file", "matrix", "process", "image", "sound", "graph", "cell", "key"]
    texts = [" ".join(rng.choice(words, 8)) + f" {i}" for i in range(300)]
    for name, some in (("corpus", texts), ("queries", [f"how to {text[:30]}" for text in texts])):
        lines = [json.dumps({"_id": f"{name}-{i}", "title": "", "text": text}) for i, text in enumerate(some)]
        (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def run_commands(text):
    """Lines of a shell block: those of amips in this process, others are for people."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["amips"]:
            cli(words[1:], standalone_mode=False)
        elif words and not line.strip().startswith((*SHOWN, "python ", ". ", "#")):
            pytest.fail(f"nobody runs this line: {line}")


def gained(index, keys, x):
    """How many times fewer FLOPs than plain IVF with the same cells, at the recall on x; that recall."""
    top = np.argsort(-(x @ keys.T), axis=1)[:, :10]
    had = recalls(index.search(x)[1], top, 10).mean()
    plain = index.with_model(None)
    for probes in range(1, plain.c + 1):
        if recalls(plain.search(x, probes=probes)[1], top, 10).mean() >= had:
            return plain.cost(x, probes=probes).flops.mean() / index.cost(x).flops.mean(), had
    return 0.0, had


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_as_printed(page, data, place, capsys):
    keys, queries, x = data
    names = {"keys": keys, "queries": queries, "x": x, "np": np, "product_ids": np.arange(N) + 10**6}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.name}: {text.splitlines()[0]}", "exec"), names)
        elif language == "toml":  # its first line may say what the file is called
            named = re.match(r"# (\S+\.toml)\n", text)
            (place / (named[1] if named else "systems.toml")).write_text(text)
        elif language in ("", "sh") and not text.startswith(SHOWN):
            run_commands(text)
    indexes = [value for value in names.values() if isinstance(value, Searcher) and value.design is not None]
    for index in indexes:
        factor, had = gained(index, keys, x)
        assert had > index.target_recall - 0.04, (page.name, index)
        assert factor > 1, (page.name, index)


def test_a_block_that_fails_is_noticed(data, place):
    with pytest.raises((click.ClickException, amips.AmipsError, SystemExit)):
        run_commands("amips search nowhere keys.npy")
    with pytest.raises(pytest.fail.Exception):
        run_commands("rm -r everything")


def test_pages_have_blocks_to_run():
    counts = {page.name: len([b for b in blocks(page) if b[0] in ("python", "", "sh")]) for page in PAGES}
    assert counts["README.md"] >= 2
    assert counts["your-own-index.md"] >= 2
    assert sum(counts.values()) >= 10


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
