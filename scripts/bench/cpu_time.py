"""CPU time of a running launch's processes, by name, from /proc."""

import os
from pathlib import Path
from typing import Final

from nvserve.scripts import launch_dir
from nvserve.scripts.control_socket import ask

ASK_LIMIT_S: Final = 5.0
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
UTIME: Final = 11  # place of user and system time in /proc/PID/stat, behind the name
STIME: Final = 12


def child_pids(url: str) -> dict[str, int]:
    """Names and pids of the processes of the launch that serves this URL; empty if none does."""
    for directory in launch_dir.find_all():
        try:
            status = ask(directory, {"command": "status"}, ASK_LIMIT_S)
        except (OSError, ValueError):
            continue  # stale, or just ending
        if status.get("url") == url:
            return {process["name"]: process["pid"] for process in status["processes"]}
    return {}


def cpu_s(pid: int) -> float:
    """Seconds all threads of a process have run, in steps of a tick (10 ms); 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    fields = stat.rpartition(b") ")[2].split()
    return (int(fields[UTIME]) + int(fields[STIME])) / TICKS_PER_S
