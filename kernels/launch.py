"""How kernels are launched: dependent launch, where a kernel starts while the one before it drains.

Every kernel launched with launch_options() calls inputs_ready() before it touches memory that the
kernels before it may still read or write; what comes before that call (addresses, weights, what
was written before a kernel that lets no other start early) overlaps with the earlier kernel's tail.
Needs Hopper; elsewhere, and in the interpreter, the switch is off.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nvserve.kernels.compilation import Source, compile_source, held_back
from nvserve.kernels.dispatch import INTERPRETED

HAS_PTX: Final = tl.constexpr(not INTERPRETED)


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
        self._asked_for: set[tuple[object, ...]] = set()  # by compiling_only()

    @property
    def cache_key(self) -> str:
        """As the library's, of functions called here first.

        In some releases, 3.6 for one, the library's own key depends on whether theirs were asked
        for before: another process, or order of launches, would miss what is in the kernel cache.
        """
        if self.hash is None:
            for name in self.fn.__code__.co_names:
                called = self.fn.__globals__.get(name)
                if isinstance(called, _Kernel) and called is not self:
                    _ = called.cache_key
        return str(super().cache_key)

    def create_binder(self) -> Any:
        binder = super().create_binder()
        self.ASTSource, self.compile = Source, compile_source
        return binder

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if held_back.is_on:
            return functools.partial(self._compile, grid)
        return functools.partial(self._launch, grid)

    def _compile(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        key = self._key(arguments, options)
        if key not in self._asked_for:
            self.warmup(*arguments, grid=grid, **options)
            self._asked_for.add(key)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        key = self._key(arguments, options)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.run(*arguments, grid=grid, warmup=False, **options)
            self._compiled[key] = compiled
            return
        constants = [options[name] for name in self._constants]
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)

    def _key(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
        """The same for launches that one compiled kernel serves."""
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
        return tuple(likes)


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
