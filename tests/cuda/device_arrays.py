"""Arrays on the CUDA device for tests: torch's, or stand-ins whose memory is the emulated device's.

The stand-ins have what `llmserve.ops` asks of an array and of torch, and keep which streams they
were told of.
"""

import ctypes
import types

import numpy as np
from llmserve import _core_testing

CPU, CUDA = 1, 2
CODES = {"i": 0, "u": 1, "f": 2}
BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


# What capsules and work of the emulated streams point to: for good, since this is a test.
_alive = []


def synchronize():
    """Waits for all streams of the emulated device: to give memory back does."""
    backend = _core_testing.make_backend("cuda")
    array = backend.to_device(np.zeros(1, np.float32))
    del array  # before its backend


class FakeTensor:
    """A NumPy array that says it is on a device. bf16 is uint16, as in the other tests."""

    def __init__(self, values, device=(CUDA, 0)):
        self.values, self.device, self.streams = np.asarray(values), device, []
        _alive.append(self.values)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        values = self.values
        code = BFLOAT if values.dtype == np.uint16 else CODES[values.dtype.kind]
        integers = ctypes.c_int64 * values.ndim
        shape = integers(*values.shape)
        strides = integers(*(step // values.itemsize for step in values.strides))
        pointer = values.__array_interface__["data"][0]
        bits = 8 * values.itemsize
        managed = _ManagedTensor(
            _Tensor(pointer, *self.device, values.ndim, code, bits, 1, shape, strides, 0)
        )
        _alive.extend((shape, strides, managed))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)

    def tolist(self):
        return self.numpy().tolist()

    def to(self, device):
        return FakeTensor(self.values, device)

    def numpy(self):
        synchronize()
        return self.values


def fake_torch(stream):
    """A module with the part of torch that ops on a device use, whose current stream is given."""
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda _: types.SimpleNamespace(cuda_stream=stream),
    )
    return types.SimpleNamespace(
        Tensor=FakeTensor,
        float32=np.float32,
        cuda=cuda,
        empty=lambda shape, dtype, device: FakeTensor(np.full(shape, np.nan, dtype), device),
        from_dlpack=lambda array: FakeTensor(np.from_dlpack(array), (CPU, 0)),
    )
