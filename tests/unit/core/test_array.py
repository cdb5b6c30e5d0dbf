"""llmserve.Array and what comes in: arrays cross by DLPack or NumPy without a copy."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from llmserve import Array, InvalidArgument, NotSupported, ops
from llmserve import _core_testing as testing

DTYPES = ["float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]


class Foreign:
    """An array of some other library: nothing but the protocol, and it counts."""

    def __init__(self, array: Any, *, device: tuple[int, int] = (1, 0), is_old: bool = False):
        self.array, self.device, self.is_old = array, device, is_old
        self.num_capsules = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.is_old and options:
            raise TypeError("this library is from before max_version")
        self.num_capsules += 1
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_dlpack_read_the_same_memory(dtype: str) -> None:
    array = Array(np.arange(6).reshape(2, 3).astype(dtype))
    assert (array.shape, array.dtype, len(array)) == ((2, 3), dtype, 2)
    assert repr(array) == f"Array({dtype} [2, 3])"
    view, other = np.asarray(array), np.from_dlpack(array)
    assert view.dtype == other.dtype == np.dtype(dtype)
    view[1, 2] = 0
    np.testing.assert_array_equal(other, view)
    assert np.shares_memory(view, other)
    assert view.ctypes.data % 64 == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 2, 3, 4)])
def test_any_shape_up_to_four_dimensions_crosses(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    array = Array(values)
    assert array.shape == shape
    np.testing.assert_array_equal(np.from_dlpack(array), values)


@pytest.mark.parametrize("is_old", [False, True])
def test_both_kinds_of_capsule_are_read_and_let_go_of(is_old: bool) -> None:
    values = np.arange(12, dtype=np.int64).reshape(3, 4)
    foreign = Foreign(values, is_old=is_old)
    references = sys.getrefcount(values)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(Array(foreign)), values)
    assert foreign.num_capsules == 3
    assert sys.getrefcount(values) == references


def test_strided_arrays_keep_their_places() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (values[1:, ::2], values.T, values[::-1], np.broadcast_to(values[0], (3, 6))):
        np.testing.assert_array_equal(np.asarray(Array(view)), view)
        if view.flags.writeable:
            np.testing.assert_array_equal(np.asarray(Array(Foreign(view))), view)


def test_memory_lives_as_long_as_the_last_holder() -> None:
    array = Array(np.ones(3, np.float32))
    assert testing.use_count(array) == 1
    capsules = [array.__dlpack__(), array.__dlpack__(max_version=(1, 0))]
    assert testing.use_count(array) == 3
    capsules.clear()  # nobody consumed them
    assert testing.use_count(array) == 1
    consumers = [np.from_dlpack(array), np.from_dlpack(array)]
    assert testing.use_count(array) == 3
    consumers.pop()
    assert testing.use_count(array) == 2
    del array
    gc.collect()
    np.testing.assert_array_equal(consumers[0], 1)
    view = np.asarray(Array(np.full(3, 7.0)))
    gc.collect()
    np.testing.assert_array_equal(view, 7)


def test_a_read_only_array_stays_so() -> None:
    array = testing.freeze(Array(np.zeros(2, np.float32)))
    assert not np.asarray(array).flags.writeable
    capsule = array.__dlpack__(max_version=(1, 0))
    assert '"dltensor_versioned"' in repr(capsule)
    with pytest.raises(BufferError, match=r"DLPack 1\.0"):
        array.__dlpack__()
    assert '"dltensor"' in repr(array.__dlpack__(copy=True))


def test_a_copy_is_a_copy() -> None:
    array = Array(np.zeros(2, np.float32))
    np.asarray(array, copy=True)[0] = 1
    np.asarray(array, np.float64)[0] = 1
    assert testing.use_count(array) == 1
    array.__dlpack__(copy=True)
    np.testing.assert_array_equal(np.asarray(array), 0)
    assert np.asarray(array, np.int32).dtype == np.int32


def test_what_cannot_be_exported_is_a_buffer_error() -> None:
    array = Array(np.zeros(2, np.float32))
    assert array.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="stream=None"):
        array.__dlpack__(stream=2)
    with pytest.raises(BufferError, match="the CPU"):
        array.__dlpack__(dl_device=(2, 0))


def test_numpy_gets_the_values_of_bfloat16_in_float32() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.0e38, np.inf], np.float32)
    array = Array(values, "bfloat16")
    rounded = np.array([1.0, 1.0, 1.015625, -3.0e38, np.inf], np.float32)  # halves go to even
    np.testing.assert_allclose(np.asarray(array), rounded, rtol=2**-8)
    np.testing.assert_array_equal(np.asarray(array)[:3], rounded[:3])
    assert np.asarray(array).dtype == np.float32
    with pytest.raises(ValueError, match="NumPy has no bfloat16"):
        array.__array__(copy=False)
    np.testing.assert_array_equal(np.asarray(Array(array, "float32")), np.asarray(array))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "values: expected a NumPy array, a torch tensor .* got list"),
        (np.zeros(2, np.complex64), "values: expected elements of float32, .* got complex64"),
        (np.zeros(2, ">f4"), "got >f4; convert it"),
        (np.zeros((1, 1, 1, 1, 1)), "values: expected at most 4 dimensions, got 5"),
        (np.frombuffer(bytes(9), np.uint8)[1:].view(np.float32), "at multiples of their size"),
    ],
)
def test_what_is_no_usable_array_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Array(value)


def test_an_array_on_another_device_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"on device CUDA 1; copy it to the CPU first"):
        Array(Foreign(np.zeros(2), device=(2, 1)))


def test_a_producer_that_refuses_or_lies_is_named() -> None:
    class Refuses(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    class Lies(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            return object()

    with pytest.raises(InvalidArgument, match=r"__dlpack__.. refused: not today"):
        Array(Refuses(np.zeros(2)))
    with pytest.raises(InvalidArgument, match="gave no DLPack capsule"):
        Array(Lies(np.zeros(2)))


def test_dtypes_convert_only_between_floats() -> None:
    with pytest.raises(InvalidArgument, match="dtype: expected float32 or bfloat16, got 'int8'"):
        Array(np.zeros(2, np.float32), "int8")
    with pytest.raises(InvalidArgument, match=r"got bfloat16 of int32 \[2\]"):
        Array(np.zeros(2, np.int32), "bfloat16")


def test_torch_reads_and_lends_every_dtype_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (*DTYPES, "bfloat16"):
        tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
        array = Array(tensor)
        assert array.dtype == dtype
        back = torch.from_dlpack(array)
        assert back.dtype == tensor.dtype
        torch.testing.assert_close(back, tensor)
        assert testing.use_count(array) == 2
        back[1, 1] = 0
        assert torch.from_dlpack(array)[1, 1] == 0
        del back
        assert testing.use_count(array) == 1
    with pytest.raises(InvalidArgument, match=r"refused: .*detach"):
        Array(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_arrays_are_copied_and_pickled(dtype: str) -> None:
    values = np.array([[1.5, -2.0, 3.0], [0.0, 1.0, 0.25]])
    if dtype == "bfloat16":
        array = Array(values.astype(np.float32), dtype)
    else:
        array = Array(values.astype(dtype))
    for other in (pickle.loads(pickle.dumps(array)), copy.deepcopy(array)):
        assert (other.dtype, other.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(np.asarray(other), np.asarray(array))
        assert not np.shares_memory(np.asarray(other), np.asarray(array))


class DlTensor(ctypes.Structure):
    """DLPack's, of the standard's C API."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),  # DLManagedTensor's, from here on
        ("deleter", ctypes.c_void_p),
    ]


