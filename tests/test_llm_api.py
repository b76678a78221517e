"""The Python API: argument forms without an engine, and the demo model end to end."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from reference import ReferenceModel
from tokenizers import Tokenizer

import nvserve
from nvserve import LLM, SamplingParams
from nvserve.frontend.client_session import Request, RequestError
from nvserve.protocol.client_messages import ClientParams
from nvserve.scripts import llm as llm_module
from nvserve.scripts import python_child
from nvserve.scripts.bench.cpu_time import child_pids
from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed

DEMO = Path(nvserve.__path__[0]) / "scripts" / "demo_model"
WAIT_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def wait_until(what: str, probe: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not probe():
        assert time.monotonic() < deadline_s, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] != b"Z"


# -- without an engine -----------------------------------------------------------------------------


def test_importing_nvserve_loads_neither_torch_nor_the_client() -> None:
    code = (
        "import sys, nvserve\n"
        "assert 'zmq' not in sys.modules, 'the client came with the package'\n"
        "from nvserve import LLM, SamplingParams\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    run = subprocess.run(
        python_child.command("-c", code),
        env=python_child.environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert run.returncode == 0, run.stderr


def test_an_unknown_name_is_no_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LLMM'"):
        _ = nvserve.LLMM


def test_sampling_parameters_are_for_all_or_one_for_each() -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert llm_module._params_for(params, 2) == params
    assert llm_module._params_for(params[0], 2) == [params[0]] * 2
    with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts"):
        llm_module._params_for(params, 3)
    with pytest.raises(ValueError, match="n must be at least 1"):
        llm_module._params_for(SamplingParams(n=0), 1)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"temperature": 0.0}, "dict"),
        ([{"temperature": 0.0}], "dict"),
        ([SamplingParams(), None], "NoneType"),
        ("greedy", "str"),
        (0.0, "float"),
        (ClientParams(), "ClientParams"),
    ],
)
def test_what_are_no_sampling_parameters_is_a_type_error(params: object, kind: str) -> None:
    text = f"params are SamplingParams or a list of them, not {kind}"
    with pytest.raises(TypeError, match=text):
        llm_module._params_for(params, 2)


def test_choices_get_different_seeds_and_the_server_never_sees_n() -> None:
    params = SamplingParams(n=2, seed=7)
    fields = [llm_module._fields(params, choice) for choice in range(2)]
    assert fields[0]["seed"] == 7 != fields[1]["seed"]
    assert "n" not in fields[0]
    assert llm_module._fields(SamplingParams(), 1)["seed"] is None


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"seed": 2**63}, ValueError, "seed must fit in 64 bits"),
        ({"seed": 2**64}, ValueError, "seed must fit in 64 bits"),
        ({"seed": -(2**63) - 1}, ValueError, "seed must fit in 64 bits"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, not float: 1.5"),
        ({"seed": "1"}, TypeError, "seed must be an integer, not str: '1'"),
        ({"n": 1.5}, TypeError, "n must be an integer, not float: 1.5"),
        ({"n": "2"}, TypeError, "n must be an integer, not str: '2'"),
        ({"n": None}, TypeError, "n must be an integer, not NoneType"),
    ],
)
def test_a_seed_or_count_that_is_none_is_refused_and_never_folded(
    params: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        llm_module._params_for([SamplingParams(), SamplingParams(**params)], 2)


def test_every_seed_of_64_bits_is_taken() -> None:
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        assert llm_module._params_for(SamplingParams(seed=seed), 1)[0].seed == seed


def test_a_parameter_of_an_unknown_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_a_model_that_is_not_there_is_told_in_the_launchers_words() -> None:
    with pytest.raises(LaunchFailed, match="/no/such/model: no such folder"):
        LLM("/no/such/model")


def test_a_launch_that_is_stopped_as_it_begins_is_gone() -> None:
    launch = EmbeddedLaunch(["--device", "sim"])
    launch.stop()
    assert not launch.is_running
    assert launch.exit_code is not None
    with pytest.raises(LaunchFailed, match=f"exit status {launch.exit_code}"):
        launch.wait_ready(WAIT_S)


def test_a_start_that_is_interrupted_leaves_nothing_behind_while_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a notebook keeps the last one."""
    launches = []

    def interrupt(launch: EmbeddedLaunch, limit_s: float) -> None:
        launches.append(launch)
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedLaunch, "wait_ready", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        LLM(device="sim")
    [launch] = launches
    assert not launch.is_running
    assert launch.exit_code is not None
    assert kept.tb is not None


