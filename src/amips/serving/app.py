"""The service over HTTP: routes, who may use them, and one line for whatever goes wrong."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from amips.serving.answers import MANY, failure, json_answer, results_json, timed
from amips.serving.bodies import LARGE, Aside, Bodies
from amips.serving.logs import RequestLog
from amips.serving.openapi import document
from amips.serving.pages import page
from amips.serving.prometheus import CONTENT_TYPE
from amips.serving.refusals import CONFLICT, WRONG_TYPE, ClientGone, Refused, busy
from amips.serving.requests import (
    JSON,
    RAW,
    ask_request,
    change_request,
    content_type,
    explain_request,
    search_request,
    wants_raw,
)
from amips.serving.security import Tokens, check_host
from amips.serving.service import Service

OPEN = {
    "/health",
    "/",
}  # without a token: for whoever watches over the process, and the page that asks for it
CHANGES = {
    "/add": frozenset({"keys", "ids", "attributes"}),
    "/remove": frozenset({"ids"}),
    "/update": frozenset({"keys", "ids", "attributes"}),
}
WRITE = {*CHANGES, "/reload"}
MOST_REQUESTS = 4096  # at a time
MOST_RESULTS = 1 << 22  # that are being searched, written and sent; one request alone may have more
IDENTITY = b"identity"
GONE = 499  # status in the log: the client left

Answering = Callable[[Request], Awaitable[Response]]

TASK = "amips.task"  # of a scope: what answers the request
OVERLOADED = "amips.overloaded"  # of a scope: there are as many connections as there may be
RESULTS = "amips.results"  # of a scope: how many it asks for
AT_ONCE = "amips.at_once"  # of a scope: writes (status, headers, body) in one piece; False if it cannot

log = logging.getLogger("amips.serving")


def give_up(scope: Any) -> None:
    """Do not answer the request of this scope any more: its client has left.

    A search that waits is dropped; a change that was handed over is made all the same.
    """
    task = scope.pop(TASK, None)
    if task is not None:
        task.cancel()


class Application:
    """The ASGI application of a service.

    Args:
        service: what is served.
        tokens: who may ask, and who may change.
        local: it is reached from this machine alone: without a token, under no other name.
        requests_log: is told of each request.
    """

    def __init__(
        self,
        service: Service,
        tokens: Tokens | None = None,
        *,
        local: bool = False,
        requests_log: RequestLog | None = None,
    ) -> None:
        self.service, self._tokens, self._requests_log = service, tokens or Tokens(), requests_log
        self._check_host = local and self._tokens.read is None
        self._bodies, self._aside = Bodies(service.limits.body), Aside()
        self._requests = self._results = 0
        get: dict[str, Answering] = {
            "/": self._page,
            "/health": self._health,
            "/info": self._info,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        post: dict[str, Answering] = {
            "/search": self._search,
            "/ask": self._ask,
            "/explain": self._explain,
            "/reload": self._reload,
            **dict.fromkeys(CHANGES, self._change),
        }
        # By path as it is: there are no parameters in it, and a router would take a fifth of a short request.
        self._calls = {path: ("GET", call) for path, call in get.items()}
        self._calls |= {path: ("POST", call) for path, call in post.items()}
        self._start = Router(lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self.service.start()
        try:
            yield
        finally:
            await self.service.close()
            self._aside.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; whatever goes wrong is one line of JSON."""
        if scope["type"] != "http":
            await self._start(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        scope[TASK] = asyncio.current_task()
        write = scope.pop(AT_ONCE, None)  # which leads back to the scope: not to be left in it as garbage
        self._requests += 1

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            answer = await self._called(scope)(Request(scope, receive))
            if write is not None and write(answer.status_code, answer.raw_headers, answer.body):
                status = answer.status_code
            else:
                await answer(scope, receive, note_status)
        except ClientGone:
            status = GONE
        except asyncio.CancelledError:
            if TASK in scope:  # it is the service that ends
                raise
            status = GONE
        except Exception as problem:
            if status:  # the answer has begun: the connection is closed
                raise
            await failure(problem, self.service.path)(scope, receive, note_status)
        finally:
            self._requests -= 1
            self._results -= scope.pop(RESULTS, 0)
            self._note(scope, status or GONE, time.perf_counter() - start)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in OPEN:
            return
        if self._requests > MOST_REQUESTS or OVERLOADED in scope:
            raise busy("too many requests at a time: try again later")
        headers = dict(scope["headers"])
        if self._check_host:
            check_host(headers.get(b"host", b""))
            if b"origin" in headers:  # a page in a browser says whose it is
                check_host(headers[b"origin"].partition(b"://")[2])
        self._tokens.check(headers.get(b"authorization", b""), write=path in WRITE)
        if path not in self._calls:
            raise HTTPException(404)
        if headers.get(b"content-encoding", IDENTITY) != IDENTITY:
            raise Refused(WRONG_TYPE, "a body that is encoded (content-encoding): send it as it is")
        if scope["method"] == "POST" and b"upgrade" in headers.get(b"connection", b"").lower():
            # The parser of HTTP takes the body for one of another protocol.
            raise Refused(WRONG_TYPE, "this service speaks HTTP/1.1: leave out the header upgrade")
        self._check_loaded()

    def _called(self, scope: Scope) -> Answering:
        """What answers a request whose path exists; a HEAD is answered as a GET, whose body is not sent."""
        method, call = self._calls[scope["path"]]
        if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
            raise HTTPException(405, headers={"allow": "GET, HEAD" if method == "GET" else method})
        return call

    def _check_loaded(self) -> None:
        if self.service.index is None:
            raise busy("the index is being loaded: try again later")

    def note_unread(self, status: int) -> None:
        """Count what was no whole request, and was answered without being read."""
        self.service.counters.requests.labels("other", str(status)).inc()
        if self._requests_log is not None:
            self._requests_log.note({"method": None, "path": "other", "status": status, "ms": None})

    def _count_results(self, scope: Scope, results: int) -> None:
        """Count them until the request ends; `Refused` if they are too many beside those of others."""
        if self._results and self._results + results > MOST_RESULTS:
            raise busy("too many results are asked for at a time: try again later, or ask for fewer")
        self._results += results
        scope[RESULTS] = results

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._calls else "other"
        self.service.counters.note_request(path, status, seconds)
        if self._requests_log is not None:
            facts = {"method": scope["method"], "path": path, "status": status, "ms": round(1e3 * seconds, 3)}
            self._requests_log.note({**facts, **scope.get("amips", {})})

    async def _health(self, _: Request) -> Response:
        self._check_loaded()
        return json_answer({"status": "ready"})

    async def _page(self, _: Request) -> Response:
        return page()

    async def _info(self, _: Request) -> Response:
        info = self.service.info
        may_change = info["changes"] and self._tokens.write is not None
        return json_answer({**info, "changes": may_change})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.service.metrics(), media_type=CONTENT_TYPE)

    async def _openapi(self, _: Request) -> Response:
        return json_answer(document(self.service.limits))

    async def _search(self, request: Request) -> Response:
        body = await self._bodies.read(request.headers, request.receive)
        kind, limits = content_type(request.headers), self.service.limits
        index, address = self.service.index, request.scope["query_string"]
        with self._bodies.counted(len(body)):
            if len(body) < LARGE:
                wanted = search_request(body, kind, address, index.d, limits)
            else:
                keys = getattr(index, "snapshot", index).n
                wanted = await self._aside.run(
                    partial(search_request, body, kind, address, index.d, limits, keys)
                )
            request.scope["amips"] = {"rows": len(wanted.x), "k": wanted.options.k}
            self._count_results(request.scope, len(wanted.x) * wanted.options.k)
            start = time.perf_counter()
            scores, ids, seconds, missing = await self.service.search(wanted)
        wait = time.perf_counter() - start - seconds
        if wants_raw(request.headers) and ids.dtype.kind == "i" and not wanted.partial:
            rows = np.ascontiguousarray(scores, "<f4").tobytes() + np.ascontiguousarray(ids, "<i8").tobytes()
            return timed(Response(rows, media_type=RAW), seconds, wait)
        if wanted.partial and missing is None:  # of an index in one piece
            missing = np.zeros(len(scores), np.float32)
        write = partial(results_json, scores, ids, missing if wanted.partial else None)
        text = write() if scores.size < MANY else await self._aside.run(write, refuse=False)
        return timed(Response(text, media_type=JSON), seconds, wait)

    async def _ask(self, request: Request) -> Response:
        body = await self._bodies.read(request.headers, request.receive)
        parse = partial(ask_request, body, content_type(request.headers), self.service.limits)
        question, options = parse() if len(body) < LARGE else await self._aside.run(parse)
        answer = await self.service.ask(question, options)
        hits = [
            {"score": hit.score, "id": hit.text.id, "title": hit.text.title, "text": hit.text.text}
            for hit in answer.hits
        ]
        return json_answer({"hits": hits, "probes": answer.probes, "scanned": answer.scanned, "n": answer.n})

    async def _explain(self, request: Request) -> Response:
        body = await self._bodies.read(request.headers, request.receive)
        kind, limits = content_type(request.headers), self.service.limits
        parse = partial(explain_request, body, kind, self.service.index.d, limits)
        wanted = parse() if len(body) < LARGE else await self._aside.run(parse)
        return json_answer(await self.service.explain(*wanted))

    async def _change(self, request: Request) -> Response:
        body = await self._bodies.read(request.headers, request.receive)
        service, path = self.service, request.scope["path"]
        kind = content_type(request.headers)
        parse = partial(
            change_request,
            body,
            kind,
            CHANGES[path],
            service.index.d,
            service.limits,
            needs_ids=path != "/add",
        )
        wanted = parse() if len(body) < LARGE else await self._aside.run(parse)
        answer: dict[str, Any] = {}
        if path == "/add":
            answer["ids"] = (await service.add(wanted)).tolist()
        elif path == "/remove":
            answer["removed"] = await service.remove(wanted)
        else:
            await service.update(wanted)
        return json_answer({**answer, "n": int(service.index.n)})

    async def _reload(self, request: Request) -> Response:
        await self._bodies.read(request.headers, request.receive)
        if self.service.read_only is not None:  # the other workers would not hear of it
            raise Refused(CONFLICT, self.service.read_only)
        return json_answer({"changed": await self.service.reload(), "n": int(self.service.index.n)})
