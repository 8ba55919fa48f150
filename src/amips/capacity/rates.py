"""How fast a machine is at what amips does: the constants of the cost model, in a small JSON file."""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from amips.arguments import check_number
from amips.errors import AmipsError
from amips.files import read_json, write_json
from amips.resources import processor, threads
from amips.terminal import one_line

FORMAT = 1


@dataclass(frozen=True)
class Rates:
    """What one machine does in a second; what is shipped is a rough guess of two cores of a server.

    Args:
        exact: FLOPs of exact search (labelling).
        passes: bytes of keys that are checked, fingerprinted, compared and copied before exact search.
        kmeans, assign: FLOPs of k-means, and of finding the cell of every key.
        second: FLOPs of finding second cells.
        judge: scores of cells that are looked at, to see what training queries miss.
        train: FLOPs of training a linear router: 6 for each weight and sample.
        code: values of projected keys that are coded and put into cells.
        learn_code: seconds of learning the codes of one dimension.
        save: bytes of a bundle that are written and read back.
        read: bytes of keys that are read from disk, in order.
        scan: 4-bit values that are scanned for one query after the other.
        route: FLOPs of scoring cells, of one query alone.
        rescore: float32 values of candidates that are scored again, in memory.
        query: seconds of a query whatever it asks, one alone.
        random_read: seconds to read one key from disk, others being read meanwhile.
    """

    exact: float = 5.0e10
    passes: float = 2.2e8
    kmeans: float = 4.0e10
    assign: float = 2.5e10
    second: float = 2.0e10
    judge: float = 1.0e7
    train: float = 1.5e10
    code: float = 1.0e7
    learn_code: float = 2.0e-2
    save: float = 3.0e8
    read: float = 1.0e9
    scan: float = 4.0e9
    route: float = 4.0e9
    rescore: float = 3.0e8
    query: float = 4.0e-5
    random_read: float = 2.0e-5

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "rates", "format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str) -> "Rates":
        """What `to_json` gave; AmipsError if it did not."""
        names = [field.name for field in fields(cls)]
        if values.get("kind") != "rates" or any(name not in values for name in names):
            raise AmipsError(f"{where} has no rates of a machine; measure them with: amips plan --calibrate")
        return cls(**{name: check_number(name, values[name], above=0) for name in names})

    def save_to(self, path: Path) -> None:
        """Write what was measured on this machine, or replace what is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**self.to_json(), "machine": _this_machine()})


def rates_file() -> Path:
    """Where the rates of this machine are kept, if nothing else is said: in the cache of the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "amips" / "rates.json"


def load_rates(path: str | Path | None = None) -> tuple[Rates, str]:
    """Rates, and where they come from: a file, the one of this machine, or else what is shipped."""
    place = rates_file() if path is None else Path(path)
    if path is None and not place.exists():
        return Rates(), "shipped with amips; measure this machine with: amips plan --calibrate"
    values = read_json(place, AmipsError)
    rates = Rates.from_json(values, str(place))
    measured, here = str(values.get("machine", "an unknown machine")), _this_machine()
    if measured == here:
        return rates, str(place)
    return rates, (
        f"{one_line(f'{place}, of {measured}')}, not of this machine, {here}; "
        "measure this one with: amips plan --calibrate"
    )


def _this_machine() -> str:
    count = threads()
    return f"{processor()}, {count} thread" + ("s" if count > 1 else "")
