"""Small pipelines, which Hopper does in one launch (csrc/conv3d/small_chain)."""

from __future__ import annotations

import pytest
import torch

from pipeline_cases import PIPELINES, check, last_format, upcast

# Small chains, which Hopper does in one launch: batch, c_in, c_out, norm groups, sizes, kernel, options
SMALL_CHAINS = {
    "mean": {
        "one value a channel and group": (5, 3, 4, 2, (3, 3, 3), (3, 3, 3), {}),
        "a block a sample": (200, 6, 8, 8, (6, 5, 4), (5, 2, 2), {"dilation": (1, 1, 2)}),
        "a cluster a sample": (6, 13, 7, 1, (6, 15, 16), (2, 2, 2), {"padding": (0, 1, 0), "stride": (1, 2, 1)}),
        "depth divided": (3, 2, 16, 2, (41, 24, 17), (2, 1, 2), {"padding": (1, 0, 0)}),
        "a team of blocks": (1, 5, 54, 2, (23, 44, 38), (2, 1, 3), {}),
        "conv groups": (3, 10, 72, 4, (4, 7, 7), (2, 3, 2), {"groups": 2, "padding": (1, 0, 0)}),
        "many channels": (2, 3, 600, 40, (3, 4, 5), (2, 2, 2), {}),
    },
    "logsumexp": {
        "one channel": (9, 2, 1, 1, (27, 55), (3, 3), {"padding": (1, 0)}),
        "a block a sample": (105, 1, 4, 4, (17, 15), (3, 3), {"stride": (1, 2)}),
        "a cluster a sample": (14, 3, 4, 4, (55, 57), (1, 3), {"padding": (0, 1)}),
        "channels among lanes": (3, 28, 130, 2, (6, 9), (3, 3), {"dilation": (2, 1), "stride": (1, 2)}),
        "a team of blocks": (1, 2, 8, 8, (386, 484), (3, 1), {"stride": (1, 2)}),
        "long K": (3, 23, 16, 16, (10, 14), (5, 7), {"padding": (1, 0)}),
        "conv groups": (6, 14, 4, 4, (5, 4), (3, 3), {"groups": 2, "padding": 1, "dilation": (2, 1)}),
    },
}


SMALL = [(pipeline, name) for pipeline, chains in SMALL_CHAINS.items() for name in chains]


def make_small(pipeline, name, dtype, device):
    batch, c_in, c_out, groups, size, kernel, options = SMALL_CHAINS[pipeline][name]
    generator = torch.Generator().manual_seed(c_in * c_out)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    tensors = [draw(batch, c_in, *size), draw(c_out, c_in // options.get("groups", 1), *kernel) * 0.3]
    tensors += [draw(c_out), draw(c_out), draw(c_out)]
    x, weight, bias, gamma, beta = (t.to(device, dtype) for t in tensors)
    return [x, weight, bias, groups, gamma, beta], options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("pipeline", "name"), SMALL)
def test_small_chain_values(pipeline, name, dtype, device, poisoned):
    args, options = make_small(pipeline, name, dtype, device)
    function = PIPELINES[pipeline][0]
    y = function(*args, **options)
    check(pipeline, y, args, options)
    assert torch.equal(y, function(*args, **options)), "the same bits again"
    moved = [args[0].contiguous(memory_format=last_format(args[0])), *args[1:]]
    check(pipeline, function(*moved, **options), args, options)
    wide = torch.randn(args[0].shape[0] + 1, *args[0].shape[1:-1], args[0].shape[-1] + 3, device=device).to(dtype)
    wide[1:, ..., 2:-1] = args[0]
    assert torch.equal(y, function(wide[1:, ..., 2:-1], *args[1:], **options)), "a slice of something larger"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("pipeline", "name"), [one for one in SMALL if "divided" not in one[1]])
def test_small_chain_keeps_samples_apart(pipeline, name, value, device):
    """What is not finite makes its own sample NaN and no other."""
    args, options = make_small(pipeline, name, torch.float32, device)
    function = PIPELINES[pipeline][0]
    before = function(*args, **options)
    middle = tuple(size // 2 for size in args[0].shape[2:])
    args[0][(-1, 0, *middle)] = value
    after = function(*args, **options)
    expected = PIPELINES[pipeline][1](*args, **options)
    assert bool(after[-1].isnan().all()) == bool(expected[-1].isnan().all())
    assert torch.equal(before[:-1], after[:-1])


@pytest.mark.parametrize(("pipeline", "name"), SMALL)
def test_small_chain_gradients(pipeline, name, device):
    """Statistics that the one launch leaves for the backward."""
    args, options = make_small(pipeline, name, torch.float32, device)
    function, ref, *_ = PIPELINES[pipeline]
    at = [0, 1, 2, 4, 5]

    def gradients(f, inputs):
        inputs = [t.detach().clone().requires_grad_() if i in at else t for i, t in enumerate(inputs)]
        f(*inputs, **options).double().square().sum().backward()
        return [inputs[i].grad for i in at]

    exact = [true.to(device) for true in gradients(ref, upcast(args))]
    # Gradients of the bias in front of the norm are sums that cancel: nothing but rounding.
    least = 1e-4 * max(float(true.norm()) for true in exact)
    for own, torchs, true in zip(gradients(function, args), gradients(ref, args), exact, strict=True):
        allowed = 3 * float((torchs - true).norm()) + 2e-5 * max(float(true.norm()), least)
        assert float((own - true).norm()) <= allowed
