"""Whether the kernel's out-of-memory killer struck in our cgroup: its SIGKILL looks like any."""

from pathlib import Path
from typing import Final

MOUNT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


class OomWatch:
    """Counts `oom_kill` events of this process's cgroup since the last look."""

    def __init__(self, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> None:
        self._files: Final = _files(mount, membership)
        self._count = self._read()

    def has_struck(self) -> bool:
        """An out-of-memory kill has come since the last call."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        for path in self._files:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.isdigit():
                    return int(count)
        return 0


def _files(mount: Path, membership: Path) -> list[Path]:
    """Where the count may be: version 2 and version 1 of cgroups, ours and what is mounted."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if not controllers:
            found += [mount / inner / "memory.events", mount / "memory.events"]
        elif "memory" in controllers.split(","):
            version_1 = mount / "memory"
            found += [version_1 / inner / "memory.oom_control", version_1 / "memory.oom_control"]
    return found
