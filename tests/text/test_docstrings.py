"""Docstrings: found by name without importing anything, whatever the files hold."""

import json
import os
import subprocess
import sys

import pytest

from amips.text import docstrings
from amips.text.docstrings import collect, standard_paths
from amips.text.texts import Text

LONG = "Say something of five words or more"


def write(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body if isinstance(body, bytes) else body.encode())


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "site"
    write(
        root / "pack" / "__init__.py",
        f'"""{LONG}: package."""\nraise SystemExit("it was imported")\n',
    )
    write(
        root / "pack" / "module.py",
        f'''
import os
class Thing:
    """{LONG}: class.

    And
        more.
    """
    def method(self):
        """{LONG}: method."""
        def hidden():
            """{LONG}: not to be named."""
    def short(self):
        """Return self."""
    class Inner:
        async def run(self):
            "{LONG}: coroutine."
try:
    import missing
except ImportError:
    def fallback():
        """{LONG}: fallback."""
if os:
    pass
else:
    def other():
        """{LONG}: other."""
def again():
    """{LONG}: method."""
def nothing():
    x = "not a docstring, though it has many words"
''',
    )
    write(root / "pack" / "tests" / "test_it.py", f'"""{LONG}: tests."""')
    write(root / "pack" / "conftest.py", f'"""{LONG}: conftest."""')
    write(root / "pack-1.0.dist-info" / "x.py", f'"""{LONG}: info."""')
    write(root / "space" / "plain.py", f'"""{LONG}: namespace package."""')
    return root


def test_qualified_names_lines_and_texts(tree):
    found = list(collect([tree]))
    assert found[0] == Text("pack:1", "pack", f"{LONG}: package.")
    assert [text.id for text in found] == [
        "pack:1",
        "pack.module.Thing:3",
        "pack.module.Thing.method:9",
        "pack.module.Thing.Inner.run:16",
        "pack.module.fallback:21",
        "pack.module.other:26",
        "space.plain:1",
    ]
    assert found[1].text == f"{LONG}: class.\n\nAnd\n    more."


def test_a_package_or_a_file_has_the_names_it_is_imported_by(tree):
    assert next(collect([tree / "pack"])).id == "pack:1"
    assert next(collect([tree / "pack" / "module.py"])).title == "pack.module.Thing"


def test_the_first_of_two_modules_with_one_name_is_taken(tree, tmp_path):
    write(tmp_path / "first" / "pack" / "module.py", f'"""{LONG}: shadow."""')
    found = [text.id for text in collect([tmp_path / "first", tree])]
    assert [name for name in found if name.startswith("pack.module")] == ["pack.module:1"]
    ids = [text.id for text in collect([tree, tree, tree / "pack"])]
    assert len(set(ids)) == len(ids) == 7


def test_most_stops_and_reads_no_more(tree, monkeypatch):
    read = []
    real = docstrings.read_docstrings
    monkeypatch.setattr(docstrings, "read_docstrings", lambda *a: read.append(a) or real(*a))
    assert len(list(collect([tree], most=1))) == 1
    assert len(read) == 1


def test_files_that_cannot_be_read_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "LARGEST", 100_000)
    write(tmp_path / "a_syntax.py", "def f(:\n")
    write(tmp_path / "b_null.py", b'"""x"""\0')
    write(tmp_path / "c_encoding.py", b"# coding: nonsense\n'''one two three four five'''")
    write(tmp_path / "d_bytes.py", b'"""\xff\xfe one two three four five"""')
    write(tmp_path / "e_deep.py", "(" * 5000 + ")" * 5000)
    write(tmp_path / "f_huge.py", f'"""{LONG}"""' + "#" * 100_000)
    write(tmp_path / "g_folder.py" / "x.txt", "")
    (tmp_path / "h_link.py").symlink_to(tmp_path / "nowhere.py")
    write(tmp_path / "i_latin.py", "# coding: latin-1\n'''Größe of one two three'''".encode("latin-1"))
    write(tmp_path / "j_surrogate.py", "'''one two three four \\ud800 five'''")
    write(tmp_path / "k_escape.py", "'''one two three four \\d five'''")  # Python warns of it
    write(tmp_path / "l-dash.py", f'"""{LONG}"""')
    write(tmp_path / "m_empty.py", "")
    found = {text.title: text.text for text in collect([tmp_path])}
    assert found == {
        "i_latin": "Größe of one two three",
        "j_surrogate": "one two three four ? five",
        "k_escape": "one two three four \\d five",
    }


def test_nothing_is_imported_and_the_order_does_not_depend_on_hashes(tree):
    code = (
        "import sys, json; from amips.text.docstrings import collect, standard_paths\n"
        "before = set(sys.modules)\n"
        f"ids = [t.id for t in collect([{str(tree)!r}, standard_paths()[0] / 'email'])]\n"
        "print(json.dumps([ids, sorted(set(sys.modules) - before)]))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    ids, imported = json.loads(said[0])
    assert not [name for name in imported if name.startswith(("pack", "space", "email"))]
    assert any(name.startswith("email.message.Message.get_payload:") for name in ids)


def test_the_standard_library_is_among_the_standard_paths():
    assert (standard_paths()[0] / "json" / "__init__.py").is_file()
    (found,) = [text for text in collect([standard_paths()[0] / "json"]) if text.title == "json.loads"]
    assert found.id == f"json.loads:{json.loads.__code__.co_firstlineno}"
    assert found.text.startswith("Deserialize")
    assert found.whole.startswith("json.loads Deserialize")
