"""The page at `/`: one file, which asks nothing of anybody but this service, and the browser sees to it."""

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.responses import Response

PAGE = "page.html"


@cache
def page() -> Response:
    """The page to try the service, with headers that let nothing but its own script and style run."""
    text = files("amips.serving").joinpath(PAGE).read_text("utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_digest(text, 'script')}",
        f"style-src {_digest(text, 'style')}",
        "img-src data:",  # the icon, which is none
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _digest(text: str, tag: str) -> str:
    """What a policy says to allow the one element of this name."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(inside.encode()).digest()).decode()}'"
