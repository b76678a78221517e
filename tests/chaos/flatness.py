"""What a server holds at a quiet moment, to be compared with what it holds much later."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chaos.rig import Rig

KIB_OF: dict[str, int] = {  # growth of a process between two moments that is no leak
    "launcher": 2 << 10,
    "frontend": 8 << 10,
    "core": 6 << 10,
    "worker": 24 << 10,
}
SLACK = 3  # descriptors and threads that come and go with what is going on


@dataclass(frozen=True)
class Holding:
    """Of one process; memory is what it wrote itself, without the pages of its files."""

    pid: int
    memory_kib: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Self:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        memory_kib = int(fields["RssAnon"][0]) + int(fields["RssShmem"][0])
        num_descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(pid, memory_kib, num_descriptors, int(fields["Threads"][0]))


@dataclass(frozen=True)
class Moment:
    """All of a server, settled and with no request open."""

    holdings: dict[str, Holding]
    num_files: int  # in the launch directory
    num_shared: int  # of its processes in /dev/shm
    gauges: dict[str, float]

    @classmethod
    def of(cls, rig: Rig) -> Self:
        rig.check()
        status: dict[str, Any] = rig.settled()
        pids = {p["name"]: p["pid"] for p in status["processes"]} | {"launcher": rig.server.pid}
        [directory] = rig.server.tmpdir.glob("nvserve-*")
        metrics = rig.metrics()
        names = ("num_free_kv_blocks", "frontend_open_requests")
        return cls(
            {name: Holding.of(pid) for name, pid in pids.items()},
            sum(1 for _ in directory.iterdir()),
            len(rig.shared_memory.names()),
            {name: metrics[name] for name in names},
        )

    def complaints(self, later: "Moment") -> list[str]:
        """What has grown; memory only of processes that are the same."""
        found = []
        for name, before in self.holdings.items():
            after = later.holdings[name]
            limit = KIB_OF.get(name.split()[0])
            grown = after.memory_kib - before.memory_kib
            if limit is not None and before.pid == after.pid and grown > limit:
                found.append(f"{name} grew by {grown} KiB to {after.memory_kib} KiB")
            for what in ("num_descriptors", "num_threads"):
                values = getattr(before, what), getattr(after, what)
                if name != "spare" and values[1] > values[0] + SLACK:
                    found.append(f"{name}: {what} from {values[0]} to {values[1]}")
        if later.num_files > self.num_files:
            found.append(f"launch directory: {self.num_files} files, later {later.num_files}")
        if later.num_shared > self.num_shared:
            found.append(f"/dev/shm: {self.num_shared} files, later {later.num_shared}")
        if later.gauges != self.gauges:
            found.append(f"{self.gauges} became {later.gauges}")
        return found

    def describe(self) -> str:
        """One line for the report."""
        parts = [
            f"{name} {one.memory_kib / 1024:.1f} MiB {one.num_descriptors} fd {one.num_threads} th"
            for name, one in sorted(self.holdings.items())
        ]
        return f"{', '.join(parts)}; {self.num_files} files"
