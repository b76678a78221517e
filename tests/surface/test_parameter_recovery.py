"""Each parameter under the death of a worker or of core: every field as if nothing had happened.

The same requests go over HTTP whole and streamed and over ZMQ, all at once; a process is killed
while they are in their middle.
"""

import http.client
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from process.server import Server, served, wait_for
from surface.asking import Asker
from surface.parameter_rows import Row, rows

from nvserve.frontend.client import Client
from nvserve.protocol.client_messages import ClientParams
from nvserve.protocol.control import FaultKind, Inject
from nvserve.protocol.faults import LAUNCH, SEND
from nvserve.scripts.running import order

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
NUM_ROUNDS = max(1, round(5 * SCALE))  # of each victim
ANSWER_LIMIT_S = 200.0
LOGPROB_ERROR = 1e-5
FLAGS = [
    *("--tp", "2", "--dtype", "float32", "--enable-faults", "--max-restarts", "1000"),
    *("--zmq-port", "0", "--tool-call-parser", "hermes", "--spares", "1"),
]
KILL_IN_STEP = Inject(FaultKind.KILL, phase=LAUNCH)
KILLS_IN_SEND = [
    Inject(FaultKind.KILL, phase=SEND, message=name) for name in ("Emits", "SchedulerOutput")
]
VICTIMS = {"worker 1": [KILL_IN_STEP], "worker 0": [KILL_IN_STEP], "core": KILLS_IN_SEND}
CLIENT_FIELDS = frozenset(ClientParams.__struct_fields__)
RANDOM_FIELDS = frozenset({"id", "created"})  # new in every answer
CONSTANTS = frozenset({"role", "type", "object", "model", "finish_reason"})


@dataclass
class Asked:
    """One request under way, or its answer: a document without what differs in every answer."""

    name: str
    num_events: int = 0
    answer: Any = None


