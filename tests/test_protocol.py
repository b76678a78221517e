"""Messages survive the wire unchanged, and nothing else gets through."""

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from process.server import environment
from protocol_strategies import FROM_WORKER, TO_CORE, TO_FRONTEND, TO_WORKER

from nvserve.protocol import channel, control, messages
from nvserve.protocol.codec import (
    BadFrame,
    decode_from_child,
    decode_from_worker,
    decode_to_child,
    decode_to_core,
    decode_to_frontend,
    decode_to_worker,
    encode,
)
from nvserve.protocol.messages import (
    Abort,
    Chunks,
    Emits,
    FinishReason,
    Hello,
    Logprobs,
    ModelOutput,
    SchedulerOutput,
    Strikes,
    TableChanges,
    make_request_id,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.progress import Phase, ProgressPage, page_path, read_page
from nvserve.protocol.sampling import BadParameter, SamplingParams, check_sampling

EVENT_LIMIT_MS = 30_000  # for whatever surely comes
DECODERS: list[Callable[[bytes], messages.Message]] = [
    decode_to_core,
    decode_to_frontend,
    decode_to_worker,
    decode_from_worker,
    decode_to_child,
    decode_from_child,
]


@given(TO_CORE)
def test_messages_to_core_come_back_equal(message: messages.Message) -> None:
    assert decode_to_core(encode(message)) == message


@given(TO_FRONTEND)
def test_messages_to_the_frontend_come_back_equal(message: messages.Message) -> None:
    assert decode_to_frontend(encode(message)) == message


@given(TO_WORKER)
def test_messages_to_workers_come_back_equal(message: messages.Message) -> None:
    assert decode_to_worker(encode(message)) == message


@given(FROM_WORKER)
def test_messages_from_workers_come_back_equal(message: messages.Message) -> None:
    assert decode_from_worker(encode(message)) == message


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_garbage_is_a_bad_frame_in_every_direction(frame: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(frame)
        except BadFrame:
            continue
        assert decode(encode(message)) == message  # what got through is a whole message


@settings(max_examples=300)
@given(
    st.one_of(TO_CORE, TO_FRONTEND, TO_WORKER, FROM_WORKER),
    st.integers(0, 400),
    st.integers(0, 255),
    st.integers(0, 400),
)
def test_mutated_frames_decode_or_are_bad_frames_and_nothing_else(
    message: messages.Message, position: int, value: int, cut: int
) -> None:
    frame = bytearray(encode(message))
    frame[position % len(frame)] = value
    for mutant in (bytes(frame), bytes(frame[: cut % (len(frame) + 1)]), bytes(frame) * 2):
        for decode in DECODERS:
            try:
                decode(mutant)
            except BadFrame:
                continue


@pytest.mark.parametrize("frame", [b"\x91" * 100_000, b"\xc1", b"", b"\xdd\xff\xff\xff\xff"])
def test_nested_and_oversized_claims_are_bad_frames(frame: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(BadFrame):
            decode(frame)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_to_core, SchedulerOutput(0, 0)),
        (decode_to_worker, Abort(0, 0, [1])),
        (decode_to_frontend, Abort(0, 0, [1])),
        (decode_from_worker, SchedulerOutput(0, 0)),
        (decode_to_child, control.Drained()),
        (decode_from_child, control.Exit()),
    ],
)
def test_a_message_of_the_wrong_direction_is_a_bad_frame(
    decode: Callable[[bytes], messages.Message], message: messages.Message
) -> None:
    with pytest.raises(BadFrame):
        decode(encode(message))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Emits(0, 0, [1], [0], [2], pack_ids([5]), [FinishReason.NONE], [0]),
        lambda: Emits(0, 0, [1, 2], [0], [1], pack_ids([5]), [FinishReason.NONE], [0]),
        lambda: Emits(0, 0, [1], [0], [1], pack_ids([5]), [FinishReason.NONE], [0], []),
        lambda: Emits(0, 0, [1], [0], [1], pack_ids([5]), [FinishReason.NONE], [0], None, []),
        lambda: Chunks([0], [0], [3], pack_ids([1, 2]), [True]),
        lambda: Chunks([0], [0], [1], pack_ids([1]), []),
        lambda: ModelOutput(0, 0, b"\0\0\0"),
        lambda: Emits(
            0, 0, [1, 2], [0, 0], [-1, 2], pack_ids([5]), [FinishReason.NONE] * 2, [0, 0]
        ),
        lambda: Chunks([0, 1], [0, 0], [-1, 3], pack_ids([1, 2]), [True, True]),
        lambda: TableChanges([0, 1], [0, 0], [3, -1], pack_ids([1, 2])),
        lambda: Strikes(0, 0, [1], [-1]),
        lambda: Logprobs([0, 1], bytes(8), [-1, 1], b"", b""),
        lambda: Logprobs([0, 1], bytes(8), [2, -1], bytes(4), bytes(4)),
    ],
)
def test_columns_that_disagree_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"where|whole"):
        build()


