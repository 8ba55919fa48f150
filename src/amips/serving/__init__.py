"""An index as a service: requests that wait together are searched together.

Needs the extra `serve`; the client is `amips.connect`.
"""

from amips.serving.app import Application
from amips.serving.batching import Batcher
from amips.serving.limits import Limits, Settings
from amips.serving.logs import RequestLog
from amips.serving.security import Tokens
from amips.serving.server import serve
from amips.serving.service import Service

__all__ = ["Application", "Batcher", "Limits", "RequestLog", "Service", "Settings", "Tokens", "serve"]
