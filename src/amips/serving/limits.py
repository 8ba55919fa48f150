"""What a service allows: its limits, and how it was started."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amips.arguments import check_number, check_whole
from amips.errors import AmipsError

LONGEST = 86_400.0  # seconds that anything may take
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many may wait.

    Args:
        k: results for each query, at most.
        rows: queries, or keys, of one request, at most.
        body: bytes of a request, at most.
        queue: rows that may wait for the searcher; beyond, requests are refused at once.
        seconds: until a request that waits is given up; one may ask for less.
        client_seconds: in which a client must have sent its request, and must go on reading the answer.
    """

    k: int = 1000
    rows: int = 1024
    body: int = 8 << 20
    queue: int = 4096
    seconds: float = 10.0
    client_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in ("k", "rows", "body"):
            check_whole(name, getattr(self, name), 1)
        check_whole("queue", self.queue, self.rows)
        for name, word in (("seconds", "timeout"), ("client_seconds", "client-timeout")):
            check_number(word, getattr(self, name), above=0, most=LONGEST, what="seconds")

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """How a service is started: all that a worker process needs to know.

    Args:
        bundle: the bundle directory.
        host, port: where it listens; port 0 is any that is free.
        workers: processes; with more than one, none of them changes the bundle.
        token_file, write_token_file: files of tokens; without, the environment is asked.
        insecure: listen beyond this machine without a token.
        batching: search requests together that wait together.
        threads: of a search: those of one that has few rows wait for each other more than they work.
        mmap, trusted, index: as of `amips.load`.
        partial: of shards, serve those that there are.
        encoder: of questions, where it is not the one that the bundle names.
        log_requests: a line for each request; otherwise for those that failed.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    limits: Limits = Limits()
    token_file: Path | None = None
    write_token_file: Path | None = None
    insecure: bool = False
    batching: bool = True
    threads: int = 1
    mmap: bool = False
    trusted: tuple[Path, ...] = ()
    index: Path | None = None
    partial: bool = False
    encoder: str | None = None
    log_requests: bool = True

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, 1, 256)
        check_whole("port", self.port, 0, 65535)
        check_whole("threads", self.threads, 1)
        if not self.host:
            raise AmipsError("host is empty: give an address, such as 127.0.0.1, or 0.0.0.0 for all")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK
