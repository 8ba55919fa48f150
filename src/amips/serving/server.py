"""`amips serve`: sockets, processes and signals around the application."""

import asyncio
import atexit
import gc
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from amips.errors import AmipsError
from amips.serving.app import AT_ONCE, Application, give_up
from amips.serving.index_kinds import check_place
from amips.serving.limits import Settings
from amips.serving.logs import RequestLog, log_as_json
from amips.serving.prometheus import DIRECTORY
from amips.serving.security import read_tokens
from amips.serving.service import Service

KEEP_ALIVE = 30  # seconds that a connection may be idle
DRAIN = 30  # seconds in which requests that are under way end
ANSWERING = 30  # seconds in which a worker must say that it lives, also while it loads the bundle
MOST_CONNECTIONS = 8192
SPARE_FILES = 128  # that are open beside connections
MOST_HEAD = 1 << 16  # bytes of the head of a request
BACKLOG = 1024  # connections that the system keeps until they are taken
YOUNG = 10_000  # objects beyond those that were freed, after which Python looks for cycles among the newest
SHORT = 1 << 16  # bytes of an answer that is copied, to be written with its head
SWITCH = 0.0002  # seconds after which one thread, of those that search and read, lets the other go on
_LATE = b'{"error": "the request did not come in time"}'
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
LATE += b"content-length: %d\r\n\r\n%b" % (len(_LATE), _LATE)

_LONG = b'{"error": "the head of the request is too long"}'
LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
)
LONG += b"content-length: %d\r\n\r\n%b" % (len(_LONG), _LONG)

log = logging.getLogger("amips.serving")


class ClientProtocol(HttpToolsProtocol):
    """HTTP for clients that must send their request within some seconds, and may leave before its answer."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self._head: int | None = 0  # bytes of a head that is not complete; None between heads

    def data_received(self, data: bytes) -> None:
        """More of a request; the parser itself takes heads of any length."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MOST_HEAD and not self.transport.is_closing():
                self.transport.write(LONG)
                self.transport.close()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head = None
        super().on_headers_complete()

    def connection_made(self, transport: Any) -> None:
        """A client has come, and has not said anything yet."""
        super().connection_made(transport)
        self._due = self.loop.call_later(self.seconds, self._late)

    def on_message_begin(self) -> None:
        """The first bytes of a request are there."""
        super().on_message_begin()
        self._head = 0
        self._due.cancel()
        self._due = self.loop.call_later(self.seconds, self._late)

    def on_message_complete(self) -> None:
        """The last ones are."""
        self._due.cancel()
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked for another protocol: nothing to tell anyone."""

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope[AT_ONCE] = partial(write_at_once, cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: what it waits for is given up, without a task that watches for this."""
        self._due.cancel()
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            give_up(self.cycle.scope)

    def _late(self) -> None:
        if not self.transport.is_closing():
            if self.cycle is None or not self.cycle.response_started:
                self.transport.write(LATE)
            self.transport.close()


