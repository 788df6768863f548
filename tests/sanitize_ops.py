"""A small shape of every CUDA op, forward and backward: what `make sanitize` runs under compute-sanitizer.

Not a test by itself: nothing is compared here, the ops only have to run. `python tests/sanitize_ops.py` runs it plain.
Sizes are no multiples of any tile, and small, since a sanitizer makes a kernel a hundred times slower.
With --own-kernels the pipelines run forward only: their backward goes through cuDNN, which racecheck cannot run.
With --initcheck what reads cuDNN's output in half types is left out, with --synccheck one case of large clusters.
--sections=NAME,NAME runs those of `SECTIONS`.
test_sanitize.py compares the ops and the kernel families that it runs with those that there are.
"""

from __future__ import annotations

import itertools
import sys

import torch

import kgopt  # noqa: F401  (registers the ops)
from opcases import small_calls

ops = torch.ops.kgopt
LOGSUMEXP = ops.conv2d_group_norm_tanh_hardswish_residual_logsumexp
MEAN = ops.conv3d_group_norm_mean
TRANSPOSED = ops.conv_transpose3d_relu_group_norm
DEVICE = "cuda"  # test_sanitize.py sets "meta", to see which ops are called
HALVES = (torch.bfloat16, torch.float16)
ACTS = (
    "relu",
    "leaky_relu",
    "silu",
    "gelu",
    "gelu_tanh",
    "sigmoid",
    "tanh",
    "hardswish",
    "hardtanh",
    "elu",
    "mish",
    "softplus",
    "tanh+hardswish",
    "leaky_relu(0.2)",
    "softplus(2,15)",
    "hardtanh(-2,3)+logsigmoid+mul(1.5)",
)
DTYPES = (torch.float32, *HALVES, torch.float64)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> torch.Tensor:
    """Random values on the GPU; made on the host, so that no other kernel is instrumented for it."""
    x = torch.randn(shape, dtype=torch.float32).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x.to(DEVICE)


def run(name: str, *inputs: torch.Tensor | None, call, backward: bool = True) -> None:
    """Calls an op on leaves and sends a gradient of ones back."""
    leaves = [t.detach().requires_grad_(backward and t.is_floating_point()) if t is not None else None for t in inputs]
    out = call(*leaves)
    outs = out if isinstance(out, (tuple, list)) else [out]
    if backward:
        # In the output's own layout, so that nothing but kgopt's kernels touches them.
        ones = [torch.empty_like(o, device="cpu").fill_(1).to(DEVICE) for o in outs if o.requires_grad]
        torch.autograd.backward([o for o in outs if o.requires_grad], ones)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("  " + name, flush=True)


def format_name(channels_last: bool) -> str:
    return "channels_last" if channels_last else "contiguous"


def run_chain(name, op, x, weight, c_out, groups, *rest, bias=True, backward=False, **keywords) -> None:
    """A pipeline, its convolution of c_out channels with a bias or without."""
    b, gamma, beta = (tensor(c_out, dtype=x.dtype) for _ in range(3))
    call = lambda x, w, b, g, h: op(x, w, b, groups, g, h, *rest, **keywords)  # noqa: E731
    run(name, x, weight, b if bias else None, gamma, beta, backward=backward, call=call)


def every_op_cases() -> None:
    """A call of each op there is, forward and backward, as the tests of the compiler make it."""
    through_cudnn = ("conv", "group_norm_conv")
    for dtype, last, backward in itertools.product((torch.float32, torch.float64), (False, True), (False, True)):
        calls = small_calls(DEVICE, dtype=dtype, channels_last=last, requires_grad=backward)
        for name, args, kwargs in calls:
            if "--own-kernels" in sys.argv and name.startswith(through_cudnn):
                continue  # their own kernels run in the sections below
            differentiable = backward and not name.endswith("_backward")
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

            def call(*given, name=name, args=args, kwargs=kwargs, places=places):
                values = list(args)
                for place, value in zip(places, given, strict=True):
                    values[place] = value
                return getattr(ops, name)(*values, **kwargs)

            run(f"{name} {dtype} {format_name(last)}", *tensors, call=call, backward=differentiable)


def add_case(name: str, x: torch.Tensor, groups: int) -> None:
    """relu(group_norm(x) + r), and PReLU with one slope and with one a channel."""
    slope = tensor(x.shape[1], dtype=x.dtype)
    run(f"group_norm_prelu {name}", x, slope[:1].clone(), call=lambda x, s: ops.group_norm_prelu(x, s, groups))
    prelu_of_sum = lambda x, s, r: ops.group_norm_prelu(x, s, groups, residual=r)  # noqa: E731
    run(f"group_norm_prelu by channel {name}", x, slope, x.detach().clone(), call=prelu_of_sum)
    affine = tensor(2, *x.shape[:2], dtype=x.dtype)
    by_sample = lambda x, w, b: ops.group_norm_by_sample(x, w, b, groups, act="silu")  # noqa: E731
    run(f"group_norm_by_sample {name}", x, *affine, call=by_sample)
    leaky = lambda x, r: ops.group_norm_add(x, r, groups, act="leaky_relu")  # noqa: E731
    run(f"group_norm_add, leaky {name}", x, x.detach().clone(), call=leaky)
    run(f"group_norm_add {name}", x, x.detach().clone(), call=lambda x, r: ops.group_norm_add(x, r, groups, act="relu"))