# -- end to end ------------------------------------------------------------------------------------


def start(device: str = "cpu") -> LLM:
    """On the simulated device where the model is of no account."""
    return LLM(device=device, max_model_len=256, num_kv_blocks=400)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with start() as engine:
        yield engine


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_greedy_ids_equal_those_of_transformers_in_one_batch(llm: LLM) -> None:
    rng = Random(3)
    prompts = [[0, *rng.choices(range(5, 1024), k=length)] for length in range(2, 42)]
    model = ReferenceModel(DEMO)
    references = model.clear_references(prompts, 24, frozenset({1}), 8)
    answers = llm.generate([list(one.prompt) for one in references], GREEDY)
    assert [tuple(answer.outputs[0].token_ids) for answer in answers] == [
        reference.ids for reference in references
    ]
    assert [tuple(answer.prompt_token_ids) for answer in answers] == [
        reference.prompt for reference in references
    ]


def test_a_text_and_its_own_ids_get_the_same_answer(llm: LLM) -> None:
    [from_text] = llm.generate("To be, or", GREEDY)
    [from_ids] = llm.generate(from_text.prompt_token_ids, GREEDY)
    assert from_text.prompt == "To be, or"
    assert from_ids.prompt is None
    assert from_text.prompt_token_ids == llm.encode("To be, or")
    assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
    assert from_text.outputs[0].text
    assert from_text.outputs[0].finish_reason == "length"


def test_answers_keep_the_order_of_prompts_with_lengths_of_their_own(llm: LLM) -> None:
    lengths = [9, 1, 30, 4]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0) for n in lengths]
    answers = llm.generate(["Romeo", "Juliet", "Nurse", "Prince"], params)
    assert [answer.prompt for answer in answers] == ["Romeo", "Juliet", "Nurse", "Prince"]
    assert [len(answer.outputs[0].token_ids) for answer in answers] == lengths


def test_a_seed_makes_choices_repeatable_and_different_from_each_other(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.5, max_tokens=12, ignore_eos=True)
    [first] = llm.generate("My lord,", params)
    [second] = llm.generate("My lord,", params)
    ids = [output.token_ids for output in first.outputs]
    assert ids == [output.token_ids for output in second.outputs]
    assert len({tuple(one) for one in ids}) == 3
    assert [output.index for output in first.outputs] == [0, 1, 2]


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    [answer] = llm.generate("What", params)
    logprobs = answer.outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == answer.outputs[0].token_ids
    assert all(entry.top_ids[0] == entry.token_id for entry in logprobs)


def test_more_prompts_than_may_be_open_are_all_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "MAX_OPEN", 3)
    prompts = [[0, 5 + number] for number in range(10)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    assert [answer.prompt_token_ids for answer in answers] == prompts


def test_a_refused_request_names_the_parameter_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="top_p"):
        llm.generate(["fine", "bad"], [SamplingParams(), SamplingParams(top_p=7.0)])
    with pytest.raises(RequestError, match="256"):
        llm.generate([[5] * 300], SamplingParams(max_tokens=1))
    assert llm.generate("fine", SamplingParams(max_tokens=1))


