"""Compiles kernels in processes of their own: threads would wait for the interpreter's lock.

A worker forks its server before it opens its device or starts a thread, so that the server has all
modules loaded and no lock held. The server forks once for each kernel; what comes of it is in the
kernel cache, where the worker then finds it. The server ends with the worker, whose end of the
socket it reads from, and what it forked ends with it.

Only the way to the cache: a kernel that cannot be compiled here is compiled by its worker.
"""

import ast
import gc
import importlib
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from typing import Any, Final, NamedTuple, NoReturn

import setproctitle
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvserve import kernels
from nvserve.kernels import compilation
from nvserve.protocol.child import die_with_parent, is_readable

logger = logging.getLogger(__name__)

# Of one kernel; those of ours take two seconds.
COMPILE_LIMIT_S: Final = 30
END_LIMIT_S: Final = 2.0  # of a server whose socket was closed
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

    def __init__(self, pid: int, to_server: socket.socket) -> None:
        self._pid: Final = pid
        self._to_server: Final = to_server
        self._signatures: Final[set[str]] = set()
        self._lock: Final = threading.Lock()
        self._is_lost = False

    def ask(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> bool:
        """Have a kernel compiled; waits for it. False where it was not, for any reason."""
        signature = str(source.signature)
        with self._lock:
            is_new = signature not in self._signatures
            self._signatures.add(signature)
        names = source.fn.__module__, source.fn.__name__
        types = source.signature, source.constants, source.attrs
        return self.compile(Job(*names, *types, target, options, is_new))

    def compile(self, job: Job) -> bool:
        """See ask()."""
        if self._is_lost:
            return False
        answer, to_answer = os.pipe()
        try:
            try:
                socket.send_fds(self._to_server, [job.to_bytes()], [to_answer])
            finally:
                os.close(to_answer)
            # Only the process that compiles holds the other end now: its death ends the wait.
            if is_readable(answer, COMPILE_LIMIT_S):
                return os.read(answer, 1) == _DONE
            logger.warning("no kernel from the compile server in %d s", COMPILE_LIMIT_S)
            self._is_lost = True
        except OSError as error:
            logger.warning("no compile server: %s", error)
            self._is_lost = True
        finally:
            os.close(answer)
        return False

    def close(self) -> None:
        """Have the server end, and wait for that."""
        self._is_lost = True
        self._to_server.close()
        ended = os.pidfd_open(self._pid)
        try:
            if not is_readable(ended, END_LIMIT_S):
                os.kill(self._pid, signal.SIGKILL)
                is_readable(ended, END_LIMIT_S)
            os.waitpid(self._pid, os.WNOHANG)
        finally:
            os.close(ended)


_server: CompileServer | None = None


def start_server() -> None:
    """From now on kernels are compiled by a process of its own, if one can be made.

    Before this process opens its device, or starts a thread.
    """
    global _server
    try:
        _server = fork_server()
    except OSError as error:
        logger.warning("kernels are compiled here, one after the other: %s", error)
        return
    compilation.set_elsewhere(_server.ask)


def stop_server() -> None:
    """From now on this process compiles."""
    global _server
    compilation.set_elsewhere(None)
    if _server is not None:
        _server.close()
        _server = None


def fork_server() -> CompileServer:
    """OSError where there can be no other process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        if pid == 0:
            _serve(ours, theirs)
    return CompileServer(pid, ours)


def _serve(ours: socket.socket, jobs: socket.socket) -> NoReturn:
    """Fork for each job until the worker's end is closed. Never returns to the caller's code."""
    try:
        ours.close()
        setproctitle.setproctitle("nvserve: compile server")  # workers are found by theirs
        gc.disable()  # none of these processes lives for long
        compilation.prepare_triton()
        _know_kernels()
        while True:
            frame, descriptors, _, _ = socket.recv_fds(jobs, _MAX_JOB_BYTES, 1)
            if not frame:
                break
            server = os.getpid()
            if os.fork() == 0:
                _answer(jobs, frame, descriptors[0], server)
            os.close(descriptors[0])
            _reap()
    except Exception:  # the worker goes on without
        logger.exception("the compile server ends")
    finally:
        _leave()


def _know_kernels() -> None:
    """Load all kernels and hash their sources, once for all processes that compile them."""
    for found in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, triton.JITFunction):
                _ = value.cache_key


def _answer(jobs: socket.socket, frame: bytes, answer: int, server: int) -> NoReturn:
    try:
        jobs.close()  # the worker shall see it when the server ends
        die_with_parent(server)
        signal.alarm(COMPILE_LIMIT_S)
        job = Job.from_bytes(frame)
        began = time.monotonic()
        job.compile()
        logger.debug("compiled %s in %.2f s", job.kernel, time.monotonic() - began)
        os.write(answer, _DONE)
    except Exception:  # the worker tries it again
        logger.warning("the compile server could not compile a kernel", exc_info=True)
    finally:
        _leave()


def _reap() -> None:
    """Collect the ended processes, so that they do not stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _leave() -> NoReturn:
    """End without the exit handlers, which are the worker's."""
    try:
        sys.stderr.flush()
    finally:
        os._exit(0)
