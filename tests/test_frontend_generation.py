"""Choices turn ids into text over an engine that only records."""

import asyncio
import contextlib
import gc
import itertools
import weakref
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.errors import ApiError
from nvserve.frontend.generation import Choice, Delta, Generation, Plan
from nvserve.frontend.journal import Entry
from nvserve.frontend.params import TextRules
from nvserve.protocol.messages import FinishReason
from nvserve.protocol.sampling import SamplingParams

DEMO = Path(__file__).parents[1] / "scripts" / "demo_model" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(DEMO))
VOCABULARY = Vocabulary(TOKENIZER, frozenset(range(5)))
EOS = 1
NONE, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


class RecordingEngine:
    """Takes every request up to a limit and remembers what becomes of it."""

    def __init__(self, max_requests: int = 100) -> None:
        self.max_requests = max_requests
        self.entries: list[Entry] = []
        self.aborted: list[Entry] = []
        self.finished: list[Entry] = []

    def draw_seed(self) -> int:
        return len(self.entries)

    def submit(self, listener: Choice, **fields: Any) -> Entry:
        if len(self.entries) == self.max_requests:
            raise ApiError(429, "full")
        entry = Entry(
            len(self.entries),
            fields["prompt"],
            fields["sampling"],
            fields["seed"],
            arrival=0.0,
            deadline=0.0,
        )
        self.entries.append(entry)
        return entry

    def abort(self, entry: Entry) -> None:
        self.aborted.append(entry)

    def finish(self, entry: Entry) -> None:
        self.finished.append(entry)


Test = Callable[[RecordingEngine, Generation, list[Delta]], Coroutine[Any, Any, None]]


def run(
    test: Test,
    *,
    rules: TextRules | None = None,
    sampling: SamplingParams | None = None,
    num_choices: int = 1,
    max_requests: int = 100,
) -> None:
    async def inside() -> None:
        engine = RecordingEngine(max_requests)
        plan = Plan(
            prompts=[array("i", [7, 8])],
            sampling=[sampling or SamplingParams(max_tokens=50)],
            rules=rules or TextRules([], include_stop=False, skip_special=True),
            num_choices=num_choices,
            seed=5,
        )
        generation = Generation(engine, VOCABULARY, frozenset({EOS}), plan)  # type: ignore[arg-type]  # the engine's shape
        await test(engine, generation, [])

    asyncio.run(inside())


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def start(generation: Generation, deltas: list[Delta]) -> list[Choice]:
    generation.start(lambda _, delta: deltas.append(delta))
    return generation.choices