def test_an_error_ends_those_that_come_before_it_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []
    submit = llm.client.submit

    def submit_and_keep(*prompt: Any, **params: Any) -> Request:
        requests.append(submit(*prompt, **params))
        return requests[-1]

    monkeypatch.setattr(llm.client, "submit", submit_and_keep)
    monkeypatch.setattr(llm_module, "LOOK_S", 0.0)
    with pytest.raises(RequestError, match="token id"):
        llm.generate([[5, 6], [10**6]], SamplingParams(max_tokens=250, ignore_eos=True))
    assert not requests[0].is_over
    assert not llm.client.num_open


def test_an_empty_prompt_is_refused_by_its_index_as_over_http(llm: LLM) -> None:
    for prompts in ("", ["fine", ""], [[5], []]):
        number = len(prompts) - 1 if prompts else 0
        with pytest.raises(ValueError, match=f"prompt {number} is empty"):
            llm.generate(prompts)


def test_half_a_surrogate_pair_is_refused_by_its_index(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 is not valid Unicode: .*ud800.* character 3"):
        llm.generate(["fine", "bad\ud800"])
    with pytest.raises(ValueError, match=r"text is not valid Unicode: .*ud800.* character 0"):
        llm.encode("\ud800")
    assert len(llm.encode("")) < len(llm.encode("a"))


def test_hundreds_of_long_prompts_are_on_their_way_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnTheWay(Exception):
        pass

    def submit(*prompt: Any, **params: Any) -> Request:
        raise OnTheWay

    monkeypatch.setattr(llm.client, "submit", submit)
    prompts = [list(range(600)) for _ in range(256)]
    seconds = []
    for _ in range(3):
        begun_s = time.process_time()
        with pytest.raises(OnTheWay):
            llm.generate(prompts)
        seconds.append(time.process_time() - begun_s)
    assert min(seconds) < 0.1, "of work for each id before the first request is sent"


def test_the_first_text_finds_the_tokenizer_loaded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str) -> Any:
        raise AssertionError(f"{path} is loaded within a call")

    monkeypatch.setattr(Tokenizer, "from_file", load)
    assert llm.encode("To be")


def test_thousands_of_requests_cost_their_caller_microseconds_each() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[5 + number % 900, 7] for number in range(2500)]
    with start("sim") as engine:
        begun_s = time.process_time()
        engine.generate(prompts, params)
        used_s = time.process_time() - begun_s
    assert used_s < 1.2, "of work that grows with what is open"


def test_a_connection_full_of_the_callers_own_holds_up_no_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "MAX_OPEN", 1)
    own = [llm.client.submit([5], max_tokens=200, ignore_eos=True) for _ in range(3)]
    assert len(llm.generate(["fine", "as well"], SamplingParams(max_tokens=2))) == 2
    for request in own:
        llm.client.abort(request)


def test_arguments_that_cannot_be_sent_leave_nothing_behind(llm: LLM) -> None:
    for params in (SamplingParams(stop="\ud800"), SamplingParams(bad_words=["\ud800"])):
        with pytest.raises(ValueError, match=r"^(stop|bad_words) cannot be sent"):
            llm.generate(["fine", "To be"], [SamplingParams(), params])
        assert not llm.client._session.requests
    with pytest.raises(RequestError, match="prompt: the request has"):
        llm.generate([5] * 4_300_000, limit_s=WAIT_S)
    with pytest.raises(ValueError, match="prompt 1 holds a token id"):
        llm.generate([[5], [2**31]])
    with pytest.raises(TypeError, match="not generator"):
        llm.generate(one for one in ("first", "second"))  # type: ignore[arg-type]
    assert llm.generate("fine", SamplingParams(max_tokens=1))


def test_calls_of_several_threads_are_answered_one_after_the_other(llm: LLM) -> None:
    def ask(number: int) -> list[list[int]]:
        prompts = [[5 + number, place] for place in range(20)]
        answers = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        assert [answer.prompt_token_ids for answer in answers] == prompts
        return [answer.outputs[0].token_ids for answer in answers]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4), timeout=WAIT_S))
    assert {len(ids) for answer in answers for ids in answer} == {20}


