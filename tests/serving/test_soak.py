"""A service under load for a while, with reloads and bad clients: `make soak` takes ten minutes."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque

import httpx
import psutil
import pytest

import amips
from amips.serving.requests import RAW
from helpers import make_world
from serving_helpers import served

SECONDS = float(os.environ.get("AMIPS_SOAK", "4"))
WARM = 60.0  # seconds after which memory must not grow
GROWTH = 1.1  # of memory after that, and a little that any process varies by
VARIES = 16 << 20


def good(server, x, end, statuses, seed):
    chance = random.Random(seed)
    with httpx.Client(base_url=server.address, timeout=30) as client:
        while time.monotonic() < end:
            rows = x[: chance.choice([1, 1, 1, 20])].tolist()
            path = "/explain" if chance.random() < 0.02 else "/search"
            body = {"query": rows[0]} if path == "/explain" else {"queries": rows}
            statuses.append(client.post(path, json=body).status_code)


BODIES = [b"", b"{", b'{"queries": [[1]]}', b'{"queries": [["a"]]}', b"[" * 5000, b'{"k": 1e9}']
POST = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


def bad(server, x, end, statuses):
    large = json.dumps({"queries": x[:100].tolist(), "k": 600, "probes": 8}).encode()
    pieces = [
        (POST % 99 + b"{", False),  # leaves within its body
        (POST % len(large) + large, False),  # before its answer
        (POST % len(large) + large, True),  # does not read it
        (POST % 99 + b"{", True),  # never sends the rest
        (b"\x16\x03\x01\0\r\n\r\n", False),  # does not speak HTTP
        (b"GET /info HTTP/1.1\r\nhost: evil.example\r\n\r\n" * 50, True),  # all at once
        (b"GET /" + b"x" * 100_000, False),
    ]
    others = [
        {"method": "POST", "url": "/search", "json": {"queries": x[0].tolist(), "k": 10**6}},
        {"method": "POST", "url": "/search", "json": {"queries": x[0].tolist(), "where": "nothing = 1"}},
        {"method": "POST", "url": "/search", "content": b"\0" * 7, "headers": {"content-type": RAW}},
        {"method": "POST", "url": "/search", "content": b"\0" * (9 << 20)},
        {"method": "POST", "url": "/explain", "json": {"query": [1, 2]}},
        {"method": "POST", "url": "/add", "json": {"keys": [[1.0]]}},
        {"method": "DELETE", "url": "/search"},
        {"method": "GET", "url": "/nowhere"},
        {"method": "GET", "url": "/info", "headers": {"origin": "http://evil.example"}},
    ]
    silent: deque[socket.socket] = deque()
    with httpx.Client(base_url=server.address, timeout=30) as client:
        while time.monotonic() < end:
            calls = [{"method": "POST", "url": "/search", "content": body} for body in BODIES]
            for call in (*calls, *others):
                # One that is refused before its body is read may find the connection closed.
                with contextlib.suppress(httpx.TransportError):
                    status = client.request(**call).status_code
                    statuses.append(status if status >= 400 else 500)  # none of them is asked rightly
            for data, stays in pieces:
                with contextlib.suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", server.port), 5)
                    silent.append(one)
                    one.settimeout(1)
                    one.sendall(data)
                    if not stays:
                        one.close()
            while len(silent) > 60:
                silent.popleft().close()
            time.sleep(0.05)
    for one in silent:
        one.close()


@pytest.fixture
def soaked(request, tmp_path):
    """What is served, and queries: for a long time 30,000 keys, whose index would be seen to leak."""
    if SECONDS < 60:
        return request.getfixturevalue("bundle"), request.getfixturevalue("x")
    keys, queries = make_world(30_000, 4000, 64, seed=1)
    task = amips.label(keys, queries, cells=128, val=500, test=500, k=10, out=tmp_path / "task")
    amips.build(task, out=tmp_path / "large", recall=0.9).close()
    return tmp_path / "large", task.test.queries[:].copy()


def test_nothing_but_2xx_4xx_and_503_and_memory_does_not_grow(soaked, tmp_path):
    bundle, x = soaked
    statuses, sizes = [], []
    copies = [shutil.copytree(bundle, tmp_path / name) for name in ("one", "other")]
    link = tmp_path / "bundle"
    link.symlink_to(copies[0])
    with served(link, "--no-log-requests", "--client-timeout", 5) as server:
        start = time.monotonic()
        end = start + SECONDS
        threads = [threading.Thread(target=good, args=(server, x, end, statuses, i)) for i in range(4)]
        threads.append(threading.Thread(target=bad, args=(server, x, end, statuses)))
        for thread in threads:
            thread.start()
        process = psutil.Process(server.process.pid)
        while time.monotonic() < end:
            time.sleep(1)
            copies.reverse()
            (tmp_path / "next").symlink_to(copies[0])
            (tmp_path / "next").replace(link)
            server.process.send_signal(signal.SIGHUP)
            sizes.append((time.monotonic() - start, process.memory_info().rss))
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        reloads = re.search(
            r'amips_reloads_total{result="changed"} (\d+)', httpx.get(f"{server.address}/metrics").text
        )
        assert int(reloads.group(1)) >= SECONDS / 2
        assert server.end() == 0
    wrong = {
        status for status in statuses if not (200 <= status < 300 or 400 <= status < 500 or status == 503)
    }
    assert wrong == set()
    assert statuses.count(200) > SECONDS
    assert not [line for line in server.log if line["event"] in ("defect", "no JSON")]
    later = [size for seconds, size in sizes if seconds >= WARM]
    if len(later) > 60:
        third = len(later) // 3
        assert max(later[-third:]) <= GROWTH * max(later[:third]) + VARIES
    counts = ", ".join(f"{count:,} of {status}" for status, count in sorted(Counter(statuses).items()))
    sys.stdout.write(
        f"{len(statuses):,} requests in {SECONDS:g} s, {reloads.group(1)} reloads: {counts}; memory "
        f"{sizes[0][1] >> 20} MB at first, {max(size for _, size in sizes) >> 20} at most, "
        f"{sizes[-1][1] >> 20} at last\n"
    )
