"""The submit of the Python clients: what cannot be sent is told by its name, and not kept."""

from array import array
from typing import Any

import pytest

from nvserve.frontend import client_submit
from nvserve.frontend.client_session import RequestError, Session
from nvserve.frontend.client_submit import open_request, resubmit_frames
from nvserve.protocol.client_messages import (
    MAX_CLIENT_FRAME_BYTES,
    Accepted,
    Emit,
    StructuredOutputs,
    Submit,
    decode_to_server,
)
from nvserve.protocol.messages import pack_ids

DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
BAD_FIELDS: list[tuple[str, Any]] = [
    ("stop", "\ud800"),
    ("stop", ["fine", "\ud800"]),
    ("bad_words", ["\udfff"]),
    ("cache_salt", "\ud800"),
    ("logit_bias", {"\ud800": 1.0}),
    ("structured_outputs", StructuredOutputs(regex="\ud800")),
    ("structured_outputs", StructuredOutputs(json={"a": object()})),
    ("structured_outputs", StructuredOutputs(json=DEEP)),
    ("seed", 2**64),
    ("priority", -(2**80)),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=[name for name, _ in BAD_FIELDS])
def test_a_field_that_cannot_be_encoded_is_named_and_its_request_not_kept(
    name: str, value: Any
) -> None:
    session = Session()
    kept, _ = open_request(session, "fine", (), {})
    with pytest.raises(ValueError, match=f"^{name} cannot be sent: "):
        open_request(session, "x", (), {"max_tokens": 3, name: value})
    assert list(session.requests.values()) == [kept]


def test_a_prompt_with_half_a_surrogate_pair_is_named_as_well() -> None:
    session = Session()
    with pytest.raises(ValueError, match=r"^prompt cannot be sent: "):
        open_request(session, "bad\ud800", (), {})
    assert not session.requests


@pytest.mark.parametrize(
    ("name", "prompt", "params"),
    [
        ("prompt", "a" * MAX_CLIENT_FRAME_BYTES, {}),
        ("prompt", [5] * (MAX_CLIENT_FRAME_BYTES // 4), {}),
        ("stop", "x", {"stop": ["a" * MAX_CLIENT_FRAME_BYTES]}),
    ],
    ids=["text", "ids", "stop"],
)
def test_a_frame_over_the_doors_limit_is_refused_by_its_largest_field(
    name: str, prompt: str | list[int], params: dict[str, Any]
) -> None:
    session = Session()
    with pytest.raises(RequestError, match=f"^400: {name}: the request has") as caught:
        open_request(session, prompt, (), params)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert not session.requests


def test_a_request_that_has_outgrown_a_frame_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session()
    grown, frame = open_request(session, [1, 2, 3], (), {})
    other, _ = open_request(session, [4], (), {})
    monkeypatch.setattr(client_submit, "MAX_CLIENT_FRAME_BYTES", len(frame) + 100)
    for request in (grown, other):
        session.take(Accepted(id=request.submit.id, seed=7, num_prompt_tokens=1))
    session.take(Emit(id=grown.submit.id, first=0, tokens=pack_ids(range(30))))
    frames = [decode_to_server(one) for one in resubmit_frames(session)]
    assert [one.id for one in frames if isinstance(one, Submit)] == [other.submit.id]
    assert grown.is_over
    assert grown.error is not None
    assert grown.error.param == "emitted"
    assert list(session.requests.values()) == [other]


def test_a_request_closed_while_others_are_resubmitted_is_not_sent() -> None:
    session = Session()
    first, _ = open_request(session, "a", (), {})
    second, _ = open_request(session, "b", (), {})
    frames = resubmit_frames(session)
    sent = decode_to_server(next(frames))
    assert isinstance(sent, Submit)
    assert sent.id == first.submit.id
    session.close(second)
    assert not list(frames)


@pytest.mark.parametrize("emitted", ["abc", b"abc", ["5"], 5], ids=repr)
def test_emitted_ids_are_not_asked_for_as_a_prompt_is(emitted: Any) -> None:
    session = Session()
    with pytest.raises(TypeError, match=r"^emitted is no list of token ids, but "):
        open_request(session, "x", emitted, {})
    assert not session.requests


def test_the_callers_own_array_is_not_what_output_is_added_to() -> None:
    session, held = Session(), array("i", [9])
    request, _ = open_request(session, [5], held, {})
    session.take(Emit(id=request.submit.id, first=1, tokens=pack_ids([10])))
    assert (held.tolist(), request.output.tolist()) == ([9], [9, 10])


def test_ids_travel_as_they_were_given() -> None:
    _, frame = open_request(Session(), [5, 2**31 - 1, -1], [9], {"max_tokens": 3})
    submit = decode_to_server(frame)
    assert isinstance(submit, Submit)
    assert submit.prompt_ids == pack_ids([5, 2**31 - 1, -1])
    assert submit.emitted == pack_ids([9])
    assert submit.params.max_tokens == 3
