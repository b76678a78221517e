"""`launcher.sock` in the launch directory: one JSON line in, one JSON line out, then it closes.

The directory is 0700, so only the launch's own user gets here; nothing of it is on a network.
`ask` is the other end, for `nvserve status`.
"""

import json
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Request = dict[str, Any]
Reply = dict[str, Any]

SOCKET_NAME: Final = "launcher.sock"
MAKING_NAME: Final = "launcher.making"
MAX_LINE_BYTES: Final = 65536
MAX_CONNECTIONS: Final = 8


class ControlSocket:
    """The launcher's end, driven by the launcher's own selector."""

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        answer: Callable[[Request], Reply],
    ) -> None:
        self._selector: Final = selector
        self._answer: Final = answer
        self._received: Final[dict[socket.socket, bytes]] = {}
        self._socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        making = directory / MAKING_NAME
        self._socket.bind(str(making))
        self._socket.listen(MAX_CONNECTIONS)
        making.rename(directory / SOCKET_NAME)  # it appears listening: nobody is refused
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for connection in list(self._received):
            self._drop(connection)
        self._selector.unregister(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it left already
            return
        if len(self._received) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            chunk = connection.recv(MAX_LINE_BYTES)
        except OSError:
            chunk = b""
        line = self._received[connection] = self._received[connection] + chunk
        if chunk and b"\n" not in line and len(line) < MAX_LINE_BYTES:
            return
        if chunk:
            self._reply(connection, line)
        self._drop(connection)

    def _reply(self, connection: socket.socket, line: bytes) -> None:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        is_known = isinstance(request, dict)
        reply = self._answer(request) if is_known else {"error": "not a JSON object"}
        try:
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            return  # the asker left, or does not read what fits its buffer

    def _drop(self, connection: socket.socket) -> None:
        del self._received[connection]
        self._selector.unregister(connection)
        connection.close()


def ask(directory: Path, request: Request, timeout_s: float) -> Reply:
    """The launcher's answer; OSError when no launcher answers in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(directory / SOCKET_NAME))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answer:
            line = answer.readline()
    if not line:
        raise ConnectionError("the launcher closed the connection")
    reply: Reply = json.loads(line)
    return reply
