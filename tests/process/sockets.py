"""Which TCP ports processes listen on, from /proc."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def listeners() -> dict[str, tuple[str, int]]:
    """(address in hexadecimal, port) of TCP sockets in state LISTEN, by inode."""
    rows = []
    for name in ("tcp", "tcp6"):
        rows += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    split = {row[9]: row[1].split(":") for row in fields if row[3] == "0A"}
    return {inode: (address, int(port, 16)) for inode, (address, port) in split.items()}


def listeners_of(pids: Iterable[int]) -> set[tuple[str, int]]:
    """What these processes listen on."""
    known = listeners()
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                held.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return {known[inode] for inode in held & known.keys()}
