"""A directory of shards: written shard by shard, finished when its manifest is there.

shards/
  plan.json                what it is made of: another call continues it only with the same
  work/                    labels, cells and training runs, until it is finished
  shard-000/ ...           one ordinary bundle each; ids are those of the whole collection
  router/                  what chooses shards (`amips.sharding.router`)
  manifest.json            sizes, operating points, what was measured; written last
"""

from pathlib import Path
from typing import Any

import numpy as np

from amips.arguments import check_flag, check_number, check_path, check_whole
from amips.errors import AmipsError, BundleError
from amips.files import read_manifest, sha256, write_manifest
from amips.search import Index, Point, load
from amips.sharding.router import ShardRouter
from amips.sharding.sharded import LocalShards, ShardedIndex, Shards
from amips.version import __version__

MANIFEST, PLAN, WORK, ROUTER, LOCK = "manifest.json", "plan.json", "work", "router", ".lock"
KIND, FORMAT = "shards", 1
MOST = 1 << 48


def shard_path(directory: Path, shard: int) -> Path:
    """The bundle of a shard."""
    return directory / f"shard-{shard:03d}"


def write_shards(directory: Path, index: ShardedIndex) -> None:
    """Put the manifest in its place: the directory is finished."""
    fields = {
        "kind": KIND,
        "format": FORMAT,
        "amips": __version__,
        "n": index.n,
        "d": index.d,
        "sizes": index.sizes.tolist(),
        "bundles": [
            sha256(shard_path(directory, shard) / MANIFEST, BundleError) for shard in range(len(index.sizes))
        ],
        "ids": np.dtype(index.id_type).str,
        "trained": index.router.model is not None,
        "cell_temperature": index.router.temperature,
        "temperature": index.temperature,
        "target_recall": index.target_recall,
        "inner_recall": index.inner_recall,
        "points": [point.to_json() for point in index.points],
        "about": index.about,
    }
    names = index.router.save(directory / ROUTER)
    write_manifest(directory, MANIFEST, fields, [f"{ROUTER}/{name}" for name in names])


def open_shard(place: Path, digest: str, size: int, **options: Any) -> Index:
    """A bundle that is the one made for a shard; BundleError of another, which would silently have less.

    Args:
        place: of the bundle.
        digest: of the manifest that it had when the shards were made.
        size: how many keys it had.
        options: as of `amips.load`.
    """
    bundle: Index = load(place, watch=False, **options)
    if sha256(place / MANIFEST, BundleError) != digest:
        raise BundleError(f"{place} is not the bundle that was made for this shard; copy that one there")
    if bundle.n != size:
        raise BundleError(f"{place} was changed since it was made; shards are made anew with amips shard")
    return bundle


def read_shards(directory: Path, shards: Shards, verify: bool = True) -> ShardedIndex:
    """The index of a directory, with its shards wherever they are; BundleError if it is damaged."""
    manifest = read_manifest(directory, MANIFEST, KIND, FORMAT, BundleError, verify)
    try:
        n, d = (check_whole(name, manifest[name], 1, MOST, error=BundleError) for name in ("n", "d"))
        sizes = [check_whole("sizes", size, 1, MOST, error=BundleError) for size in manifest["sizes"]]
        digests = tuple(str(digest) for digest in manifest["bundles"])
        if len(digests) != len(sizes):
            raise BundleError("each shard has one bundle")
        id_type = np.dtype(str(manifest["ids"]))
        if id_type.kind not in "iU" or not sizes:
            raise BundleError("ids are whole numbers or strings, of one shard at least")
        trained = check_flag("trained", manifest["trained"], error=BundleError)
        numbers = {
            name: check_number(name, manifest[name], above=0, error=BundleError)
            for name in ("cell_temperature", "temperature", "target_recall", "inner_recall")
        }
        points = [Point.from_json(point) for point in manifest["points"]]
        about = dict(manifest["about"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, AmipsError) as problem:
        raise BundleError(f"{directory / MANIFEST} is damaged: {problem}") from None
    for name in manifest["files"]:
        if (directory / name).is_symlink() or (directory / ROUTER).is_symlink():
            raise BundleError(f"{directory / name} is a link; replace it by the file itself")
    router = ShardRouter.load(directory / ROUTER, len(sizes), d, numbers.pop("cell_temperature"), trained)
    return ShardedIndex(
        router=router,
        shards=shards,
        sizes=np.array(sizes, np.int64),
        n=n,
        d=d,
        id_type=id_type,
        points=points,
        about=about,
        digests=digests,
        **numbers,
    )


def load_shards(
    path: str | Path, *, mmap: bool = False, verify: bool = True, partial: bool = False
) -> ShardedIndex:
    """Open a directory of shards, all of them in this process.

    Args:
        path: what `amips.shard` made.
        mmap, verify: as of `amips.load`.
        partial: open it although shards are missing or damaged: searches that need them say so.
    """
    path = Path(check_path("path", path, error=BundleError))
    without = read_shards(path, LocalShards([]), check_flag("verify", verify, error=BundleError))
    bundles: list[Index | str] = []
    for shard, (digest, size) in enumerate(zip(without.digests, without.sizes.tolist(), strict=True)):
        try:
            bundles.append(open_shard(shard_path(path, shard), digest, size, mmap=mmap, verify=verify))
        except BundleError as problem:
            if not partial:
                raise BundleError(f"{problem}; open the others with partial=True") from None
            bundles.append(str(problem))
    return read_shards(path, LocalShards(bundles), verify=False)


def is_sharded(path: str | Path) -> bool:
    """Whether a directory is one of shards, and not a bundle."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / ROUTER).is_dir()
