"""Answers that are no results: which status an error has, and what a client is told."""

import math

from amips.errors import AmipsError, BundleError, DiskFullError, MemoryLimitError, ShardsMissingError

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT = 400, 401, 403, 404, 409
TOO_LARGE, WRONG_TYPE, BUSY, NO_ROOM = 413, 415, 503, 507


class Refused(AmipsError):  # noqa: N818  (it is an answer)
    """A request that is not served.

    Args:
        status: of HTTP.
        message: one line that says why, and what to do.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """What HTTP says beside the message."""
        if self.retry_after is not None:
            return {"retry-after": str(max(1, math.ceil(self.retry_after)))}
        return {"www-authenticate": "Bearer"} if self.status == UNAUTHORIZED else {}


class ClientGone(Exception):  # noqa: N818  (it is not an error: nobody waits for the answer any more)
    """The client has closed the connection."""


def busy(message: str, retry_after: float = 1.0) -> Refused:
    """Too much at the moment: the same request may succeed later."""
    return Refused(BUSY, message, retry_after=retry_after)


def refusal(problem: AmipsError | MemoryError) -> Refused:
    """What a client is told of an error of amips."""
    if isinstance(problem, Refused):
        return problem
    if isinstance(problem, DiskFullError):
        return Refused(NO_ROOM, str(problem))
    if isinstance(problem, MemoryLimitError) or not isinstance(problem, AmipsError):
        return busy("there is not enough memory for this request at the moment: ask for less at a time")
    if isinstance(problem, ShardsMissingError):
        return Refused(BUSY, str(problem))
    return Refused(CONFLICT if isinstance(problem, BundleError) else BAD_REQUEST, str(problem))
