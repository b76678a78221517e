"""How kernels are launched: dependent launch, where a kernel starts while the one before it drains.

Every kernel launched with launch_options() calls inputs_ready() before it touches memory that an
earlier kernel wrote or still reads; what comes before that call (addresses, weights) overlaps with
the earlier kernel's tail. Needs Hopper; elsewhere, and in the interpreter, the switch is off.
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
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nvserve.kernels.dispatch import INTERPRETED


class _HeldBack(threading.local):
    """What launches of this thread compiled inside compiling_only(); None outside."""

    kernels: list[Any] | None = None


_held_back = _HeldBack()


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
    num_threads = max(1, min(16, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            with triton.AsyncCompileMode(threads):
                held_back = _held_back.kernels = []
                yield
            # Kernels of one signature share a launcher, which is built with a C compiler.
            kernels = {str(k.src.signature): k for k in map(_finished, held_back)}
        finally:
            _held_back.kernels = None
        device = torch.cuda.current_device()  # threads begin at the first

        def load(kernel: Any) -> None:
            """The first look at a kernel's grid builds its launcher."""
            with torch.cuda.device(device):
                kernel[(1, 1, 1)]

        list(threads.map(load, kernels.values()))


def _finished(kernel: Any) -> Any:
    return kernel.result() if hasattr(kernel, "result") else kernel


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

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if _held_back.kernels is not None:
            return functools.partial(self._compile, grid)
        return functools.partial(self._launch, grid)

    def _compile(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        assert _held_back.kernels is not None, "inside compiling_only()"
        _held_back.kernels.append(self.warmup(*arguments, grid=grid, **options))

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
