"""Matmul of 2 to 128 rows of x on the matrix units: strips of outputs, tiles of a strip's inputs.

Programs take whole strips, round robin, or equal shares: the tiles of all strips are one line, of
which each program takes a run, so that every multiprocessor has the same to read, whatever the
shape. A run may cover the end of one strip, some whole ones and the start of another. What covers
a strip alone writes its outputs; otherwise each program leaves its sums in float32, and the last
to arrive adds them, in an order that does not depend on who that is: the same bits in every run.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    meet,
    num_sms,
    prefetch_rows,
    start_next,
)
from nvserve.kernels.matmul import SkinnyCut
from nvserve.kernels.room import has_room, tile_tokens

# The least that is allocated, enough for any cut in use.
_SUMS_PER_SM: Final = 2 * 8192
_ARRIVALS: Final = 16384


class Workspace(NamedTuple):
    """Where programs that share a strip meet. Launches may use it one after the other only.

    sums: float32, two slots a program: for the strip in which its run begins and the one in which
        it ends. arrivals: int32, of each strip, zero between two launches.
    """

    sums: torch.Tensor
    arrivals: torch.Tensor


# Of each device. The last one serves new launches; the graphs that were captured with the earlier
# ones go on with them. Kernels of one stream follow each other (see inputs_ready), and our device
# work is on one stream at a time, so that all launches may share it.
_workspaces: Final[dict[torch.device, list[Workspace]]] = {}


def workspace(device: torch.device, num_sums: int, num_strips: int) -> Workspace:
    """The device's workspace of at least this size; must not have to grow during a capture.

    Nor does it where the same launch ran, or was compiled, before the capture.
    """
    known = _workspaces.setdefault(device, [])
    if known:
        num_sums = max(num_sums, known[-1].sums.numel())
        num_strips = max(num_strips, known[-1].arrivals.numel())
        if (num_sums, num_strips) == (known[-1].sums.numel(), known[-1].arrivals.numel()):
            return known[-1]
    is_cuda = device.type == "cuda"
    # Graphs would share memory of a graph's own pool, and nothing would have set it to zero.
    assert not (is_cuda and torch.cuda.is_current_stream_capturing()), "allocate it beforehand"
    num_sums = max(num_sums, _SUMS_PER_SM * num_sms(device))
    sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    arrivals = torch.zeros(max(num_strips, _ARRIVALS), dtype=torch.int32, device=device)
    if is_cuda:
        torch.cuda.current_stream(device).synchronize()  # zero for every stream
    known.append(Workspace(sums, arrivals))
    return known[-1]


@jit
def silu_mul(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _write(  # type: ignore[no-untyped-def]
    acc,
    up_acc,
    bias_ptr,
    out_ptr,
    strip,
    num_tokens,
    outputs,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SWAPPED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The outputs of one strip, from its sums over all inputs."""
    row_axis: tl.constexpr = 1 if SWAPPED else 0
    rows = strip * ROWS + tl.arange(0, ROWS)
    rows_wide = tl.expand_dims(rows, 1 - row_axis)
    tokens_wide = tl.expand_dims(tl.arange(0, TOKENS), row_axis)
    out = acc
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < outputs, other=0.0)
        out += tl.expand_dims(bias.to(tl.float32), 1 - row_axis)
    if GATED:
        up = up_acc
        if BIAS:
            bias = tl.load(bias_ptr + outputs + rows, mask=rows < outputs, other=0.0)
            up += tl.expand_dims(bias.to(tl.float32), 1 - row_axis)
        out = silu_mul(out, up)
    out_at = out_ptr + tokens_wide * outputs + rows_wide
    out_mask = (rows_wide < outputs) & (tokens_wide < num_tokens)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit
