"""Libraries that not everybody needs: what to install when one is missing, what to say when one is broken."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from amips.errors import AmipsError


@contextmanager
def needs_extra(what: str, extra: str, *modules: str) -> Iterator[None]:
    """Imports inside: if one of these modules is missing or broken, say so in one line.

    What is missing comes with an extra of amips. What is installed and cannot be imported (a shared library
    that it does not find, an undefined symbol, a dependency that is gone) has a reason of its own, which is
    given.

    Args:
        what: needs the modules, for the message: "amips report".
        extra: of amips, that brings them.
    """
    try:
        yield
    except AmipsError:
        raise
    except Exception as problem:  # a library may raise anything while it is imported
        if isinstance(problem, ModuleNotFoundError) and _library(problem.name or "") in modules:
            raise _missing(what, extra, str(problem.name)) from None
        if _is_own(problem):
            raise
        reason = (str(problem).splitlines() or [""])[0] or type(problem).__name__
        names = " or ".join(_distribution(module) for module in dict.fromkeys(modules))
        raise AmipsError(
            f"{what} needs {names}, which is installed and cannot be imported: {reason}; install it again: "
            f"pip install --force-reinstall 'amips[{extra}]'"
        ) from None


def check_extra(what: str, extra: str, *modules: str) -> None:
    """The same without importing anything, for libraries that take seconds to import."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(what, extra, module)


def _missing(what: str, extra: str, module: str) -> AmipsError:
    return AmipsError(f"{what} needs {_distribution(module)}; pip install 'amips[{extra}]'")


def _is_own(problem: BaseException) -> bool:
    """Whether it went wrong in amips itself: then no library is to blame."""
    if isinstance(problem, ImportError) and problem.name:
        return _library(problem.name) == "amips"
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _library(str(trace.tb_frame.f_globals.get("__name__"))) == "amips"


def _library(module: str) -> str:
    """The top package of a module."""
    return module.split(".")[0]


def _distribution(module: str) -> str:
    """What a module is called where it is installed from, nearly always."""
    return _library(module).replace("_", "-")
