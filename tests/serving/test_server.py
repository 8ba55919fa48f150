"""`amips serve` as a process: signals, slow clients, workers, tokens, what is refused at the start."""

import itertools
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest

import amips
from amips.errors import AmipsError
from amips.serving import Settings
from amips.serving.server import listen
from serving_helpers import READ, WRITE, everything, served

SEARCH = (
    "POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(bundle):
    """A server that is impatient with clients."""
    with served(bundle, "--client-timeout", 1) as process:
        yield process


def connected(server, data=b""):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(data)
    return client


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"POST /sea", SEARCH.format(100).encode(), SEARCH.format(100).encode() + b'{"queries": ['],
    ids=["silent", "head", "no body", "half a body"],
)
def test_a_slow_client_is_cut_off_and_others_are_served(server, beginning):
    with connected(server, beginning) as client:
        assert httpx.get(f"{server.address}/health").status_code == 200
        start = time.monotonic()
        answer = everything(client)[0]
        assert time.monotonic() - start < 10
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert f"content-length: {len(body)}".encode() in head
    assert "error" in json.loads(body)


@pytest.mark.parametrize(
    "data",
    [b"\0\1\2\3\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"x" * 200_000, b"\x16\x03\x01 tls\r\n\r\n"],
)
def test_what_is_not_http_is_no_harm(server, data):
    answer = b""
    with suppress(OSError), connected(server, data) as client:  # it may close before all is sent
        client.shutdown(socket.SHUT_WR)
        answer = everything(client)[0]
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_client_that_does_not_read_and_one_that_leaves_are_no_harm(server, x):
    body = json.dumps({"queries": x.tolist(), "k": 600}).encode()
    request = SEARCH.format(len(body)).encode() + body
    deaf = connected(server)
    deaf.setblocking(False)
    try:
        for _ in range(20):  # megabytes of answers, of which none is read
            deaf.send(request)
    except BlockingIOError:
        pass
    for _ in range(5):
        connected(server, request).close()
        connected(server, request[:200]).close()
    for row in x[
        :5
    ]:  # an impatient server may find a request late on a busy machine: it says so, and goes on
        answer = httpx.post(f"{server.address}/search", json={"queries": row.tolist()}, timeout=60)
        assert answer.status_code in (200, 408)
    until(lambda: httpx.get(f"{server.address}/health", timeout=60).status_code == 200)
    deaf.close()


def test_a_client_that_has_left_is_noted(server, x):
    body = json.dumps({"queries": np.tile(x, (10, 1)).tolist(), "k": 600}).encode()
    request = SEARCH.format(len(body)).encode() + body
    before = [line["status"] for line in server.events("request")].count(499)
    pauses = itertools.cycle([0.005, 0.01, 0.02, 0.05, 0.1, 0.2])  # one of which ends within the search

    def left():
        with connected(server, request) as client:
            time.sleep(next(pauses))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return [line["status"] for line in server.events("request")].count(499) > before

    until(left, 60)
    assert not server.events("defect")


def test_a_head_without_an_end_is_refused(server):
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + 70 * (b"x-more: " + b"y" * 1000 + b"\r\n")
    with connected(server, head) as client:
        assert everything(client)[0].startswith(b"HTTP/1.1 431")
    assert httpx.get(f"{server.address}/health", timeout=60).status_code == 200


def test_sighup_takes_in_changes_and_loses_no_request_and_sigterm_drains(own_bundle, x, task):
    statuses, stop = [], threading.Event()
    with served(own_bundle) as server:

        def ask():
            with httpx.Client(base_url=server.address, timeout=60) as client:
                while not stop.is_set():
                    statuses.append(client.post("/search", json={"queries": x[:3].tolist()}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        with amips.load(own_bundle) as index:
            index.add(x[:7])
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(server.events("reload")) == 1)
        assert httpx.get(f"{server.address}/info").json()["n"] == 607
        amips.build(task, out=own_bundle, recall=0.8).close()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(server.events("reload")) == 2)
        assert httpx.get(f"{server.address}/info").json()["target_recall"] == 0.8
        (own_bundle / "manifest.json").write_text("{}")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: any("reload failed" in line["event"] for line in server.log))
        stop.set()
        for thread in threads:
            thread.join()
        assert len(statuses) > 10
        assert set(statuses) == {200}
        # A request that is under way when the signal comes is answered.
        body = json.dumps({"queries": x[0].tolist()}).encode()
        with connected(server, SEARCH.format(len(body)).encode() + body[:20]) as client:
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            client.sendall(body[20:])
            answer = everything(client)[0]
        assert answer.startswith(b"HTTP/1.1 200")
        assert server.process.wait(20) == 0
        until(lambda: not server.reader.is_alive())
        assert {"/search", "/info"} == {line["path"] for line in server.events("request")}
        numbers = {f"{value:.6f}" for value in x[0].tolist()}
        assert not any(number in json.dumps(line) for line in server.log for number in numbers)


