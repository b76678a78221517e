"""The clients' session: what messages make of a request, and in how few objects it is kept."""

import gc
from array import array
from typing import Any

import pytest

from nvserve.frontend.client_session import Piece, Request, Session
from nvserve.frontend.client_submit import open_request
from nvserve.protocol.client_messages import (
    Emit,
    Finished,
    TokenLogprob,
    decode_to_client,
    encode_client,
)
from nvserve.protocol.messages import pack_ids


def take(session: Session, request: Request, ids: list[int], **fields: Any) -> None:
    """Have the server send these ids."""
    emit = Emit(id=request.submit.id, first=len(request.output), tokens=pack_ids(ids), **fields)
    assert session.take(decode_to_client(encode_client(emit))) is request


def taken(request: Request) -> list[Piece]:
    pieces = []
    while request.has_piece:
        pieces.append(request.take_piece())
    return pieces


def scored(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-0.5)


def num_tracked() -> int:
    """Objects that every full garbage collection has to look at."""
    gc.collect()  # which looks at tuples of numbers for the last time
    return len(gc.get_objects())


def test_pieces_taken_late_are_as_they_came() -> None:
    session = Session()
    request, _ = open_request(session, [5], (), {})
    take(session, request, [1], text="a")
    take(session, request, [2, 3], text="bc")
    assert taken(request) == [Piece("a", [1]), Piece("bc", [2, 3])]
    take(session, request, [], text="d")
    assert taken(request) == [Piece("d", [])]
    assert (request.output, request.texts) == (array("i", [1, 2, 3]), ["a", "bc", "d"])


def test_a_piece_is_there_once_all_of_it_is() -> None:
    """A signal handler, or another thread, may look in the midst of a message."""
    session = Session()
    request, _ = open_request(session, [5], (), {})
    found: list[list[Piece]] = []

    class Texts(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            found.append(taken(request))

    request.texts = Texts()
    take(session, request, [1], text="a")
    take(session, request, [2], text="b")
    assert found == [[], [Piece("a", [1])]]
    assert taken(request) == [Piece("b", [2])]


def test_a_piece_holds_the_scores_of_its_own_tokens() -> None:
    session = Session()
    request, _ = open_request(session, [5, 6, 7], [8, 9], {"logprobs": 0, "prompt_logprobs": 0})
    take(session, request, [], prompt_first=1, prompt_logprobs=[scored(6)], logprobs=[])
    take(session, request, [1], prompt_first=2, prompt_logprobs=[scored(7)], logprobs=[scored(1)])
    take(session, request, [2, 3], text="x", logprobs=[scored(2), scored(3)])
    assert taken(request) == [
        Piece("", [], [], [scored(6)]),
        Piece("", [1], [scored(1)], [scored(7)]),
        Piece("x", [2, 3], [scored(2), scored(3)]),
    ]


@pytest.mark.parametrize("asked", [True, False])
def test_scores_that_were_asked_for_are_a_list_though_there_are_none(asked: bool) -> None:
    """Of a prompt of one token with nothing behind it."""
    fields = {"max_tokens": 0, "logprobs": 1, "prompt_logprobs": 1} if asked else {}
    session = Session()
    request, _ = open_request(session, [5], (), fields)
    finished = Finished(
        id=request.submit.id,
        finish_reason="length",
        num_prompt_tokens=1,
        num_output_tokens=0,
        num_cached_tokens=0,
    )
    assert session.take(decode_to_client(encode_client(finished))) is request
    result = request.result()
    expected: list[TokenLogprob] | None = [] if asked else None
    assert (result.logprobs, result.prompt_logprobs) == (expected, expected)


def test_scores_that_come_again_are_in_no_piece() -> None:
    session = Session()
    request, _ = open_request(session, [5, 6, 7], (), {"prompt_logprobs": 0})
    take(session, request, [], prompt_first=1, prompt_logprobs=[scored(6)])
    take(session, request, [1], prompt_first=1, prompt_logprobs=[scored(6), scored(7)])
    assert taken(request) == [Piece("", [], None, [scored(6)]), Piece("", [1], None, [scored(7)])]


@pytest.mark.parametrize("num_tops", [None, 0, 2], ids=["plain", "logprobs", "best ones"])
def test_what_waits_for_its_reader_gives_a_collection_nothing_to_look_at(
    num_tops: int | None,
) -> None:
    session = Session()
    request, _ = open_request(session, [5], (), {"logprobs": num_tops})
    tops, values = (7, 8)[: num_tops or 0], (-0.5, -0.75)[: num_tops or 0]
    score = TokenLogprob(token_id=7, logprob=-0.5, top_ids=tops, top_logprobs=values)
    num_before = num_tracked()
    for number in range(1000):
        scores = None if num_tops is None else [score]
        take(session, request, [number], text=f"text {number}", logprobs=scores)
    assert num_tracked() < num_before + 100  # the process may have made others meanwhile
