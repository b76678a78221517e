"""What ranks tell each other while they form a group: short words, through the group's store."""

from collections.abc import Callable
from typing import Final

from torch._C._distributed_c10d import Store


class RollCall:
    """One rank's voice. All ranks raise the same questions in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        wait: Callable[[], None],
    ) -> None:
        """`wait` is called while ranks are missing: it returns soon, or raises to give up."""
        self.rank: Final = rank
        self.size: Final = size
        self._store: Final = store
        self.wait: Final = wait

    def hear_all(self, question: str, answer: str) -> list[str]:
        """Give this rank's answer, and wait for those of all, in rank order."""
        self._store.set(f"{question}{self.rank}", answer)
        everyone = [f"{question}{rank}" for rank in range(self.size)]
        while not self._store.check(everyone):
            self.wait()
        return [self._store.get(key).decode() for key in everyone]

    def all_agree(self, question: str, is_yes: bool) -> bool:
        """Do all ranks say yes?"""
        return all(answer == "yes" for answer in self.hear_all(question, "yes" if is_yes else "no"))
