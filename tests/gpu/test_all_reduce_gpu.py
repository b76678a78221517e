"""Sums through peer memory by ranks that are processes, on a GPU each or sharing one.

What shares a GPU takes turns on it, so that a wait lasts until the other process has its turn.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from peer_rank import Job, run_ranks
from test_all_reduce import check, make_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    ("width", "dtype", "rows"),
    [
        (4096, "bfloat16", (1, 3, 32, 128)),
        (8192, "bfloat16", (1, 17, 256)),
        (1000, "float32", (1, 5, 512)),
        (14336, "float16", (2, 7)),
    ],
)
def test_every_rank_gets_the_sum_in_rank_order(
    tmp_path: Path, width: int, dtype: str, rows: tuple[int, ...]
) -> None:
    calls = make_calls(24, rows)
    check(Job(str(tmp_path), 0, 2, width, dtype, calls, device="cuda", first_call=2**31 - 9))


def test_abort_ends_the_wait_for_a_rank_that_never_comes(tmp_path: Path) -> None:
    calls = make_calls(400, (1, 32))
    job = Job(str(tmp_path), 0, 2, 4096, "bfloat16", calls, device="cuda", late_rank=1)
    results = run_ranks(job)
    assert [len(result) for result in results] == [400, 0]
