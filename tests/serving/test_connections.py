"""HTTP with one client, within this process: writes, clients that do not read, what is no whole request."""

import gc
import json
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx
import numpy as np
import uvicorn

from amips.serving import Application, Service, Settings, connections
from amips.serving.connections import ClientProtocol, Unread
from amips.serving.prometheus import DIRECTORY
from amips.serving.server import Workers, _config
from serving_helpers import everything

GET = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextmanager
def listening(bundle, protocol=ClientProtocol, seconds=5.0, **options):
    """The address of a server in a thread."""
    settings = Settings(bundle)
    service = Service.of(settings)
    service.open()
    config = _config(settings, Application(service))
    config.http_protocol_class = config.http = partial(protocol, seconds=seconds)
    for name, value in options.items():
        setattr(config, name, value)
    own = uvicorn.Server(config)
    place = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=own.run, args=([place],))
    thread.start()
    end = time.monotonic() + 20
    while not own.started:
        assert time.monotonic() < end
        time.sleep(0.02)
    try:
        yield place.getsockname()
    finally:
        own.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_an_answer_is_one_write_and_requests_leave_no_garbage(bundle):
    writes = []

    class Protocol(ClientProtocol):
        def connection_made(self, transport):
            super().connection_made(Written(transport))

    class Written:
        def __init__(self, transport):
            self.transport = transport

        def __getattr__(self, name):
            return getattr(self.transport, name)

        def write(self, data):
            writes.append(data)
            self.transport.write(data)

    with (
        listening(bundle, Protocol) as address,
        socket.create_connection(address, timeout=20) as client,
    ):
        client.sendall(GET % b"/health")
        client.recv(1 << 16)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                client.sendall(GET % b"/health")
                assert client.recv(1 << 16).endswith(b'{"status": "ready"}')
            assert gc.collect() < 50  # what has to be searched for stops every thread
        finally:
            gc.enable()
    assert len(writes) == 51


def test_a_client_that_takes_its_answer_too_slowly_is_cut_off(bundle, x, monkeypatch):
    monkeypatch.setattr(connections, "SLOWEST_READ", 1 << 30)
    body = json.dumps({"queries": np.tile(x, (10, 1)).tolist(), "k": 600, "probes": 8}).encode()
    head = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with listening(bundle, seconds=0.5) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(address)
        client.sendall(head + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 20
        while not connections.UNREAD._bytes:  # it waits
            assert time.monotonic() < end
            time.sleep(0.01)
        while connections.UNREAD._bytes:
            assert time.monotonic() < end
            client.recv(1)  # it does read
            time.sleep(0.02)
        rest, reset = everything(client)
    assert reset or len(rest) < 1000 * 600 * 6


def test_who_has_waited_longest_is_cut_off_where_too_much_waits():
    gone = []

    class Client:
        def __init__(self, name):
            self.cut_off = lambda: gone.append(name)

    unread, clients = Unread(100), [Client(i) for i in range(4)]
    unread.add(clients[0], 200)  # alone it may have more
    assert gone == []
    unread.drop(clients[0])
    for client in clients[1:3]:
        unread.add(client, 50)
    unread.add(clients[1], 50)  # another answer
    assert gone == []
    unread.add(clients[3], 1)
    assert gone == [2]


def test_what_is_no_whole_request_is_answered_in_json_and_counted(bundle):
    late, long = b"POST /search HTTP/1.1\r\nhost: localhost\r\n", b"GET /" + b"x" * (1 << 17)
    with listening(bundle, seconds=1.0) as address:
        for data, status in ((b"\0\1\2\r\n\r\n", 400), (late, 408), (long, 431)):
            with socket.create_connection(address, timeout=20) as client:
                client.sendall(data)
                answer, reset = everything(client)
            head, _, body = answer.partition(b"\r\n\r\n")
            if not reset:  # as it is where more comes than is read
                assert head.startswith(b"HTTP/1.1 %d" % status)
                assert set(json.loads(body)) == {"error"}
        metrics = httpx.get("http://{}:{}/metrics".format(*address)).text
    for status in (400, 408, 431):
        assert f'amips_requests_total{{path="other",status="{status}"}} 1.0' in metrics


def test_the_second_request_of_a_connection_may_be_late_too(bundle):
    with (
        listening(bundle, seconds=0.5) as address,
        socket.create_connection(address, timeout=20) as client,
    ):
        client.sendall(GET % b"/health")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        assert everything(client)[0].startswith(b"HTTP/1.1 408")


def test_too_many_connections_are_told_when_to_come_again_and_health_is_answered(bundle):
    with listening(bundle, limit_concurrency=1) as (host, port):
        full = httpx.get(f"http://{host}:{port}/info")
        health = httpx.get(f"http://{host}:{port}/health")
    assert (full.status_code, health.status_code) == (503, 200)
    assert int(full.headers["retry-after"]) >= 1
    assert full.headers["connection"] == "close"
    assert "too many requests" in full.json()["error"]


def test_the_gauges_of_a_worker_that_died_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    for name in ("gauge_livesum_4711.db", "counter_4711.db", "gauge_livesum_4712.db"):
        (tmp_path / name).write_bytes(b"")

    class Process:
        def __init__(self, pid):
            self.pid = pid

    def replace(self):
        self.processes = [Process(4712), Process(4713)]

    monkeypatch.setattr("uvicorn.supervisors.Multiprocess.keep_subprocess_alive", replace)
    workers = Workers.__new__(Workers)
    workers.processes = [Process(4711), Process(4712)]
    workers.keep_subprocess_alive()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_4711.db", "gauge_livesum_4712.db"]