class Liar:
    """What gives a capsule of any fields."""

    def __init__(self, shape: list[int] | None, strides: list[int] | None = None, **fields: int):
        self.memory = (ctypes.c_float * 8)()
        common = {"data": ctypes.addressof(self.memory), "device_type": 1, "ndim": len(shape or ())}
        common |= {"code": 2, "bits": 32, "lanes": 1}
        self.tensor = DlTensor(**{**common, **fields})
        for name, part in (("shape", shape), ("strides", strides)):
            if part is not None:
                array = (ctypes.c_int64 * len(part))(*part)
                setattr(self.tensor, name, ctypes.cast(array, ctypes.POINTER(ctypes.c_int64)))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize(
    ("liar", "message"),
    [
        (Liar(None, ndim=2), "has 2 dimensions and no shape"),
        (Liar([2, 2], ndim=-1), "-1 dimensions"),
        (Liar([2, -1]), "dimension 1 is negative: -1"),
        (Liar([2**32, 2**32]), "reach further than memory"),
        (Liar([2**62, 2]), "reach further than memory"),
        (Liar([0, 2**40, 2**40]), "reach further than memory"),
        (Liar([2, 2], [2**62, 1]), "reach further than memory"),
        (Liar([2, 2], [-(2**63), 1]), "reach further than memory"),
        (Liar([3, 2], [2**61, 2**61]), "reach further than memory"),
        (Liar([2, 2], data=0), "it has elements, and no memory"),
        (Liar([2, 2], data=0, byte_offset=64), "it has elements, and no memory"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_capsule_that_lies_about_its_shape_is_refused(liar: Liar, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Array(liar)
    with pytest.raises(InvalidArgument, match=message):
        ops.rms_norm(np.ones((2, 4), "f4"), np.ones(4, "f4"), out=liar)


def test_a_capsule_that_does_not_lie_is_read() -> None:
    np.testing.assert_array_equal(np.asarray(Array(Liar([2, 3]))), np.zeros((2, 3), "f4"))
    assert Array(Liar([0, 3], data=0)).shape == (0, 3)
    assert Array(Liar([1, 3], [-(2**63), 1])).shape == (1, 3)  # a stride that is never taken


def test_far_strides_are_not_written_to() -> None:
    far = np.lib.stride_tricks.as_strided(np.ones(4, "f4"), (3, 2), (2**62, 4))
    with pytest.raises(InvalidArgument, match="reach further than memory"):
        ops.rms_norm(np.ones((3, 2), "f4"), np.ones(2, "f4"), out=far)
