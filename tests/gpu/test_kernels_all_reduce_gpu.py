"""Sums in one shot within one process: what is in the inboxes, and two ranks that replay graphs.

Here the memory of all ranks is this device's; tests/test_all_reduce.py has ranks as processes.
"""

import time

import pytest
import torch
from gpu.kernel_cases import DEVICE, MARKS, on_gpu_only

from nvserve.kernels.all_reduce import NUM_INBOXES
from nvserve.workers.peer_memory import Layout, PeerMemory

pytestmark = MARKS

NUM_PLACES = 2
ROWS = 4
MAX_PROGRAMS = 3  # fewer than rows
END_LIMIT_S = 20.0


def make_ranks(layout: Layout) -> tuple[list[PeerMemory], list[torch.Tensor]]:
    """All ranks, and the inboxes [NUM_INBOXES, inbox_rows, size - 1, N] of each."""
    whole = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    addresses = [each.data_ptr() for each in whole]
    abort = torch.zeros(1, dtype=torch.int32)
    word = abort if DEVICE == "cpu" else abort.pin_memory()
    ranks = [
        PeerMemory(rank, layout, each, addresses, word, max_programs=MAX_PROGRAMS)
        for rank, each in enumerate(whole)
    ]
    shape = (NUM_INBOXES, layout.inbox_rows, 1, layout.width)
    return ranks, [each[layout.inboxes :].view(layout.dtype).view(shape) for each in whole]


def place_of(memory: PeerMemory, call: int) -> torch.Tensor:
    place = memory.take(call % NUM_PLACES, ROWS)
    assert place is not None
    return place


@pytest.mark.parametrize("rank", [0, 1])
def test_an_inbox_is_read_then_emptied_before_its_turn_and_nothing_else_is_touched(
    rank: int,
) -> None:
    """The test is the peer, and always a call ahead, as the peer may be."""
    layout = Layout(2, NUM_PLACES, 16, torch.float16)
    ranks, inboxes = make_ranks(layout)
    memory, ours, theirs = ranks[rank], inboxes[rank], inboxes[1 - rank]
    addends = torch.randn(2, 3 * NUM_INBOXES, ROWS, 16).to(DEVICE, torch.float16)
    mine, others = addends[rank], addends[1 - rank]

    def send(call: int) -> None:
        ours[call % NUM_INBOXES, :ROWS, 0] = others[call]

    send(0)
    for call in range(len(mine) - 1):
        send(call + 1)
        total = memory.sum(place_of(memory, call).copy_(mine[call]))
        expected = addends[0, call].float() + addends[1, call].float()
        assert torch.equal(total, expected.half())
        assert torch.equal(theirs[call % NUM_INBOXES, :ROWS, 0], mine[call])
        assert torch.equal(ours[(call + 1) % NUM_INBOXES, :ROWS, 0], others[call + 1])
        assert not ours[(call + 2) % NUM_INBOXES].any(), "the peer may send there next"


@on_gpu_only
def test_two_ranks_replay_graphs_whose_sums_go_round_the_inboxes() -> None:
    """5 sums a graph: each replay begins with another inbox. A stream is a rank."""
    num_sums, num_replays, width = 5, 7, 1024
    layout = Layout(2, NUM_PLACES, width, torch.bfloat16)
    ranks, _ = make_ranks(layout)
    drawn = torch.randn(2, num_replays, num_sums, ROWS, width, device=DEVICE).bfloat16()
    addends = torch.empty_like(drawn[:, 0])  # what the graphs read
    sums = torch.empty(2, num_replays, num_sums, ROWS, width, device=DEVICE, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in ranks]
    graphs = []
    for rank, memory in enumerate(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            results = [
                memory.sum(place_of(memory, call).copy_(addends[rank, call]))
                for call in range(num_sums)
            ]
        graphs.append((graph, results))
    for rank in range(2):  # loads what else is launched: it would wait for sums that wait for it
        addends[rank].copy_(drawn[rank, 0])
        torch.stack(list(drawn[rank, 0].unbind()), out=sums[rank, 0])
    torch.cuda.synchronize()
    for replay in range(num_replays):
        for rank, (graph, results) in enumerate(graphs):
            with torch.cuda.stream(streams[rank]):
                addends[rank].copy_(drawn[rank, replay])
                graph.replay()
                torch.stack(results, out=sums[rank, replay])
    ended = [stream.record_event() for stream in streams]
    give_up = time.monotonic() + END_LIMIT_S
    while not all(event.query() for event in ended):
        if time.monotonic() > give_up:
            ranks[0].abort()
            pytest.fail("the sums do not end")
        time.sleep(0.001)
    expected = (drawn[0].float() + drawn[1].float()).bfloat16()
    assert torch.equal(sums[0], expected)
    assert torch.equal(sums[1], expected)
