"""Kernels compiled ahead, side by side: by the compile server while there is one, else in threads.

What is found in the kernel cache is only loaded.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch
import triton
from triton.compiler import ASTSource

from nvserve.kernels import compile_server
from nvserve.kernels.compile_server import Job, fork_server
from nvserve.kernels.dispatch import INTERPRETED


class _HeldBack(threading.local):
    """Whether this thread is inside compiling_only()."""

    is_on = False


held_back = _HeldBack()


_front_end = threading.Lock()


class _NotCached(Exception):
    """A kernel has yet to be compiled."""


class Source(ASTSource):  # type: ignore[misc]
    """A kernel's source, one of which at a time goes through the part that is all Python.

    Threads that shared the interpreter there would all come late to the part that is not.
    """

    is_only_looked_up = False

    def make_ir(self, *arguments: Any, **options: Any) -> Any:
        if self.is_only_looked_up:
            raise _NotCached
        with _front_end:
            return super().make_ir(*arguments, **options)


class _Server:
    """The compile server, and which signatures' launchers it was asked for."""

    def __init__(self) -> None:
        self._server: Final = fork_server()
        self._signatures: Final[set[str]] = set()
        self._lock: Final = threading.Lock()

    def compile(self, source: Source, target: Any, options: dict[str, Any]) -> None:
        signature = str(source.signature)
        with self._lock:
            is_new = signature not in self._signatures
            self._signatures.add(signature)
        kernel, constants, attributes = source.fn, source.constants, source.attrs
        names = kernel.__module__, kernel.__name__
        job = Job(*names, source.signature, constants, attributes, target, options, is_new)
        self._server.compile(job)

    def close(self) -> None:
        self._server.close()


_server: _Server | None = None


def start_server() -> None:
    """From now on a process of its own compiles. Before this one's first thread, and its device."""
    global _server
    _server = _Server()


def stop_server() -> None:
    """From now on this process compiles."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def compile_source(source: Source, target: Any, options: dict[str, Any], **others: Any) -> Any:
    """triton.compile, for which the compile server fills the cache while there is one."""
    arguments = {"target": target, "options": options, **others}
    server = _server
    if server is not None:
        source.is_only_looked_up = True
        try:
            return triton.compile(source, **arguments)
        except _NotCached:
            server.compile(source, target, options)
        finally:
            source.is_only_looked_up = False
    return triton.compile(source, **arguments)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and build the launcher of each new signature at once.

    A launcher is C code, which takes a compiler of its own that long; kernels of one signature
    share one. It is built beside the kernels that still compile.
    """

    def __init__(self) -> None:
        super().__init__(max(1, min(16, len(os.sched_getaffinity(0)))))
        self._device = torch.cuda.current_device()  # threads begin at the first
        self._kernels: list[Any] = []
        self._signatures: set[str] = set()
        self._lock = threading.Lock()

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return super().submit(self._compile, functools.partial(compile_kernel, *args, **options))

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        signature = str(kernel.src.signature)
        with self._lock:
            self._kernels.append(kernel)
            is_new = signature not in self._signatures
            self._signatures.add(signature)
        if is_new:
            self._load(kernel)
        return kernel

    def _load(self, kernel: Any) -> None:
        """The first look at a kernel's grid builds its launcher, and loads it to the device."""
        with torch.cuda.device(self._device):
            kernel[(1, 1, 1)]

    def load_all(self) -> None:
        """Once all have ended. Later, loading waits for what runs, which may wait for a peer."""
        for kernel in self._kernels:
            self._load(kernel)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, this thread's launches compile their kernels in other ones; waits for all at the end.

    What takes longest should be asked for first. Nothing runs, so what the kernels would have
    written is not: use the results for nothing but further launches.
    """
    if INTERPRETED or not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    prepare().join()
    with _Compilers() as threads, triton.AsyncCompileMode(threads):
        held_back.is_on = True
        try:
            yield
        finally:
            held_back.is_on = False
    threads.load_all()


@functools.cache
def prepare() -> threading.Thread:
    """Do in a thread, once, what the first compilation of a process needs: half a second of it.

    Needs no device context, so it can go on beside the loading of weights.
    """

    def read_all() -> None:
        if torch.cuda.is_available():
            compile_server.prepare()

    thread = threading.Thread(target=read_all, name="triton", daemon=True)
    thread.start()
    return thread
