"""Services around a bundle: within this process, and as `amips serve`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx
import jsonschema

from amips.serving import Application, Limits, Service, Settings, Tokens
from amips.serving.openapi import document

READ, WRITE = "a-token-to-search-with", "a-token-to-change-with"
DESCRIPTION = document(Limits())


def headers(token):
    return {"authorization": f"Bearer {token}"}


@asynccontextmanager
async def running(app):
    """A client of an application that has started."""
    await app.service.start()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client
    finally:
        await app.service.close()


def application(path, *, tokens=None, local=True, **limits):
    service = Service.of(Settings(path, limits=Limits(**limits)))
    return Application(service, tokens or Tokens(), local=local)


def talk(app, conversation):
    """Run a conversation with an application: a coroutine that is given a client of it."""

    async def run():
        async with running(app) as client:
            return await conversation(client)

    return asyncio.run(run())


def described(answer):
    """The status of an answer, which is as the description of the service says, and so is what was sent."""
    path, method = answer.request.url.path, answer.request.method.lower()
    answers = DESCRIPTION["paths"][path][method]["responses"]
    status = str(answer.status_code)
    content = answers[status if status in answers else f"{status[0]}XX"]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, (path, kind)
    if kind == "application/json":
        jsonschema.Draft202012Validator(content[kind]["schema"]).validate(answer.json())
    sent = answer.request.content
    if sent and status == "200":
        body = DESCRIPTION["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator(body).validate(json.loads(sent))
    return answer.status_code


class Server:
    """`amips serve` in a process of its own: its address, and its log."""

    def __init__(self, process):
        self.process = process
        line = process.stdout.readline()
        assert "http://" in line, process.stderr.read()
        self.address = line[line.index("http://") :].split(",")[0].strip()
        self.port = int(self.address.rpartition(":")[2])
        self.log = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        # To the end, whatever comes: a service whose errors nobody reads waits when the pipe is full.
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": "no JSON", "line": line})

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(40)
        self.reader.join(10)
        return code

    def events(self, name):
        return [line for line in self.log if line["event"] == name]


@contextmanager
def served(path, *options, **environment):
    """`amips serve PATH` on a free port, and its end."""
    command = [sys.executable, "-m", "amips", "serve", str(path), "--port", "0", *map(str, options)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AMIPS_")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,  # with its workers, which must not outlive it
    )
    server = None
    try:
        server = Server(process)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if server is not None:
            server.reader.join(10)
        process.stdout.close()
        process.stderr.close()


def everything(client):
    """All that comes until the connection is closed, and whether it was reset."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        return b"".join(parts), True
    return b"".join(parts), False
