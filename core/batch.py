"""Who has a slot and what they do there, mirrored to the workers through the delta.

Carries decisions out; makes none.
"""

from nvserve.core.block_tables import BlockTables
from nvserve.core.request import Phase, Request
from nvserve.core.step_delta import StepDelta


class Batch:
    """The running requests of one epoch, each in at most one of three lists.

    One in none of them has its last token planned and waits for the commit that finishes it.
    """

    def __init__(self, num_slots: int, tables: BlockTables) -> None:
        self.tables = tables
        self.delta = StepDelta()
        self.running: dict[int, Request] = {}  # in the order of admission
        self.decoding: list[Request] = []  # the decode list of the workers after the last plan
        self.prefilling: list[Request] = []  # some of the prompt is not planned yet
        self.joining: list[Request] = []  # to decode as soon as they may
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))  # lowest last, taken first

    def __len__(self) -> int:
        return len(self.running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def youngest(self) -> Request:
        """The first to make room for others."""
        return max(self.running.values(), key=lambda request: request.order)

    def enter(self, request: Request) -> None:
        """Give an admitted request a slot."""
        request.slot = self._free_slots.pop()
        request.move_to(Phase.RUNNING)
        self.running[request.request_id] = request
        self.prefilling.append(request)
        self.delta.enter(request)

    def plan_chunk(self, request: Request, budget: int) -> int:
        """Plan the next tokens of a prompt, at most `budget`, and return how many."""
        start = request.num_planned
        end = min(start + budget, request.prefill_end)
        request.num_planned = end
        self.delta.chunk(request, start, end)
        if end == request.prefill_end:
            self.prefilling.remove(request)
            self.joining.append(request)
        return end - start

    def join(self, request: Request) -> None:
        request.is_decoding = True
        self.decoding.append(request)
        self.delta.join(request.slot)

    def leave(self, request: Request) -> None:
        request.is_decoding = False
        self.decoding.remove(request)
        self.delta.leave(request.slot)

    def grow(self, request: Request) -> bool:
        """Add blocks to a full table; False when there are none."""
        num_new = self.tables.grow(request, num_running=len(self.running))
        if num_new:
            self.delta.extend(request, num_new)
        return num_new > 0

    def start_step(self) -> list[Request]:
        """Plan one token for everybody in the decode list; returns who has a row in the step."""
        for request in self.decoding:
            request.num_planned += 1
        chunks = self.delta.chunks
        return self.decoding + [request for request, _, end in chunks if end == request.prefill_end]

    def vacate(self, request: Request) -> None:
        """Take slot and blocks back, also while a step of the request is in flight.

        Both may be given out in the next step, because steps run in order on one stream.
        """
        self.delta.free(request.slot)
        self._free_slots.append(request.slot)
        self.tables.release(request)
        del self.running[request.request_id]
        for members in (self.decoding, self.prefilling, self.joining):
            if request in members:
                members.remove(request)
        request.leave()

    def check(self) -> None:
        """Assert that slots, lists and phases agree, and the tables with them."""
        running = list(self.running.values())
        slots = self._free_slots + [request.slot for request in running]
        assert sorted(slots) == list(range(self._num_slots)), f"slots lost or doubled: {slots}"
        members = self.decoding + self.prefilling + self.joining
        assert len({id(request) for request in members}) == len(members), "in two lists"
        assert all(request.request_id in self.running for request in members)
        for request in running:
            assert request.phase is Phase.RUNNING
            assert request.is_decoding == (request in self.decoding)
            assert request.num_prefilled <= request.num_planned <= self.tables.capacity(request)
            is_planned = request.num_planned >= request.prefill_end
            assert is_planned == (request not in self.prefilling), f"{request}"
            assert request.num_planned <= request.max_total - 1, f"{request}"
            if request not in members:
                assert request.num_planned == request.max_total - 1, f"forgotten: {request}"
        self.tables.check(running)
