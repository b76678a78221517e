"""What `nvserve fault` and `nvserve restart` do to a server under load: the answers stay right."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from chaos.cases import NUM_TOKENS, Case, Texts
from chaos.client import BadAnswer
from chaos.conftest import Row
from chaos.load import Load, Ride
from chaos.rig import Rig, rig
from process.server import ROOT, environment, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FROM_CORE = ("SchedulerOutput", "Emits", "Accepted")
FROM_WORKERS = ("ModelOutput", "StepDone")
FROM_FRONTEND = ("Submit",)
MESSAGE_KINDS = ("drop", "delay", "duplicate", "corrupt")
STEP_KINDS = ("exception", "nan", "oom", "shape")
SECONDS_LIMIT = 60.0


@pytest.fixture(scope="module")
def chaos(texts: Texts, cases: list[Case]) -> Iterator[Rig]:
    with rig(texts, cases, "--enable-faults") as chaos:
        yield chaos


def nvserve(chaos: Rig, *words: str) -> str:
    """Run a command on this server; what it prints."""
    port = chaos.url.rpartition(":")[2]  # others may run servers here as well
    done = subprocess.run(
        [sys.executable, "-m", "nvserve", *words, "--port", port],
        env=environment(TMPDIR=str(chaos.server.tmpdir)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def draw_fault(kind: str, chance: random.Random) -> list[str]:
    """A command line of this kind."""
    if kind in STEP_KINDS:
        return [kind, f"worker {chance.randrange(2)}", "--seed", str(chance.randrange(1000))]
    message = chance.choice(FROM_CORE + FROM_WORKERS + FROM_FRONTEND)
    name = "core" if message in FROM_CORE else "frontend"
    if message in FROM_WORKERS:
        name = f"worker {FROM_WORKERS.index(message)}"
    return [
        *(kind, name, "--message", message),
        *("--seed", str(chance.randrange(1000)), "--seconds", f"{chance.uniform(0.05, 1.5):.2f}"),
    ]


def test_messages_and_steps_that_go_wrong(row: Row, chaos: Rig) -> None:
    """Corrupt, late, doubled, missing messages; exceptions, NaN, no memory, wrong shapes."""
    kinds = MESSAGE_KINDS + STEP_KINDS
    for number in row.rounds(10 * len(kinds)):
        chance = random.Random(row.seed + number)
        core = chaos.settled()["restarts"]["core"]
        words = draw_fault(kinds[number % len(kinds)], chance)
        with chaos.load(chance) as load:
            at = time.monotonic()
            printed = nvserve(chaos, "fault", *words)
            assert "nvserve fault" in printed
            row.pauses += chaos.judge(load, at)
        chaos.check()
        assert chaos.server.status()["restarts"]["core"] == core, f"core died of {words}"


def rare_tokens(cases: list[Case]) -> list[int]:
    """Ids that no prompt holds."""
    used = {token for case in cases for token in case.prompt + case.ids}
    return [token for token in range(1000, 100, -1) if token not in used]


@pytest.mark.parametrize("victim", ["worker 1", "core"])
def test_poisonous_requests(victim: str, row: Row, chaos: Rig) -> None:
    """One among 16 streams kills whatever computes it: it alone fails."""
    token = rare_tokens(chaos.cases)[0]
    point = ["--phase", "send", "--message", "SchedulerOutput"] if victim == "core" else []
    nvserve(chaos, *("fault", "crash", victim, "--token", str(token), "--step", "-1"), *point)
    body = {"model": "demo", "prompt": [token, 5, 6], "max_tokens": 8, "temperature": 0}
    for number in row.rounds(5, at_least=1):
        chance = random.Random(row.seed + number)
        chaos.settled()
        with chaos.load(chance, extra_bodies=(body,), arrivals_per_s=0.0) as load:
            chaos.judge(load, time.monotonic())
        [poison] = load.extras
        assert isinstance(poison.error, BadAnswer), poison
        assert (poison.error.status, poison.error.code) == (500, "engine_fault")
        chaos.check()


MAX_SEARCH_CRASHES = 8  # of 6 requests: halves, the last one twice, one lost with each core


def test_a_search_outlives_core(row: Row, chaos: Rig) -> None:
    """Core is killed while it searches for a request that kills workers."""
    token = rare_tokens(chaos.cases)[1]  # nobody else is armed with it
    nvserve(chaos, "fault", "crash", "worker 0", "--token", str(token), "--step", "-1")
    body = {"model": "demo", "prompt": [token, 5, 6], "max_tokens": 8, "temperature": 0}
    for number in row.rounds(5, at_least=1):
        chance = random.Random(row.seed + number)
        before = chaos.settled()["restarts"]
        with chaos.load(
            chance, extra_bodies=(body,), arrivals_per_s=0.0, num_streams=5, num_plain=0
        ) as load:
            at = time.monotonic()
            for num_crashes in sorted(chance.sample([1, 2, 3], 2)):
                wait_crashes(chaos, load, before["worker"] + num_crashes)
                chaos.kill("core")
            row.pauses += chaos.judge(load, at)
        [poison] = load.extras
        assert isinstance(poison.error, BadAnswer), poison
        assert (poison.error.status, poison.error.code) == (500, "engine_fault")
        after = chaos.settled()["restarts"]
        assert after["worker"] - before["worker"] <= MAX_SEARCH_CRASHES
        chaos.check()


def wait_crashes(chaos: Rig, load: Load, count: int) -> None:
    """So many workers have been replaced, or the search is over."""

    def probe() -> bool:
        is_over = not load.extras[0].is_live
        return bool(is_over or chaos.server.status()["restarts"]["worker"] >= count)

    wait_for(f"{count} crashes", probe, SECONDS_LIMIT)


def test_kills_from_outside_blame_nobody(row: Row, chaos: Rig) -> None:
    """One long stream that is there at every death."""
    case, rounds = chaos.cases[0], row.rounds(10)
    body = {"model": "demo", "prompt": case.prompt, "temperature": 0, "ignore_eos": True}
    num_tokens = min(3900, 400 * len(rounds))
    load = Load(
        chaos.url,
        chaos.cases,
        seed=row.seed,
        num_streams=0,
        num_plain=0,
        extra_bodies=(body | {"max_tokens": num_tokens, "stream": True},),
        arrivals_per_s=0.0,
    )
    told = len(chaos.server.text)
    with load:
        wait_for("the stream", lambda: load.extras and load.extras[0].answer.text)
        stream: Ride = load.extras[0]
        for number in rounds:
            # Without waiting for a spare: meanwhile the stream would come to its end.
            before = chaos.server.wait_status("ready", lambda s: s["state"] == "ready")
            if number >= 2 and not stream.is_live:  # the context is full
                row.num_rounds = number
                break
            victim = "core" if number % 3 == 2 else f"worker {number % 2}"
            os.kill(chaos.pid(victim), random.Random(number).choice(SIGNALS))
            chaos.wait_recovered(before)
            assert stream.error is None  # it may have come to its end
        load.finish()
    assert stream.error is None
    assert stream.answer.is_complete
    assert "suspect" not in chaos.server.text[told:]


SIGNALS = [signal.SIGKILL, signal.SIGTERM]


def test_planned_restarts(row: Row, chaos: Rig) -> None:
    """Nothing is lost, nothing is counted against --max-restarts, and the pause is told."""
    names = ("worker 0", "core", "frontend")
    for number in row.rounds(9, at_least=len(names)):
        chance = random.Random(row.seed + number)
        name = names[number % len(names)]
        before = chaos.settled()
        pid = chaos.pid(name)
        with chaos.load(chance, arrivals_per_s=0.0, num_tokens=NUM_TOKENS // 2) as load:
            at = time.monotonic()
            printed = nvserve(chaos, "restart", *name.split())
            chaos.judge(load, at)
        told = re.fullmatch(r"restarted (.*); pause (\d+\.\d\d) s\n", printed)
        assert told is not None, printed
        assert told[1] == name
        row.pauses.append(float(told[2]))
        assert chaos.pid(name) != pid
        assert (chaos.settled()["epoch"] > before["epoch"]) == (name != "frontend")
        chaos.check()


def test_faults_need_their_flag(texts: Texts, cases: list[Case]) -> None:
    with (
        rig(texts, cases, "--spares", "0") as chaos,
        pytest.raises(AssertionError, match="--enable-faults"),
    ):
        nvserve(chaos, "fault", "kill", "core")