def test_a_call_that_waits_for_another_threads_keeps_its_limit(llm: LLM) -> None:
    has_begun = threading.Event()

    def ask() -> None:
        with llm._turn:
            has_begun.set()
            assert may_end.wait(WAIT_S)

    may_end = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask)
        assert has_begun.wait(WAIT_S)
        try:
            with pytest.raises(TimeoutError, match="another thread"):
                llm.generate("To be", limit_s=0.05)
        finally:
            may_end.set()
        other.result(WAIT_S)


def test_closing_while_another_thread_waits_for_answers_ends_its_call() -> None:
    with start("sim") as engine, ThreadPoolExecutor(1) as pool:
        submit = engine.client.submit
        has_begun = threading.Event()

        def submit_and_tell(*prompt: Any, **params: Any) -> Request:
            request = submit(*prompt, **params)
            has_begun.set()
            return request

        engine.client.submit = submit_and_tell  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        call = pool.submit(engine.generate, [[5]] * 3000, params)
        assert has_begun.wait(WAIT_S)
        engine.close()
        with pytest.raises(LaunchFailed, match="this LLM is closed"):
            call.result(WAIT_S)


def test_closing_while_another_thread_is_using_the_client_ends_that_first() -> None:
    with start("sim") as engine, ThreadPoolExecutor(1) as pool:
        is_held = threading.Event()

        def hold() -> None:
            with engine.client._thread:
                is_held.set()
                wait_until("the end", lambda: not engine._launch.is_running)

        other = pool.submit(hold)
        assert is_held.wait(WAIT_S)
        engine.close()
        other.result(WAIT_S)
        assert engine.client._context.closed


def test_a_signal_handler_that_closes_ends_the_call_that_it_interrupts() -> None:
    def ask_for_ever(engine: LLM) -> None:
        while True:
            engine.generate([[5]] * 100, SamplingParams(max_tokens=200, ignore_eos=True))

    with start("sim") as engine:
        before = signal.signal(signal.SIGALRM, lambda *_: engine.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(LaunchFailed, match="this LLM is closed"):
                ask_for_ever(engine)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        assert engine.client._context.closed


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_closing_leaves_no_process_and_a_closed_engine_says_so() -> None:
    with start("sim") as engine:
        pids = child_pids(engine.announcement.url)
        assert set(pids) == {"frontend", "core", "worker 0"}
    assert not any(is_running(pid) for pid in pids.values())
    with pytest.raises(LaunchFailed, match="closed"):
        engine.generate("Hello?")
    engine.close()


def test_a_launcher_that_is_killed_ends_the_call_without_a_wait_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start("sim") as engine:
        launcher = engine._launch._process
        assert launcher is not None
        submit = engine.client.submit

        def submit_and_kill(*prompt: Any, **params: Any) -> Request:
            request = submit(*prompt, **params)
            launcher.send_signal(signal.SIGKILL)
            return request

        monkeypatch.setattr(engine.client, "submit", submit_and_kill)
        with pytest.raises(LaunchFailed, match=r"has ended\n.*exit status -9"):
            engine.generate("To be", SamplingParams(max_tokens=200, ignore_eos=True))
        with pytest.raises(LaunchFailed, match="exit status -9"):  # nothing is sent any more
            engine.generate("To be")


def test_nothing_outlives_a_program_that_is_killed() -> None:
    code = (
        "from nvserve import LLM\n"
        "from nvserve.scripts.bench.cpu_time import child_pids\n"
        "llm = LLM(device='sim', max_model_len=64, num_kv_blocks=40)\n"
        "print(*child_pids(llm.announcement.url).values(), flush=True)\n"
        "input()\n"
    )
    program = subprocess.Popen(
        python_child.command("-c", code),
        env=python_child.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdin is not None
    try:
        pids = [int(pid) for pid in program.stdout.readline().split()]
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait(WAIT_S)
        program.stdin.close()
        program.stdout.close()
    assert len(pids) == 3
    wait_until("all gone", lambda: not any(is_running(pid) for pid in pids))
