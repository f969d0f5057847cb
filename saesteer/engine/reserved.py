"""Device memory whose addresses are fixed at once, and whose parts are taken when they are first needed.

CUDA graphs hold the addresses of what they write. A tensor at every site that requests may read would take gigabytes
that most servers never use, so only its addresses are reserved here, by CUDA's virtual memory management (CUDA driver
API, section "Virtual Memory Management"). On a CPU the operating system does the same for every allocation.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name} found too little GPU memory")
    if code:
        raise RuntimeError(f"{name} returned CUDA error {code}")


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


class Reserved:
    """A tensor [rows, width] of which no row may be touched before it was taken.

    Args:
        rows: number of its rows.
        width: numbers of a row.
        dtype: of the numbers.
        device: where it is.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._row = width * dtype.itemsize
        self._lazy = device.type == "cuda" and torch.version.hip is None
        self.bytes = 0  # taken so far
        self.tensor: Tensor
        if not self._lazy:
            self.tensor = torch.zeros(rows, width, dtype=dtype, device=device)
            self.bytes = self.tensor.nbytes
            return
        self._device = torch.cuda.current_device() if device.index is None else device.index
        torch.zeros(1, device=device)  # makes the context that the driver's functions need
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, self._device))
        grain = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), 0)
        self._grain = grain.value
        self._taken: set[int] = set()  # grains
        whole = -(-max(1, rows * self._row) // self._grain) * self._grain
        address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve", ctypes.byref(address), _size(whole), _size(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        )
        self._address = address.value
        weakref.finalize(self, _free, self._address, whole, self._grain, self._taken)
        self._take(0, 1)  # torch looks up the device of the first address
        # torch reads this attribute; it has no name for bfloat16 there.
        number = {1: "|u1", 2: "<i2", 4: "<f4"}[dtype.itemsize]
        self.__cuda_array_interface__ = {
            "shape": (rows, width),
            "typestr": number,
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }
        self.tensor = torch.as_tensor(self, device=device).view(dtype)

    def take(self, first: int, rows: int) -> None:
        """Make rows usable, if they are not; what they hold is undefined.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        if self._lazy:
            self._take(first * self._row // self._grain, -(-(first + rows) * self._row // self._grain))

    def _take(self, begin: int, end: int) -> None:
        """Map grains that are not mapped, each run of them at once."""
        missing = [grain for grain in range(begin, end) if grain not in self._taken]
        while missing:
            run = next((n for n, grain in enumerate(missing) if grain != missing[0] + n), len(missing))
            try:
                self._map(missing[0], run)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # torch may hold what it does not use
                self._map(missing[0], run)
            missing = missing[run:]

    def _map(self, first: int, grains: int) -> None:
        size = grains * self._grain
        address, handle = ctypes.c_uint64(self._address + first * self._grain), ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            _call("cuMemMap", address, _size(size), _size(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # it stays as long as it is mapped
        access = _Access(self._properties.location, _READ_WRITE)
        _call("cuMemSetAccess", address, _size(size), ctypes.byref(access), _size(1))
        self._taken.update(range(first, first + grains))
        self.bytes += size


def _free(address: int, whole: int, grain: int, taken: set[int]) -> None:
    """Give everything back once the device has no work that may use it."""
    torch.cuda.synchronize()
    for one in taken:
        _driver().cuMemUnmap(ctypes.c_uint64(address + one * grain), _size(grain))
    _driver().cuMemAddressFree(ctypes.c_uint64(address), _size(whole))
