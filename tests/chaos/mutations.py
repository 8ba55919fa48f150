"""Damage that knows the formats: one random change to one file of a directory, by a seed.

Bytes are flipped, cut, doubled, spliced; headers of .npy and .safetensors files and values inside JSON are
replaced by others of the same or of another type; files are swapped, emptied, removed, made into links, pipes
and directories. `reseal` then recomputes what manifests say of sizes and hashes, as somebody who means harm
would.
"""

import ast
import contextlib
import json
import os
import random
import struct
from pathlib import Path

from amips.files import digest_of, sha256

# What a number, a word or a list in JSON may turn into.
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**31 - 1, 2**63, 2**64, 10**8, 10**30, -(10**30)),
    *(1e308, 1e-320, float("nan"), float("inf"), -float("inf"), 0.5),
    *("", "x", "../x", "/etc/passwd", "\x00", "\x1b[31m", "a" * 5000),
    *([], {}, [1], {"a": 1}, [[[[]]]], ["../../etc/passwd"]),
]
DTYPES = [
    *("<f4", "<f8", "<f2", "<i4", "<i8", "|u1", "|b1", "|O", "<U4", "<c8", ">f4", "|V4", "<M8[s]"),
    "(2,)<f4",
]


def mutate(directory: Path, rng: random.Random) -> str:
    """Change one thing; what it was, in words."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    path = rng.choice(files)
    name = path.relative_to(directory)
    choices = [_flip, _flip, _cut, _extend, _splice, _replace_all]
    if path.suffix in (".json", ".jsonl"):
        choices += [_json_value] * 8
    if path.suffix == ".npy":
        choices += [_npy_header] * 5 + [_npy_value] * 3
    if path.suffix == ".safetensors":
        choices += [_tensor_header] * 5 + [_npy_value] * 2
    if rng.random() < 0.06:
        return f"{name}: {_file_kind(path, files, rng)}"
    change = rng.choice(choices)
    before = path.read_bytes()
    with contextlib.suppress(ValueError, SyntaxError, KeyError, IndexError, UnicodeDecodeError):
        after = change(before, rng)
        path.write_bytes(after)
    return f"{name}: {change.__name__.strip('_')}"


def reseal(directory: Path) -> None:
    """Make sizes, hashes and digests of all manifests true again, where that is possible."""
    for path in sorted(directory.rglob("*.json"), key=lambda path: -len(path.parts)):
        if path.is_symlink() or not path.is_file():
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            manifest = json.loads(path.read_bytes())
            files = manifest.get("files")
            for name, facts in files.items() if isinstance(files, dict) else ():
                listed = path.parent / name
                if listed.is_file() and not listed.is_symlink() and isinstance(facts, dict):
                    facts.update(size=listed.stat().st_size, sha256=sha256(listed))
            if "digest" in manifest:
                path.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}, indent=1) + "\n")


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, len(data) // 2, len(data) - 1, rng.randrange(len(data) + 1)])]


def _extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([b"\0", b"\n", data, rng.randbytes(17)])


def _splice(data: bytes, rng: random.Random) -> bytes:
    low = rng.randrange(len(data))
    high = min(len(data), low + rng.choice([1, 4, 8, 100]))
    return (
        data[:low] + rng.choice([b"", b"\xff" * (high - low), b"\0" * (high - low), data[:8]]) + data[high:]
    )


def _replace_all(data: bytes, rng: random.Random) -> bytes:
    return rng.choice([rng.randbytes(len(data)), b"\0" * len(data), b"{}", b"[]", b"\x93NUMPY", b"null"])


def _json_value(data: bytes, rng: random.Random) -> bytes:
    """One value somewhere inside replaced by another, or a name removed or added."""
    lines = data.splitlines(keepends=True) if data.count(b"\n{") else [data]
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    places = list(_places(value))
    parent, key = rng.choice(places)
    action = rng.random()
    if action < 0.1 and isinstance(parent, dict):
        del parent[key]
    elif action < 0.15 and isinstance(parent, dict):
        parent[rng.choice(["extra", "../x", ""])] = rng.choice(VALUES)
    elif action < 0.35 and isinstance(parent[key], int | float):
        parent[key] = rng.choice([parent[key] + 1, parent[key] - 1, -parent[key], parent[key] * 2, 0])
    else:
        parent[key] = rng.choice(VALUES)
    lines[at] = json.dumps(value).encode() + b"\n"
    return b"".join(lines)


def _places(value):
    """Every (container, key) inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _npy_header(data: bytes, rng: random.Random) -> bytes:
    """Another dtype, shape or order, the data as it was."""
    (length,) = struct.unpack("<H", data[8:10])
    header = ast.literal_eval(data[10 : 10 + length].decode())
    shape = list(header["shape"])
    what = rng.randrange(4)
    if what == 0:
        header["descr"] = rng.choice(DTYPES)
    elif what == 1 and shape:
        at = rng.randrange(len(shape))
        shape[at] = rng.choice([0, 1, shape[at] + 1, shape[at] - 1, shape[at] * 2, 10**12, -1, 2**62])
    elif what == 2:
        shape = rng.choice([shape[::-1], [*shape, 1], shape[1:], []])
    else:
        header["fortran_order"] = not header["fortran_order"]
    header["shape"] = tuple(shape)
    text = repr(header).encode().ljust(length - 1) + b"\n"
    return data[:8] + struct.pack("<H", len(text)) + text + data[10 + length :]


def _npy_value(data: bytes, rng: random.Random) -> bytes:
    """Some numbers of the data replaced by ones that matter: huge, negative, not a number."""
    out = bytearray(data)
    kinds = [("<f", [float("nan"), float("inf"), 3e38, -1.0]), ("<i", [-1, 2**31 - 1, -(2**31), 10**6])]
    kinds.append(("<q", [-1, 2**62, -(2**63), 10**6]))
    pattern, values = rng.choice(kinds)
    size = struct.calcsize(pattern)
    start = 128 if len(out) > 256 else 0
    for _ in range(rng.choice([1, 1, 5])):
        at = start + size * rng.randrange(max(1, (len(out) - start) // size))
        struct.pack_into(pattern, out, at, rng.choice(values))
    return bytes(out)


def _tensor_header(data: bytes, rng: random.Random) -> bytes:
    """A value inside the JSON header of a safetensors file replaced, or its length."""
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.2:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 8, 2**40, 2**63])) + data[8:]
    header = _json_value(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _file_kind(path: Path, files: list[Path], rng: random.Random) -> str:
    """What should be a file becomes something else, or changes places with another."""
    what = rng.choice(
        ["remove", "empty", "directory", "pipe", "link out", "link to itself", "swap", "zero device"]
    )
    if what == "swap":
        other = rng.choice(files)
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return f"swapped with {other.name}"
    path.unlink()
    if what == "empty":
        path.touch()
    elif what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link out":
        path.symlink_to("/etc/passwd")
    elif what == "link to itself":
        path.symlink_to(path)
    elif what == "zero device":
        path.symlink_to("/dev/zero")
    return what