@dataclass
class Round:
    """All rows through all doors at once; `finish` gives the answers by name."""

    asker: Asker
    table: list[Row]
    salt: str
    asked: list[Asked] = field(default_factory=list)
    futures: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in self.table:
            if row.is_warm:
                self.asker.complete(**row.body(self.salt) | {"max_tokens": 1})
        self._pool = ThreadPoolExecutor(2 * len(self.table) + 1)
        for row in self.table:
            self._start(row.name + ", whole", _ask_whole, row)
            if row.streams:
                self._start(row.name + ", streamed", _ask_streamed, row)
        found = ((row.name, zmq_params(row, f"{self.salt} zmq")) for row in self.table)
        over_zmq = {name: params for name, params in found if params is not None}
        asked = {name: Asked(f"{name}, zmq") for name in over_zmq}
        self.asked += asked.values()
        self.futures.append(self._pool.submit(_ask_zmq, self.asker, over_zmq, asked))

    def _start(self, name: str, ask: Any, row: Row) -> None:
        asked = Asked(name)
        self.asked.append(asked)
        self.futures.append(self._pool.submit(ask, self.asker, row, self.salt, asked))

    def wait_middle(self) -> None:
        """Half of those whose tokens we see have had eight events."""

        def is_there() -> bool:
            if any(future.done() and future.exception() for future in self.futures):
                return True
            counts = sorted(one.num_events for one in self.asked if "whole" not in one.name)
            return counts[len(counts) // 2] >= 8

        wait_for("the middle of the requests", is_there, ANSWER_LIMIT_S)

    def finish(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_LIMIT_S
        for future in self.futures:
            future.result(max(0.0, deadline - time.monotonic()))
        self._pool.shutdown()
        return {one.name: one.answer for one in self.asked}


def zmq_params(row: Row, salt: str) -> dict[str, Any] | None:
    """The row as a ZMQ client says it; None for what only HTTP has."""
    body = row.body(salt)
    prompt = body.pop("prompt", None)
    body.pop("return_token_ids", None)
    return body | {"prompt": prompt} if prompt and body.keys() <= CLIENT_FIELDS else None


# -- asking ----------------------------------------------------------------------------------------


def _ask_whole(asker: Asker, row: Row, salt: str, asked: Asked) -> None:
    with _posted(asker, row.path, row.body(salt)) as answer:
        asked.answer = settled(json.loads(answer.read()))


def _ask_streamed(asker: Asker, row: Row, salt: str, asked: Asked) -> None:
    body = row.body(f"{salt} streamed") | {"stream": True}
    body["stream_options"] = {"include_usage": True}
    joined: Any = None
    lines: list[str] = []
    with _posted(asker, row.path, body) as answer:
        for line in answer:
            lines.append(line.decode().strip().removeprefix("data: "))
            if lines[-1] not in ("", "[DONE]"):
                joined = merged(joined, settled(json.loads(lines[-1])))
                asked.num_events += 1
    assert lines[-2:] == ["[DONE]", ""]
    asked.answer = joined


def _ask_zmq(asker: Asker, params: dict[str, dict[str, Any]], asked: dict[str, Asked]) -> None:
    with Client(asker.zmq_endpoint) as client:
        requests = {name: client.submit(**fields) for name, fields in params.items()}
        for name, request in requests.items():
            for _ in client.pieces(request, ANSWER_LIMIT_S):
                for other, one in requests.items():
                    asked[other].num_events = one.num_submits + len(one.output)
            asked[name].answer = msgspec.to_builtins(request.result())


@contextmanager
def _posted(asker: Asker, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", asker.port, timeout=ANSWER_LIMIT_S)
    with closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            yield answer


# -- comparing -------------------------------------------------------------------------------------


def settled(document: Any) -> Any:
    """Without the fields that are new in every answer."""
    if isinstance(document, list):
        return [settled(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {name: settled(one) for name, one in document.items() if name not in RANDOM_FIELDS}


def merged(left: Any, right: Any, name: str = "") -> Any:
    """Two events as one: texts and lists grow, of constants the last one counts."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, dict):
        names = left.keys() | right.keys()
        return {key: merged(left.get(key), right.get(key), key) for key in names}
    if isinstance(left, list):
        if not any(isinstance(one, dict) and "index" in one for one in left + right):
            return left + right
        both: dict[int, Any] = {one["index"]: one for one in left}
        for one in right:
            both[one["index"]] = merged(both.get(one["index"]), one)
        return [both[index] for index in sorted(both)]
    return left + right if isinstance(left, str) and name not in CONSTANTS else right


def difference(left: Any, right: Any, where: str = "") -> str | None:
    """The first place where two answers differ; logprobs may in their last digits."""
    if isinstance(left, float) and isinstance(right, float):
        return None if abs(left - right) <= LOGPROB_ERROR else f"{where}: {left} is not {right}"
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        found = (difference(left[name], right[name], f"{where}.{name}") for name in left)
    elif isinstance(left, list | tuple) and type(left) is type(right) and len(left) == len(right):
        found = (
            difference(one, other, f"{where}[{index}]")
            for index, (one, other) in enumerate(zip(left, right, strict=True))
        )
    else:
        return None if left == right else f"{where}: {left!r} is not {right!r}"
    return next((one for one in found if one is not None), None)


# -- the tests -------------------------------------------------------------------------------------


@dataclass
class Rig:
    """The server, its table, and the answers of a run that nobody disturbed."""

    asker: Asker
    table: list[Row]
    expected: dict[str, Any]

    def strike(self, name: str, fault: Inject) -> None:
        """Arm the fault, and wait until it has struck."""
        server, before = self.asker.server, self.asker.server.status()
        [directory] = server.tmpdir.glob("nvserve-*")
        columns = msgspec.to_builtins(fault)
        order(directory, {"command": "fault", "name": name, "fault": columns})
        server.wait_status("struck", lambda status: bool(status["epoch"] > before["epoch"]))

    def num_recovered(self) -> float:
        """Requests that went on after a death, as this life of core counts them."""
        return self.asker.metrics()["nvserve:requests_recovered_total"]

    def check_quiet(self) -> None:
        """Ready, with a spare, and nothing of a round is left."""

        def is_whole(status: dict[str, Any]) -> bool:
            spares = [one for one in status["processes"] if one["name"] == "spare"]
            return status["state"] == "ready" and any(spare["is_ready"] for spare in spares)

        self.asker.server.wait_status("ready with a spare", is_whole)
        wait_for("nothing is left", self._is_empty)

    def _is_empty(self) -> bool:
        now = {name.removeprefix("nvserve:"): value for name, value in self.asker.metrics().items()}
        finished = sum(v for name, v in now.items() if name.startswith("request_success_total"))
        is_settled = finished == now["requests_accepted_total"]
        return is_settled and now["num_free_kv_blocks"] == now["num_kv_blocks"] > 0


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with served(Server.launch(*FLAGS)) as server:
        asker = Asker(server, server.wait_ready())
        table = rows(asker)
        yield Rig(asker, table, Round(asker, table, "undisturbed").finish())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_parameter_survives_a_death(rig: Rig, victim: str) -> None:
    faults = VICTIMS[victim]
    for number in range(NUM_ROUNDS):
        rig.check_quiet()
        now = Round(rig.asker, rig.table, f"{victim} {number}")
        now.wait_middle()
        before = 0.0 if victim == "core" else rig.num_recovered()
        rig.strike(victim, faults[number % len(faults)])
        answers = now.finish()
        rig.asker.settle()
        num_recovered = rig.num_recovered() - before
        assert num_recovered > len(answers) / 2, "most had ended before the fault"
        wrong = {name: difference(answers[name], right) for name, right in rig.expected.items()}
        found = [f"{name}{text}" for name, text in wrong.items() if text]
        assert not found, f"{len(found)} of {len(wrong)} answers differ:\n" + "\n".join(found)
    rig.check_quiet()