# Groups that stay on chip: in clusters, the channels of one and of many to a block, in teams of lanes.
ON_CHIP = (
    ("cluster", (1, 6, 101, 103), 2),
    ("cluster, many channels", (1, 520, 9, 5), 4),
    ("cluster of sixteen", (1, 2, 217, 219), 2),
    ("block", (3, 6, 21, 37), 3),
    ("team", (4, 12, 7, 11), 4),
    ("small team", (5, 6, 3, 3), 6),
)
# channels_last x that stays on chip: clusters, rows longer than a warp, rows of several positions, teams of blocks.
COLUMNS = (
    ("cluster", (2, 24, 33, 40), 8),
    ("long rows", (1, 1024, 7, 9), 1),
    ("several positions", (2, 6, 32, 34), 2),
    ("teams", (3, 128, 78, 88), 8),
    ("roles", (30, 24, 60, 64), 8),
    ("roles, long rows", (3, 1024, 23, 29), 1),
    ("roles, forward too", (3, 256, 48, 52), 8),
)
# Small groups: blocks of all samples, of neighbours, clusters, one channel, vectors; narrow groups side by side.
SMALL = (
    ("one position", (4, 159, 1, 1), 1),
    ("all samples", (9, 22, 3, 7), 11),
    ("short rows", (3, 657, 2, 2), 1),
    ("vectors", (2, 40, 8, 9), 5),
    ("one channel", (2, 11, 31, 33), 11),
    ("cluster", (2, 19, 45, 23), 1),
    ("narrow", (60, 89, 10, 11), 89),
)


def group_norm_cases() -> None:
    norms_of_every_dtype()
    channel_norms_of_many_channels()
    for dtype in (torch.float32, torch.bfloat16):
        for family, shapes, channels_last in (
            ("on chip", ON_CHIP, False),
            ("columns", COLUMNS, True),
            ("small", SMALL, False),
            ("small", SMALL, True),
        ):
            for name, shape, groups in shapes:
                # Clusters of sixteen whose blocks wait for each other's messages. In a cluster of more than eight
                # synccheck reports "Missing wait", and ends the process, for a program of sixty lines as well:
                # docs/log/2026-11-h200.md has it. The other tools run it.
                if "--synccheck" in sys.argv and name == "roles, forward too" and dtype in HALVES:
                    continue
                norm_and_sum(f"{family}, {name} {dtype}", shape, groups, dtype, channels_last)
    norms_read_once()
    # A group that spans several blocks, parameters in fp32 beside half data, a misaligned start, no parameters.
    big = tensor(1, 8, 41, 43, 37)
    run("group_norm large groups", big, call=lambda x: ops.group_norm(x, 2))
    run("group_norm_mean large groups", big, call=lambda x: ops.group_norm_mean(x, 2))
    half = tensor(2, 24, 5, 7, dtype=torch.bfloat16)
    run("group_norm mixed", half, tensor(24), tensor(24), call=lambda x, w, b: ops.group_norm(x, 8, w, b))
    flat = tensor(1 + 2 * 6 * 11)
    run("group_norm misaligned", flat, call=lambda t: ops.group_norm(t[1:].view(2, 6, 11), 3))


def norms_of_every_dtype() -> None:
    for dtype, last, spatial in itertools.product(DTYPES, (False, True), ((5, 7), (3, 5, 7))):
        label = f"{dtype} {format_name(last)} {spatial}"
        x = tensor(2, 24, *spatial, dtype=dtype, channels_last=last)
        weight, bias = tensor(24, dtype=dtype), tensor(24, dtype=dtype)
        run(f"group_norm {label}", x, weight, bias, call=lambda x, w, b: ops.group_norm(x, 8, w, b, 1e-5, "silu"))
        for kind in ("rms", "l2", "layer"):
            call = lambda x, w, b, kind=kind: ops.channel_norm(x, w, b, kind, 1e-6, "silu")  # noqa: E731
            run(f"channel_norm {kind} {label}", x, weight, bias, call=call)
        run(f"group_stats {label}", x, call=lambda x: ops.group_stats(x, 8))
        run(f"group_norm_mean {label}", x, weight, bias, call=lambda x, w, b: ops.group_norm_mean(x, 8, w, b))


