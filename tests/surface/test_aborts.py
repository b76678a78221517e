"""Requests that nobody wants any more (A19 to A21 of the reports): freed, counted, never mixed up.

`test_reports.py` has the same over HTTP.
"""

import random
import socket
import time
from typing import Any

import pytest
from process.server import wait_for
from surface.asking import Asker
from surface.test_reports import assert_sums, ids_of
from surface.zmq_peer import Peer

from nvserve.protocol.client_messages import (
    Abort,
    Accepted,
    ClientParams,
    Emit,
    Error,
    Finished,
    Submit,
)

LONG = "the king and the queen of " * 12
USELESS = "nvserve:frontend_zmq_dropped_frames_total"
LAST_DELAY_S = 0.3  # and until all are accepted


def submit(number: int, prompt: str = "To be", max_tokens: int = 8) -> Submit:
    params = ClientParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Submit(id=number, prompt=prompt, params=params)


def num_aborted(asker: Asker) -> float:
    metrics = asker.metrics()
    return sum(value for name, value in metrics.items() if 'finished_reason="abort"' in name)


def wait_idle(asker: Asker) -> None:
    """Nothing is open, and at every scrape until then the sums are right."""

    def is_idle() -> bool:
        metrics = asker.metrics()
        assert_sums(metrics)
        names = ("num_requests_running", "num_requests_waiting", "frontend_open_requests")
        return all(metrics[f"nvserve:{name}"] == 0 for name in names)

    wait_for("nothing runs", is_idle)


def wait_accepted(peer: Peer) -> None:
    while not isinstance(message := peer.receive(), Accepted):
        assert isinstance(message, Emit), message


def expected_ids(asker: Asker, prompt: str = "To be", max_tokens: int = 8) -> list[int]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return ids_of(asker.complete(**body, return_token_ids=True))


# -- A19 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "aborts"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, LAST_DELAY_S])
def test_a19_zmq_clients_that_are_gone_free_everything(
    asker: Asker, delay_s: float, how: str
) -> None:
    expected = expected_ids(asker, max_tokens=30)
    asker.settle()
    aborted_before = num_aborted(asker)
    with Peer(asker.zmq_endpoint) as kept:
        kept.send(submit(1, max_tokens=30))
        peers = [Peer(asker.zmq_endpoint) for _ in range(4)]
        for number in range(32):
            prompt = LONG if number % 3 else "a"
            peers[number % 4].send(submit(number, prompt, max_tokens=2000))
        time.sleep(delay_s)  # not for an event: queued, prefilling and decoding are all wanted
        if delay_s == LAST_DELAY_S:
            for peer in peers:
                for _ in range(8):
                    wait_accepted(peer)
        if how == "aborts":
            for number in range(32):
                peers[number % 4].send(Abort(id=number))
        else:
            for peer in peers:
                peer.close()
        assert kept.output(1, Finished)[0] == expected
        wait_idle(asker)
        for peer in peers:
            peer.close()
    if delay_s == LAST_DELAY_S:
        wait_for("32 aborts", lambda: num_aborted(asker) == aborted_before + 32)
    asker.check_alive()


# -- A20 -------------------------------------------------------------------------------------------


def test_a20_aborts_that_come_too_early_too_late_and_twice(asker: Asker) -> None:
    expected = expected_ids(asker)
    before = asker.metrics()[USELESS]
    with Peer(asker.zmq_endpoint) as peer:
        peer.send(Abort(id=1))  # before its submit
        peer.send(submit(1))
        assert peer.output(1, Finished)[0] == expected
        peer.send(Abort(id=1))  # finished
        peer.send(Abort(id=99))  # never there
        peer.send(submit(2, max_tokens=2000))
        peer.expect(Accepted)
        peer.send(Abort(id=2))
        peer.send(Abort(id=2))  # twice
        peer.send(submit(3))
        ids: list[int] = []
        while True:
            message = peer.receive()
            if isinstance(message, Finished):
                assert message.id == 3, "the aborted one is never finished"
                break
            assert not isinstance(message, Error), message
        peer.send(submit(4))
        ids, _ = peer.output(4, Finished)
        assert ids == expected
    assert asker.metrics()[USELESS] == before + 4
    asker.check_alive()


