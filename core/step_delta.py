"""Collects what changed since the last step and writes it as one SchedulerOutput.

Knows the wire columns and nothing else. Changes outlive a `plan` that sends no step.
"""

from nvserve.core.request import Request
from nvserve.protocol.messages import (
    Chunks,
    Masks,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
)


class StepDelta:
    """The columns of the next step; `take` builds the message and starts afresh."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._freed: list[int] = []
        self._leaves: list[int] = []
        self._joins: list[int] = []
        self._new: list[Request] = []
        self._tables: list[tuple[int, int, list[int]]] = []  # slot, start, block ids
        self.chunks: list[tuple[Request, int, int]] = []  # request, start, end

    def free(self, slot: int) -> None:
        if slot in self._leaves:  # `freed` comes first and takes it out of the decode list already
            self._leaves.remove(slot)
        self._freed.append(slot)

    def leave(self, slot: int) -> None:
        self._leaves.append(slot)

    def join(self, slot: int) -> None:
        self._joins.append(slot)

    def enter(self, request: Request) -> None:
        """A request took its slot and its first blocks."""
        self._new.append(request)
        self._tables.append((request.slot, 0, request.blocks))

    def extend(self, request: Request, num_new: int) -> None:
        """The table of a request grew by its last `num_new` blocks."""
        start = len(request.blocks) - num_new
        self._tables.append((request.slot, start, request.blocks[start:]))

    def chunk(self, request: Request, start: int, end: int) -> None:
        """Compute the tokens from `start` up to `end`; samples when these are all of them."""
        self.chunks.append((request, start, end))

    def take(
        self, *, epoch: int, step: int, is_full_tail: bool, masks: Masks | None
    ) -> SchedulerOutput:
        """The step as a message."""
        output = SchedulerOutput(
            epoch,
            step,
            is_full_tail,
            freed=self._freed or None,
            leaves=self._leaves or None,
            new=_new_rows(self._new) if self._new else None,
            tables=_table_changes(self._tables) if self._tables else None,
            joins=self._joins or None,
            chunks=_chunks(self.chunks) if self.chunks else None,
            masks=masks,
        )
        self._start()  # the lists now belong to the message
        return output


def _new_rows(requests: list[Request]) -> NewRows:
    prompts, outputs = [], []
    for request in requests:
        has_history, split = request.needs_history, request.num_prompt
        prompts.append(request.tokens[:split].tobytes() if has_history else b"")
        outputs.append(request.tokens[split:].tobytes() if has_history else b"")
    return NewRows(
        slots=[request.slot for request in requests],
        sampling=[request.sampling for request in requests],
        seeds=[request.seed for request in requests],
        prompts=prompts,
        outputs=outputs,
    )


def _table_changes(tables: list[tuple[int, int, list[int]]]) -> TableChanges:
    blocks: list[int] = []
    for _, _, ids in tables:
        blocks += ids
    return TableChanges(
        slots=[slot for slot, _, _ in tables],
        starts=[start for _, start, _ in tables],
        counts=[len(ids) for _, _, ids in tables],
        blocks=pack_ids(blocks),
    )


def _chunks(chunks: list[tuple[Request, int, int]]) -> Chunks:
    return Chunks(
        slots=[request.slot for request, _, _ in chunks],
        starts=[start for _, start, _ in chunks],
        counts=[end - start for _, start, end in chunks],
        tokens=b"".join(request.tokens[start:end].tobytes() for request, start, end in chunks),
        samples=[end == len(request.tokens) for request, _, end in chunks],
    )


def step_masks(rows: list[Request]) -> Masks | None:
    """What the next token of each constrained row may be; None when nothing is forbidden."""
    slots, masks = [], []
    for request in rows:
        mask = request.constraint.mask(request.tokens) if request.constraint is not None else None
        if mask is not None:
            slots.append(request.slot)
            masks.append(mask)
    return Masks(slots, b"".join(masks)) if slots else None
