"""How kernels are launched: dependent launch, where a kernel starts while the one before it drains.

Every kernel launched with launch_options() calls inputs_ready() before it touches memory that the
kernels before it may still read or write; what comes before that call (addresses, weights, what
was written before a kernel that lets no other start early) overlaps with the earlier kernel's tail.
Needs Hopper; elsewhere, and in the interpreter, the switch is off.
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
import triton.language as tl
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from nvserve.kernels.dispatch import INTERPRETED

HAS_PTX: Final = tl.constexpr(not INTERPRETED)


class _HeldBack(threading.local):
    """Whether this thread is inside compiling_only()."""

    is_on = False


_held_back = _HeldBack()


_front_end = threading.Lock()


class _Source(ASTSource):  # type: ignore[misc]
    """A kernel's source, one of which at a time goes through the part that is all Python.

    Threads that shared the interpreter there would all come late to the part that is not.
    """

    def make_ir(self, *arguments: Any, **options: Any) -> Any:
        with _front_end:
            return super().make_ir(*arguments, **options)


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

    Most of a compilation is outside of Python, so that the threads need not wait for each other;
    the longest should be asked for first. Nothing runs, so what the kernels would have written is
    not: use the results for nothing but further launches.
    """
    if INTERPRETED or not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    prepare().join()
    with _Compilers() as threads, triton.AsyncCompileMode(threads):
        _held_back.is_on = True
        try:
            yield
        finally:
            _held_back.is_on = False
    threads.load_all()


@functools.cache
def prepare() -> threading.Thread:
    """Do in a thread, once, what the first compilation of a process needs: half a second of it.

    Triton builds a library of its own to reach the driver, and hashes all of itself. Needs no
    device context, so it can go on beside the loading of weights.
    """

    def read_all() -> None:
        if not torch.cuda.is_available():
            return
        _ = triton.runtime.driver.active  # made at the first look
        for module in (triton.runtime.cache, triton.compiler.compiler):  # by version
            if hasattr(module, "triton_key"):
                module.triton_key()

    thread = threading.Thread(target=read_all, name="triton", daemon=True)
    thread.start()
    return thread


class _Kernel(triton.JITFunction):  # type: ignore[misc]
    """A kernel, or a function that kernels call.

    compiling_only() can hold it back, and its launches are short cuts: the library's own way takes
    tens of microseconds, most of it to find what was compiled for arguments like these. Parameters
    of kernels are first those of run time, given by position, then constexprs, given by name.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._is_general = [param.do_not_specialize for param in self.params]
        self._constants = [param.name for param in self.params if param.is_constexpr]
        self._compiled: dict[tuple[object, ...], Any] = {}

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource = _Source
        return binder

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if _held_back.is_on:
            return functools.partial(self._compile, grid)
        return functools.partial(self._launch, grid)

    def _compile(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.warmup(*arguments, grid=grid, **options)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        likes: list[object] = [torch.cuda.current_device(), *options.values()]
        for argument, is_general in zip(arguments, self._is_general, strict=False):
            if isinstance(argument, torch.Tensor):
                likes += (argument.dtype, argument.data_ptr() % 16)
            elif isinstance(argument, int):
                likes.append(-(1 << 31) <= argument < 1 << 31 if is_general else argument)
            elif isinstance(argument, TensorDescriptor):
                likes += (argument.base.dtype, *argument.block_shape)
            else:
                likes.append(type(argument))
        key = tuple(likes)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.run(*arguments, grid=grid, warmup=False, **options)
            self._compiled[key] = compiled
            return
        constants = [options[name] for name in self._constants]
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def jit_general(*arguments: str) -> Callable[[Callable[..., Any]], Any]:
    """triton.jit whose compiled kernels serve every value of these integer arguments."""
    if INTERPRETED:
        decorator: Callable[[Callable[..., Any]], Any] = triton.jit(
            do_not_specialize=list(arguments)
        )
        return decorator
    return functools.partial(_Kernel, do_not_specialize=list(arguments))


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit with types, since the library has none."""
    return jit_general()(function)


@jit
def inputs_ready(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernels before this one have finished and their writes can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def start_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel's programs start; they still wait for our end in inputs_ready()."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def meet():  # type: ignore[no-untyped-def]
    """debug_barrier(), in a form that the compiler's pipeliner does not know.

    It leaves loops with a barrier as they are. For what a loop passes seldom, all threads alike,
    and where nothing is touched that is loaded ahead.
    """
    if HAS_PTX:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, $1;",
            "=r,r",
            [0],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()


@jit
def prefetch_rows(rows_ptr, num_bytes):  # type: ignore[no-untyped-def]
    """Ask for num_bytes (a multiple of 16) at each of these addresses to come into the L2 cache.

    May come before inputs_ready() even for data that an earlier kernel still writes.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows_ptr.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments for the launch of a kernel that has a PDL switch."""
    enabled = _has_dependent_launch(device)
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; a few for the interpreter, so that programs have several."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
