"""The real frontend process under a launcher's end of the control channel, for tests."""

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from api.fake_core import EVENT_LIMIT_S, FakeCore

from nvserve.protocol.channel import ControlChannel
from nvserve.protocol.codec import decode_from_child, encode
from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import Condition, Drain, Peers, Ready, Role, Setup, State

FIT_LIMIT_S = 2.0  # another one is started in less
START_LIMIT_S = 60.0  # an interpreter starts slowly on a full machine
ROOT = Path(__file__).parents[2]
DEMO_MODEL = str(ROOT / "scripts" / "demo_model")
MODEL_NAME = "demo"
LABEL = f'{{model_name="{MODEL_NAME}"}}'
T = TypeVar("T")


def make_config(**changes: Any) -> Config:
    facts = ModelFacts("LlamaForCausalLM", 1024, 6, 4, 4096, 0, [1])
    base = Config(
        model=DEMO_MODEL,
        facts=facts,
        served_model_names=[MODEL_NAME],
        max_model_len=512,
        zmq_endpoint="tcp://127.0.0.1:*",
        log_level="warning",
    )
    return msgspec.structs.replace(base, **changes)


class FrontendProcess:
    """Started, told its Setup, and connected to fake cores as a test wants."""

    def __init__(self, *, api_key: str = "", life: int = 0, **changes: Any) -> None:
        self.life = life
        self._folder = tempfile.TemporaryDirectory(prefix="nvs")
        self.launch_dir = self._folder.name
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self.endpoint = ""  # of the ZMQ door, set from Ready
        self._core_life = -1
        self.core: FakeCore | None = None
        self.last_headers: http.client.HTTPMessage
        self.process: subprocess.Popen[bytes]
        self.control: ControlChannel
        self._start(make_config(**changes), api_key)

    def restart(self, **changes: Any) -> None:
        """Kill it with SIGKILL and start the next life on the same listening socket."""
        self.process.kill()
        self.process.wait(EVENT_LIMIT_S)
        self.control.close()
        if self.core is not None:
            self.core.kill()
            self.core = None
        self.life += 1
        self._start(make_config(**changes), "")

    def _start(self, config: Config, api_key: str) -> None:
        self.control, theirs = ControlChannel.pair()
        fds = (theirs.fileno(), self._listener.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nvserve.frontend.main", str(fds[0]), str(os.getpid())],
            pass_fds=fds,
            env=os.environ | {"PYTHONPATH": str(ROOT / ".src"), "PYTHONSAFEPATH": "1"},
            cwd=ROOT,
        )
        theirs.close()
        setup = Setup(
            config=config,
            role=Role.FRONTEND,
            life=self.life,
            launch_dir=self.launch_dir,
            api_key=api_key,
            listen_fd=fds[1],
        )
        self.control.send(encode(setup))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def expect(self, message_type: type[T], limit_s: float = START_LIMIT_S) -> T:
        """The next control message of this type; others before it are skipped."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            select.select([self.control], [], [], left_s)
            frame = self.control.receive()
            message: object = decode_from_child(frame) if frame else None
            if isinstance(message, message_type):
                return message
        raise AssertionError(f"no {message_type.__name__} within {limit_s} s")

    def wait_connected(self) -> None:
        """Until /ready is 200: core's Hello has arrived."""
        self._wait_for("ready", lambda: self.get("/ready")[0] == 200)

    def wait_health(self, status: str) -> None:
        """Until /health has this status."""
        self._wait_for(status, lambda: json.loads(self.get("/health")[1])["status"] == status)

    def wait_metric(self, name: str, value: float) -> None:
        """Until a metric with no label but the model's name has this value."""
        self._wait_for(f"{name} of {value}", lambda: self._has_metric(name, value))

    def _has_metric(self, name: str, value: float) -> bool:
        return f"\n{name}{LABEL} {float(value)}\n" in self.get("/metrics")[1].decode()

    def _wait_for(self, what: str, probe: Callable[[], bool]) -> None:
        deadline = time.monotonic() + EVENT_LIMIT_S
        while not probe():
            assert time.monotonic() < deadline, f"{what}: not within {EVENT_LIMIT_S} s"

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """A JSON (or raw bytes) body; the answer must be JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        status, answer = self.request("POST", path, raw, headers)
        return status, json.loads(answer)

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        limit_s: float = EVENT_LIMIT_S,
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            self.last_headers = answer.headers
            return answer.status, answer.read()
        finally:
            connection.close()

    def ready(self) -> Ready:
        return self.expect(Ready)

    def new_core(self, most_tokens: int | None = None) -> FakeCore:
        """Kill the present core, if any, and give the frontend the next life of it."""
        if self.core is not None:
            self.core.kill()
        self._core_life += 1
        core = self.core = FakeCore(self.launch_dir, self.life, self._core_life, most_tokens)
        self.control.send(encode(Peers(self.life, self._core_life)))
        self.tell(State.READY)
        return core

    def tell(self, state: State, reason: str = "") -> None:
        self.control.send(encode(Condition(state, reason)))

    def exit_code(self) -> int:
        """Wait for the process to end by itself."""
        return self.process.wait(EVENT_LIMIT_S)

    def is_fit(self) -> bool:
        """For another test: it lives, serves, and soon has no request any more; core is gone."""
        if self.core is not None:
            self.core.kill()
            self.core = None
        self.tell(State.READY)
        deadline = time.monotonic() + FIT_LIMIT_S
        try:
            while self.process.poll() is None and time.monotonic() < deadline:
                is_draining = b'"draining"' in self.get("/health")[1]
                if is_draining or self._has_metric("nvserve:frontend_open_requests", 0):
                    return not is_draining
        except OSError:
            pass
        return False

    def drain(self, timeout_s: float, *, is_restart: bool = False) -> None:
        self.control.send(encode(Drain(timeout_s, is_restart)))

    def close(self) -> None:
        if self.core is not None:
            self.core.kill()
        self.control.close()  # the frontend leaves with its launcher
        try:
            self.process.wait(EVENT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(EVENT_LIMIT_S)
            raise
        finally:
            self._listener.close()
            self._folder.cleanup()
