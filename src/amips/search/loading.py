"""Opening a bundle."""

from pathlib import Path
from typing import Any, overload

from amips.arguments import check_flag, check_path
from amips.errors import BundleError
from amips.search.bundle_state import open_bundle
from amips.search.living import Index
from amips.search.watching import Watch
from amips.search.wrapped import WrappedIndex
from amips.signing import Trusted


@overload
def load(
    path: str | Path,
    *,
    index: None = None,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
    watch: Watch = True,
) -> Index: ...


@overload
def load(
    path: str | Path,
    *,
    index: Any,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
    watch: Watch = True,
) -> WrappedIndex: ...


def load(
    path: str | Path,
    *,
    index: Any = None,
    model: Any = None,
    keys: Any = None,
    mmap: bool = False,
    verify: bool = True,
    trusted: Trusted | None = None,
    watch: Watch = True,
) -> Index | WrappedIndex:
    """Open a bundle, with what was changed since it was written.

    Args:
        path: the bundle directory.
        index: for a bundle that `wrap(...).save` wrote, the FAISS index that it routes, or its file.
        keys: the keys it is expected to hold, an array or a file: others are an error.
        model: for a bundle of an index with a router of your own, that router: it is not in the bundle.
        mmap: leave the float32 keys on disk, mapped into memory as they are needed; otherwise all is read.
            The files must then stay as they are: one that is cut short while it is mapped ends the process.
        verify: check the SHA-256 of every file before it is read. All else is always checked, but for NaN and
            infinite values in keys that are left on disk.
        trusted: public keys, one or several, each a file or PEM as bytes: a bundle that none of them signed
            is an error (`amips sign`), and every file is verified.
        watch: keep a ring of recent queries, and adapt to them if they become unlike the log; "report" only
            says so, False keeps nothing. See `Index.watch`.
    """
    path = check_path("path", path, error=BundleError)
    options = {"mmap": check_flag("mmap", mmap, error=BundleError)}
    options |= {"verify": check_flag("verify", verify, error=BundleError)}
    snapshot, opened, place = open_bundle(
        path, index=index, model=model, keys=keys, trusted=trusted, **options
    )
    if isinstance(snapshot, WrappedIndex):
        return snapshot
    loaded = Index(snapshot, opened, place)
    loaded.watch(watch)
    return loaded