def channel_norms_of_many_channels() -> None:
    """Several warps that share a position, channels that are read again, parameters in a table in memory."""
    for dtype, last, channels in itertools.product(DTYPES, (False, True), (136, 1096, 2056)):
        x = tensor(1, channels, 2, 40, dtype=dtype, channels_last=last)
        weight, bias = tensor(channels, dtype=dtype), tensor(channels, dtype=dtype)
        call = lambda x, w, b: ops.channel_norm(x, w, b, "layer", 1e-6, "silu")  # noqa: E731
        run(f"channel_norm {channels} {dtype} {format_name(last)}", x, weight, bias, call=call)


def norm_and_sum(name: str, shape: tuple[int, ...], groups: int, dtype: torch.dtype, channels_last: bool) -> None:
    x = tensor(*shape, dtype=dtype, channels_last=channels_last)
    weight, bias = tensor(shape[1]), tensor(shape[1])
    name = f"{name} {format_name(channels_last)}"
    run(f"group_norm {name}", x, weight, bias, call=lambda x, w, b: ops.group_norm(x, groups, w, b, 1e-5, "silu"))
    add_case(name, x, groups)


def norms_read_once() -> None:
    once = tensor(1, 6, 161, 160, 9)  # groups of 0.9 MB, off the 128-byte lines
    run("group_norm read once", once, call=lambda x: ops.group_norm(x, 6, None, None, 1e-5, "silu"))
    add_case("read once", once, 6)
    held = tensor(1, 2, 1100, 2101)  # groups of 9.2 MB: tiles in registers, too
    run("group_norm read once, in registers", held, call=lambda x: ops.group_norm(x, 2, None, None, 1e-5, "silu"))
    for dtype in (torch.float32, torch.bfloat16):
        both = tensor(2, 8, 147, 1024, dtype=dtype)  # x and dy of a group: 4.8 MB and more
        run("group_norm read once, both ways", both, call=lambda x: ops.group_norm(x, 1, None, None, 1e-5, "silu"))
        both = tensor(1, 6, 600, 1501, dtype=dtype)  # tiles in registers
        run("group_norm read once, relu", both, call=lambda x: ops.group_norm(x, 3, None, None, 1e-5, "relu"))


def pointwise_cases() -> None:
    x = tensor(3, 5, 7)
    for act in ACTS:
        run(f"activation {act}", x, call=lambda t, act=act: ops.activation(t, act))
    for dtype in DTYPES:
        x = tensor(3, 65, 5, 7, dtype=dtype)
        run(f"activation {dtype}", x, call=lambda t: ops.activation(t, "silu"))
        run(f"activation {dtype} strided", x, call=lambda t: ops.activation(t[:, ::2], "silu"))
        for dim in ([1], [3], [0, 2], [0, 1, 2, 3]):
            run(f"logsumexp {dtype} {dim}", x, call=lambda t, dim=dim: ops.logsumexp(t, dim, True))
            run(f"mean {dtype} {dim}", x, call=lambda t, dim=dim: ops.mean(t, dim, False))
        # Whole vectors along and across what is reduced, slices, and rows that take a block each.
        for shape in ((2, 40, 16, 24), (1, 3, 64, 312), (1, 70000)):
            x = tensor(*shape, dtype=dtype)
            for dim in ([1], [0, *range(2, len(shape))]):
                run(f"logsumexp {dtype} {shape} {dim}", x, call=lambda t, dim=dim: ops.logsumexp(t, dim, True))
                run(f"mean {dtype} {shape} {dim}", x, call=lambda t, dim=dim: ops.mean(t, dim, False))
        for columns in (5, 1028):
            x = tensor(3, columns, dtype=dtype)
            call = lambda t: ops.scaled_softmax(t, 0.3, t.dtype)  # noqa: E731
            run(f"scaled_softmax {dtype} {columns}", x, backward=False, call=call)


def conv_cases() -> None:
    """Gradients of a convolution come from ATen, so only the forward kernels are of interest."""
    exact = ((torch.float32, False), (torch.float64, False))
    for (dtype, tf32), last in itertools.product(((torch.float32, True), *exact, *((d, True) for d in HALVES)),
                                                 (False, True)):  # fmt: skip
        label = f"{dtype} tf32={tf32} {format_name(last)}"
        convs_of_each_family(label, dtype, tf32, last)
        convs_of_each_kind(label, dtype, last, {"backend": "kgopt", "allow_tf32": tf32})


def convs_of_each_family(label: str, dtype: torch.dtype, tf32: bool, last: bool) -> None:
    for (c_in, c_out, size), family in itertools.product(
        ((32, 32, (3, 9, 37)), (64, 72, (2, 7, 32)), (8, 24, (4, 5, 19))),
        ("", ":implicit_gemm", ":tap_columns", ":position_rows", ":few_channels"),
    ):
        x = tensor(2, c_in, *size, dtype=dtype, channels_last=last)
        w = tensor(c_out, c_in, 3, 3, 3, dtype=dtype)
        own = {"backend": f"kgopt{family}", "allow_tf32": tf32}
        once, none = [1] * 3, [0] * 3
        if DEVICE == "cuda" and ops.explain_conv(x, w, once, once, once, none, 1, False, **own).startswith("none"):
            continue  # the kernel that is named cannot run it
        call = lambda x, w, b, own=own: ops.conv3d(x, w, b, [1] * 3, [1] * 3, [1] * 3, **own)  # noqa: E731
        bias = tensor(c_out, dtype=dtype)
        run(f"conv3d {c_in} channels {label} {own['backend']}", x, w, bias, backward=False, call=call)


