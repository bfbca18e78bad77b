"""DLPack: arrays go to and come from other libraries without a copy.

NumPy packs and unpacks the capsules. It has no bfloat16 and no 8-bit floats: their bits travel as
integers of that width, and the element type in the capsule is exchanged.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rlx.errors import ArrayCopyError, ArrayTypeError, InputError
from rlx.ir.dtype import DType, bf16, f8e4m3, f8e5m2

_FLOAT_CODES = {bf16: 4, f8e4m3: 10, f8e5m2: 12}  # of DLDataTypeCode
_BITS_OF_CODE = {code: element for element, code in _FLOAT_CODES.items()}
_UINT = 1
_HOST = 1  # kDLCPU
_VERSIONED, _PLAIN = b"dltensor_versioned", b"dltensor"
# where DLTensor begins in DLManagedTensorVersioned (after version, context, deleter and flags), and
# where its element type is (after the data pointer, the device and the rank)
_TENSOR_OFFSET, _TYPE_OFFSET = 32, 20


class _ElementType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


def _element_type(capsule: object) -> _ElementType:
    """The element type in a capsule that was not taken yet."""
    is_valid, pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    is_valid.restype, pointer.restype = ctypes.c_int, ctypes.c_void_p
    for name, offset in ((_VERSIONED, _TENSOR_OFFSET), (_PLAIN, 0)):
        if is_valid(capsule, name):
            return _ElementType.from_address(pointer(capsule, name) + offset + _TYPE_OFFSET)
    raise InputError("no DLPack capsule", where="from_dlpack", got=repr(capsule))


def export(
    data: np.ndarray[Any, Any], stream: object, max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None, copy: bool | None,
) -> object:  # fmt: skip
    """A capsule of `data`, whose elements must not be written to.

    Capsules since version 1.0 say so. A consumer that does not know them gets a copy, unless it
    asks for none.
    """
    if stream is not None:
        raise InputError("a stream for host memory", where="__dlpack__", got=stream, expected=None)
    if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != (_HOST, 0):
        raise ArrayCopyError(
            "arrays are in the host's memory", where="__dlpack__", got=dl_device, expected=(1, 0)
        )
    flagged = max_version is not None and max_version[0] >= 1
    element = DType.of(data.dtype)
    shared = data.copy() if copy or (copy is None and not flagged) else data.view()
    if flagged and shared.base is not None:
        shared.flags.writeable = False
    code = _FLOAT_CODES.get(element)
    bits = shared if code is None else shared.view(f"u{element.bytes}")
    try:
        capsule = bits.__dlpack__(max_version=(1, 0) if flagged else None)
    except BufferError as error:  # memory that is read-only, in a capsule that cannot say so
        raise ArrayCopyError(
            "a copy is needed", where="__dlpack__", got=f"copy={copy}", expected=str(error),
            hint="ask for max_version=(1, 0)",
        ) from error  # fmt: skip
    if code is not None:
        _element_type(capsule).code = code
    return capsule


class _Taken:
    """A capsule with an element type that NumPy knows."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_HOST, 0)


def take(x: Any, copy: bool | None) -> np.ndarray[Any, Any]:
    """The elements of another library's array, shared unless `copy`."""
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise ArrayTypeError(
            "not an array with DLPack", where="from_dlpack", got=type(x).__name__,
            expected="an object with __dlpack__ and __dlpack_device__",
        )  # fmt: skip
    kind = int(x.__dlpack_device__()[0])
    options: dict[str, Any] = {"max_version": (1, 0)}
    if kind != _HOST:
        if copy is False:
            raise ArrayCopyError(
                "a copy to the host's memory is needed", where="from_dlpack", got=f"device {kind}"
            )
        options |= {"dl_device": (_HOST, 0), "copy": copy}
    try:
        capsule = x.__dlpack__(**options)
    except TypeError:  # a producer older than version 1.0
        capsule = x.__dlpack__()
    held = _element_type(capsule)
    element = _BITS_OF_CODE.get(held.code)
    if element is not None:
        held.code = _UINT
    data: np.ndarray[Any, Any] = np.from_dlpack(_Taken(capsule))  # type: ignore[arg-type]
    data = data if element is None else data.view(element.numpy)
    return data.copy() if copy else data
