"""What processes of one server have in /dev/shm, whatever else on the machine uses it."""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")


class SharedMemory:
    """Files that were seen mapped by a process of ours, or carry the pid of one in their name."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._pids: set[int] = set()  # ever seen
        self._mapped: set[str] = set()  # by them

    def note(self, pids: Iterable[int]) -> None:
        """These processes are ours."""
        self._pids |= set(pids)
        self._mapped |= self._mapped_by(pids)

    def names(self) -> set[str]:
        """All that is there of processes noted so far."""
        return {p.name for p in self._folder.iterdir() if self._is_ours(p.name)}

    def leftovers(self, alive: Iterable[int]) -> set[str]:
        """What is there of them and none of these living ones has mapped."""
        return self.names() - self._mapped_by(alive)

    def _is_ours(self, name: str) -> bool:
        numbers = re.findall(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])", name)
        return name in self._mapped or any(int(number) in self._pids for number in numbers)

    def _mapped_by(self, pids: Iterable[int]) -> set[str]:
        names = set()
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:  # it has ended
                continue
            paths = (Path(line.split(maxsplit=5)[-1]) for line in lines if "/" in line)
            names |= {path.name for path in paths if path.parent == self._folder}
        return names
