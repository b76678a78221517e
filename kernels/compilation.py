"""Kernels compiled ahead, side by side: in other processes where there are any, else in threads.

What is found in the kernel cache is only loaded.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.compiler import ASTSource

from nvserve.kernels.dispatch import INTERPRETED

Elsewhere = Callable[[ASTSource, Any, dict[str, Any]], object]


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


_elsewhere: Elsewhere | None = None


def set_elsewhere(compile_elsewhere: Elsewhere | None) -> None:
    """Have kernels compiled into the cache by this function; this process does what it leaves."""
    global _elsewhere
    _elsewhere = compile_elsewhere


def compile_source(source: Source, target: Any, options: dict[str, Any], **others: Any) -> Any:
    """triton.compile, of what is not in the cache elsewhere if there is such a function."""
    arguments = {"target": target, "options": options, **others}
    compile_elsewhere = _elsewhere
    if compile_elsewhere is not None:
        source.is_only_looked_up = True
        try:
            return triton.compile(source, **arguments)
        except _NotCached:
            compile_elsewhere(source, target, options)
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
            prepare_triton()

    thread = threading.Thread(target=read_all, name="triton", daemon=True)
    thread.start()
    return thread


def prepare_triton() -> None:
    """See prepare(). Opens no device.

    Triton builds a library of its own to reach the driver, and hashes all of itself.
    """
    triton.runtime.driver.set_active(backends["nvidia"].driver())
    for module in (triton.runtime.cache, triton.compiler.compiler):  # by version
        if hasattr(module, "triton_key"):
            module.triton_key()
