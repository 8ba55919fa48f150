"""HTTP with one client: how long it may take, how much of an answer may wait for it, and who is told."""

import json
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from amips.serving.app import AT_ONCE, OVERLOADED, give_up

MOST_HEAD = 1 << 16  # bytes of the head of a request
SHORT = 1 << 16  # bytes of an answer that is copied, to be written with its head
SLOWEST_READ = 1 << 18  # bytes a second that a client takes of an answer that is waiting for it
MOST_UNREAD = 1 << 27  # bytes of answers that wait for clients to read them; one alone may have more


class Unread:
    """Answers that wait for their clients; who has waited longest is cut off where they are too many."""

    def __init__(self, most: int = MOST_UNREAD) -> None:
        self._most, self._bytes = most, dict[Any, int]()

    def add(self, client: Any, size: int) -> None:
        """A client is to read so many bytes."""
        self._bytes.pop(client, None)
        self._bytes[client] = size
        while len(self._bytes) > 1 and sum(self._bytes.values()) > self._most:
            oldest = next(iter(self._bytes))
            del self._bytes[oldest]
            oldest.cut_off()

    def drop(self, client: Any) -> None:
        """It has read them, or has gone."""
        self._bytes.pop(client, None)


UNREAD = Unread()  # of this process


class ClientProtocol(HttpToolsProtocol):
    """HTTP for clients that must send their request within some seconds, and may leave before its answer."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self._unread: Any = None  # the timer of an answer that waits to be read
        self._head: int | None = 0  # bytes of a head that is not complete; None between heads

    def data_received(self, data: bytes) -> None:
        """More of a request; the parser itself takes heads of any length."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MOST_HEAD and not self.transport.is_closing():
                self._refuse(431, "the head of the request is too long")

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

    def send_400_response(self, msg: str) -> None:
        """What has come is not HTTP."""
        self._refuse(400, "this is not HTTP/1.1")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if app is service_unavailable:  # uvicorn's own is no JSON, and does not say when to come again
            cycle.scope[OVERLOADED], cycle.keep_alive, app = True, False, self.app
        cycle.scope[AT_ONCE] = partial(write_at_once, cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: what it waits for is given up, without a task that watches for this."""
        self._due.cancel()
        self._has_read()
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            give_up(self.cycle.scope)

    def pause_writing(self) -> None:
        """More waits to be read by the client than the system takes."""
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        self._has_read()
        self._unread = self.loop.call_later(self.seconds + size / SLOWEST_READ, self.cut_off)
        UNREAD.add(self, size)

    def resume_writing(self) -> None:
        """It has been read."""
        self._has_read()
        super().resume_writing()

    def cut_off(self) -> None:
        """Close the connection, whatever was still to be read."""
        self.transport.abort()

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
            UNREAD.drop(self)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        complete = self.cycle is None or self.cycle.response_complete
        if (self._head is not None and complete) or self.cycle is None or not self.cycle.response_started:
            self._refuse(408, "the request did not come in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str) -> None:
        """An answer to what is no whole request, after which the connection is closed."""
        body = json.dumps({"error": reason}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
        if (note := getattr(self.app, "note_unread", None)) is not None:
            note(status)


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
