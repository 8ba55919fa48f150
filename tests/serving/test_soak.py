"""A service under load for a while, with reloads and bad clients: `make soak` takes ten minutes."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time

import httpx
import psutil

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


def bad(server, end, statuses):
    bodies = [b"", b"{", b'{"queries": [[1]]}', b'{"queries": [["a"]]}', b"[" * 5000, b'{"k": 1e9}']
    with httpx.Client(base_url=server.address, timeout=30) as client:
        while time.monotonic() < end:
            for body in bodies:
                status = client.post("/search", content=body).status_code
                statuses.append(status if status >= 400 else 500)  # none of them is a search
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 5) as one:
                one.sendall(b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
            time.sleep(0.05)


def test_nothing_but_2xx_4xx_and_503_and_memory_does_not_grow(bundle, x, tmp_path):
    statuses, sizes = [], []
    copies = [shutil.copytree(bundle, tmp_path / name) for name in ("one", "other")]
    link = tmp_path / "bundle"
    link.symlink_to(copies[0])
    with served(link, "--no-log-requests") as server:
        start = time.monotonic()
        end = start + SECONDS
        threads = [threading.Thread(target=good, args=(server, x, end, statuses, i)) for i in range(4)]
        threads.append(threading.Thread(target=bad, args=(server, end, statuses)))
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
    assert not [line for line in server.log if line["event"] == "defect"]
    later = [size for seconds, size in sizes if seconds >= WARM]
    if len(later) > 60:
        third = len(later) // 3
        assert max(later[-third:]) <= GROWTH * max(later[:third]) + VARIES
    sys.stdout.write(
        f"{len(statuses):,} requests, {sizes[0][1] >> 20} MB at first, {sizes[-1][1] >> 20} at last\n"
    )
