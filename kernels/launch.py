"""Programmatic dependent launch: a kernel starts while the one before it drains.

Every kernel launched with launch_options() calls inputs_ready() before it touches memory that an
earlier kernel wrote or still reads; what comes before that call (addresses, weights) overlaps with
the earlier kernel's tail. Needs Hopper; elsewhere, and in the interpreter, the switch is off.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def inputs_ready(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernels before this one have finished and their writes can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel's programs start; they still wait for our end in inputs_ready()."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments for the launch of a kernel that has a PDL switch."""
    enabled = _has_dependent_launch(device)
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}
