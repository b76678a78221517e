"""Triton prefill attention: chunks of any lengths against the paged cache.

A program takes a block of consecutive queries of one request, with all the query heads of one KV
head: its rows are (query, head of the group). Which request it serves it finds from cu_seqlens_q,
so the host needs to know only the number of tokens and requests.

T tokens in the step, R requests in it, H query heads, K KV heads, G = H / K, D head size.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.attention_sums import LOG2E
from nvserve.kernels.launch import inputs_ready, jit_general, launch_options, start_next


@jit_general("num_requests")
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    out_ptr,
    num_requests,
    table_stride,
    scale,  # softmax scale times log2(e)
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM padded to a power of two
    ROWS: tl.constexpr,  # at least QUERIES * GROUP
    QUERIES: tl.constexpr,  # queries of a program
    TILE: tl.constexpr,
    REQUESTS: tl.constexpr,  # num_requests padded to a power of two
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Late requests first: they tend to be the long ones of a chunked step.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    start_next(PDL)
    inputs_ready(PDL)
    # Request r owns the blocks from cu_seqlens[r] // QUERIES + r on: enough for any remainder.
    each = tl.arange(0, REQUESTS)
    starts = tl.load(cu_seqlens_ptr + each, mask=each < num_requests, other=2147483647)
    owned = starts // QUERIES + each <= block
    request = tl.sum((owned & (each < num_requests)).to(tl.int32)) - 1
    first = tl.load(cu_seqlens_ptr + request)
    num_queries = tl.load(cu_seqlens_ptr + request + 1) - first
    begin = (block - first // QUERIES - request) * QUERIES
    if begin >= num_queries:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    queries = begin + rows // GROUP
    in_dim = dims < HEAD_DIM
    in_rows = (queries < num_queries) & (rows < QUERIES * GROUP)
    token = (first + queries).to(tl.int64)
    q_row = token * NUM_KV_HEADS * GROUP + head * GROUP + rows % GROUP
    q_at = q_row[:, None] * HEAD_DIM + dims[None, :]
    q_mask = in_rows[:, None] & in_dim[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    length = tl.load(seq_lens_ptr + request)
    seen = length - num_queries + queries + 1  # keys that each row sees
    last = tl.minimum(length - num_queries + begin + QUERIES, length)
    table = block_tables_ptr + request.to(tl.int64) * table_stride

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for tile in tl.range(0, tl.cdiv(last, TILE), num_stages=STAGES):
        tokens = tile * TILE + tl.arange(0, TILE)
        inside = tokens < last
        page = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        kv_row = (page * BLOCK_SIZE + tokens % BLOCK_SIZE) * NUM_KV_HEADS + head
        kv_at = kv_row[:, None] * HEAD_DIM + dims[None, :]
        kv_mask = inside[:, None] & in_dim[None, :]
        keys = tl.load(key_ptr + kv_at, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(tokens[None, :] < seen[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(best - safe)
        total = total * decay + tl.sum(weights, axis=1)
        values = tl.load(value_ptr + kv_at, mask=kv_mask, other=0.0)
        acc = tl.dot(
            weights.to(values.dtype), values, acc=acc * decay[:, None], input_precision="ieee"
        )
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + q_at, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over the paged cache, one chunk a request."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests = seq_lens.shape[0]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    q = q.contiguous()
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    out = torch.empty_like(q) if out is None else out
    assert out.is_contiguous()
    if num_tokens == 0:
        return out
    wide = q.dtype == torch.float32
    rows = 16 if max_query_len * group <= 16 else (32 if wide else 128 if head_dim <= 128 else 64)
    rows = max(rows, triton.next_power_of_2(group))
    queries = rows // group
    _prefill_kernel[(num_tokens // queries + num_requests, num_kv_heads)](
        q,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        out,
        num_requests,
        block_tables.stride(0),
        scale * LOG2E,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=max(16, triton.next_power_of_2(head_dim)),
        ROWS=rows,
        QUERIES=queries,
        TILE=32 if wide else 64,
        # One kernel for nearly all: a burst of requests must not wait for another one.
        REQUESTS=max(256, triton.next_power_of_2(num_requests)),
        STAGES=2 if wide else 3,
        num_warps=8 if rows >= 128 else 4,
        **launch_options(q.device),
    )
    return out