def test_a20_aborts_around_the_end_of_short_requests(asker: Asker) -> None:
    draw = random.Random(21)
    with Peer(asker.zmq_endpoint) as peer:
        due: list[tuple[float, int]] = []
        for number in range(150):
            peer.send(submit(number, "a", max_tokens=3))
            due.append((time.monotonic() + draw.random() * 0.05, number))
            while due and due[0][0] < time.monotonic():
                peer.send(Abort(id=due.pop(0)[1]))
            if number % 10 == 0:
                assert_sums(asker.metrics())
        for _, number in due:
            peer.send(Abort(id=number))
        wait_idle(asker)
        peer.send(submit(1000))
        while not (isinstance(message := peer.receive(), Finished) and message.id == 1000):
            assert not isinstance(message, Error), message
    asker.check_alive()


# -- A21 -------------------------------------------------------------------------------------------


def test_a21_one_id_of_two_clients_and_twice_of_one(asker: Asker) -> None:
    expected = expected_ids(asker), expected_ids(asker, "The king")
    with Peer(asker.zmq_endpoint) as one, Peer(asker.zmq_endpoint) as two:
        one.send(submit(5, max_tokens=400))  # it is there when the next one comes
        one.send(submit(5, "What"))
        two.send(submit(5, "The king"))
        refusals = []
        ids: list[int] = []
        while True:
            message = one.receive()
            if isinstance(message, Error):
                refusals.append(message)
            elif isinstance(message, Finished):
                break
        assert [(error.status, error.param) for error in refusals] == [(409, "id")]
        assert two.output(5, Finished)[0] == expected[1]
        one.send(submit(5))  # one after the other
        ids, _ = one.output(5, Finished)
        assert ids == expected[0]
    asker.check_alive()


def test_a21_ids_of_another_kind_are_refused(asker: Asker) -> None:
    values: list[Any] = ["", "a\nb", "x" * (1 << 20), 1.5, None, [1], True]
    with Peer(asker.zmq_endpoint) as peer:
        for value in values:
            peer.send_fields(type="Submit", id=value, prompt="x", params={"max_tokens": 1})
            error = peer.expect(Error)
            assert (error.status, error.id) == (400, None)
            assert len(error.message) < 500
        for number in (-(2**63), 2**64 - 1):
            peer.send(submit(number))
            assert peer.output(number, Finished)[0] == expected_ids(asker)
    asker.check_alive()


def test_a21_no_client_can_take_the_place_of_another(asker: Asker) -> None:
    """Two sockets of one name are two clients: each gets its own output and nothing else."""
    expected = expected_ids(asker), expected_ids(asker, "The king")
    with (
        Peer(asker.zmq_endpoint, identity=b"mine") as one,
        Peer(asker.zmq_endpoint, identity=b"mine") as two,
    ):
        one.send(submit(1))
        two.send(submit(1, "The king"))
        assert two.output(1, Finished)[0] == expected[1]
        assert one.output(1, Finished)[0] == expected[0]
    asker.check_alive()


@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"a\r\n b", b"a\nx-evil: 1", b"a\rx-evil: 1", b"a\tb", b"\xff", b"x" * 129],
)
def test_a21_an_id_that_is_no_word_is_not_repeated(asker: Asker, value: bytes) -> None:
    with socket.create_connection(("127.0.0.1", asker.port), timeout=60) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"x-request-id: " + value + b"\r\n\r\n"
        )
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith((b"http/1.1 200 ", b"http/1.1 400 "))
    assert b"evil" not in head
    for line in head.split(b"\r\n"):
        if line.startswith(b"x-request-id:"):
            assert len(line.partition(b":")[2].strip()) == 32, "one of ours"


def test_a21_a_megabyte_of_id_is_a_431(asker: Asker) -> None:
    with socket.create_connection(("127.0.0.1", asker.port), timeout=60) as connection:
        try:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: "
                + b"a" * (1 << 20)
                + b"\r\n\r\n"
            )
            answer = connection.recv(65536)
        except ConnectionError:  # refused while we were still sending
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    asker.check_alive()
