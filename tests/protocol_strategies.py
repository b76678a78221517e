"""Hypothesis strategies for every message: arbitrary values whose columns agree with each other."""

from hypothesis import strategies as st

from nvserve.protocol.messages import (
    Abort,
    Accepted,
    Chunks,
    CoreStats,
    Emits,
    Finish,
    FinishReason,
    FromWorker,
    Gap,
    Hello,
    Logprobs,
    Masks,
    Message,
    ModelOutput,
    NewRows,
    RefusalKind,
    Refused,
    SchedulerOutput,
    StepDone,
    StepFailed,
    Strikes,
    Submit,
    TableChanges,
    pack_ids,
)
from nvserve.protocol.sampling import SamplingParams

NATURAL = st.integers(0, 2**31 - 1)
LIFE = st.integers(0, 1000)
REQUEST_ID = st.integers(0, 2**55)
IDS = st.lists(NATURAL, max_size=20)
PACKED = IDS.map(pack_ids)
TIME = st.floats(0, 2e9)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    max_tokens=NATURAL,
    stop_token_ids=IDS,
    logit_bias=st.dictionaries(NATURAL, st.floats(-100, 100), max_size=4),
    bad_words=st.lists(IDS, max_size=3),
)


@st.composite
def logprobs(draw: st.DrawFn) -> Logprobs:
    num_tops = draw(st.lists(st.integers(0, 5), max_size=5))
    num_values = sum(num_tops)
    return Logprobs(
        rows=list(range(len(num_tops))),
        chosen=b"\0" * 4 * len(num_tops),
        num_tops=num_tops,
        top_ids=pack_ids(range(num_values)),
        top_values=b"\1\2\3\4" * num_values,
    )


@st.composite
def emits(draw: st.DrawFn) -> Emits:
    counts = draw(st.lists(st.integers(0, 4), max_size=8))
    num = len(counts)

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=num, max_size=num))

    pieces = st.lists(st.none() | logprobs(), min_size=num, max_size=num)
    return Emits(
        core_life=draw(LIFE),
        frontend_life=draw(LIFE),
        request_ids=column(REQUEST_ID),
        firsts=column(NATURAL),
        counts=counts,
        tokens=pack_ids(range(sum(counts))),
        finishes=[draw(st.sampled_from(FinishReason)) for _ in counts],
        cached=column(NATURAL),
        logprobs=draw(st.none() | pieces),
        prompt_logprobs=draw(st.none() | pieces),
    )


@st.composite
def new_rows(draw: st.DrawFn) -> NewRows:
    slots = draw(st.lists(NATURAL, max_size=4))
    num = len(slots)
    columns = st.lists(PACKED, min_size=num, max_size=num)
    sampling = draw(st.lists(SAMPLING, min_size=num, max_size=num))
    return NewRows(slots, sampling, list(range(num)), draw(columns), draw(columns))


@st.composite
def table_changes(draw: st.DrawFn) -> TableChanges:
    counts = draw(st.lists(st.integers(0, 4), max_size=4))
    rows = list(range(len(counts)))
    return TableChanges(rows, rows, counts, pack_ids(range(sum(counts))))


@st.composite
def chunks(draw: st.DrawFn) -> Chunks:
    counts = draw(st.lists(st.integers(0, 4), max_size=4))
    rows = list(range(len(counts)))
    samples = [draw(st.booleans()) for _ in counts]
    return Chunks(rows, rows, counts, pack_ids(range(sum(counts))), samples)


HELLO = st.builds(Hello, life=LIFE, rank=st.integers(-1, 7))

TO_CORE: st.SearchStrategy[Message] = st.one_of(
    HELLO,
    st.builds(
        Submit,
        frontend_life=LIFE,
        core_life=LIFE,
        request_id=REQUEST_ID,
        prompt=PACKED,
        emitted=PACKED,
        sampling=SAMPLING,
        seed=st.integers(0, 2**63 - 1),
        arrival=TIME,
        deadline=TIME,
        strikes=LIFE,
        is_replay=st.booleans(),
        salt=st.text(max_size=5),
    ),
    st.builds(Abort, LIFE, LIFE, st.lists(REQUEST_ID, max_size=5)),
    st.builds(Finish, LIFE, LIFE, st.lists(REQUEST_ID, max_size=5)),
)
TO_FRONTEND: st.SearchStrategy[Message] = st.one_of(
    HELLO,
    st.builds(Accepted, LIFE, LIFE, st.lists(REQUEST_ID, max_size=5)),
    st.builds(
        Refused,
        core_life=LIFE,
        frontend_life=LIFE,
        request_id=REQUEST_ID,
        kind=st.sampled_from(RefusalKind),
        message=st.text(max_size=20),
        param=st.text(max_size=5),
        retry_after_s=TIME,
    ),
    emits(),
    st.lists(st.tuples(REQUEST_ID, NATURAL), max_size=5).map(
        lambda pairs: Strikes(0, 0, [i for i, _ in pairs], [count for _, count in pairs])
    ),
    st.builds(
        CoreStats,
        **{
            name: NATURAL
            for name in CoreStats.__struct_fields__
            if name not in ("finished_totals", "request_ids", "unanswered_ids")
        },
        request_ids=st.none() | st.lists(REQUEST_ID, max_size=5),
        unanswered_ids=st.none() | st.lists(REQUEST_ID, max_size=5),
        finished_totals=st.lists(NATURAL, min_size=6, max_size=6),
    ),
)
TO_WORKER: st.SearchStrategy[Message] = st.one_of(
    HELLO,
    st.builds(
        SchedulerOutput,
        epoch=LIFE,
        step=NATURAL,
        is_full_tail=st.booleans(),
        freed=st.none() | IDS,
        leaves=st.none() | IDS,
        new=st.none() | new_rows(),
        tables=st.none() | table_changes(),
        joins=st.none() | IDS,
        chunks=st.none() | chunks(),
        masks=st.none() | st.builds(Masks, IDS, PACKED),
    ),
)
FROM_WORKER: st.SearchStrategy[FromWorker] = st.one_of(
    HELLO,
    st.builds(
        ModelOutput,
        epoch=LIFE,
        step=NATURAL,
        tokens=PACKED,
        counts=st.none() | PACKED,
        checksum=st.integers(0, 2**32 - 1),
        logprobs=st.none() | logprobs(),
        forward_ms=TIME,
        launch_ms=TIME,
    ),
    st.builds(StepDone, LIFE, NATURAL, LIFE, st.integers(0, 2**32 - 1)),
    st.builds(StepFailed, LIFE, NATURAL, LIFE, st.text(max_size=20)),
    st.builds(Gap, LIFE, NATURAL, NATURAL, LIFE),
)
