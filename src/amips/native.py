"""The compiled part of amips, `amips._native` (see the directory `native`), or None where it was not built.

Whatever calls it has a twin in numpy that gives the same answers, slower: amips installs and searches without
a compiler.
"""

import importlib
import os
from typing import Any

SWITCH = "AMIPS_NATIVE"  # in the environment: "0" leaves the compiled part alone, "generic" its use of AVX2


def _load() -> Any:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return importlib.import_module("amips._native")
    except ImportError:
        return None


compiled: Any = _load()
