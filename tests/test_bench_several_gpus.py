"""The script for several GPUs: its budget, parts that fail or hang, what it tells of results."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from process.server import environment, is_running, wait_for

from nvserve.scripts.bench import part, several_gpus
from nvserve.scripts.bench.equal_ids import Round, compare, rounds_of
from nvserve.scripts.bench.part import Outcome, Part, limits_s, run_part
from nvserve.scripts.bench.several_gpus import Options, parts_of, run_parts

ENOUGH_S = 60.0  # for a Python that does nothing
SAY = "import json, sys; json.dump({'value': 7}, open(sys.argv[-1], 'w')); print('said')"
FAIL = "import sys; print('no such device'); sys.exit(3)"
HALF = "import sys; open(sys.argv[-1], 'w').write('{'); sys.exit('broken')"


def stand_in(
    code: str, *, name: str = "one", least_s: float = 1.0, most_s: float = ENOUGH_S
) -> Part:
    return Part(
        name, least_s, most_s, lambda _: ["-c", code], lambda result: f"value {result['value']}"
    )


# -- the budget ------------------------------------------------------------------------------------


def test_a_part_gets_what_the_later_ones_do_not_need() -> None:
    one, two = stand_in("", least_s=10, most_s=50), stand_in("", least_s=20, most_s=600)
    assert limits_s(one, [two], 100.0) == 50
    assert limits_s(one, [two], 45.0) == 25
    assert limits_s(two, [], 45.0) == 45


def test_a_part_without_its_least_time_gets_none() -> None:
    one, two = stand_in("", least_s=10), stand_in("", least_s=20)
    assert limits_s(one, [two], 29.0) == 0.0
    assert limits_s(two, [], -5.0) == 0.0


def test_all_parts_have_their_least_time_within_eight_minutes() -> None:
    remaining_s, parts = 480.0, parts_of(options())
    for number, one in enumerate(parts):
        limit_s = limits_s(one, parts[number + 1 :], remaining_s)
        assert limit_s >= one.least_s, one.name
        remaining_s -= limit_s  # each one takes all it may
    assert remaining_s >= 0.0


def test_a_part_for_which_no_time_is_left_is_skipped_and_told(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    parts = [stand_in(SAY, name="late", least_s=9e9)]
    outcomes = run_parts(parts, path, {}, time.monotonic() + ENOUGH_S)
    assert outcomes["late"].state.startswith("skipped")
    assert outcomes["late"].summary(parts[0]) == "-"
    assert json.loads(path.read_text())["parts"]["late"]["exit_code"] is None


# -- parts -----------------------------------------------------------------------------------------


def test_a_part_hands_back_its_result_and_its_words() -> None:
    outcome = run_part(stand_in(SAY), ENOUGH_S)
    assert (outcome.state, outcome.exit_code, outcome.result) == ("ok", 0, {"value": 7})
    assert outcome.log == ("said",)
    assert outcome.summary(stand_in("")) == "value 7"


@pytest.mark.parametrize(("code", "words"), [(FAIL, "no such device"), (HALF, "broken")])
def test_a_part_that_fails_is_told_by_its_last_line(code: str, words: str) -> None:
    outcome = run_part(stand_in(code), ENOUGH_S)
    assert outcome.state == "failed"
    assert outcome.result is None
    assert outcome.summary(stand_in("")) == words


def test_a_result_of_another_form_costs_only_its_headline() -> None:
    outcome = Outcome("ok", result={"other": 1})
    assert outcome.summary(stand_in("")).startswith("a result of another form")


def test_a_part_that_never_ends_is_too_late() -> None:
    outcome = run_part(stand_in("import signal; signal.pause()"), 1.0)
    assert outcome.state == "too late"
    assert outcome.exit_code != 0
    assert outcome.result is None


def begin(code: str, ready: Path) -> "subprocess.Popen[bytes]":
    """A process as a part has it, once it says by this file that it runs."""
    process = subprocess.Popen([sys.executable, "-c", code, str(ready)], process_group=0)
    wait_for("it runs", lambda: ready.exists() and ready.read_text())
    return process


def test_a_process_that_is_ended_may_write_what_it_has(tmp_path: Path) -> None:
    code = """
