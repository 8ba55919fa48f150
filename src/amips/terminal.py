"""Text that is shown to a person: what could move the cursor, change colours or reorder it is made visible.

Texts, ids, labels and fields of manifests may come from someone else. On their way to a terminal they pass
through here: by `AmipsError`, by the bars of `progress`, and by `echo` of the commands. Files keep what they
say.
"""

import re

# C0 controls but for tab and line end, DEL, C1 controls; marks that turn the direction of a line, which make
# it read otherwise than it is; separators that some terminals take for a line end; halves of surrogate
# pairs, which cannot be written.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with every control character as a visible escape, \\x1b for ESC; tabs and line ends stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """`printable`, with line ends and tabs as escapes: what is quoted cannot look like a line of its own."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_json(text: str) -> str:
    """JSON with the same characters as escapes of JSON: it says what it said before."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(match: "re.Match[str]") -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
