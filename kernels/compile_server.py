"""Compiles kernels in processes of their own: threads would wait for the interpreter's lock.

A worker forks its server before it opens its device or starts a thread, so that the server has all
modules loaded and no lock held. The server forks once for each kernel; what comes of it is in the
kernel cache, where the worker then finds it. The server ends with the worker, whose end of the
socket it reads from.

Only the way to the cache: a kernel that cannot be compiled here is compiled by its worker.
"""

import ast
import gc
import importlib
import logging
import os
import pkgutil
import select
import signal
import socket
import sys
import time
from typing import Any, Final, NamedTuple, NoReturn

import setproctitle
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from nvserve import kernels

logger = logging.getLogger(__name__)

# Of one kernel; those of ours take less than a second.
COMPILE_LIMIT_S: Final = 60
_MAX_JOB_BYTES: Final = 1 << 16
_DONE: Final = b"1"


class Job(NamedTuple):
    """What triton.compile needs to know of a kernel, by names that hold in both processes."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    target: GPUTarget
    options: dict[str, Any]
    has_new_launcher: bool  # the C code of its signature is to be compiled as well

    def to_bytes(self) -> bytes:
        """As Python's literals."""
        target = (self.target.backend, self.target.arch, self.target.warp_size)
        return repr(tuple(self._replace(target=target))).encode()

    @classmethod
    def from_bytes(cls, frame: bytes) -> "Job":
        """SyntaxError or ValueError where a value was none that a literal can be of."""
        job = cls(*ast.literal_eval(frame.decode()))
        return job._replace(target=GPUTarget(*job.target))

    def compile(self) -> None:
        """Leave the kernel in the cache; no device is needed."""
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        source = ASTSource(kernel, self.signature, self.constants, self.attributes)
        compiled = triton.compile(source, target=self.target, options=self.options)
        if self.has_new_launcher:
            triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


class CompileServer:
    """The worker's side of its server."""

    def __init__(self, to_server: socket.socket) -> None:
        self._to_server: Final = to_server

    def compile(self, job: Job) -> bool:
        """Have a kernel compiled; waits for it. False where it was not, for any reason."""
        answer, to_answer = os.pipe()
        try:
            try:
                socket.send_fds(self._to_server, [job.to_bytes()], [to_answer])
            finally:
                os.close(to_answer)
            # Only the process that compiles holds the other end now: its death ends the wait.
            is_readable, _, _ = select.select([answer], [], [], COMPILE_LIMIT_S)
            return bool(is_readable) and os.read(answer, 1) == _DONE
        except OSError as error:
            logger.debug("no compile server: %s", error)
            return False
        finally:
            os.close(answer)

    def close(self) -> None:
        """Have the server end. What it compiles goes on, into the cache."""
        self._to_server.close()


def fork_server() -> CompileServer:
    """Start a server. Call it before this process starts threads or opens its device."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    return CompileServer(ours)


def _serve(jobs: socket.socket) -> NoReturn:
    """Fork for each job until the worker's end is closed. Never returns to the caller's code."""
    status = 1
    try:
        setproctitle.setproctitle("nvserve: compile server")  # workers are found by theirs
        gc.disable()  # none of these processes lives for long
        prepare()
        _know_kernels()
        while True:
            job, answer = _receive(jobs)
            make_backend(job.target).hash()  # asks the assembler for its version, once
            if os.fork() == 0:
                _answer(job, answer)
            os.close(answer)
            _reap()
    except EOFError:
        status = 0
    finally:
        _leave(status)


def _know_kernels() -> None:
    """Load all kernels and hash their sources, once for all processes that compile them."""
    for found in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, triton.JITFunction):
                _ = value.cache_key


def _receive(jobs: socket.socket) -> tuple[Job, int]:
    """A job and where its answer goes; EOFError when the worker is gone."""
    frame, descriptors, _flags, _address = socket.recv_fds(jobs, _MAX_JOB_BYTES, 1)
    if not frame:
        raise EOFError
    return Job.from_bytes(frame), descriptors[0]


def _answer(job: Job, answer: int) -> NoReturn:
    try:
        signal.alarm(COMPILE_LIMIT_S)  # ends this process, which nobody else waits for
        began = time.monotonic()
        job.compile()
        logger.debug("compiled %s in %.2f s", job.kernel, time.monotonic() - began)
        os.write(answer, _DONE)
    except BaseException as error:  # the worker compiles it again, and has the traceback
        logger.debug("could not compile a kernel: %s", error)
    finally:
        _leave(0)


def _reap() -> None:
    """Collect the ended processes, so that they do not stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _leave(status: int) -> NoReturn:
    """End without the exit handlers, which are the worker's."""
    sys.stderr.flush()
    os._exit(status)


def prepare() -> None:
    """Do once what the first compilation of a process needs: half a second of it.

    Triton builds a library of its own to reach the driver, and hashes all of itself. Opens no
    device.
    """
    triton.runtime.driver.set_active(backends["nvidia"].driver())
    for module in (triton.runtime.cache, triton.compiler.compiler):  # by version
        if hasattr(module, "triton_key"):
            module.triton_key()
