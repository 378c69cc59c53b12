"""The few calls of the CUDA driver that torch does not have, or has slower. Thin: numbers in, errors out."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from steerpipe.core.errors import CapacityError, TransferError
from steerpipe.core.units import format_bytes

_OUT_OF_MEMORY = 2
_NOT_LOCKED = (1, _OUT_OF_MEMORY, 304, 801)  # of a registration: also an invalid value, the system's or unsupported
_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_PORTABLE, _DEVICE_MAP = 1, 2  # registered memory: for every context; kernels can read it
_WRITE_64 = 5  # of CUstreamBatchMemOpParams, 48 bytes: this, an address, a value, no flags
_WORD = (1 << 64) - 1
_OPERATION, _BATCH = 6, 64  # words of one, and how many go together
_RESTART = "the GPU cannot be used any more in this process: start it again; if it stays, look at dmesg and nvidia-smi"

_POINTER, _SIZE, _DEVICE, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyHtoDAsync_v2": (_DEVICE, _POINTER, _SIZE, _POINTER),
    "cuStreamWriteValue64_v2": (_POINTER, _DEVICE, ctypes.c_uint64, _FLAGS),
    "cuStreamBatchMemOp_v2": (_POINTER, _FLAGS, _POINTER, _FLAGS),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _FLAGS),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_DEVICE), _POINTER, _FLAGS),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_POINTER), _FLAGS, ctypes.c_int),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamSynchronize": (_POINTER,),
    "cuCtxGetStreamPriorityRange": (ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)),
    "cuCtxGetCurrent": (ctypes.POINTER(_POINTER),),
    "cuCtxSetCurrent": (_POINTER,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Driver:
    """libcuda in the context that was current when this was made. One thread at a time.

    `htod(into, source, size, stream)` and `write64(stream, address, value, 0)` are the bare functions: they return a
    status that the caller gives to `check` when it is not 0. On the hot path a call less is a quarter of a microsecond.
    They keep Python's lock: giving it away for a microsecond may cost milliseconds while readers are busy.
    """

    def __init__(self) -> None:
        self._library = _load(ctypes.CDLL)
        quick = _load(ctypes.PyDLL)
        self.htod = quick.cuMemcpyHtoDAsync_v2
        self.write64 = getattr(quick, "cuStreamWriteValue64_v2", None)  # drivers before 11.7 have none
        self.write_batch = getattr(quick, "cuStreamBatchMemOp_v2", None)  # nor this
        context = _POINTER()
        self.check(self._library.cuCtxGetCurrent(ctypes.byref(context)))
        assert context.value, "torch has to make its context current first"
        self._context = context

    def check(self, status: int) -> None:
        """Raises what a status means, unless it is 0."""
        if status == 0:
            return
        what = self._said(status)
        if status == _OUT_OF_MEMORY:
            raise CapacityError(what, fix="give a smaller --ram or --fast-memory, or free memory")
        raise TransferError(what, fix=_RESTART)

    def activate(self) -> None:
        """Makes the context current in the calling thread: one that has not used the GPU yet, such as a finaliser's."""
        self.check(self._library.cuCtxSetCurrent(self._context))

    def new_stream(self) -> int:
        """The handle of a stream of the highest priority: its queue is not shared with streams that compute."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), _POINTER()
        self.check(self._library.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)))
        self.check(self._library.cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, greatest))
        assert stream.value, "the driver gave no stream"
        return stream.value

    def free_stream(self, stream: int) -> None:
        """After all that was queued on it."""
        self.check(self._library.cuStreamSynchronize(stream))
        self.check(self._library.cuStreamDestroy_v2(stream))

    def synchronize(self, stream: int) -> None:
        self.check(self._library.cuStreamSynchronize(stream))

    def register(self, address: int, size_bytes: int) -> None:
        """Pins memory of this process: the GPU can copy from it, and kernels can read it.

        Takes about 0.35 s/GiB; pages should be touched. CapacityError if the machine lets no more be locked.
        """
        status = self._library.cuMemHostRegister_v2(address, size_bytes, _PORTABLE | _DEVICE_MAP)
        if status in _NOT_LOCKED:
            raise CapacityError(
                f"{format_bytes(size_bytes)} of RAM could not be page-locked: {self._said(status)}",
                fix="give a smaller --pin (0 locks nothing but a small ring), or raise the limit of locked memory "
                "(ulimit -l, or that of the container)",
            )
        self.check(status)

    def device_view(self, address: int) -> int:
        """Where kernels see registered memory, normally at the same address; 0: they do not."""
        view = _DEVICE()
        status = self._library.cuMemHostGetDevicePointer_v2(ctypes.byref(view), address, 0)
        return view.value if status == 0 else 0

    def unregister(self, address: int) -> None:
        self.check(self._library.cuMemHostUnregister(address))

    def _said(self, status: int) -> str:
        name, text = self._text("cuGetErrorName", status), self._text("cuGetErrorString", status)
        return f"the CUDA driver said {name}: {text}"

    def _text(self, name: str, status: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, name)(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"status {status}"


class WordBatch:
    """Words that are written one after the other by one call. One thread at a time."""

    def __init__(self, driver: Driver) -> None:
        assert driver.write_batch is not None, "this driver writes words one by one"
        self._driver, self._call = driver, driver.write_batch
        memory = (ctypes.c_uint64 * (_BATCH * _OPERATION))()
        self._address, self._view = ctypes.addressof(memory), memoryview(memory).cast("B").cast("Q")
        for first in range(0, len(self._view), _OPERATION):
            self._view[first] = _WRITE_64

    def write(self, stream: int, words: Sequence[tuple[int, int]]) -> None:
        """(address, value) of each; as `write64`, each with everything queued before it."""
        view = self._view
        for first in range(0, len(words), _BATCH):
            some = words[first : first + _BATCH]
            at = 1
            for address, value in some:
                view[at], view[at + 1] = address, value & _WORD  # a value may be negative
                at += _OPERATION
            if status := self._call(stream, len(some), self._address, 0):
                self._driver.check(status)


@functools.cache
def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    try:
        library = kind("libcuda.so.1")
    except OSError as problem:
        raise TransferError(
            f"the CUDA driver cannot be loaded: {problem}", fix="install it, or use --device cpu"
        ) from None
    for name, arguments in _SIGNATURES.items():
        if (function := getattr(library, name, None)) is not None:
            function.argtypes, function.restype = arguments, ctypes.c_int
    return library
