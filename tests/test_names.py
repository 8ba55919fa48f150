"""Names say what a thing is: nouns of the field, no participles; and no function hides its module."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import amips
from helpers import ROOT

PARTICIPLES = {"found", "made", "held", "told", "taken", "given"}
ALLOWED = {("claims.py", "held")}  # of a claim it is the word
SOURCES = sorted(
    path for folder in ("src", "paper", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
LONGEST = 350  # lines


def assigned(tree):
    """Every name that a module gives to something: variables, parameters, attributes, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_name_is_a_participle(path):
    wrong = {
        f"{name} in line {line}"
        for name, line in assigned(ast.parse(path.read_text()))
        if name in PARTICIPLES and (path.name, name) not in ALLOWED
    }
    assert wrong == set()


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_no_function_hides_its_module():
    for package in [
        amips,
        *(
            importlib.import_module(m.name)
            for m in pkgutil.walk_packages(amips.__path__, "amips.")
            if m.ispkg
        ),
    ]:
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        exported = set(getattr(package, "__all__", []))
        assert exported & modules == set(), package.__name__


def test_no_two_modules_of_a_name():
    names = [
        path.stem
        for path in SOURCES
        if path.stem not in ("__init__", "__main__") and Path("src") in path.relative_to(ROOT).parents
    ]
    assert {name for name in names if names.count(name) > 1} == set()
