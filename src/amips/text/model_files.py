"""What a sentence-transformers model may consist of: JSON, tokenizers, safetensors; nothing that runs code.

The library (since version 6) refuses code that comes with a model (`trust_remote_code=False`), but imports
parts by name from wherever Python finds them, reads pickled weights where there are no others, lets the files
of a model choose arguments of the loader (`weights_only` among them), and follows an adapter to whatever
model it names. None of that is needed for a published encoder.
"""

import json
import re
from pathlib import Path
from typing import Any

from amips.errors import AmipsError
from amips.files import read_json
from amips.untrusted import read_bounded

# What is downloaded of a repository; neither code nor pickled weights are.
DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja", "README.md"]
NOT_DOWNLOADED = ["onnx/*", "openvino/*"]  # the same weights, for other engines

# Arguments of the loader, which take the place of what the files of a model say.
LOADING: dict[str, Any] = {"use_safetensors": True, "weights_only": True}

MODULES = "modules.json"
_LIBRARY_TYPE = re.compile(r"sentence_transformers(\.\w+)+", re.ASCII)
_PICKLED = ("pytorch_model*", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)


def check_model_files(directory: Path) -> None:
    """AmipsError if opening this model could run code of it, or open a file elsewhere."""
    for folder in (directory, *_module_folders(directory)):
        pickled = next((file for kind in _PICKLED for file in sorted(folder.glob(kind))), None)
        if pickled is not None and not any(folder.glob("*.safetensors")):
            raise AmipsError(
                f"{pickled}: pickled weights can run code when they are read, and are not opened; save the "
                "model as safetensors"
            )
        if (folder / "adapter_config.json").exists():
            raise AmipsError(
                f"{folder} is an adapter, which opens the model that it names; merge it into that model"
            )
        for config in sorted({*folder.glob("config.json"), *folder.glob("sentence_*_config.json")}):
            _check_config(config)


def _module_folders(directory: Path) -> list[Path]:
    """The folders of a model's parts, such as 1_Pooling, and those in them; each is inside of the model."""
    if not (directory / MODULES).exists():
        return []
    try:
        listed = json.loads(read_bounded(directory / MODULES, AmipsError))
        parts = [(str(part["type"]), str(part["path"])) for part in listed]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise AmipsError(
            f"{directory / MODULES} is damaged: expected a list of parts with a type and a path"
        ) from None
    folders: list[Path] = []
    for kind, name in parts:
        if not _LIBRARY_TYPE.fullmatch(kind):
            raise AmipsError(f"{directory / MODULES}: {kind!r} is not a part that sentence-transformers has")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise AmipsError(f"{directory / MODULES} names {name!r}, which is not inside of the model")
        if Path(name).parts:
            part = directory / name
            folders += [part, *(path for path in sorted(part.rglob("*")) if path.is_dir())]
    return folders


def _check_config(path: Path) -> None:
    config = read_json(path, AmipsError)
    weights = config.get("transformers_weights")
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        raise AmipsError(f"{path}: transformers_weights is {weights!r}, which is not a safetensors file")
    stated = [(name, value) for name, value in config.items() if "attn_implementation" in name]
    for group in _ARGUMENTS:
        values = config.get(group) or {}
        stated += values.items() if isinstance(values, dict) else [(group, values)]
    for name, value in stated:
        # A name with a slash is a path or a repository (of compiled kernels, of code), a group may nest one.
        harmless = value is None or isinstance(value, (bool, int, float, str))
        if not harmless or (isinstance(value, str) and "/" in value):
            raise AmipsError(f"{path}: {name} is {value!r}; models with such arguments are not opened")