def convs_of_each_kind(label: str, dtype: torch.dtype, last: bool, own: dict) -> None:
    x3, x2 = (tensor(2, c, *s, dtype=dtype, channels_last=last) for c, s in ((3, (5, 9, 11)), (8, (13, 17))))
    b10, b20 = tensor(10, dtype=dtype), tensor(20, dtype=dtype)
    for name, op, x, weight, bias, geometry in (
        ("conv3d", ops.conv3d, x3, (10, 3, 3, 3, 3), b10, ([1, 2, 1], [1, 0, 1], [1, 1, 2])),
        ("conv2d", ops.conv2d, x2, (20, 8, 3, 3), b20, ([1, 1], [1, 1])),
        ("conv2d grouped", ops.conv2d, x2, (20, 4, 3, 3), None, ([2, 1], [0, 1], [1, 1], 2)),
        ("conv_transpose3d", ops.conv_transpose3d, x3, (3, 10, 3, 3, 3), b10, ([2, 1, 2], [1, 0, 1], [1, 0, 0])),
        ("conv_transpose2d", ops.conv_transpose2d, x2, (8, 12, 4, 3), None, ([1, 2], [0, 1], [0, 1])),
    ):
        call = lambda x, w, b, op=op, geometry=geometry: op(x, w, b, *geometry, **own)  # noqa: E731
        run(f"{name} {label}", x, tensor(*weight, dtype=dtype), bias, backward=False, call=call)


def conv_gradient_cases() -> None:
    """Own kernels alone: what ATen makes of the rest is left out, and so is dbias."""
    for dtype in (torch.float32, *HALVES):
        gradients_in_channels_last(dtype)
        gradients_of_first_layers(dtype)
        x = tensor(1, 32, 3, 9, 37, dtype=dtype, channels_last=True)
        for c_out in (40, 72):  # fp32 weights, which the two kernels' packing rounds
            call = lambda x, w, b: ops.conv3d(x, w, b, [1] * 3, [1] * 3, backend="kgopt", allow_tf32=True)  # noqa: E731
            weight, bias = tensor(c_out, 32, 3, 3, 3), tensor(c_out)
            run(f"conv3d fp32 weights {c_out} {dtype}", x, weight, bias, call=call, backward=False)


def run_gradients(name, dy, x, weight, geometry, wanted=(True, True, True), backend="kgopt") -> None:
    """``geometry``: stride, padding, dilation, output padding, groups, transposed."""
    call = lambda dy, x, w: ops.conv_backward(dy, x, w, *geometry, list(wanted), backend=backend, allow_tf32=True)  # noqa: E731
    run(f"conv_backward {name} {x.dtype}", dy, x, weight, backward=False, call=call)


