"""JSON lines, written whole or not at all."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from amips.errors import AmipsError
from amips.files import check_output_file, partial


def line(record: dict[str, Any]) -> str:
    """One line of JSON, in UTF-8 as it stands; what UTF-8 cannot hold (lone surrogates) becomes '?'."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"


@contextmanager
def writing(path: str | Path) -> Iterator[TextIO]:
    """A file to stream into, put in place by one rename when the block ends well and not at all otherwise."""
    with (
        partial(check_output_file(path, AmipsError)) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        yield file
