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
from uvicorn.supervisors import Multiprocess

from amips.errors import AmipsError
from amips.serving.app import Application
from amips.serving.connections import ClientProtocol
from amips.serving.index_kinds import check_place
from amips.serving.limits import Settings
from amips.serving.logs import RequestLog, log_as_json
from amips.serving.prometheus import DIRECTORY, forget_process
from amips.serving.security import read_tokens
from amips.serving.service import Service

KEEP_ALIVE = 30  # seconds that a connection may be idle
DRAIN = 30  # seconds in which requests that are under way end
ANSWERING = 30  # seconds in which a worker must say that it lives, also while it loads the bundle
MOST_CONNECTIONS = 8192
SPARE_FILES = 128  # that are open beside connections
BACKLOG = 1024  # connections that the system keeps until they are taken
YOUNG = 10_000  # objects beyond those that were freed, after which Python looks for cycles among the newest
SWITCH = 0.0002  # seconds after which one thread, of those that search and read, lets the other go on

log = logging.getLogger("amips.serving")


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

    def keep_subprocess_alive(self) -> None:
        """Start others in the place of those that have died, whose gauges do not count any more."""
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            forget_process(pid)

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
