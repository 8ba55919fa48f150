"""Libraries that not everybody needs: what to install when one is missing."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from amips.errors import AmipsError


@contextmanager
def needs_extra(what: str, extra: str, *modules: str) -> Iterator[None]:
    """Imports inside: if one of these modules is not installed, say in one line which extra brings it.

    Args:
        what: needs the modules, for the message: "amips report".
        extra: of amips, that brings them.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        # A module that is missing inside of a library is the library's own matter.
        if problem.name is None or problem.name.split(".")[0] not in modules:
            raise
        raise _missing(what, extra, problem.name) from None


def check_extra(what: str, extra: str, *modules: str) -> None:
    """The same without importing anything, for libraries that take seconds to import."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(what, extra, module)


def _missing(what: str, extra: str, module: str) -> AmipsError:
    name = module.split(".")[0].replace("_", "-")
    return AmipsError(f"{what} needs {name}; pip install 'amips[{extra}]'")