import signal, sys
try:
    open(sys.argv[1], "w").write("ready")
    signal.pause()
except KeyboardInterrupt:
    open(sys.argv[1], "w").write("interrupted")
"""
    process = begin(code, tmp_path / "words")
    part.end(process)
    assert process.returncode == 0
    assert (tmp_path / "words").read_text() == "interrupted"
    part.end(process)  # harmless


def test_a_process_that_ignores_ctrl_c_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "GRACE_S", 0.5)
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = os.fork()
if child:
    open(sys.argv[1], "w").write(str(child))
signal.pause()
"""
    process = begin(code, tmp_path / "pid")
    part.end(process)
    process.wait(ENOUGH_S)
    assert process.returncode == -signal.SIGKILL
    child = int((tmp_path / "pid").read_text())
    wait_for("its child is gone", lambda: not is_running(child))


def test_the_file_holds_every_part_that_is_over_and_a_failure_costs_no_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.json"
    look = f"import sys; print(open({str(path)!r}).read()); sys.exit(1)"
    parts = [stand_in(FAIL, name="a"), stand_in(look, name="b"), stand_in(SAY, name="c")]
    outcomes = run_parts(parts, path, {"tp": 2}, time.monotonic() + 3 * ENOUGH_S)
    assert [outcome.state for outcome in outcomes.values()] == ["failed", "failed", "ok"]
    seen = json.loads("\n".join(outcomes["b"].log))
    assert seen["tp"] == 2
    assert list(seen["parts"]) == ["a"]
    told = json.loads(path.read_text())["parts"]
    assert list(told) == ["a", "b", "c"]
    assert told["c"]["result"] == {"value": 7}
    assert list(tmp_path.iterdir()) == [path]


