"""JSON lines, written whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from amips.errors import AmipsError
from amips.files import fsync_directory


def line(record: dict[str, Any]) -> str:
    """One line of JSON, in UTF-8 as it stands; what UTF-8 cannot hold (lone surrogates) becomes '?'."""
    made = json.dumps(record, ensure_ascii=False)
    return made.encode("utf-8", "replace").decode() + "\n"


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """A file to stream into, put in place by one rename when the block ends well and not at all otherwise."""
    if not path.parent.is_dir():
        raise AmipsError(f"{path.parent} is not a directory: {path} cannot be written")
    if path.is_dir():
        raise AmipsError(f"{path} is a directory; name a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
