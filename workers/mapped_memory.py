"""Device memory that other processes can map, through the CUDA driver's virtual memory calls.

The memory lives as long as anybody has it mapped: kernels of a survivor may go on reading what a
dead peer gave. torch's symmetric memory would do the same, but its rendezvous counts what a process
has exchanged in its life, so that a replaced rank and a survivor never find each other.
"""

import importlib
from contextlib import ExitStack
from typing import Any, Final

import torch

_POSIX: Final = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"


class MappedMemory:
    """Memory of some device, mapped for reading and writing by the current one until `close`."""

    def __init__(self, handle: Any, num_bytes: int, device: int) -> None:
        """`handle` is the driver's, which this takes over; num_bytes is a multiple of its grain."""
        driver = _driver()
        self.num_bytes: Final = num_bytes
        self._handle: Final = handle
        access = driver.CUmemAccessDesc()
        access.location = _location(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            undo.callback(lambda: _call(driver.cuMemRelease(handle)))
            reserved = self._range = _call(driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
            undo.callback(lambda: _call(driver.cuMemAddressFree(reserved, num_bytes)))
            _call(driver.cuMemMap(reserved, num_bytes, 0, handle, 0))
            undo.callback(lambda: _call(driver.cuMemUnmap(reserved, num_bytes)))
            _call(driver.cuMemSetAccess(reserved, num_bytes, [access], 1))
            self._undo: Final = undo.pop_all()

    @staticmethod
    def allocate(num_bytes: int, device: int) -> "MappedMemory":
        """At least num_bytes of this device, all zero; RuntimeError when there is not so much."""
        driver, wanted = _driver(), _properties(device)
        grain = _call(
            driver.cuMemGetAllocationGranularity(
                wanted,
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        rounded = -(-num_bytes // grain) * grain
        memory = MappedMemory(_call(driver.cuMemCreate(rounded, wanted, 0)), rounded, device)
        memory.tensor().zero_()
        torch.cuda.current_stream().synchronize()  # before any peer can write there
        return memory

    @staticmethod
    def of_descriptor(descriptor: int, num_bytes: int, device: int) -> "MappedMemory":
        """What a peer exported; the descriptor may be closed then. `device` is the one to read it.

        RuntimeError when this device cannot.
        """
        driver = _driver()
        kind = getattr(driver.CUmemAllocationHandleType, _POSIX)
        handle = _call(driver.cuMemImportFromShareableHandle(descriptor, kind))
        return MappedMemory(handle, num_bytes, device)

    def export(self) -> int:
        """An open file that stands for the memory; the caller closes it."""
        driver = _driver()
        kind = getattr(driver.CUmemAllocationHandleType, _POSIX)
        return int(_call(driver.cuMemExportToShareableHandle(self._handle, kind, 0)))

    @property
    def address(self) -> int:
        return int(self._range)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes] over it, of no use after `close`."""
        return torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        """Give it back; nothing on the device may use it any more."""
        self._undo.close()


def _driver() -> Any:
    """NVIDIA's own binding, which torch's CUDA builds bring along and others lack."""
    return importlib.import_module("cuda.bindings.driver")


def _location(device: int) -> Any:
    driver = _driver()
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _properties(device: int) -> Any:
    driver = _driver()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = _location(device)
    wanted.requestedHandleTypes = getattr(driver.CUmemAllocationHandleType, _POSIX)
    return wanted


def _call(answer: tuple[Any, ...]) -> Any:
    """The result of a driver's call, which come behind a status."""
    status, *results = answer
    if status != _driver().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answers {status.name}")
    return results[0] if results else None
