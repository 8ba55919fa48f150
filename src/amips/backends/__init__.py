"""Backends: other libraries' and databases' indexes behind one `search`, one file each."""

from amips.backends.backend import MANIFEST, Backend, rungs
from amips.backends.drop_in import DropIn
from amips.backends.registry import BACKENDS, backend_class, build, load, missing
from amips.backends.routable import RoutableBackend

__all__ = [
    "BACKENDS",
    "MANIFEST",
    "Backend",
    "DropIn",
    "RoutableBackend",
    "backend_class",
    "build",
    "load",
    "missing",
    "rungs",
]