def test_several_workers_share_a_port_and_do_not_change_the_bundle(bundle, x):
    with served(bundle, "--workers", 2, AMIPS_WRITE_TOKEN=WRITE) as server:

        def ready():
            try:
                return httpx.get(f"{server.address}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(ready, 60)
        head = {"authorization": f"Bearer {WRITE}"}
        _, ids = amips.load(bundle).search(x[:20])
        for row, expected in zip(x[:20], ids, strict=True):
            answer = httpx.post(f"{server.address}/search", json={"queries": row.tolist()})
            assert answer.json()["ids"] == [expected.tolist()]
        refused = httpx.post(f"{server.address}/remove", json={"ids": [1]}, headers=head)
        assert refused.status_code == 409
        assert "several workers" in refused.json()["error"]
        counts = httpx.get(f"{server.address}/metrics").text
        assert 'amips_requests_total{path="/search",status="200"} 20.0' in counts
        assert httpx.post(f"{server.address}/reload", headers=head).status_code == 409
        server.process.send_signal(signal.SIGHUP)  # one that has not started yet has what is newest
        until(lambda: len(server.events("reload")) >= 1)
        assert server.end() == 0


def test_tokens_come_from_files_and_the_environment(own_bundle, tmp_path, x):
    (tmp_path / "token").write_text(f"{READ}\n")
    with served(own_bundle, "--token-file", tmp_path / "token", AMIPS_WRITE_TOKEN=WRITE) as server:
        with amips.connect(server.address) as index, pytest.raises(amips.AmipsError, match="401"):
            index.search(x[0])
        with amips.connect(server.address, token=READ) as index:
            assert index.search(x[0])[1].shape == (1, 10)
            with pytest.raises(amips.AmipsError, match="401"):
                index.remove([0])
        with amips.connect(server.address, write_token=WRITE) as index:
            assert index.remove([0]) == 1


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--host", "0.0.0.0"], {}, "can be reached from other machines: set AMIPS_TOKEN"),
        ([], {"AMIPS_TOKEN": "short"}, "AMIPS_TOKEN: expected one word of 16"),
        ([], {"AMIPS_TOKEN": READ, "AMIPS_WRITE_TOKEN": READ}, "give it one of its own"),
        (["--token-file", "nowhere"], {}, "nowhere does not exist"),
        (["--workers", "0"], {}, "workers=0"),
        (["--queue", "5"], {}, "queue=5"),
        (["--timeout", "nan"], {}, "timeout=nan"),
        (["--client-timeout", "1e99"], {}, "client-timeout=1e+99"),
        (["--host", "no.such.host.invalid"], {"AMIPS_TOKEN": READ}, "cannot listen on"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_at_the_start(bundle, options, environment, words, monkeypatch):
    assert words in start(monkeypatch, bundle, *options, **environment)


def test_no_bundle_and_a_port_that_is_taken(bundle, tmp_path, monkeypatch):
    assert "nothing" in start(monkeypatch, tmp_path / "nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen on" in start(monkeypatch, bundle, "--port", taken.getsockname()[1])


def test_a_port_that_is_taken_while_the_bundle_is_loaded(bundle):
    first, second = (socket.socket() for _ in range(2))
    with first, second:
        for one in (first, second):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        with pytest.raises(AmipsError, match=r"cannot listen on .*:8000: Address already in use"):
            listen(second, Settings(bundle))


def start(monkeypatch, *options, **environment):
    """What `amips serve` says when it refuses to start."""
    for name in ("AMIPS_TOKEN", "AMIPS_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "amips", "serve", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_a_dimension_is_kept_apart_from_others(server, x):
    answer = httpx.post(f"{server.address}/search", json={"queries": np.ones((2, 17)).tolist()})
    assert answer.status_code == 400
    assert "[m, 16]" in answer.json()["error"]


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n"


def test_requests_that_come_at_once_are_answered_in_turn(server, x):
    body = json.dumps({"queries": x[:2].tolist()}).encode()
    search = SEARCH.format(len(body)).encode() + body
    head = GET.replace(b"GET", b"HEAD") % b""
    with connected(server, search + GET % b"" + head + search + GET % b"connection: close\r\n") as client:
        answers = everything(client)[0].split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 5
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    assert json.loads(bodies[0]) == json.loads(bodies[3])
    assert bodies[1] == bodies[4] == b'{"status": "ready"}'
    assert bodies[2] == b""
    assert all(answer.count(b"\r\ndate: ") == 1 for answer in answers)
