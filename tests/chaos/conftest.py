"""What the rows share: texts, references made once, and the lines printed at the end of the run."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from chaos.cases import Case, Texts, greedy_cases, seeded_cases
from chaos.client import Client
from chaos.rig import FLAGS
from process.server import Server, served

LINES: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("chaos")
    for line in LINES:
        terminalreporter.write_line(line)


def scale() -> float:
    return float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))


@dataclass
class Row:
    """One row of the table: how many rounds, from which seed, and what is told of it."""

    seed: int
    pauses: list[float] = field(default_factory=list)
    num_rounds: int = 0
    notes: list[str] = field(default_factory=list)  # more lines of the report
    by_round: list[list[float]] = field(default_factory=list)  # pauses to be judged

    def add(self, pauses: list[float]) -> None:
        """The pauses of one more round."""
        self.pauses += pauses
        self.by_round.append(pauses)

    def judged(self) -> list[float]:
        """Of the whole table all pauses; of the few rounds of a smaller scale those of the better
        half, since what the server does is done in each and a machine stands still in one."""
        rounds = sorted(filter(None, self.by_round), key=max)
        if scale() < 1.0:
            rounds = rounds[: (len(rounds) + 1) // 2]
        return [pause for one in rounds for pause in one]

    def rounds(self, in_table: int, at_least: int = 2) -> range:
        """A share of the table's rounds, but so many at least."""
        self.num_rounds = max(at_least, round(in_table * scale()))
        return range(self.num_rounds)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """Seeds rotate, and are printed with the time of the row and its pauses."""
    given = os.environ.get("NVSERVE_CHAOS_SEED")
    row = Row(int(given) if given else time.time_ns() % 1_000_000)
    begun = time.monotonic()
    yield row
    took_s = time.monotonic() - begun
    line = f"{request.node.name}: {row.num_rounds} rounds in {took_s:.0f} s, seed {row.seed}"
    if row.pauses:
        line += f", {len(row.pauses)} pauses p50 {share(row.pauses, 0.5):.2f} s,"
        line += f" p95 {share(row.pauses, 0.95):.2f} s, max {max(row.pauses):.2f} s"
    LINES.append(line)
    LINES.extend(f"  {note}" for note in row.notes)


def share(values: list[float], part: float) -> float:
    """The value that `part` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@pytest.fixture(scope="session")
def texts() -> Texts:
    return Texts()


@pytest.fixture(scope="session")
def cases(texts: Texts) -> list[Case]:
    """Greedy references by `transformers`, and samples of a server that nobody disturbs."""
    with served(Server.launch(*FLAGS, "--spares", "0")) as server:
        greedy = greedy_cases(texts)  # while the server starts
        return greedy + seeded_cases(texts, Client(server.wait_ready()))
