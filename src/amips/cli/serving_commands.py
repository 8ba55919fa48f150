"""serve: a bundle as a service."""

from pathlib import Path
from typing import Any

import click

from amips.cli.options import TRUSTED_HELP, cli, echo, path, size
from amips.extras import needs_extra


@cli.command()
@click.argument("bundle", type=path)
@click.option("--host", default="127.0.0.1", help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, help="The port to listen on; 0 for any that is free.")
@click.option("--workers", default=1, help="Processes; with more than one, BUNDLE is not changed by them.")
@click.option("--token-file", type=path, help="A file of the token that searching needs; or AMIPS_TOKEN.")
@click.option(
    "--write-token-file", type=path, help="... that changes and reloads need; or AMIPS_WRITE_TOKEN."
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a token.")
@click.option("--max-k", default=1000, help="Results for each query, at most.")
@click.option("--max-rows", default=1024, help="Queries or keys in a request, at most.")
@click.option("--max-body", default="8M", help="Bytes of a request, at most.")
@click.option("--queue", default=4096, help="Queries that may wait; more are refused at once.")
@click.option("--timeout", default=10.0, help="Seconds that a request may wait.")
@click.option("--client-timeout", default=20.0, help="Seconds in which a client must send its request.")
@click.option("--threads", default=1, help="Threads of a search; requests are read by another.")
@click.option(
    "--batching/--no-batching", default=True, help="Search what waits together, or each request alone."
)
@click.option("--mmap", is_flag=True, help="Leave the keys on disk.")
@click.option("--index", type=path, help="The FAISS index that BUNDLE routes, if it wraps one.")
@click.option("--partial", is_flag=True, help="Of shards: serve those there are.")
@click.option("--encoder", help="What encoded the texts of BUNDLE: a model's name or directory.")
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
@click.option(
    "--log-requests/--no-log-requests", default=True, help="Log each request, or failed ones alone."
)
def serve(
    bundle: Path,
    max_k: int,
    max_rows: int,
    max_body: str,
    queue: int,
    timeout: float,
    client_timeout: float,
    **options: Any,
) -> None:
    """Serve BUNDLE, or a directory of shards, over HTTP, until SIGTERM.

    POST /search and /ask, GET /info, /health, /metrics and /openapi.json; with a token for changes POST /add,
    /remove, /update and /reload. SIGHUP takes in what others have changed. Logs are lines of JSON on standard
    error.
    """
    with needs_extra(
        "amips serve", "serve", "starlette", "uvicorn", "prometheus_client", "httptools", "uvloop", "orjson"
    ):
        from amips.serving import Limits, Settings
        from amips.serving import serve as run
    limits = Limits(max_k, max_rows, size(max_body), queue, timeout, client_timeout)
    run(Settings(bundle, limits=limits, **options), lambda line: echo(line))
