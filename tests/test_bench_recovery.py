"""`bench recovery`: how requests are judged, and a whole run of the demo model on two ranks."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from process.server import environment, is_running, wait_for

from nvserve.scripts.bench.recovery_faults import schedule
from nvserve.scripts.bench.recovery_report import (
    Fault,
    Reference,
    Ride,
    clearest,
    first_difference,
    format_spreads,
    format_verdict,
    judge,
    silence,
    spread,
    summarize,
)

RUN_LIMIT_S = 240.0  # the suite may share its cores
SMALL = ("--device", "cpu", "--tp", "2", "--num-kv-blocks", "200", "--max-num-seqs", "8")
REFERENCES = [
    Reference([7], [1, 2, 3, 4], [1.0, 0.5, 0.001, 2.0]),
    Reference([8], [5, 6, 7, 8], [1.0, 1.0, 1.0, 1.0]),
]


def ride(stream: int, ids: list[int], begun_s: float = 0.0, ended_s: float = 1.0) -> Ride:
    return Ride(stream, begun_s, ids, ended_s=ended_s)


def kill(struck_s: float, *, rank: int = 0, resumed_s: float = 2.0, **changes: Any) -> Fault:
    return Fault("kill", rank, struck_s, resumed_s=[resumed_s], **changes)


# -- requests --------------------------------------------------------------------------------------


def test_whole_right_answers_are_neither_lost_nor_different() -> None:
    verdict = judge([ride(0, [1, 2, 3, 4]), ride(1, [5, 6, 7, 8])], REFERENCES, [])
    assert (verdict.num_requests, verdict.lost, verdict.differences) == (2, [], [])
    assert verdict.complaint(is_exact=True) == ""


def test_an_error_and_a_short_answer_are_lost_requests() -> None:
    failed = ride(1, [5], ended_s=2.0)
    failed.error = "gone"
    verdict = judge([failed, ride(0, [1, 2, 3])], REFERENCES, [kill(1.5)])
    assert [(loss.stream, loss.num_tokens, loss.error) for loss in verdict.lost] == [
        (1, 1, "gone"),
        (0, 3, "ended after 3 of 4 tokens"),
    ]
    assert [loss.faults for loss in verdict.lost] == [[0], []]
    assert verdict.complaint(is_exact=False) == "2 requests lost"


def test_a_whole_answer_that_ends_with_an_error_is_lost_all_the_same() -> None:
    failed = ride(0, [1, 2, 3, 4])
    failed.error = "500"
    assert len(judge([failed], REFERENCES, []).lost) == 1


def test_a_difference_tells_its_first_position_and_the_gap_of_the_reference_there() -> None:
    verdict = judge([ride(0, [1, 2, 9, 9]), ride(1, [5, 9, 7, 8])], REFERENCES, [])
    found = [(d.stream, d.position, d.got, d.expected, d.gap) for d in verdict.differences]
    assert found == [(0, 2, 9, 3, 0.001), (1, 1, 9, 6, 1.0)]
    assert verdict.num_beyond_ties == 1
    assert verdict.complaint(is_exact=False) == ""
    assert verdict.complaint(is_exact=True) == "ids of 2 requests differ in float32"
    told = format_verdict(verdict, [])
    assert "differ from the reference: 0 that met a fault, 2 that met none" in told
    assert "the largest gap: 0.000 with a fault, 1.000 without" in told


def test_ids_of_a_lost_request_are_compared_too() -> None:
    verdict = judge([ride(1, [5, 9])], REFERENCES, [])
    assert len(verdict.lost) == len(verdict.differences) == 1


def test_the_clearest_references_are_those_that_stay_far_from_ties() -> None:
    third = Reference([9], [1], [0.01])
    assert clearest([*REFERENCES, third], 2) == [REFERENCES[1], third]


@pytest.mark.parametrize(
    ("got", "place"), [([], None), ([1, 2], None), ([0, 2], 0), ([1, 2, 3, 5], 3)]
)
def test_the_first_difference_is_sought_in_the_common_length(
    got: list[int], place: int | None
) -> None:
    assert first_difference(got, [1, 2, 3, 4]) == place


@pytest.mark.parametrize(
    ("begun_s", "ended_s", "is_touched"),
    [
        (0.0, 9.9, False),
        (0.0, 10.0, True),
        (11.0, 11.5, True),
        (12.0, 20.0, True),
        (12.1, 20.0, False),
    ],
)
def test_a_request_meets_a_fault_from_its_strike_until_the_last_stream_goes_on(
    begun_s: float, ended_s: float, is_touched: bool
) -> None:
    one = ride(0, [1, 2, 3, 4], begun_s, ended_s)
    assert judge([one], REFERENCES, [kill(10.0)]).num_touched == int(is_touched)


# -- times -----------------------------------------------------------------------------------------


def test_the_silence_is_the_longest_gap_that_overlaps_the_fault() -> None:
    arrivals_s = [0.0, 5.0, 9.0, 9.5, 10.1, 12.5, 12.6, 20.0]
    assert silence(arrivals_s, 10.0, 12.0) == (10.1, 12.5)
    assert silence(arrivals_s, 12.55, 12.55) == (12.5, 12.6)


def test_percentiles_lie_between_the_values() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == {"num": 4, "p50": 2.5, "p95": 3.85, "max": 4.0}


def test_faults_are_summed_up_by_kind() -> None:
    faults = [
        kill(0.0, resumed_s=1.0, detected_s=0.25, pauses_s=[0.5, 1.0], phases_s={"fence": 0.125}),
        kill(9.0, resumed_s=3.0, detected_s=0.5, pauses_s=[2.0, 3.0], phases_s={"fence": 0.5}),
        Fault("planned", 1, resumed_s=[0.5], pauses_s=[0.25], planned_s=0.75),
    ]
    found = summarize(faults)
    assert found.keys() == {"kill", "planned"}
    assert {line: one["max"] for line, one in found["kill"].items()} == {
        "detected": 0.5,
        "resumed": 2.5,
        "pause": 3.0,
        "fence": 0.5,
    }
    assert {line: one["num"] for line, one in found["planned"].items()} == {
        "resumed": 1,
        "pause": 1,
        "planned": 1,
    }
    assert len(format_spreads(found).splitlines()) == 1 + 4 + 3


def test_other_processes_that_changed_are_named_with_their_fault() -> None:
    verdict = judge([], REFERENCES, [])
    text = format_verdict(verdict, [kill(0.0), kill(5.0, changed=["worker 1"])])
    assert "beside the struck ones: 1: worker 1 (fault 1)" in text


def test_a_run_that_is_cut_short_has_struck_every_rank_in_every_way() -> None:
    strikes = schedule({"kill": 3, "stop": 1, "planned": 0}, 2)
    assert strikes[:4] == [("kill", 0), ("kill", 1), ("stop", 0), ("stop", 1)]
    assert strikes[4:] == [("kill", 0), ("kill", 1)] * 2


# -- whole runs ------------------------------------------------------------------------------------


def start(tmp_path: Path, *flags: str) -> "subprocess.Popen[str]":
    """The command on the demo model, with a folder of its own for what it leaves."""
    (tmp_path / "left").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "nvserve", "bench", "recovery", *SMALL, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(TMPDIR=str(tmp_path / "left"), CUDA_VISIBLE_DEVICES=""),
    )


def test_a_run_strikes_both_ranks_loses_nothing_and_writes_it_down(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    load = ("--streams", "3", "--context", "8", "--output-len", "32", "--hang-timeout", "3")
    counts = ("--kills", "1", "--stops", "1", "--planned", "0")
    run = start(tmp_path, *load, *counts, "--output", str(path))
    text, _ = run.communicate(timeout=RUN_LIMIT_S)
    assert run.returncode == 0, text
    result = json.loads(path.read_text())
    assert result["failure"] == ""
    assert result["min_gap"] > 0.0
    assert (result["dtype"], result["tensor_parallel_size"]) == ("float32", 2)
    struck = [(fault["kind"], fault["rank"]) for fault in result["faults"]]
    assert struck == [("kill", 0), ("kill", 1), ("stop", 0), ("stop", 1)]
    for fault in result["faults"]:
        assert 0.0 <= fault["detected_s"] <= fault["ready_s"]
        assert fault["phases_s"].keys() == {"fence", "rebuild", "resume", "total"}
        assert len(fault["pauses_s"]) == len(fault["resumed_s"]) == 3
        assert all(pause_s > 0.0 for pause_s in fault["pauses_s"])
    requests = result["requests"]
    assert requests["num"] >= requests["num_touched"] >= 3
    assert (requests["num_lost"], requests["lost"]) == (0, [])
    assert (requests["num_differing"], requests["differences"]) == (0, [])
    for kind in ("kill", "stop"):
        spreads = result["seconds"][kind]
        assert spreads["pause"]["num"] == 6
        assert spreads["total"]["p50"] <= spreads["total"]["p95"] <= spreads["total"]["max"]
    assert result["gpu_memory_bytes"] is None, "on a CPU"
    assert any("recovered in" in line for line in result["server_words"])
    assert "passed" in text
    assert list((tmp_path / "left").iterdir()) == []


def test_ctrl_c_leaves_nothing_behind_but_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    load = ("--streams", "2", "--output-len", "16", "--no-spare")
    run = start(tmp_path, "--kills", "1000", *load, "--output", str(path))
    assert run.stdout is not None
    try:
        lines = [run.stdout.readline() for _ in range(2)]
        assert "ready after" in lines[0], lines
        assert "kill worker 0" in lines[1], "the first fault is over"
        pids = children_of(run.pid)
        assert pids
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=RUN_LIMIT_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, text
    wait_for("all gone", lambda: not any(map(is_running, pids)))
    wait_for("nothing left", lambda: list((tmp_path / "left").iterdir()) == [])
    result = json.loads(path.read_text())
    assert result["failure"] == "interrupted"
    assert result["faults"][0]["kind"] == "kill"
    assert result["requests"]["num_lost"] == 0, "what runs is not judged"


def children_of(pid: int) -> set[int]:
    """All processes below this one; of what ends meanwhile some may be missing."""
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | children_of(int(child))
    return found