def test_columns_that_disagree_on_the_wire_are_bad_frames() -> None:
    good = Chunks([0], [0], [2], pack_ids([1, 2]), [True])
    step = encode(SchedulerOutput(1, 2, chunks=good))
    assert decode_to_worker(step) == SchedulerOutput(1, 2, chunks=good)
    with pytest.raises(BadFrame):
        decode_to_worker(step.replace(pack_ids([1, 2]), pack_ids([1]) + b"\0\0\0\1"[:0], 1))


def test_an_unchanged_decode_step_is_at_most_64_bytes() -> None:
    assert len(encode(SchedulerOutput(2**31, 2**40))) <= 64


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_an_id_beyond_int32_cannot_be_packed() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_request_ids_of_two_frontend_lives_differ() -> None:
    assert make_request_id(1, 0) > make_request_id(0, 2**40 - 1)


# -- channels ------------------------------------------------------------------------------------


@pytest.fixture
def context() -> "Iterator[zmq.Context[zmq.Socket[bytes]]]":
    with zmq.Context() as context:
        yield context


def test_frames_sent_before_the_receiver_exists_arrive_in_order(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/a"
    outbox = channel.Outbox(context, address)
    for index in range(10):
        assert outbox.send(encode(Hello(index)))
    inbox = channel.Inbox(context, address)
    received = [inbox.receive(EVENT_LIMIT_MS) for _ in range(10)]
    assert received == [encode(Hello(index)) for index in range(10)]
    assert inbox.receive() is None
    inbox.close()
    outbox.close()
    assert not (tmp_path / "a").exists()


def test_nothing_queued_for_a_dead_life_reaches_its_successor(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    old = channel.Outbox(context, channel.core_to_worker(str(tmp_path), 0, 0))
    assert old.send(encode(SchedulerOutput(0, 7)))
    old.close()
    inbox = channel.Inbox(context, channel.core_to_worker(str(tmp_path), 1, 0))
    assert inbox.receive(200) is None
    inbox.close()


def test_a_full_peer_makes_send_return_false_without_blocking_or_losing(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/full"
    inbox = channel.Inbox(context, address)
    outbox = channel.Outbox(context, address)
    num_sent = 0
    while outbox.send(bytes(1000)):
        num_sent += 1
        assert num_sent < 1_000_000
    for number in range(num_sent):
        assert inbox.receive(EVENT_LIMIT_MS) is not None, f"{number} of {num_sent} arrived"
    assert inbox.receive(200) is None
    inbox.close()
    outbox.close()


def test_a_path_too_long_for_the_system_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="107"):
        channel.worker_to_core(str(tmp_path / ("a" * 120)), 0)


def test_control_channel_keeps_message_borders_and_reports_the_end() -> None:
    ours, raw = channel.ControlChannel.pair()
    theirs = channel.ControlChannel(raw)
    assert theirs.receive() is None
    assert ours.send(encode(control.Drain(1.5)))
    assert ours.send(encode(control.Exit()))
    first, second = theirs.receive(), theirs.receive()
    assert first is not None
    assert second is not None
    assert decode_to_child(first) == control.Drain(1.5)
    assert decode_to_child(second) == control.Exit()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    assert not theirs.send(b"x")
    theirs.close()


def test_progress_page_shows_the_last_beat(tmp_path: Path) -> None:
    path = page_path(str(tmp_path), "worker", 3)
    assert read_page(path) is None
    page = ProgressPage(path)
    page.epoch, page.step = 2, 9
    page.beat(Phase.FORWARD)
    snapshot = read_page(path)
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.step, snapshot.phase) == (2, 9, Phase.FORWARD)
    Path(path).write_bytes(b"\xff" * 48)
    assert read_page(path) is None


@pytest.mark.parametrize("num_beats", [1, 2])
def test_a_process_stopped_in_the_midst_of_a_beat_shows_the_one_before(
    tmp_path: Path, num_beats: int
) -> None:
    path = page_path(str(tmp_path), "worker", 0)
    page = ProgressPage(path)
    for step in range(num_beats):
        page.step = step
        page.beat(Phase.FORWARD)
    before, old = read_page(path), Path(path).read_bytes()
    page.step = 99
    page.beat(Phase.SENDING)
    new = Path(path).read_bytes()
    for written in range(len(new)):
        Path(path).write_bytes(new[:written] + old[written:])
        seen = read_page(path)
        assert seen is not None
        assert seen in (before, seen._replace(step=99, phase=Phase.SENDING))


def test_a_page_read_while_it_is_written_never_goes_back(tmp_path: Path) -> None:
    path = page_path(str(tmp_path), "worker", 0)
    code = (
        "import sys; from nvserve.protocol.progress import ProgressPage\n"
        "page = ProgressPage(sys.argv[1]); print(flush=True)\n"
        "while True: page.beat()"
    )
    command = [sys.executable, "-P", "-c", code, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"\n"
            last = 0.0
            for _ in range(20_000):
                snapshot = read_page(path)
                assert snapshot is not None
                assert snapshot.time_s >= last
                last = snapshot.time_s
        finally:
            writer.kill()
    assert last > 0.0


# -- sampling parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("temperature", SamplingParams(temperature=math.nan)),
        ("temperature", SamplingParams(temperature=-0.1)),
        ("temperature", SamplingParams(temperature=math.inf)),
        ("top_p", SamplingParams(top_p=0.0)),
        ("top_p", SamplingParams(top_p=1.0001)),
        ("top_k", SamplingParams(top_k=-2)),
        ("top_k", SamplingParams(top_k=2**40)),
        ("min_p", SamplingParams(min_p=2.0)),
        ("presence_penalty", SamplingParams(presence_penalty=1e308)),
        ("frequency_penalty", SamplingParams(frequency_penalty=-1e308)),
        ("repetition_penalty", SamplingParams(repetition_penalty=0.0)),
        ("max_tokens", SamplingParams(max_tokens=-1)),
        ("min_tokens", SamplingParams(min_tokens=5, max_tokens=4)),
        ("logprobs", SamplingParams(logprobs=21)),
        ("stop_token_ids", SamplingParams(stop_token_ids=[100])),
        ("logit_bias", SamplingParams(logit_bias={-1: 1.0})),
        ("logit_bias", SamplingParams(logit_bias={1: 1e30})),
        ("bad_words", SamplingParams(bad_words=[[]])),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=[100])),
    ],
)
def test_a_sampling_value_out_of_range_names_its_field(param: str, params: SamplingParams) -> None:
    with pytest.raises(BadParameter) as caught:
        check_sampling(params, vocab_size=100)
    assert caught.value.param == param


def test_the_edges_of_the_legal_ranges_pass() -> None:
    check_sampling(SamplingParams(), 100)
    check_sampling(SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=0), 100)
    check_sampling(SamplingParams(temperature=1e-45, top_k=0, logit_bias={99: -100.0}), 100)


def test_nan_travels_through_msgpack_so_the_check_must_run_at_both_ends() -> None:
    params = SamplingParams(temperature=math.nan)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert math.isnan(received.temperature)


def test_a_late_reader_thread_sees_doubled_frames_as_two_frames(tmp_path: Path) -> None:
    """Doubling is the receiver's to detect by step and index: the channel hides nothing."""
    with zmq.Context() as context:
        inbox = channel.Inbox(context, f"ipc://{tmp_path}/d")
        outbox = channel.Outbox(context, f"ipc://{tmp_path}/d")
        sender = threading.Thread(target=lambda: [outbox.send(b"same") for _ in range(2)])
        sender.start()
        sender.join(30)
        assert [inbox.receive(EVENT_LIMIT_MS) for _ in range(2)] == [b"same", b"same"]
        inbox.close()
        outbox.close()
