"""Streams, precision, memory and graphs of CUDA."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgopt.torch_private.lookup import expect, private, privates


def _conv_precision() -> str:
    """The switch of cuDNN's convolutions; reading allow_tf32 warns, or raises where both interfaces were used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
        return found if isinstance(found, str) else "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _set_conv_precision(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = getattr(torch.backends.cudnn, "conv", None)
        if hasattr(conv, "fp32_precision"):
            setattr(conv, "fp32_precision", precision)  # noqa: B010  (torch 2.10's type says nothing of it)
        else:
            torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _of_convolutions(path: str, probe: Callable[[Any], object]) -> Any:
    found = private(path, None, "torch.backends.cudnn.conv.fp32_precision", probe)
    return None if found is None else functools.partial(found, "cuda", "conv")


# PyTorch's switch for cuDNN's convolutions in fp32: "tf32", "ieee" or "none".
conv_precision: Callable[[], str] = (
    _of_convolutions("torch._C._get_fp32_precision_getter", lambda get: expect(get("cuda", "conv"), str))
    or _conv_precision
)
set_conv_precision: Callable[[str], None] = (
    _of_convolutions("torch._C._set_fp32_precision_setter", lambda put: put("cuda", "conv", conv_precision()))
    or _set_conv_precision
)


def _matmul_precision() -> Any:
    return getattr(torch.backends.cuda.matmul, "fp32_precision", None)


# The same of matrix products.
matmul_precision: Callable[[], Any] = (
    functools.partial(conv_precision.func, "cuda", "matmul")
    if isinstance(conv_precision, functools.partial)
    else _matmul_precision
)


def _reductions() -> Any:
    matmul = torch.backends.cuda.matmul
    return matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (first(), second())


_getters = privates(
    [f"torch._C._get_cublas_allow_{half}_reduced_precision_reduction" for half in ("fp16", "bf16")],
    "torch.backends.cuda.matmul",
)


# Whether matrix products in half precision may round their sums, in whatever form PyTorch says so.
matmul_reductions: Callable[[], Any] = _both(*_getters) if _getters else _reductions


def _copy_each(to: list[Any], given: list[Any]) -> None:
    for own, other in zip(to, given, strict=True):
        own.copy_(other)


# Of many tensors, in few launches.
copy_each: Callable[[list[Any], list[Any]], Any] = private(
    "torch._foreach_copy_", _copy_each, "one launch a tensor", lambda f: f([torch.zeros(1)], [torch.zeros(1)])
)


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# In a torch without CUDA it is not there, and never called.
current_stream: Callable[[int], int] = (
    private("torch._C._cuda_getCurrentRawStream", _current_stream, "torch.cuda.current_stream")
    if torch.version.cuda
    else _current_stream
)


def _probe_storage(make: Any) -> None:
    number = torch.zeros(1)
    expect(make(number.data_ptr(), number.device, 4), torch.UntypedStorage)


_storage_at = private(
    "torch._C._construct_storage_from_data_pointer", None, "CUDA graphs copy every argument", _probe_storage
)
CAN_BORROW = _storage_at is not None


def borrowed(t: Tensor) -> Tensor:
    """A tensor of the same kind at the same place, which does not keep the memory. Where ``CAN_BORROW`` holds."""
    numbers = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    storage = _storage_at(t.data_ptr(), t.device, numbers * t.element_size())
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


def _probe_holders(found: Any) -> None:
    t = torch.zeros(2)
    storage = t.untyped_storage()
    alone = found(storage._cdata)
    part = t[1:]
    if found(storage._cdata) != alone + 1 or part.storage_offset() != 1:
        raise RuntimeError("it does not count the tensors")


_count_of = private(
    "torch._C._storage_Use_Count", None, "gradients of replayed steps are copied out of the recording", _probe_holders
)
CAN_COUNT_HOLDERS = _count_of is not None


def holders(t: Tensor) -> int:
    """How many tensors share t's memory, t and what Python holds of it included. Where ``CAN_COUNT_HOLDERS`` holds."""
    return _count_of(t.untyped_storage()._cdata)  # type: ignore[no-any-return]


def _keep_busy(cycles: int) -> None:
    """Passes over 64 MiB, each of which takes at least 20 us at the memory of today's GPUs."""
    waste = torch.empty(2**24, device="cuda")
    for _ in range(1 + int(cycles / 2e9 / 20e-6)):
        waste.zero_()


keep_busy: Callable[[int], None] = private("torch.cuda._sleep", _keep_busy, "writes to memory instead")


def _of_cuda(name: str, instead: str) -> Any:
    """A function that a torch without CUDA does not have, and never calls."""
    return private(f"torch._C.{name}", None, instead) if torch.version.cuda else None


_clear_blas = _of_cuda("_cuda_clearCublasWorkspaces", "graphs share cuBLAS's workspace with the calls beside them")
_end_pool = _of_cuda("_cuda_endAllocateToPool", "a capture that failed stays on the allocator's list")
_release_pool = _of_cuda("_cuda_releasePool", "memory of a capture that failed is kept")


def clear_blas_workspaces() -> None:
    """Has cuBLAS allocate its workspaces anew: within a capture from the graph's pool."""
    if _clear_blas is not None:
        _clear_blas()


def end_allocation_to_pool(device: torch.device, pool: Any) -> None:
    """What ``capture_end`` leaves out where the capture is void."""
    for function in (_end_pool, _release_pool):
        if function is not None:
            with contextlib.suppress(RuntimeError):  # it was not left out
                function(torch.cuda.current_device() if device.index is None else device.index, pool)


dispatch_mode: Any = private(
    "torch.utils._python_dispatch.TorchDispatchMode",
    None,
    "kgopt.optimize records no CUDA graphs",
    lambda mode: expect(mode, type),
)