def test_the_end_of_the_script_ends_its_part(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, signal; open({str(file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    script = f"""
from nvserve.scripts.bench import several_gpus
from nvserve.scripts.bench.part import Part
part = Part("one", 1, 600, lambda _: ["-c", {code!r}], str)
several_gpus.parts_of = lambda options: [part]
several_gpus.main()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script, "--output", str(tmp_path / "r.json")],
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        pid = int(wait_for("the part runs", lambda: file.read_text() if file.exists() else None))
        run.send_signal(signal.SIGTERM)
        _, words = run.communicate(timeout=ENOUGH_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 128 + signal.SIGTERM, words
    wait_for("the part is gone", lambda: not is_running(pid))


# -- the command -----------------------------------------------------------------------------------


def options(**changes: Any) -> Options:
    values: dict[str, Any] = {
        "tp": 2,
        "device": "cuda",
        "model": "llama-8b",
        "big_model": "llama-70b",
        "batches": "1,32,128",
        "kills": 10,
        "stops": 3,
        "streams": 16,
        "output_len": 512,
        "num_prompts": 20,
        "max_batch": 17,
        "num_kv_blocks": 0,
        "hang_timeout": 10.0,
    }
    return Options(**(values | changes))


def test_every_part_is_a_command_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are taken: a wrong one would end it with exit status 2 and no word of help."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for one in parts_of(options()):
        if one.name == "all-reduce":  # argparse, and it imports torch
            continue
        run = subprocess.run(
            [sys.executable, *one.arguments(100.0), "--output", "/dev/null", "--help"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=ENOUGH_S,
        )
        assert run.returncode == 0, (one.name, run.stderr)
        flags = [word for word in one.arguments(100.0) if word.startswith("--")]
        assert not [flag for flag in flags if flag not in run.stdout], one.name


def test_the_kills_end_before_their_limit() -> None:
    recovery = next(one for one in parts_of(options()) if one.name == "recovery")
    words = recovery.arguments(200.0)
    limit_s = float(words[words.index("--time-limit") + 1])
    assert 60.0 <= limit_s <= 200.0 - part.GRACE_S


@pytest.fixture
def _sigterm() -> Iterator[None]:
    """As it was: the command takes it, here in the tests' own process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("_sigterm")
def test_the_table_tells_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [stand_in(SAY, name="good"), stand_in(FAIL, name="bad")]
    monkeypatch.setattr(several_gpus, "parts_of", lambda _: parts)
    path = str(tmp_path / "r.json")
    run = CliRunner().invoke(several_gpus.main, ["--output", path, "--budget", "200"])
    assert run.exit_code == 1
    lines = run.output.splitlines()
    assert any(line.startswith("good  ok") and line.endswith("value 7") for line in lines)
    assert any(line.startswith("bad") and line.endswith("no such device") for line in lines)
    run = CliRunner().invoke(several_gpus.main, ["--output", path, "--parts", "good"])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(several_gpus.main, ["--output", path, "--parts", "godo"])
    assert run.exit_code == 2
    assert "godo: none of good; bad" in run.output


RECOVERY: dict[str, Any] = {
    "failure": "",
    "seconds": {"kill": {"resumed": {"num": 20, "p50": 1.0, "p95": 1.5, "max": 2.0}}},
    "requests": {"num": 90, "num_lost": 0, "num_differing": 3, "num_differing_beyond_near_ties": 1},
    "num_left_out": 4,
    "gpu_memory_bytes": {"before": [1 << 30, 1 << 30], "after": [1 << 30, 3 << 29]},
}


@pytest.mark.parametrize(
    ("tell", "result", "text"),
    [
        (
            several_gpus.tell_all_reduce,
            {"rows": {"32": {"one-shot": 8.04, "nccl": 21.0}}},
            "32 rows, us: one-shot 8.0, nccl 21.0",
        ),
        (
            several_gpus.tell_latency,
            {
                "batches": {
                    "1": {"total": 20.0, "total / floor": 1.08},
                    "2": dict.fromkeys(("total", "total / floor")),
                }
            },
            "ms (/ floor): batch 1 20.00 (1.08), batch 2 - (-)",
        ),
        (
            several_gpus.tell_recovery,
            RECOVERY,
            "20 kill p95 1.50 max 2.00 s, lost 0/90, differing 3 (1 beyond ties), "
            "4 faults left out, memory +0/+512 MiB",
        ),
        (
            several_gpus.tell_recovery,
            RECOVERY
            | {"failure": "gone\nmore", "seconds": {}, "requests": None, "num_left_out": 0}
            | {"gpu_memory_bytes": None},
            "gone",
        ),
    ],
)
def test_results_are_told_in_a_line(
    tell: Callable[[dict[str, Any]], str], result: dict[str, Any], text: str
) -> None:
    assert tell(result) == text


# -- equal ids -------------------------------------------------------------------------------------


def test_batches_of_every_size_pass_through_all_prompts() -> None:
    greedy = [one.prompts for one in rounds_of(3, 4) if one.kind == "greedy"]
    assert greedy == [[0], [1, 2], [0, 1, 2], [0, 1, 2, 0]]
    others = [one for one in rounds_of(3, 4) if one.kind != "greedy"]
    assert [one.kind for one in others] == ["scored", "sampled", "truncated"]
    assert all(one.prompts == [0, 1, 2] for one in others)


def test_answers_are_compared_with_the_first_one_to_their_prompt() -> None:
    rounds = [Round("scored", [0, 1]), Round("sampled", [0]), Round("greedy", [1])]
    alone = [[[1, 2], [3, 4]], [[5, 6]], [[3, 4]]]
    assert compare(rounds, {1: alone, 2: alone}, 2) == []
    split = [[[1, 2], [3, 9]], [[5, 6]], [[3, 4, 5]]]
    found = compare(rounds, {1: alone, 2: split}, 2)
    assert [(d.tp_size, d.kind, d.batch, d.prompt, d.position) for d in found] == [
        (2, "scored", 2, 1, 1),
        (2, "greedy", 1, 1, None),
    ]


def test_short_answers_differ_even_where_both_are_short() -> None:
    rounds = [Round("greedy", [0])]
    assert len(compare(rounds, {1: [[[1]]], 2: [[[1]]]}, 2)) == 2
