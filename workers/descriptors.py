"""Ranks give each other open files: one descriptor each, over sockets in the launch directory."""

import contextlib
import os
import socket
from array import array
from pathlib import Path

from nvserve.workers.roll_call import RollCall

MAX_BYTES = 16  # of a message: a rank in decimal


def exchange_descriptors(path: Path, roll: RollCall, descriptor: int) -> list[int]:
    """What all ranks hold open, as descriptors of this process, in rank order; close them all.

    Every rank calls this with the same `path`, to which it appends its rank, and which is new with
    every epoch. roll.wait() is called while ranks are missing, and may raise.
    """
    found = {roll.rank: os.dup(descriptor)}
    mine = Path(f"{path}{roll.rank}")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.setblocking(False)
            inbox.bind(str(mine))
            roll.hear_all("bound", "")
            for rank in range(roll.size):
                if rank != roll.rank:
                    _send(inbox, f"{path}{rank}", roll, descriptor)
            while len(found) < roll.size:
                found.update(_receive(inbox, roll))
    except BaseException:
        for received in found.values():
            os.close(received)
        raise
    finally:
        mine.unlink(missing_ok=True)
    return [found[rank] for rank in range(roll.size)]


def _send(outbox: socket.socket, path: str, roll: RollCall, descriptor: int) -> None:
    message = str(roll.rank).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    while True:
        try:
            # socket.send_fds forgets the address.
            outbox.sendmsg([message], [rights], 0, path)
        except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            roll.wait()  # it has not read what others sent, or is gone: another epoch will begin
        else:
            return


def _receive(inbox: socket.socket, roll: RollCall) -> dict[int, int]:
    with contextlib.suppress(BlockingIOError):
        message, descriptors, _, _ = socket.recv_fds(inbox, MAX_BYTES, 1)
        if not descriptors:
            raise RuntimeError("a peer's memory did not come through: too many open files?")
        return {int(message): descriptors[0]}
    roll.wait()
    return {}
