"""`amips.load`: a bundle, or a directory of shards."""

from pathlib import Path
from typing import Any, overload

from amips.errors import BundleError
from amips.search import Index, Watch, WrappedIndex
from amips.search import load as load_bundle
from amips.sharding.directory import is_sharded, load_shards
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
) -> Any:
    """Open a bundle, with what was changed since it was written; or a directory of shards.

    A directory of shards gives an `amips.sharding.ShardedIndex` and takes `mmap` and `verify` alone; so does
    `load_shards`, which states that type and can open a directory from which shards are gone.

    Args:
        path: the directory of a bundle, or what `amips.shard` made.
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
    options: dict[str, Any] = {"index": index, "model": model, "keys": keys, "trusted": trusted}
    if isinstance(path, str | Path) and is_sharded(path):
        refuse_options(path, options)
        return load_shards(path, mmap=mmap, verify=verify)
    return load_bundle(path, mmap=mmap, verify=verify, watch=watch, **options)


def refuse_options(path: str | Path, options: dict[str, Any]) -> None:
    """BundleError if a bundle's options are given of shards: `trusted` above all must not be passed over."""
    asked = [name for name, value in options.items() if value is not None]
    if asked:
        raise BundleError(f"{asked[0]}=: {path} is in shards, which cannot have that; leave it out")
