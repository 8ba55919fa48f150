"""What reaches a terminal: no control character of a file, whatever way it takes."""

import ast
import json
import unicodedata
from pathlib import Path

import pytest

import amips
from amips.errors import AmipsError, BundleError
from amips.progress import Bar
from amips.terminal import one_line, printable, printable_json

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\u202egnp.exe\u2066e\rf\x7fg\ud800h\u2028i\x00"


def is_safe(text):
    """No control but tab and line end, nothing that turns the direction, and it can be written as UTF-8."""
    text.encode()
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return not any(
        (unicodedata.category(c) in ("Cc", "Zl", "Zp") and c not in "\n\t")
        or unicodedata.bidirectional(c) in bidi
        for c in text
    )


def test_every_character_of_unicode():
    shown = [printable(chr(code)) for code in range(0x110000)]
    assert all(is_safe(text) for text in shown)
    # And no letter is lost: what is not a control stays.
    kept = sum(text == chr(code) for code, text in enumerate(shown))
    c0, del_and_c1, surrogates, marks, separators_and_overrides, isolates = 30, 33, 2048, 3, 7, 4
    assert kept == 0x110000 - (c0 + del_and_c1 + surrogates + marks + separators_and_overrides + isolates)


def test_what_is_shown_instead():
    assert printable("a\x1b[31mb\nc\td") == "a\\x1b[31mb\nc\td"
    assert printable("\u202e\x9b") == "\\u202e\\x9b"
    assert one_line("a\nerror: b\tc") == "a\\nerror: b\\tc"
    assert printable("Straße, 漢字, עברית, 👩‍👩‍👧") == "Straße, 漢字, עברית, 👩‍👩‍👧"


def test_json_says_the_same():
    value = {"id": HOSTILE, "plain": "Straße"}
    text = json.dumps(value, ensure_ascii=False)
    assert not is_safe(text.encode("utf-8", "replace").decode())
    assert is_safe(printable_json(text))
    assert json.loads(printable_json(text)) == value
    assert "Straße" in printable_json(text)


@pytest.mark.parametrize("kind", [AmipsError, BundleError, amips.VectorError])
def test_an_error_that_quotes_a_file_is_one_safe_line(kind):
    assert is_safe(str(kind(f"{HOSTILE}\nerror: all is well")))
    assert "\n" not in str(kind(f"{HOSTILE}\nerror: all is well"))
    assert str(kind("it is 5 µm")) == "it is 5 µm"


def test_the_names_beside_a_bar(capfd, monkeypatch):
    monkeypatch.setattr("amips.progress.SECONDS", 0.0)
    with Bar(2, HOSTILE, "queries", show=True) as shown:
        shown.set_postfix_str(HOSTILE)
        shown.update()
    printed = capfd.readouterr().err
    assert "owned" in printed
    assert is_safe(printed)


@pytest.mark.parametrize(
    "path", sorted((Path(amips.__file__).parent / "cli").glob("*.py")), ids=lambda p: p.stem
)
def test_commands_print_through_the_one_door(path):
    """Only `echo` calls click.echo: a command that prints by itself would print what a file says."""
    direct = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and not (path.stem == "options" and function.name == "echo"):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    "click.echo",
                    "click.secho",
                    "print",
                ):
                    direct.append(f"{function.name}: {ast.unparse(node)}")
    assert direct == []
