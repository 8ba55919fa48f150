"""The rooms of the package: who may import whom, and who may import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import amips
from helpers import ROOT

PACKAGE = Path(amips.__file__).parent

# A room may import from rooms before it only.
ORDER = [
    # Foundations.
    *(
        "version",
        "terminal",
        "errors",
        "arguments",
        "extras",
        "untrusted",
        "locks",
        "files",
        "signing",
        "npy",
        "scratch",
    ),
    *("resources", "progress", "tables", "publishing"),
    "native",
    "blas",
    "cluster",
    "vectors",
    "rowfiles",
    "device",
    "exact",
    "lean",
    "metrics",
    "cells",
    "graph",
    "task",
    "nets",
    "routers",
    "learn",
    "design",
    "index",
    "search",
    "builder",
    "fitting",
    "sharding",
    "capacity",
    "backends",
    "bench",
    "text",
    "integrations",
    "client",
    "serving",
    "cli",
]
DOORS = ("__init__", "__main__")  # of the package itself: they open every room
WITHOUT_LEARN = ("graph", "routers", "design", "index", "search", "backends")
MAY_IMPORT_TORCH = ("device", "learn", "text")
MAY_IMPORT_RAY = ("cluster", "sharding")
WITHOUT_TORCH = (
    "exact",
    "task",
    "graph",
    "nets",
    "routers",
    "design",
    "index",
    "search",
    "builder",
    "sharding",
    "backends",
)
OUTSIDE = ("paper", "benchmarks", "examples")  # of the wheel: they come in by the doors, as anyone does


def modules():
    """(room, dotted name, path) of every module of the package but its doors."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in DOORS:
            continue
        name = parts[:-1] if parts[-1] == "__init__" else parts
        found.append((parts[0], ".".join(("amips", *name)), path))
    return found


def imported(source, name, is_package=False):
    """Dotted names of everything that a module imports, at any depth, lazily or not."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if is_package else name.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def room_of(name):
    """The room of an imported name; 'amips' for the package itself; None outside of it."""
    parts = name.split(".")
    if parts[0] != "amips":
        return None
    rooms = {room for room, _, _ in modules()}
    return parts[1] if len(parts) > 1 and parts[1] in rooms else "amips"


def wrong_imports(room, name, source, is_package=False):
    """What a module of `room` imports and may not."""
    wrong = []
    for target in imported(source, name, is_package):
        other = room_of(target)
        library = target.split(".")[0]
        if (library == "torch" and room not in MAY_IMPORT_TORCH) or (
            library == "ray" and room not in MAY_IMPORT_RAY
        ):
            wrong.append(target)
        elif other == "amips":
            if room != "cli":
                wrong.append(target)
        elif other is not None and other != room:
            backwards = ORDER.index(other) > ORDER.index(room)
            if backwards or (other == "learn" and room in WITHOUT_LEARN):
                wrong.append(target)
    return wrong


def past_the_door(room, name, source, is_package=False):
    """Imports that reach into a module of another room, instead of taking what its `__init__` offers."""
    return [
        target
        for target in imported(source, name, is_package)
        if room_of(target) not in (None, "amips", room)
        and len(target.split(".")) >= 3
        and (PACKAGE.joinpath(*target.split(".")[1:3]).with_suffix(".py")).exists()
    ]


@pytest.mark.parametrize(("room", "name", "path"), modules(), ids=[name for _, name, _ in modules()])
def test_rooms_are_entered_by_the_door(room, name, path):
    assert past_the_door(room, name, path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "path",
    [path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_is_outside_comes_in_by_the_door(path):
    assert past_the_door(None, path.stem, path.read_text()) == []


def test_a_way_past_the_door_is_noticed():
    assert past_the_door("bench", "amips.bench.x", "from amips.search.points import Point") != []
    assert past_the_door("bench", "amips.bench.x", "from amips.search import Point") == []
    assert past_the_door("search", "amips.search.x", "from amips.search.points import Point") == []


def test_every_room_has_its_place():
    rooms = {room for room, _, _ in modules()}
    assert rooms - set(ORDER) == set()
    assert {"vectors", "exact", "cells", "task", "nets", "learn", "cli"} <= rooms


@pytest.mark.parametrize(("room", "name", "path"), modules(), ids=[name for _, name, _ in modules()])
def test_rooms_import_only_from_rooms_before_them(room, name, path):
    assert room in ORDER, "give the room its place in ORDER"
    assert wrong_imports(room, name, path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("vectors", "from amips.exact import top_k"),
        ("exact", "import amips.task"),
        ("cells", "from amips import task"),
        ("cells", "from .. import task"),
        ("design", "from . import search"),
        ("nets", "def f():\n    from amips.learn import train"),
        ("nets", "def f():\n    import torch.nn as nn"),
        ("task", "from torch import nn"),
        ("task", "def f():\n    import ray"),
        ("task", "import amips"),
        ("nets", "from amips import label"),
    ],
)
def test_a_wrong_import_is_noticed(room, source):
    name = f"amips.{room}.module" if (PACKAGE / room).is_dir() else f"amips.{room}"
    assert len(wrong_imports(room, name, source)) == 1


def test_a_right_import_is_let_through():
    source = "import numpy\nfrom amips import exact\nfrom amips.vectors import Vectors\nfrom . import cells\n"
    assert wrong_imports("task", "amips.task", source) == []


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_searching_imports_leaves_torch_out():
    names = ["amips", *(name for room, name, _ in modules() if room in WITHOUT_TORCH)]
    assert "amips.nets.runtime" in names
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    assert run_python(code + "print('torch' in sys.modules)") == "False"


def test_train_imports_torch_when_first_used():
    assert run_python("import amips, sys; amips.train; print('torch' in sys.modules)") == "True"


def test_without_torch_the_rest_works_and_train_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"  # as if it were not installed
        "import amips\n"
        "try: amips.train\n"
        "except amips.AmipsError as problem: print(problem)\n"
    )
    assert run_python(code) == "amips.train needs torch; pip install 'amips[train]'"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        amips.nonsense  # noqa: B018
