"""What tests share: a small world of keys in clusters, queries that come from elsewhere, a silent backend."""

import importlib.util
import json
import re
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

import amips
from amips.backends.backend import Backend
from amips.design import Design
from amips.files import digest_of
from amips.nets import Linear, Recipe
from amips.rowfiles import JOURNAL

ROOT = Path(__file__).parent.parent
RATE = 2e10  # FLOPs a second: of an ordinary core


def parameter_id(value):
    """A name for a parameter: its text without addresses in memory, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def reseal(path, **changes):
    """Change fields of a manifest and state the digest that it then has, as a forger would."""
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))


def make_world(n, m, d, seed):
    """Unit-norm float32 keys [n, d] and queries [m, d] of different distributions.

    Keys lie in clusters; a query is a noisy mixture of two cluster centres, moved by a common shift.
    """
    rng = np.random.default_rng(seed)
    count = max(2, min(12, n // 8))
    centres = rng.standard_normal((count, d))
    shift = rng.standard_normal(d)
    keys = centres[rng.integers(count, size=n)] + 0.5 * rng.standard_normal((n, d))
    share = rng.random((m, 1))
    first, second = centres[rng.integers(count, size=(2, m))]
    queries = share * first + (1 - share) * second + 0.7 * shift + 0.3 * rng.standard_normal((m, d))
    return unit(keys), unit(queries)


def generate(n, m, d, seed=0):
    """Topics with variation in directions of falling weight; queries say less, in a style of their own."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.sqrt(1 + np.arange(d))
    topics = rng.standard_normal((n // 50, d))
    keys = unit((topics[rng.integers(0, len(topics), n)] + 0.8 * rng.standard_normal((n, d))) * weight)
    asked = keys[rng.integers(0, n, m)] * np.where(np.arange(d) < d // 3, 1.0, 0.4)
    style = unit(rng.standard_normal((1, d)) * weight)
    noise = rng.standard_normal((m, d)) * weight / np.linalg.norm(weight)
    return keys, unit(asked + 0.7 * style + 0.5 * noise)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def with_linear(cells, **fields):
    """Plain IVF but for what chooses cells: a trained linear router of full rank."""
    return replace(Design.plain(cells), **{"router": Linear(rank=0), "recipe": Recipe(), **fields})


def journal_rows(folder):
    """How many rows an unfinished result has safely on disk."""
    try:
        text = (folder / JOURNAL).read_text()
    except FileNotFoundError:
        return 0
    return int(text.split('"rows": ')[1].split(",")[0])


def kill_when(process, ready, seconds=60):
    """Kill a process without warning as soon as `ready()`; it must not have ended by itself."""
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL


class Silent(Backend):
    """A backend that looks at the first quarters of the keys, and tells nothing of it."""

    title, budget = "ScaNN", "nothing"

    def __init__(self, keys):
        self.keys, (self.n, self.d) = keys, keys.shape

    def find(self, x, k, budget):
        scores = x @ self.keys[: budget * self.n // 4].T
        ids = np.argsort(-scores, axis=1)[:, :k]
        return np.take_along_axis(scores, ids, 1), ids

    def budgets(self):
        return [1, 2, 3, 4]

    @classmethod
    def settings(cls, n, d):
        return {}

    @classmethod
    def make(cls, given, directory):
        np.save(directory / "keys.npy", given.keys.load())
        return ["keys.npy"]

    @classmethod
    def open(cls, directory, n, d, settings, address):
        return cls(np.load(directory / "keys.npy"))


def load_script(name):
    """A script of benchmarks/ as a module."""
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_build(task, model=None, **options):
    """`amips.build` of the simplest index, each key in one cell and in float32, but for what options say."""
    return amips.build(task, model, **{"storage": "flat", "spill_fraction": 0.0, **options})


class Words:
    """A bag of words: every word is one random direction."""

    name, d = "words", 32

    def encode(self, texts):
        rows = np.zeros((len(texts), self.d), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(self.d)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)
