"""A corpus that is on every machine: the docstrings of Python's library and of the installed packages.

Nothing is imported. Files are found by walking directories and read by Python's own parser, so that no code
of theirs runs, and a file that does not parse is left out.
"""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from amips.text.digests import Digests, digest
from amips.text.sentences import words
from amips.text.texts import Text

FEWEST_WORDS = 5  # "Return self." tells nobody anything
LARGEST = 4 << 20  # bytes of a file: larger ones are generated tables that take seconds to parse
SKIPPED = frozenset(
    {"test", "tests", "testing", "idle_test", "__pycache__", "site-packages", "dist-packages"}
)

_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def collect(paths: Iterable[str | Path] | None = None, most: int | None = None) -> Iterator[Text]:
    """Docstrings of modules, classes, functions and methods, each text once, in the order of their names.

    The title is the qualified name (`json.loads`), the id that name and the line (`json.loads:299`). Of two
    modules with the same name the first is taken, as an import would.

    Args:
        paths: Directories to look in (a package, or one that holds packages) or files; without them, those
            of the standard library and of the installed packages. Folders of tests are left out.
        most: Stop after so many.
    """
    return islice(_all(standard_paths() if paths is None else [Path(p) for p in paths]), most)


def standard_paths() -> list[Path]:
    """Where the standard library and the installed packages of this Python are."""
    places = sysconfig.get_paths()
    return list(dict.fromkeys(Path(places[name]) for name in ("stdlib", "purelib", "platlib")))


def _all(paths: list[Path]) -> Iterator[Text]:
    modules, texts = set[str](), Digests()
    for path in paths:
        base = path if path.is_dir() else path.parent
        while (base / "__init__.py").is_file() and base != base.parent:
            base = base.parent  # a package within a package has the names of both
        for file in [path] if path.is_file() else _files(path):
            module = _module(file.relative_to(base))
            if module is None or module in modules:
                continue
            modules.add(module)
            for text in read_docstrings(file, module):
                if texts.put(digest(text.text)) is None:
                    yield text


def _files(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        # Sorted in place: os.walk goes on in this order, the same on every file system. What is not an
        # identifier (numpy-2.0.dist-info, hidden folders) cannot be imported either.
        folders[:] = sorted(name for name in folders if name.isidentifier() and name not in SKIPPED)
        yield from (Path(here, name) for name in sorted(names) if name.endswith(".py"))


def _module(file: Path) -> str | None:
    """The dotted name of a module; None where none could be imported, and for tests."""
    parts = list(file.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or not all(part.isidentifier() for part in parts):
        return None
    last = parts[-1]
    return (
        None if last == "conftest" or last.startswith("test_") or last.endswith("_test") else ".".join(parts)
    )


def read_docstrings(file: Path, module: str) -> list[Text]:
    """The docstrings of one file, in the order of its lines; none if it is too large or does not parse."""
    try:
        if file.stat().st_size > LARGEST:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes like "\d" in other people's code
            tree = ast.parse(file.read_bytes())  # from bytes: the parser obeys the file's own encoding
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    texts: list[Text] = []
    _visit(tree, module, texts)
    return texts


def _visit(node: _Definition, name: str, texts: list[Text]) -> None:
    doc = ast.get_docstring(node, clean=False)
    if doc is not None:
        # Lone surrogates, which a literal may hold, cannot be written to a file.
        text = inspect.cleandoc(doc).encode("utf-8", "replace").decode().strip()
        if words(text) >= FEWEST_WORDS:
            texts.append(Text(f"{name}:{getattr(node, 'lineno', 1)}", name, text))
    if isinstance(node, ast.Module | ast.ClassDef):  # what is defined within a function has no name outside
        for inner in _definitions(node.body):
            _visit(inner, f"{name}.{inner.name}", texts)


def _definitions(
    body: Iterable[ast.AST],
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions of a body, those under `if`, `try` or `with` too."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _definitions(getattr(node, part, ()))
