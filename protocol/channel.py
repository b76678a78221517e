"""The only wrapper over ZeroMQ sockets, and the names of the sockets inside one launch.

A socket belongs to one life: its path carries the epoch or both lives, so nothing queued for a dead
peer can reach its successor. The receiver binds a PULL, the sender connects a PUSH; no send blocks.
"""

import os
import socket
from pathlib import Path
from typing import Final

import zmq

from nvserve.protocol.codec import MAX_FRAME_BYTES

MAX_IPC_PATH: Final = 107  # bytes of a UNIX socket address
HIGH_WATER_MARK: Final = 1000  # frames queued per socket
MAX_CONTROL_BYTES: Final = 1 << 20  # one control message


def frontend_to_core(launch_dir: str, frontend_life: int, core_life: int) -> str:
    return _ipc(launch_dir, f"f{frontend_life}c{core_life}.up")


def core_to_frontend(launch_dir: str, frontend_life: int, core_life: int) -> str:
    return _ipc(launch_dir, f"f{frontend_life}c{core_life}.down")


def core_to_worker(launch_dir: str, epoch: int, rank: int) -> str:
    return _ipc(launch_dir, f"e{epoch}w{rank}.steps")


def worker_to_core(launch_dir: str, epoch: int) -> str:
    return _ipc(launch_dir, f"e{epoch}.outputs")


def _ipc(launch_dir: str, name: str) -> str:
    path = str(Path(launch_dir) / name)
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(
            f"socket path of {len(path)} characters, the system allows {MAX_IPC_PATH}: {path}"
        )
    return f"ipc://{path}"


def _configure(sock: "zmq.Socket[bytes]") -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    sock.setsockopt(zmq.RECONNECT_IVL, 10)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 100)


class Inbox:
    """The receiving end: a bound PULL. `socket` may be polled; close unlinks the path."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address: Final = address
        self.socket: Final = context.socket(zmq.PULL)
        _configure(self.socket)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.bind(address)

    def receive(self, timeout_ms: int = 0) -> bytes | None:
        """The next frame, or None when none came in time; 0 does not wait."""
        if timeout_ms and not self.socket.poll(timeout_ms):
            return None
        try:
            return self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(linger=0)
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


class Outbox:
    """The sending end: a connected PUSH socket, one per peer, never shared."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address: Final = address
        self.socket: Final = context.socket(zmq.PUSH)
        _configure(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.connect(address)

    def send(self, frame: bytes) -> bool:
        """Queue one frame; False, with nothing sent, when the peer is too far behind."""
        try:
            self.socket.send(frame, zmq.DONTWAIT, copy=len(frame) < 65536)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)


class ControlChannel:
    """One end of the socketpair between launcher and child; message boundaries are kept."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket: Final = sock

    @staticmethod
    def pair() -> "tuple[ControlChannel, socket.socket]":
        """The launcher's end, and the raw end to pass to a child by file descriptor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_CONTROL_BYTES)
        return ControlChannel(ours), theirs

    @staticmethod
    def from_fd(fd: int) -> "ControlChannel":
        """The child's end, inherited as a file descriptor."""
        return ControlChannel(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Queue one message; False when the peer is gone or does not read."""
        try:
            self.socket.send(frame, socket.MSG_NOSIGNAL)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError, OSError):
            return False
        return True

    def peek(self) -> bytes | None:
        """What `receive` would take; None when there is nothing now, or the peer is gone."""
        try:
            return self.socket.recv(MAX_CONTROL_BYTES, socket.MSG_PEEK) or None
        except (BlockingIOError, ConnectionResetError):
            return None

    def receive(self) -> bytes | None:
        """The next message, None when there is none now; EOFError when the peer is gone."""
        try:
            frame = self.socket.recv(MAX_CONTROL_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            frame = b""
        if not frame:
            raise EOFError("the control channel was closed by the other side")
        return frame

    def close(self) -> None:
        self.socket.close()
