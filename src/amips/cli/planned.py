"""plan: what a collection will take."""

import json
from pathlib import Path
from typing import Any

import click

import amips
from amips.capacity import Forecast, calibrate, rates_file, so_many
from amips.cli.options import amount, cli, echo, path, size
from amips.tables import text_table

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@cli.command()
@click.option("--keys", type=amount, help="How many keys, such as 1e9, 10M or 1.5B.")
@click.option("--dim", type=int, help="Their dimension.")
@click.option("--queries", type=amount, help="How many queries are learned from, such as 1e6 or 200K.")
@click.option("--machines", type=int, help="How many there are.  [default: as few as the memory allows]")
@click.option("--memory", type=size, help="Of each machine, such as 64G.  [default: enough for all]")
@click.option("--shards", type=int, help="Parts of the keys, an index each.  [default: one a machine]")
@click.option("--scanned", type=float, help="Share of the keys that a query scans, as a fit reports it.")
@click.option(
    "--calibrate", "measure", is_flag=True, help="Measure this machine first, in about half a minute."
)
@click.option("--constants", type=path, help="The file of rates.  [default: in the user's cache]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    keys: float | None,
    dim: int | None,
    queries: float | None,
    machines: int | None,
    memory: int | None,
    shards: int | None,
    scanned: float | None,
    measure: bool,
    constants: Path | None,
    as_json: bool,
) -> None:
    """Say what so many keys will take.

    Time, memory, disk and machines of labelling, training, building and serving, from a cost model with the
    rates of this machine, which --calibrate measures and keeps.
    """
    numbers = [keys, dim, queries]
    if None in numbers and not (measure and not any(numbers)):  # before half a minute of measuring
        raise click.UsageError("give --keys, --dim and --queries, or --calibrate alone")
    if measure:
        place = constants or rates_file()
        calibrate(None if as_json else echo).save_to(place)
        echo(f"saved {place}", err=as_json)
    if keys is None or dim is None or queries is None:
        return
    limits: dict[str, Any] = {"machines": machines, "memory": memory, "shards": shards, "scanned": scanned}
    forecast = amips.plan(keys, dim, queries, rates=constants, **limits)
    echo(json.dumps(forecast.to_json(), indent=1) if as_json else _shown(forecast))


def _shown(forecast: Forecast) -> str:
    rows = [
        [phase.name, _time(phase.seconds), _bytes(phase.memory), _bytes(phase.disk)]
        for phase in forecast.phases
    ]
    rows.append(["all of it", _time(forecast.seconds), "", ""])
    serving, shards = forecast.serving, forecast.shards
    lines = [
        f"{forecast.keys:,} keys of dimension {forecast.dim}, {forecast.queries:,} queries; "
        f"{so_many(forecast.machines, 'machine')}, {so_many(shards, 'shard')} of "
        f"{so_many(forecast.cells, 'cell')}, "
        f"lean codes of {forecast.dimensions} dimensions",
        "",
        text_table(["phase", "time", "memory a machine", "disk a machine"], rows),
        "",
        f"serving: {_bytes(serving.memory)} of memory and {_bytes(serving.disk)} of disk a machine; a query "
        f"asks {serving.shards_contacted:.1f} of {so_many(shards, 'shard')}, "
        f"scans {serving.scanned:.2%} of the keys there, and takes {_time(serving.latency)} "
        f"({_time(serving.latency_on_disk)} with its candidates on disk); "
        f"{serving.queries_a_second:,.0f} queries a second on one thread a machine",
        f"rates: {forecast.rates}",
    ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    scale, unit = next((one for one in TIMES if seconds >= one[0]), TIMES[-1])
    return f"{seconds / scale:.3g} {unit}"


def _bytes(number: float) -> str:
    scale, unit = next((one for one in UNITS if number >= one[0]), UNITS[-1])
    return f"{number / scale:.3g} {unit}"
