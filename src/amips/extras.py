"""Libraries that not everybody needs: what to install when one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from amips.errors import AmipsError


@contextmanager
def needs_extra(what: str, extra: str, *modules: str) -> Iterator[None]:
    """Imports inside: if one of these modules is not installed, say in one line which extra brings it."""
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] not in modules:
            raise
        raise AmipsError(f"{what} needs {problem.name}; pip install 'amips[{extra}]'") from None