def write_at_once(cycle: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
    """Write an answer, head and body in one call of the system; False if uvicorn has to do it, in two.

    Two calls took a quarter of the time of a short request, and the client's time to read twice.
    """
    usual = cycle.keep_alive and not cycle.disconnected and not cycle.flow.write_paused
    if not usual or len(body) > SHORT or cycle.scope["method"] == "HEAD" or cycle.response_started:
        return False
    lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
    cycle.message_event.set()
    cycle.on_response()
    return True


def serve(settings: Settings, announce: Callable[[str], None], service: Service | None = None) -> None:
    """Serve a bundle until SIGTERM or SIGINT; SIGHUP takes in what is new.

    Args:
        announce: is called with a line for a person when it listens.
        service: of another index, in the place of that of the bundle; in one process.
    """
    read_tokens(settings)  # what is wrong is said before anything is loaded
    if service is None:
        check_place(settings)
    log_as_json()
    listening = _socket(settings)
    host, port = listening.getsockname()[:2]
    line = f"{settings.bundle}: http://{f'[{host}]' if ':' in host else host}:{port}"
    _allow_connections()
    if settings.workers == 1 or service is not None:
        _serve_alone(settings, service or Service.of(settings), listening, partial(announce, line))
        return
    with tempfile.TemporaryDirectory(prefix="amips-metrics-") as directory:
        os.environ[DIRECTORY] = directory
        config = _config(settings, partial(make_app, settings), factory=True, workers=settings.workers)
        listen(listening, settings)
        _end_quietly()
        announce(f"{line}, {settings.workers} workers")
        Workers(config, [listening]).run()


def _tune_python() -> None:
    """Keep threads from waiting for each other, and for the collector of garbage.

    To look through all modules for cycles stopped every thread for 40 ms, each second or so under load: the
    slowest of a hundred requests had met it. The index is not frozen, as it may be replaced.
    """
    sys.setswitchinterval(SWITCH)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # modules are taken apart at the end, which frees what they hold
    gc.set_threshold(YOUNG)


def _serve_alone(
    settings: Settings, service: Service, listening: socket.socket, announce: Callable[[], None]
) -> None:
    _tune_python()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is loaded is the newest
    service.open()  # before anyone can ask; what is wrong is an error of this command
    app = _application(settings, service)
    listen(listening, settings)  # whoever reads the line can connect
    _end_quietly()
    announce()
    uvicorn.Server(_config(settings, app)).run([listening])


class Workers(Multiprocess):
    """Worker processes, each of which takes in what is new by itself.

    uvicorn would start others in their place, and close connections on which a request may be on its way.
    """

    def handle_hup(self) -> None:
        """Pass SIGHUP on to those that have started: others load what is newest, and would be ended by it."""
        for process in self.processes:
            if process.pid is not None and process.exitcode is None and process.is_ready(timeout=1):
                os.kill(process.pid, signal.SIGHUP)


def make_app(settings: Settings) -> Application:
    """The application of one worker, which loads the bundle when it starts."""
    log_as_json()
    _tune_python()
    return _application(settings, Service.of(settings))


def _application(settings: Settings, service: Service) -> Application:
    tokens = read_tokens(settings)
    requests_log = RequestLog(failures_only=not settings.log_requests)
    return SignalledApplication(service, tokens, local=settings.local, requests_log=requests_log)


class SignalledApplication(Application):
    """An application that reloads when its process gets SIGHUP."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer; at the start, listen to signals."""
        if scope["type"] == "lifespan":
            self._tasks: set[asyncio.Task[None]] = set()
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        await super().__call__(scope, receive, send)

    def _hang_up(self) -> None:
        task = asyncio.create_task(self._reload_and_log())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_and_log(self) -> None:
        try:
            changed = await self.service.reload()
            log.info("reload", extra={"facts": {"changed": changed, "keys": int(self.service.index.n)}})
        except (AmipsError, OSError) as problem:
            log.error("reload failed: what was loaded is served further: %s", problem)


def _config(settings: Settings, app: Any, **options: Any) -> uvicorn.Config:
    protocol: Any = partial(ClientProtocol, seconds=settings.limits.client_seconds)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=min(MOST_CONNECTIONS, max(1, _files() - SPARE_FILES)),
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=DRAIN,
        timeout_worker_healthcheck=ANSWERING,
        **options,
    )


def _socket(settings: Settings) -> socket.socket:
    """A socket that is bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that does not read its answer is cut off
            seconds = int(1000 * settings.limits.client_seconds)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds)
        listening.bind(address)
    except OSError as problem:
        raise _cannot_listen(settings, problem) from None
    listening.set_inheritable(True)
    return listening


def listen(listening: socket.socket, settings: Settings) -> None:
    """Let clients connect; another process may have begun to, since the socket was bound."""
    try:
        listening.listen(BACKLOG)
    except OSError as problem:
        raise _cannot_listen(settings, problem) from None


def _cannot_listen(settings: Settings, problem: OSError) -> AmipsError:
    return AmipsError(f"cannot listen on {settings.host}:{settings.port}: {problem.strerror or str(problem)}")


def _files() -> int:
    """Files and connections that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _allow_connections() -> None:
    """As many as the system lets a process have: the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_CONNECTIONS + SPARE_FILES
    if soft < most and hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _end_quietly() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ended)  # after uvicorn has drained, it raises the signal again


def _ended(*_: object) -> None:
    """A signal after which all is done already."""