def depthwise_cases() -> None:
    """Tiles of images and volumes at both strides, and with dilation, forward and backward."""
    for dtype, last in itertools.product((torch.float32, *HALVES), (False, True)):
        for c, size, kernel, stride, padding, dilation in (
            (20, (5, 9, 24), 3, 1, 1, 1),
            (20, (6, 9, 19), 5, 2, 2, 1),
            (9, (4, 8, 16), 7, 1, 3, 1),
            (24, (19, 24), 3, 1, 1, 1),
            (24, (19, 23), 5, 2, 2, 1),
            (40, (7, 7), 7, 1, 3, 1),
            (24, (19, 25), 3, 1, 2, 2),
            (10, (5, 9, 14), 3, 1, 2, 2),
        ):
            rank = len(size)
            x = tensor(2, c, *size, dtype=dtype, channels_last=last)
            weight, bias = tensor(c, 1, *[kernel] * rank, dtype=dtype), tensor(c, dtype=dtype)
            geometry = [stride] * rank, [padding] * rank, [dilation] * rank
            op = ops.conv2d if rank == 2 else ops.conv3d
            call = lambda x, w, b, op=op, geometry=geometry, c=c: op(x, w, b, *geometry, c, backend="kgopt")  # noqa: E731
            name = f"depthwise {c} channels {size} {kernel} {dtype} {format_name(last)}"
            run(name, x, weight, bias, backward=False, call=call)
            out = [(s + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for s in size]
            dy = tensor(2, c, *out, dtype=dtype, channels_last=last)
            run_gradients(name, dy, x, weight, (*geometry, [0] * rank, c, False), (True, True, False))


def gradients_in_channels_last(dtype: torch.dtype) -> None:
    for name, c_in, c_out, size, kernel, transposed in (
        ("", 32, 40, (5, 9, 37), (3, 3, 3), False),
        ("16 channels", 16, 32, (5, 9, 20), (3, 3, 3), False),
        ("transposed", 40, 32, (3, 7, 18), (3, 3, 3), True),
        ("2d", 64, 32, (1, 19, 50), (1, 3, 3), False),
        ("5 deep", 16, 32, (6, 5, 20), (5, 3, 3), False),
        ("first layer", 4, 32, (5, 9, 40), (3, 3, 3), False),
        ("first layer, 2d", 3, 16, (1, 21, 48), (1, 3, 3), False),
    ):
        x, dy = (tensor(2, c, *size, dtype=dtype, channels_last=True) for c in (c_in, c_out))
        weight = tensor(*((c_in, c_out) if transposed else (c_out, c_in)), *kernel, dtype=dtype)
        geometry = ([1] * 3, [k // 2 for k in kernel], [1] * 3, [0] * 3, 1, transposed)
        run_gradients(name, dy, x, weight, geometry, (c_in > 4, True, True))
    for c_in, c_out in ((32, 3), (40, 1), (8, 7)):
        x, dy = (tensor(2, c, 9, 17, 19, dtype=dtype, channels_last=True) for c in (c_in, c_out))
        geometry = ([1] * 3, [0] * 3, [1] * 3, [0] * 3, 1, False)
        weight = tensor(c_out, c_in, 1, 1, 1, dtype=dtype)
        run_gradients(f"head {c_in} {c_out}", dy, x, weight, geometry, backend="auto")
    x = tensor(2, 32, 6, 11, 36, dtype=dtype, channels_last=True)
    dy = tensor(2, 40, 3, 6, 18, dtype=dtype, channels_last=True)
    geometry = ([2] * 3, [1] * 3, [1] * 3, [0] * 3, 1, False)
    run_gradients("stride 2", dy, x, tensor(40, 32, 3, 3, 3, dtype=dtype), geometry, (False, True, False))


def gradients_of_first_layers(dtype: torch.dtype) -> None:
    for name, c_in, c_out, size, kernel, padding in (
        ("contiguous", 3, 24, (5, 9, 38), (3, 3, 3), (0, 1, 0)),
        ("contiguous, padded", 4, 20, (5, 9, 40), (3, 3, 3), (1, 1, 1)),
        ("2d, contiguous", 8, 64, (1, 21, 48), (1, 3, 3), (0, 0, 0)),
    ):
        x, weight = tensor(2, c_in, *size, dtype=dtype), tensor(c_out, c_in, *kernel, dtype=dtype)
        out = [s + 2 * p - k + 1 for s, p, k in zip(size, padding, kernel, strict=True)]
        dy = tensor(2, c_out, *out, dtype=dtype)
        run_gradients(f"first layer, {name}", dy, x, weight, ([1] * 3, list(padding), [1] * 3, [0] * 3, 1, False))


def between_cases() -> None:
    for dtype, last, spatial in itertools.product(DTYPES, (False, True), ((5, 7), (3, 5, 7))):
        rank = len(spatial)
        for channels in (16, 3):
            label = f"{dtype} {format_name(last)} {spatial} {channels}"
            x = tensor(2, channels, *spatial, dtype=dtype, channels_last=last)
            larger = tensor(2, channels, *(2 * s for s in spatial), dtype=dtype, channels_last=last)
            run(f"upsample_linear {label}", x, larger, backward=False, call=ops.upsample_linear)
            run(f"upsample_linear_backward {label}", larger, backward=False, call=ops.upsample_linear_backward)
            run(f"upsample_nearest {label}", x, call=lambda x, f=[2] * rank: ops.upsample_nearest(x, f))
            run(f"in_format {label}", x, call=lambda x, f=not last: ops.in_format(x, f))
            other = torch.float16 if dtype is torch.float32 else torch.float32
            run(f"in_format {label} {other}", x, call=lambda x, f=not last, t=other: ops.in_format(x, f, t))
            pads = [1, 1] * (rank - 1) + [2, 0]
            run(f"pad_replicate {label}", x, backward=False, call=lambda x, p=pads: ops.pad_replicate(x, p))
            for window in (([2] * rank, [2] * rank, [0] * rank), ([3] * rank, [2] * rank, [1] * rank)):
                run(f"max_pool {label}", x, backward=False, call=lambda x, w=window: ops.max_pool(x, *w))
            weight = tensor(channels, channels, *[3] * rank, dtype=dtype, channels_last=last)
            for to in (False, True):
                call = lambda w, f=[2] * rank, to=to: ops.upsample_conv_weight(w, f, 1, to)  # noqa: E731
                run(f"upsample_conv_weight {label} {to}", weight, backward=False, call=call)
            weight = tensor(channels, channels, *[1] * rank, dtype=dtype, channels_last=last)
            rest = ([1] * rank, [0] * rank, [1] * rank, [0] * rank, 1, False, 2.0)
            # Its convolution is cuDNN's, which stores half types in a way that initcheck does not follow.
            if "--own-kernels" not in sys.argv and not ("--initcheck" in sys.argv and dtype in HALVES):
                bias = tensor(channels, dtype=dtype)
                call = lambda x, w, b, r, rest=rest: ops.conv_add(x, w, b, r, *rest)  # noqa: E731
                run(f"conv_add {label}", x, weight, bias, x, backward=False, call=call)
    # Through registers: positions that are whole vectors and that are not, blocks of a warp that come out even and not.
    for dtype, channels, width in itertools.product(DTYPES, (32, 56), (512, 513)):
        x = tensor(1, channels, 2**21 // (channels * width) + 3, width, dtype=dtype)
        for to, lies in ((True, x), (False, x.contiguous(memory_format=torch.channels_last))):
            call = lambda x, to=to: ops.in_format(x, to)  # noqa: E731
            run(f"in_format {dtype} {channels} {width} {to}", lies, backward=False, call=call)


def fused_convolution_cases() -> None:
    """Residuals, activations and moments in the Hopper convolution, and what reads the moments."""
    for dtype, channels, spatial in itertools.product(DTYPES, (32, 64), ((3, 4, 64), (4, 9, 37), (3, 3, 16))):
        if dtype == torch.float64:
            continue
        label = f"{dtype} {channels} {spatial}"
        x = tensor(2, channels, *spatial, dtype=dtype, channels_last=True)
        weight = tensor(channels, channels, 3, 3, 3, dtype=dtype, channels_last=True)
        bias = tensor(channels, dtype=dtype)
        rest = ([1] * 3, [1] * 3, [1] * 3, [0] * 3, 1, False, 2.0, "relu")
        call = lambda x, w, b, r, rest=rest: ops.conv_add(x, w, b, r, *rest, backend="kgopt")  # noqa: E731
        run(f"conv_add of few channels {label}", x, weight, bias, x, backward=False, call=call)
        for residual in (x, None):
            call = lambda x, w, b, r=residual, rest=rest: ops.conv_add_moments(x, w, b, r, *rest, backend="kgopt")[0]  # noqa: E731
            run(f"conv_add_moments {label}", x, weight, bias, backward=False, call=call)
    for dtype, out, channels in itertools.product(DTYPES, (1, 3, 5), (16, 24)):
        x = tensor(2, channels, 3, 5, 7, dtype=dtype, channels_last=True)
        weight, bias = tensor(out, channels, 1, 1, 1, dtype=dtype), tensor(out, dtype=dtype)
        gamma, beta = tensor(channels, dtype=dtype), tensor(channels, dtype=dtype)
        stats = torch.float64 if dtype == torch.float64 else torch.float32
        moments = tensor(2, channels, 2, dtype=stats).abs()
        label = f"{dtype} {channels} to {out}"
        call = lambda x, m, g, b: ops.group_norm_moments(x, m, 8, g, b, 1e-5, "silu")  # noqa: E731
        run(f"group_norm_moments {label}", x, moments, gamma, beta, backward=False, call=call)
        small = [1 if s % 2 else s // 2 for s in x.shape[2:]]  # maps of which a position stands for several of x
        maps = [torch.randn(*x.shape[:2], *small, device=x.device, dtype=x.dtype) for _ in range(2)]
        call = lambda x, s, t: ops.group_norm_maps(x, None, s, t, 8, act="silu")  # noqa: E731
        run(f"group_norm_maps {label}", x, *maps, backward=False, call=call)
        if "--own-kernels" in sys.argv and (out > 4 or channels == 24):
            continue  # cuDNN's convolution
        call = lambda x, m, w, b: ops.group_norm_conv1x1(x, m, 8, None, None, 1e-5, "relu", w, b)  # noqa: E731
        run(f"group_norm_conv1x1 {label}", x, moments, weight, bias, backward=False, call=call)
        call = lambda x, w, b: ops.group_norm_conv1x1(x, None, 0, None, None, 0.0, "none", w, b)  # noqa: E731
        run(f"group_norm_conv1x1 without a norm {label}", x, weight, bias, backward=False, call=call)
    for dtype, (out, channels), act in itertools.product(DTYPES[:3], ((64, 64), (72, 40), (3, 40)), ("relu", "silu")):
        for spatial in ((3, 5, 19), (9, 33)):
            rank = len(spatial)
            flat = out == 3 and rank == 3  # no taps along the depth
            kernel, padding = ([1, 3, 3], [0, 1, 1]) if flat else ([3] * rank, [1] * rank)
            x = tensor(2, channels, *spatial, dtype=dtype, channels_last=True)
            weight, bias = tensor(out, channels, *kernel, dtype=dtype, channels_last=True), tensor(out, dtype=dtype)
            moments = tensor(2, channels, 2).abs()
            rest = (None, [1] * rank, padding, [1] * rank, [0] * rank)
            backend = "auto" if out == 3 else "kgopt:position_rows"
            call = lambda x, m, w, b, act=act, rest=rest, backend=backend: ops.group_norm_conv(  # noqa: E731
                x, m, 8, None, None, 1e-5, act, w, b, *rest, backend=backend
            )
            label = f"{dtype} {channels} to {out} {spatial} {act}"
            run(f"group_norm_conv {label}", x, moments, weight, bias, backward=False, call=call)
            if dtype != torch.float32 or out == 3 or "--own-kernels" in sys.argv or "--initcheck" in sys.argv:
                continue  # initcheck does not see what cuDNN's convolutions of halves write, F.conv2d's neither
            call = lambda x, g, w, b, act=act, rest=rest: ops.group_norm_conv(  # noqa: E731
                x, None, 8, g, None, 1e-5, act, w, b, *rest, backend="kgopt:scaled_half"
            )
            run(f"scaled half {label}", x, tensor(channels), weight, bias, backward=False, call=call)


def scaled_half_cases() -> None:
    """Convolutions of scaled halves and their gradients, with and without a norm that rounds."""
    for (c_in, c_out), spatial in itertools.product(((64, 64), (40, 72)), ((3, 5, 19), (9, 33))):
        rank, dense = len(spatial), {"channels_last": True}
        geometry = [1] * rank, [1] * rank, [1] * rank
        x, dy = tensor(2, c_in, *spatial, **dense), tensor(2, c_out, *spatial, **dense)
        weight, bias, gamma = tensor(c_out, c_in, *[3] * rank), tensor(c_out), tensor(c_in)
        for groups, act in ((0, "none"), (8, "silu")):
            label = f"{c_in} to {c_out} {spatial} {groups} groups"
            norm = groups, gamma if groups else None, None, 1e-5, act
            run(f"scaled_half {label}", x, backward=False, call=lambda x, norm=norm: ops.scaled_half(x, *norm))
            if "--own-kernels" in sys.argv or "--initcheck" in sys.argv:
                continue  # initcheck does not see what cuDNN's convolutions of halves write
            half, inverse, _, _ = ops.scaled_half(x, *norm)
            call = lambda w, b, r, h=half, i=inverse, g=geometry: ops.conv_scaled_half(h, i, w, b, r, *g)  # noqa: E731
            run(f"conv_scaled_half {label}", weight, bias, dy, backward=False, call=call)
            call = lambda dy, w, h=half, i=inverse, g=geometry: ops.conv_scaled_half_backward(  # noqa: E731
                dy, h, i, w, *g, [True] * 3
            )
            run(f"conv_scaled_half_backward {label}", dy, weight, backward=False, call=call)


def norm_lse_cases() -> None:
    """The third pipeline's backward behind its convolution: more channels than a block takes at once, and few."""
    backward = ops.group_norm_tanh_hardswish_residual_logsumexp_backward
    for dtype, last in itertools.product(DTYPES, (False, True)):
        stats = torch.float64 if dtype == torch.float64 else torch.float32
        for channels, groups, spatial in ((8, 2, (9, 20)), (136, 8, (4, 7)), (15, 5, (3, 5)), (300, 10, (2, 2))):
            run(
                f"norm_lse_backward {dtype} {format_name(last)} {channels} {spatial}",
                tensor(3, channels, *spatial, dtype=dtype, channels_last=last),
                tensor(channels, dtype=dtype),
                tensor(channels, dtype=dtype),
                tensor(3, 1, *spatial, dtype=stats),
                tensor(3, groups, dtype=stats),
                tensor(3, groups, dtype=stats).abs(),
                backward=False,
                call=lambda x, w, b, dlse, mean, rstd, g=groups: backward(dlse, x, mean, rstd, g, w, b),
            )


def pipeline_cases() -> None:
    small_pipelines()
    logsumexp_with_positions_as_rows()
    pipelines_of_several_tiles()
    # Statistics from the input's autocorrelation, which are taken of many images.
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = tensor(128, 8, 64, 64, dtype=dtype), tensor(40, 8, 3, 3, dtype=dtype)
        run_chain(f"conv2d_..._logsumexp of many images {dtype}", LOGSUMEXP, x, weight, 40, 8, allow_tf32=True)
    transposed_pipelines_in_one_launch()


def small_pipelines() -> None:
    for dtype, backward in itertools.product(DTYPES, (False,) if "--own-kernels" in sys.argv else (False, True)):
        label = f"{dtype} {'forward and backward' if backward else 'forward'}"
        for name, op, x, weight, c_out, groups, *rest in (
            ("conv3d_group_norm_mean", MEAN, (2, 3, 6, 9, 11), (8, 3, 3, 3, 3), 8, 4),
            ("conv_transpose3d_relu_group_norm", TRANSPOSED, (1, 6, 3, 5, 7), (6, 8, 3, 3, 3), 8, 4, [2, 2, 2]),
            ("conv2d_..._logsumexp", LOGSUMEXP, (2, 8, 13, 19), (24, 8, 3, 3), 24, 8),
        ):
            x, weight = tensor(*x, dtype=dtype), tensor(*weight, dtype=dtype)
            bias = op is not TRANSPOSED
            run_chain(f"{name} {label}", op, x, weight, c_out, groups, *rest, bias=bias, backward=backward)


def logsumexp_with_positions_as_rows() -> None:
    """On Hopper: positions as rows of the products, an input of small spread around a slope, several chunks of
    channels.
    """
    for dtype, smooth in itertools.product((torch.float32, *HALVES), (False, True)):
        x, weight = tensor(2, 8, 70, 136, dtype=dtype), tensor(40, 8, 3, 3, dtype=dtype)
        if smooth:
            x = x * 1e-3 + torch.linspace(0, 1, 136, device=x.device, dtype=dtype)
            weight -= weight.mean(dim=(1, 2, 3), keepdim=True)
        run_chain(f"conv2d_..._logsumexp to 40 channels {dtype} slope={smooth}", LOGSUMEXP, x, weight, 40, 8)
        x = tensor(2, 12, 21, 37, dtype=dtype) * (300 if smooth else 1)
        weight = tensor(64, 12, 3, 3, dtype=dtype)
        run_chain(f"conv2d_..._logsumexp of 12 channels {dtype} large={smooth}", LOGSUMEXP, x, weight, 64, 8)


def pipelines_of_several_tiles() -> None:
    """On Hopper: rows of 32 and of 64 positions, channels as rows of the products and as columns."""
    for dtype, tf32, c_out, last in itertools.product((torch.float32, *HALVES), (True, False), (16, 40), (False, True)):
        if dtype in HALVES and not tf32:
            continue
        label = f"{dtype} tf32={tf32} to {c_out} {format_name(last)}"
        x, weight = tensor(2, 3, 4, 11, 20, dtype=dtype, channels_last=last), tensor(c_out, 3, 2, 3, 3, dtype=dtype)
        own = {"allow_tf32": tf32, "backend": "kgopt"} if DEVICE == "cuda" else {}
        run_chain(f"conv3d_group_norm_mean {label}", MEAN, x, weight, c_out, 8, backward=True, **own)
        if tf32 and c_out > 32:  # whose gradients need no kernel of cuDNN's
            x, weight = tensor(2, 8, 11, 38, dtype=dtype, channels_last=last), tensor(c_out, 8, 3, 3, dtype=dtype)
            run_chain(f"conv2d_..._logsumexp backward {label}", LOGSUMEXP, x, weight, c_out, 8, backward=True, **own)
        for size in ((11, 30), (38, 150)):
            x, weight = tensor(2, 7, *size, dtype=dtype, channels_last=last), tensor(c_out, 7, 3, 3, dtype=dtype)
            run_chain(f"conv2d_..._logsumexp {label} {size}", LOGSUMEXP, x, weight, c_out, 8, allow_tf32=tf32)


def transposed_pipelines_in_one_launch() -> None:
    """On Hopper: tiles across planes, several samples and tiles a block, two tiles of channels."""
    for dtype, tf32 in ((torch.float32, True), (torch.float32, False), *((d, True) for d in HALVES)):
        for n, c_in, c_out, size in ((4, 40, 72, (3, 6, 10)), (2, 64, 136, (6, 14, 22)), (7, 33, 128, (6, 30, 62))):
            label = f"conv_transpose3d_relu_group_norm {dtype} tf32={tf32} {n}x{c_in} to {c_out} {size}"
            x, weight = tensor(n, c_in, *size, dtype=dtype), tensor(c_in, c_out, 3, 3, 3, dtype=dtype)
            run_chain(label, TRANSPOSED, x, weight, c_out, 8, backend="kgopt", allow_tf32=tf32)


SECTIONS = {
    section.__name__.removesuffix("_cases"): section
    for section in (
        every_op_cases,
        group_norm_cases,
        pointwise_cases,
        between_cases,
        conv_cases,
        conv_gradient_cases,
        depthwise_cases,
        fused_convolution_cases,
        scaled_half_cases,
        norm_lse_cases,
        pipeline_cases,
    )
}


def main() -> int:
    wanted = [name for a in sys.argv if a.startswith("--sections=") for name in a.partition("=")[2].split(",")]
    for name in wanted:
        if name not in SECTIONS:
            sys.exit(f"--sections has {name!r}, expected some of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print("no CUDA device here, nothing to run")
        return 0
    torch.manual_seed(0)
    for name in wanted or SECTIONS:
        section = SECTIONS[name]
        print(section.__name__)
        section()
    return 0


if __name__ == "__main__":
    sys.exit(main())