def test_eos_ends_the_text_and_counts_as_a_token() -> None:
    async def test(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        (choice,) = start(generation, deltas)
        choice.on_accepted()
        choice.on_tokens([*ids_of("king"), EOS], STOP, 2, None)
        await generation.done()
        assert (deltas[0].text, deltas[0].finish_reason) == ("king", "stop")
        assert (choice.num_output_tokens, choice.cached) == (len(ids_of("king")) + 1, 2)

    run(test)


def test_all_choices_share_one_prompt() -> None:
    """A long one would be packed and kept so many times."""

    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        start(generation, deltas)
        prompts = [entry.prompt for entry in engine.entries]
        assert prompts == [array("i", [7, 8]).tobytes()] * 3
        assert len(set(map(id, prompts))) == 1

    run(test, num_choices=3)


def test_cached_tokens_are_those_of_the_first_core() -> None:
    async def test(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        (choice,) = start(generation, deltas)
        choice.on_tokens(ids_of("king"), NONE, 16, None)
        choice.on_tokens(ids_of(" king"), LENGTH, 0, None)  # of a core that began it again
        assert choice.cached == 16

    run(test)


def test_a_stop_token_shows_only_when_asked_for() -> None:
    word = ids_of(" king")

    async def hidden(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        start(generation, deltas)[0].on_tokens([*ids_of("a"), *word], STOP, 0, None)
        assert deltas[0].text == "a"

    async def shown(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        start(generation, deltas)[0].on_tokens([*ids_of("a"), *word], STOP, 0, None)
        assert deltas[0].text == "a king"

    sampling = SamplingParams(max_tokens=50, stop_token_ids=[word[-1]])
    run(hidden, sampling=sampling)
    run(shown, sampling=sampling, rules=TextRules([], include_stop=True, skip_special=True))


def test_an_unfinished_character_at_the_end_is_a_replacement() -> None:
    async def test(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        (choice,) = start(generation, deltas)
        first = VOCABULARY.table.index("한".encode()[:1])
        choice.on_tokens([first], NONE, 0, None)
        choice.on_tokens([first], LENGTH, 0, None)
        assert [delta.text for delta in deltas] == ["", "\ufffd\ufffd"]

    run(test)


def test_a_stop_string_in_the_last_token_of_all_is_a_stop() -> None:
    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        (choice,) = start(generation, deltas)
        choice.on_tokens(ids_of("one END"), LENGTH, 0, None)
        assert (deltas[0].text, deltas[0].finish_reason) == ("one ", "stop")
        assert engine.finished == []  # core has ended it already

    run(test, rules=TextRules(["END"], include_stop=False, skip_special=True))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(2, 1023), min_size=1, max_size=30),
    st.lists(st.integers(1, 7), min_size=30, max_size=30),
    st.lists(st.sampled_from(["a", "the", "e ", "\ufffd", "\n", "st"]), max_size=3),
)
def test_text_and_usage_do_not_depend_on_how_emits_are_merged(
    ids: list[int], counts: list[int], stops: list[str]
) -> None:
    def streamed(counts: list[int]) -> tuple[str, list[int], str | None, int]:
        seen: list[Delta] = []

        async def test(engine: RecordingEngine, generation: Generation, _: list[Delta]) -> None:
            (choice,) = start(generation, seen)
            rest = list(ids)
            for count in counts:
                emit, rest = rest[:count], rest[count:]
                choice.on_tokens(emit, NONE if rest else LENGTH, 0, None)
                if not rest or choice.finish_reason:
                    break
            used.append(choice.num_output_tokens)

        used: list[int] = []
        run(test, rules=TextRules(stops, include_stop=False, skip_special=True))
        text = "".join(delta.text for delta in seen)
        token_ids = [token_id for delta in seen for token_id in delta.token_ids]
        return text, token_ids, seen[-1].finish_reason, used[0]

    single = streamed([1] * 30)
    assert streamed(counts) == single
    assert single[3] == len(single[1])
    if not stops:
        assert single[0] == TOKENIZER.decode(ids)


def ended(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, str, int]:
    """Text, reason and tokens, by the rule that a stop string ends in a token behind min_tokens."""
    detokenizer = VOCABULARY.detokenizer([7, 8], skip_special=True, is_start=False)
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    pieces[-1] += detokenizer.flush()
    text = "".join(pieces)
    for end in range(len("".join(pieces[:min_tokens])) + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            lengths = itertools.accumulate(map(len, pieces))
            num_tokens = next(count for count, length in enumerate(lengths, 1) if length >= end)
            return text[: end - max(map(len, found))], "stop", num_tokens
    return text, "length", len(ids)


LETTERS = [ids[0] for ids in map(ids_of, "abcabc한é") if len(ids) == 1] + ids_of("한é")


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(0, 22),
    st.lists(st.text("abc한é\ufffd", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_count_behind_min_tokens_also_where_a_client_goes_on(
    ids: list[int], num_held: int, min_tokens: int, stops: list[str]
) -> None:
    expected = ended(ids, stops, min_tokens)
    num_held = min(num_held, expected[2] - 1)
    texts: list[str] = []

    def check(held: list[int]) -> None:
        async def test(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
            generation.start(lambda _, delta: deltas.append(delta), held)
            (choice,) = generation.choices
            choice.on_tokens(ids[len(held) :], LENGTH, 0, None)
            assert (choice.finish_reason, choice.num_output_tokens) == expected[1:]
            texts.append("".join(delta.text for delta in deltas))

        sampling = SamplingParams(max_tokens=50, min_tokens=min_tokens)
        rules = TextRules(stops, include_stop=False, skip_special=True)
        run(test, sampling=sampling, rules=rules)

    check([])
    check(ids[:num_held])
    assert texts[0] == expected[0]
    assert texts[0].endswith(texts[1])


def test_choices_end_singly_and_the_generation_with_the_last() -> None:
    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        first, second = start(generation, deltas)
        first.on_tokens([300], LENGTH, 0, None)
        assert not generation.is_over
        second.on_tokens([300], LENGTH, 0, None)
        await generation.done()
        generation.abort()
        assert engine.aborted == []

    run(test, num_choices=2)


def test_one_choice_that_is_refused_ends_all() -> None:
    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        first, second, _ = start(generation, deltas)
        first.on_accepted()
        second.on_refused(ApiError(429, "busy"))
        with pytest.raises(ApiError, match="busy"):
            await generation.accepted()
        with pytest.raises(ApiError, match="busy"):
            await generation.done()
        assert engine.aborted == engine.entries

    run(test, num_choices=3)


def test_a_queue_that_fills_up_midway_leaves_nothing_behind() -> None:
    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        with pytest.raises(ApiError, match="full"):
            start(generation, deltas)
        assert engine.aborted == engine.entries
        assert len(engine.entries) == 2

    run(test, num_choices=3, max_requests=2)


def test_core_is_told_when_the_owner_of_a_generation_is_cancelled() -> None:
    async def test(engine: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        start(generation, deltas)
        owner = asyncio.create_task(generation.done())
        await asyncio.sleep(0)
        owner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await owner
        assert not generation.is_over
        generation.abort()
        assert engine.aborted == engine.entries

    run(test)


def finish(choice: Choice) -> None:
    choice.on_accepted()
    choice.on_tokens([300], LENGTH, 0, None)


def refuse(choice: Choice) -> None:
    choice.on_refused(ApiError(429, "busy"))


@pytest.mark.parametrize("end", [finish, refuse, None], ids=["finished", "refused", "aborted"])
def test_what_is_over_goes_without_a_garbage_collection(
    end: Callable[[Choice], None] | None,
) -> None:
    last: list[weakref.ref[Generation]] = []

    async def test(_: RecordingEngine, generation: Generation, deltas: list[Delta]) -> None:
        last.append(weakref.ref(generation))

        def sink(_: Choice, delta: Delta) -> None:
            if generation.is_resumable:  # it holds its generation, as a stream's does
                deltas.append(delta)

        generation.start(sink)
        (choice,) = generation.choices
        if end is None:
            generation.abort()
        else:
            end(choice)
        for wait in (generation.accepted, generation.done):
            with contextlib.suppress(ApiError):
                await wait()

    gc.collect()
    gc.disable()
    try:
        run(test)
        assert last[0]() is None
    finally:
        gc.enable()
