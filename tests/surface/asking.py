"""Plain HTTP requests to a real server, and the proof that one left no trace."""

import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from process.server import Server, wait_for

T = TypeVar("T")

NUM_TRIES = 3
PLAIN = {"prompt": "The king", "max_tokens": 6, "temperature": 0}
LIMIT_S = 60.0
ACCEPTED = "nvserve:requests_accepted_total"
ZMQ_LINE = r"ZMQ clients: (\S+)"


def in_time(limit_s: float, ask: Callable[[], T]) -> T:
    """An answer that came in time; this machine may stand still in one try, but not in all."""
    took_s = []
    for _ in range(NUM_TRIES):
        begun = time.monotonic()
        answer = ask()
        took_s.append(time.monotonic() - begun)
        if took_s[-1] < limit_s:
            return answer
    raise AssertionError(f"never within {limit_s} s: {took_s}")


class Asker:
    """A running server. `alive` compares with how it was when first asked."""

    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self.pids = server.pids()
        self.plain = self.complete(**PLAIN)["choices"][0]["text"]

    @property
    def zmq_endpoint(self) -> str:
        return self.server.wait_text(ZMQ_LINE).group(1)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, {"content-type": "application/json"} | headers)

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, **body: Any) -> Any:
        return self._ask("/v1/completions", body)

    def chat(self, content: str, **body: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return self._ask("/v1/chat/completions", {"messages": messages, **body})

    def _ask(self, path: str, body: Any) -> Any:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return json.loads(answer)

    def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error document of a 400."""
        status, answer = self.post(path, body)
        assert status == 400, (status, answer)
        error: dict[str, Any] = json.loads(answer)["error"]
        return error

    def events(self, path: str, body: Any) -> list[Any]:
        """The documents of a stream, which must end as one should."""
        status, answer = self.post(path, {**body, "stream": True})
        assert status == 200, answer
        lines = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name and labels, the model's name left out.

        Core's are among them: a frontend has none of these before core's first word to it.
        """
        return wait_for("core's totals", self._metrics)

    def _metrics(self) -> dict[str, float] | None:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LIMIT_S) as response:
            text = response.read().decode()
        lines = re.sub(r'\{?model_name="[^"]*"[,}]', "{", text).replace("{ ", " ").splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        found = {name: float(value) for name, value in samples}
        return found if ACCEPTED in found else None

    def settle(self) -> None:
        """Until core's totals count all that it had done before this call.

        It tells them some times a second, and in one order with its tokens.
        """
        self.complete(**PLAIN)
        before = self.metrics()[ACCEPTED]
        self.complete(**PLAIN)
        wait_for("newer totals of core", lambda: self.metrics()[ACCEPTED] != before)

    def check_alive(self) -> None:
        """The same processes give the same answer, and every block is free again."""
        assert self.complete(**PLAIN)["choices"][0]["text"] == self.plain
        assert self.server.pids() == self.pids, self.server.text[-3000:]
        assert self.request("GET", "/health")[0] == 200
        wait_for("blocks back", self._is_empty)

    def wait_more(self, name: str, before: float) -> float:
        """The value of a metric once it is larger; core tells its totals a few times a second."""

        def probe() -> float | None:
            now = self.metrics()[name]
            return now if now > before else None

        return wait_for(f"{name} over {before:g}", probe)

    def _is_empty(self) -> bool:
        now = self.metrics()
        return now["nvserve:num_free_kv_blocks"] == now["nvserve:num_kv_blocks"] > 0
