"""What holds of every op: same bits twice, every output written, inputs left alone, any strides, any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from opcases import NAMES, small_calls

OPS = torch.ops.kgopt


def as_tuple(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def tensors_of(args):
    return [a for a in args if isinstance(a, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_same_bits_twice(index, channels_last, dtype, device, poisoned):
    name, args, kwargs = small_calls(device, dtype, channels_last)[index]
    before = [t.clone() for t in tensors_of(args)]
    first = as_tuple(getattr(OPS, name)(*args, **kwargs))
    second = as_tuple(getattr(OPS, name)(*args, **kwargs))
    for a, b in zip(first, second, strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(args), before, strict=True))
    ours = {t.untyped_storage().data_ptr() for t in first}
    assert len(ours) == len(first), "two outputs share memory"
    assert not ours & {t.untyped_storage().data_ptr() for t in tensors_of(args)}, "an output is an input's memory"


def every_other(t):
    """The same values, each second element of a longer last dim."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), device=t.device, dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


def misaligned(t):
    """The same values, one element behind an aligned address."""
    flat = torch.full((t.numel() + 1,), float("nan"), device=t.device, dtype=t.dtype)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def reversed_dims(t):
    """The same values in Fortran order."""
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("view", [every_other, misaligned, reversed_dims], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_strides_of_every_argument(index, dtype, view, device, poisoned):
    """Each tensor argument in turn: parameters and statistics have strides too."""
    name, args, kwargs = small_calls(device, dtype)[index]
    expected = as_tuple(getattr(OPS, name)(*args, **kwargs))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            out = as_tuple(getattr(OPS, name)(*args[:i], view(a), *args[i + 1 :], **kwargs))
            for o, e in zip(out, expected, strict=True):
                torch.testing.assert_close(o, e, **tolerance, msg=lambda m, i=i: f"argument {i}: {m}")


def test_threads(device):
    """Data loaders and servers call from threads; workspaces and switches must not be shared between them."""
    calls = [(getattr(OPS, name), args, kwargs) for name, args, kwargs in small_calls(device)]
    expected = [as_tuple(op(*args, **kwargs)) for op, args, kwargs in calls]

    def run(seed):
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(seed)).tolist()
        return [(i, as_tuple(calls[i][0](*calls[i][1], **calls[i][2]))) for i in order]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(run, range(16)):
            for i, out in results:
                for o, e in zip(out, expected[i], strict=True):
                    torch.testing.assert_close(o, e, rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{NAMES[i]}: {m}")
