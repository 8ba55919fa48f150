"""The Hugging Face hub: what its local cache has of a model, downloads, and whether it can be reached."""

import importlib
import logging
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from amips.text.model_files import DOWNLOADED, NOT_DOWNLOADED

_HUB_SECONDS = 5.0  # to decide that the hub is out of reach; the library itself tries for over a minute


def snapshot(repository: str, offline: bool) -> Path | None:
    """The directory of a model in the cache, after a download unless `offline`; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = os.environ.get("SENTENCE_TRANSFORMERS_HOME")  # the library's own name for its cache
    with quiet_libraries():
        try:
            directory = snapshot_download(
                repository,
                cache_dir=folder,
                local_files_only=offline,
                allow_patterns=DOWNLOADED,
                ignore_patterns=NOT_DOWNLOADED,
            )
        except LocalEntryNotFoundError:
            if offline:
                return None
            raise
    return Path(str(directory))


def hub_is_out_of_reach() -> bool:
    """Whether it is known, or found within seconds, that nothing can be downloaded."""
    offline = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(value.lower() in ("1", "true", "yes", "on") for value in offline):
        return True
    from huggingface_hub.constants import ENDPOINT

    endpoint = ENDPOINT
    scheme = urlsplit(endpoint).scheme
    proxies = urllib.request.getproxies()
    if not urllib.request.proxy_bypass(urlsplit(endpoint).hostname or ""):
        endpoint = proxies.get(scheme) or proxies.get("all") or endpoint
    address = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    port = address.port or (80 if address.scheme == "http" else 443)
    reached = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((address.hostname or "", port), timeout=_HUB_SECONDS).close()
        except OSError:
            return
        reached.set()

    # In a thread, because looking up a name has no timeout of its own.
    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    knocking.join(_HUB_SECONDS)
    return not reached.is_set()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No bars over weights and files, and no warnings logged about what was not asked for."""
    hub: Any = importlib.import_module("huggingface_hub.utils")
    bars: Any = importlib.import_module("transformers.utils.logging")
    hub_bars, bars_before = not hub.are_progress_bars_disabled(), bars.is_progress_bar_enabled()
    loggers = [logging.getLogger(n) for n in ("transformers", "sentence_transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    hub.disable_progress_bars()
    bars.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if hub_bars:
            hub.enable_progress_bars()
        if bars_before:
            bars.enable_progress_bar()
