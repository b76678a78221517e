"""What tests ask of a server is asked in a way that its rare statistics cannot spoil."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from surface.asking import ACCEPTED, Asker

TOLD_EVERY = 5  # scrapes


class Door(BaseHTTPRequestHandler):
    """Completions at once, and totals that are told only now and then, at first not at all."""

    num_scrapes = 0
    num_accepted = 0
    told: int | None = None

    def do_GET(self) -> None:
        cls = type(self)
        cls.num_scrapes += 1
        if cls.num_scrapes % TOLD_EVERY == 0:
            cls.told = cls.num_accepted
        text = "nvserve:frontend_open_requests 0.0\n"
        if cls.told is not None:
            text += f'{ACCEPTED}{{model_name="demo"}} {cls.told}.0\n'
        self._answer(text)

    def do_POST(self) -> None:
        cls = type(self)
        self.rfile.read(int(self.headers["content-length"]))
        cls.num_accepted += 1
        self._answer(json.dumps({"choices": [{"text": "of"}]}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *_: object) -> None:
        pass


class NoServer:
    def pids(self) -> dict[str, int]:
        return {}


@pytest.fixture
def asker() -> Iterator[Asker]:
    class Fresh(Door):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as server:
        thread = Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield Asker(NoServer(), f"http://127.0.0.1:{server.server_port}")  # type: ignore[arg-type]
        server.shutdown()
        thread.join()


def test_metrics_are_those_of_core_too(asker: Asker) -> None:
    assert asker.metrics()[ACCEPTED] == 1.0


def test_settled_totals_count_all_that_was_done_before(asker: Asker) -> None:
    asker.metrics()
    for _ in range(3):
        asker.complete(prompt="To be")
    asker.settle()
    assert asker.metrics()[ACCEPTED] >= 4.0
