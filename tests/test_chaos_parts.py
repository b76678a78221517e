"""The judges of the chaos rows: what they take for a fault, and what is none."""

import mmap
import os
from pathlib import Path

import pytest
from chaos.health import HealthWatch, Look, assert_explained
from chaos.shared_memory import SharedMemory

OTHER_PID = 4_190_000  # nobody's


def look(code: int, *, took_s: float = 0.01, **body: object) -> Look:
    document = {"status": "recovering", "reason": "worker 1 died", "last_step_age_s": 0.1}
    return Look("/ready", code, document | body, took_s)


def watched(*looks: Look) -> HealthWatch:
    watch = HealthWatch("http://127.0.0.1:1")
    watch.looks += looks
    return watch


# -- /health and /ready beside a recovery


def test_a_round_whose_recovery_nobody_saw_is_none_of_the_servers_faults() -> None:
    rounds = [watched(look(200), look(200)), watched(look(200), look(503), look(200))]
    assert_explained([body for one in rounds for body in one.judge()])


def test_a_row_without_any_503_is_one() -> None:
    with pytest.raises(AssertionError, match="never 503"):
        assert_explained(watched(look(200), look(200)).judge())


def test_a_row_that_never_gives_a_reason_is_one() -> None:
    with pytest.raises(AssertionError, match="no reason"):
        assert_explained(watched(look(503, reason="")).judge())


@pytest.mark.parametrize(
    "wrong",
    [
        look(0),
        look(500),
        look(200, took_s=60.0),
        look(503, status="ok"),
        look(503, last_step_age_s=-0.1),
    ],
)
def test_a_wrong_answer_is_one_in_any_round(wrong: Look) -> None:
    with pytest.raises(AssertionError):
        watched(look(503), wrong).judge()


# -- /dev/shm


def test_what_others_have_in_shared_memory_is_not_asked(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    memory.note([os.getpid()])
    for name in ("nccl-AbC123", f"torch_{OTHER_PID}_1_2", f"psm_x{os.getpid()}y", "sem.mp-7"):
        (tmp_path / name).touch()
    assert memory.names() == set()


def test_what_carries_the_pid_of_a_dead_process_was_left(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    memory.note([OTHER_PID])
    name = f"torch_{OTHER_PID}_271_0"
    (tmp_path / name).touch()
    assert memory.leftovers([os.getpid()]) == {name}


def test_what_was_mapped_and_is_not_any_more_was_left(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    path = tmp_path / "nccl-AbC123"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        memory.note([os.getpid()])
        assert memory.names() == {path.name}
        assert memory.leftovers([os.getpid()]) == set()
        assert memory.leftovers([]) == {path.name}
    assert memory.leftovers([os.getpid()]) == {path.name}
    path.unlink()
    assert memory.leftovers([os.getpid()]) == set()