def _left(slots, first_program, index, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the index-th of the `count` programs of one strip left; zeros behind the last."""
    # The strip is the last of the first program's run, and the first of the others'.
    slot = 2 * (first_program + index) + tl.where(index == 0, 1, 0)
    # .cg: another SM wrote these, and this SM's L1 must not answer.
    return tl.load(slots + slot * WIDTH, mask=index < count, other=0.0, cache_modifier=".cg")


@jit
def _combine(  # type: ignore[no-untyped-def]
    slots,  # where the values of the first slot are, [OUTER, INNER]
    first_program,
    count,
    WIDTH: tl.constexpr,  # values of a slot
):
    """Add what `count` consecutive programs left, in an order of their numbers alone.

    In pairs, since the compiler has a chain of additions wait for each load anew.
    """
    acc = tl.zeros(slots.shape, tl.float32)
    for first in range(0, count, 4):
        low = _left(slots, first_program, first, count, WIDTH)
        low += _left(slots, first_program, first + 1, count, WIDTH)
        high = _left(slots, first_program, first + 2, count, WIDTH)
        high += _left(slots, first_program, first + 3, count, WIDTH)
        acc += low + high
    return acc


@jit
def _leave(  # type: ignore[no-untyped-def]
    acc, up_acc, at, arrivals_ptr, GATED: tl.constexpr, SIZE: tl.constexpr
):
    """Leave a program's sums of a strip in its slot; how many had arrived before."""
    tl.store(at, acc)
    if GATED:
        tl.store(at + SIZE, up_acc)
    # All threads' sums come before the one thread's release.
    meet()
    return tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")


@jit
def _owner(tile, share, longer):  # type: ignore[no-untyped-def]
    """The program whose run holds this tile; the first `longer` runs hold share + 1, not share."""
    return tl.maximum(tile // (share + 1), (tile - longer) // share)


@jit_general("num_tokens")
def _strip_kernel(  # type: ignore[no-untyped-def]
    x_tiles,  # tensor map of x, TOKENS x BLOCK
    weight_tiles,  # tensor map of the weight, ROWS x BLOCK
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    arrivals_ptr,
    num_tokens,
    outputs,
    inputs,
    GATED: tl.constexpr,  # weight rows `outputs` further on are those of `up`
    BIAS: tl.constexpr,
    SHARED: tl.constexpr,  # equal shares, not whole strips
    SWAPPED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to TOKENS rows of x on the matrix units; the copy engine brings tiles to shared memory.

    One loop runs over the tiles of all strips of a program, so that the pipeline does not drain
    between two of them. Tiles past an edge are filled with zeros. SWAPPED puts tokens first: for
    strips of fewer rows than the matrix instructions of Hopper take.
    """
    OUTER: tl.constexpr = TOKENS if SWAPPED else ROWS
    INNER: tl.constexpr = ROWS if SWAPPED else TOKENS
    SIZE: tl.constexpr = TOKENS * ROWS
    WIDTH: tl.constexpr = SIZE * (2 if GATED else 1)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    strips = tl.cdiv(outputs, ROWS)
    tiles = tl.cdiv(inputs, BLOCK)
    share = strips * tiles // num_programs
    longer = strips * tiles % num_programs
    if SHARED:
        begin = program * share + tl.minimum(program, longer)
        steps = share + tl.where(program < longer, 1, 0)
    else:
        begin = program * tiles
        steps = tl.cdiv(strips - program, num_programs) * tiles
    if PDL:
        rows = tl.minimum(begin // tiles * ROWS + tl.arange(0, ROWS), outputs - 1).to(tl.int64)
        column = begin % tiles * BLOCK
        num_bytes = tl.minimum(2 * BLOCK * steps, 1024 if GATED else 2048)
        num_bytes = tl.minimum(2 * (inputs - column), num_bytes)
        prefetch_rows(weight_ptr + rows * inputs + column, num_bytes)
        if GATED:
            prefetch_rows(weight_ptr + (outputs + rows) * inputs + column, num_bytes)
    start_next(PDL)
    inputs_ready(PDL)
    acc = tl.zeros([OUTER, INNER], tl.float32)
    up_acc = acc
    for step in tl.range(0, steps, num_stages=STAGES):
        if SHARED:
            strip = (begin + step) // tiles
            tile = (begin + step) % tiles
        else:
            strip = program + step // tiles * num_programs
            tile = step % tiles
        weights = weight_tiles.load([strip * ROWS, tile * BLOCK])
        x = x_tiles.load([0, tile * BLOCK])
        if SWAPPED:
            acc = tl.dot(x, tl.trans(weights), acc=acc)
        else:
            acc = tl.dot(weights, tl.trans(x), acc=acc)
        if GATED:
            ups = weight_tiles.load([outputs + strip * ROWS, tile * BLOCK])
            if SWAPPED:
                up_acc = tl.dot(x, tl.trans(ups), acc=up_acc)
            else:
                up_acc = tl.dot(ups, tl.trans(x), acc=up_acc)
        is_end = tile == tiles - 1
        if SHARED:
            is_end = is_end | (step == steps - 1)
        if is_end:
            is_whole = True
            if SHARED:
                is_whole = (step >= tile) & (tile == tiles - 1)
            if is_whole:
                _write(
                    *(acc, up_acc, bias_ptr, out_ptr, strip, num_tokens, outputs),
                    *(GATED, BIAS, SWAPPED, TOKENS, ROWS),
                )
            else:
                each = tl.arange(0, OUTER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
                slot = 2 * program + tl.where(step >= tile, 1, 0)
                at = sums_ptr + slot * WIDTH + each
                arrived = _leave(acc, up_acc, at, arrivals_ptr + strip, GATED, SIZE)
                first = _owner(strip * tiles, share, longer)
                count = _owner(strip * tiles + tiles - 1, share, longer) - first + 1
                if arrived == count - 1:
                    tl.store(arrivals_ptr + strip, 0)
                    total = _combine(sums_ptr + each, first, count, WIDTH)
                    up_total = total
                    if GATED:
                        up_total = _combine(sums_ptr + SIZE + each, first, count, WIDTH)
                    _write(
                        *(total, up_total, bias_ptr, out_ptr, strip, num_tokens, outputs),
                        *(GATED, BIAS, SWAPPED, TOKENS, ROWS),
                    )
            acc = tl.zeros([OUTER, INNER], tl.float32)
            up_acc = acc


def strips(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
    out: torch.Tensor,
    *,
    gated: bool,
) -> None:
    """linear, or gated linear_silu_mul, of 2 to 128 rows of x; weight and out are contiguous."""
    num_tokens, inputs = x.shape
    outputs = out.shape[1]
    x = x.contiguous()
    tokens = tile_tokens(num_tokens)
    num_rows = tokens if has_room(x, tokens) else num_tokens
    num_strips = triton.cdiv(outputs, cut.outputs)
    num_units = num_strips * (triton.cdiv(inputs, cut.inputs) if cut.equal_shares else 1)
    num_programs = min(num_units, cut.programs_per_sm * num_sms(x.device))
    sums = arrivals = out  # neither is used for whole strips
    if cut.equal_shares:
        num_sums = 2 * num_programs * tokens * cut.outputs * (2 if gated else 1)
        sums, arrivals = workspace(x.device, num_sums, num_strips)
    _strip_kernel[(num_programs,)](
        TensorDescriptor(x, [num_rows, inputs], [inputs, 1], [tokens, cut.inputs]),
        TensorDescriptor.from_tensor(weight, [cut.outputs, cut.inputs]),
        weight,
        x if bias is None else bias,
        out,
        sums,
        arrivals,
        num_tokens,
        outputs,
        inputs,
        GATED=gated,
        BIAS=bias is not None,
        SHARED=cut.equal_shares,
        SWAPPED=cut.outputs < 64,
        TOKENS=tokens,
        ROWS=cut.outputs,
        BLOCK=cut.inputs,
        STAGES=cut.stages,
        num_warps=cut.warps,
        **launch_options(x.device),
    )
