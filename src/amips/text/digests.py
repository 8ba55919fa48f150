"""Digests of what was read, in little memory: what duplicates are found with."""

import hashlib

SIZE = 16
_EMPTY = bytes(SIZE)


def digest(text: str, size: int = SIZE) -> bytes:
    """A digest of a text; any str has one, lone surrogates too."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


class Digests:
    """A table of 16-byte entries, found by their first `key` bytes; what follows the key is a value.

    It takes 24 to 48 bytes an entry (72 while it grows), where a Python set of the same takes over 100.
    With the whole entry as key, two of a billion different texts are mistaken for each other with a
    probability of 10^-21.
    """

    def __init__(self, key: int = SIZE) -> None:
        self._key = key
        self._table = bytearray(SIZE << 10)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, entry: bytes) -> bytes | None:
        """Add an entry unless there is one with its key; that one, or None if it was added."""
        if 3 * self._count >= 2 * (len(self._table) // SIZE):
            self._grow()
        place = self._place(entry)
        before = bytes(self._table[place : place + SIZE])
        if before != _EMPTY:
            return before
        self._table[place : place + SIZE] = entry
        self._count += 1
        return None

    def _place(self, entry: bytes) -> int:
        """Where the entry with this key is, or the free place where it belongs."""
        table, key, last = self._table, entry[: self._key], len(self._table) - SIZE
        place = (int.from_bytes(entry[:8], "little") * SIZE) & last
        while (other := table[place : place + self._key]) != key and any(other):
            place = (place + SIZE) & last
        return place

    def _grow(self) -> None:
        old, self._table = self._table, bytearray(2 * len(self._table))
        for start in range(0, len(old), SIZE):
            entry = bytes(old[start : start + SIZE])
            if entry != _EMPTY:
                place = self._place(entry)
                self._table[place : place + SIZE] = entry
