"""DTensor inputs: every op on two processes, values and gradients as of one, and the placements of what comes out.

One pair of processes runs all of it (starting one takes seconds); each case is a test that looks its outcome up.
"""

from __future__ import annotations

import copy
import os
import socket
import traceback

import pytest
import torch
from torch import nn

import kgopt
from kgopt.ops.registry import RECORDS
from opcases import BEHIND_AUTOGRAD, NAMES, small_calls

WORLD = 2


def scenarios(args):
    """What a user may hand in: placements by name, of x and its kin and of the rest."""
    return {
        "samples": lambda t, i: "S0" if t.dim() > 2 or i == 0 else "R",
        "channels": lambda t, i: "S1" if t.dim() > 2 or (i == 0 and t.dim() > 1) else "R",
        "rows": lambda t, i: "S2" if t.dim() > 2 else "R",
        "parameters": lambda t, i: "S0" if t.dim() == 1 else "R",
        "sums": lambda t, i: "P" if i == 0 else "R",
        "whole": lambda t, i: "R",
    }


SCENARIOS = tuple(scenarios(()))

# By hand, of small_calls' ops: the placement of every result where samples and where channels come sharded, and of
# the gradients of the tensors. small_calls have 2 samples and 4 or 6 channels, in 2 or 3 groups.
SHARDED_BY_CHANNELS = {  # whose result stays so
    "group_stats": ["S1", "S1"],
    "group_stats_backward": ["S1"],
    "group_norm": ["S1"],
    "group_norm_moments": ["S1"],
    "group_norm_maps": ["S1"],
    "group_norm_fwd": ["S1", "S1", "S1"],
    "group_norm_add": ["S1"],
    "group_norm_add_fwd": ["S1", "S1", "S1"],
    "group_norm_by_sample": ["S1"],
    "group_norm_by_sample_fwd": ["S1", "S1", "S1"],
    "group_norm_by_sample_backward": ["S1", "S1", "S1"],
    "group_norm_prelu": ["S1"],
    "group_norm_prelu_fwd": ["S1", "S1", "S1"],
    "group_norm_prelu_backward": ["S1", "S1", "S0", "S0", "S0"],
    "group_norm_add_leaky_relu_backward": ["S1", "S1", "S0", "S0"],
    "group_norm_backward": ["S1", "S0", "S0"],
    "activation": ["S1"],
    "activation_backward": ["S1"],
    "upsample_linear": ["S1"],
    "upsample_nearest": ["S1"],
    "upsample_nearest_backward": ["S1"],
    "pad_replicate": ["S1"],
    "in_format": ["S1"],
    "max_pool": ["S1"],
}
SHARDED_BY_SAMPLES = {name: ["S0"] for name in NAMES} | {
    "conv_backward": ["S0", "P", "P"],
    "channel_norm_backward": ["S0", "P", "P"],
    "group_norm_backward": ["S0", "P", "P"],
    "group_norm_mean_backward": ["S0", "P", "P"],
    "group_norm_tanh_hardswish_residual_logsumexp_backward": ["S0", "P", "P"],
    "group_stats": ["S0"] * 2,
    "group_norm_fwd": ["S0"] * 3,
    "group_norm_add_fwd": ["S0"] * 3,
    "group_norm_by_sample_fwd": ["S0"] * 3,
    "group_norm_by_sample_backward": ["S0"] * 3,
    "group_norm_prelu_fwd": ["S0"] * 3,
    "group_norm_prelu_backward": ["S0", "S0", "P", "P", "P"],
    "group_norm_add_leaky_relu_backward": ["S0", "S0", "P", "P"],
    "group_norm_mean_fwd": ["S0"] * 4,
    "conv_add_moments": ["S0"] * 2,
    "group_norm_conv_moments": ["S0"] * 2,
    "conv3d_group_norm_mean_fwd": ["S0"] * 4,
    "conv_transpose3d_relu_group_norm_fwd": ["S0"] * 4,
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd": ["S0"] * 3,
    "upsample_conv_weight": ["R"],  # a weight has no samples
    "mean_backward": ["S1"],  # its dy [4, 10] has no dim of samples: dim 0 are the channels
}
# Those of which no gradient is asked: statistics, and what is no tensor of values.
FIXED = {"moments", "mean", "rstd", "channel_mean", "lse", "y", "dmean", "drstd"}


def placement(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1), "S2": Shard(2)}[text]


def short(placements):
    """ "S1" for (Shard(1),)."""
    (one,) = placements
    return "R" if one.is_replicate() else "P" if one.is_partial() else f"S{one.dim}"


def as_tuple(out):
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def tolerance(dtype):
    return {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}


def distributed(t, mesh, text):
    """A DTensor with the values of t; of "P", whose parts differ and sum up to them."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    t = t.detach()
    if text == "P":
        part = t / 4 if mesh.get_local_rank() == 0 else t - t / 4
        return DTensor.from_local(part, mesh, [placement("P")], run_check=False)
    if text.startswith("S") and int(text[1:]) >= t.dim():
        text = "R"
    return distribute_tensor(t, mesh, [placement(text)])


def run_op(mesh, index, scenario, dtype):
    """One op with DTensors against the same op with the whole tensors, in every way of being called."""
    name, args, kwargs = small_calls(mesh.device_type, dtype)[index]
    op = getattr(torch.ops.kgopt, name)
    of = scenarios(args)[scenario]
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    names = [a.name for a in op.default._schema.arguments]
    differentiable = [i for i in tensors if names[i] not in FIXED and not name.endswith("_backward")]

    def leaves(make):
        made = [make(a, i) if i in tensors else a for i, a in enumerate(args)]
        for i in differentiable:
            made[i].requires_grad_()
        return made

    plain = leaves(lambda a, i: a.detach().clone())
    sharded = leaves(lambda a, i: distributed(a, mesh, of(a, i)))
    expected, actual = as_tuple(op(*plain, **kwargs)), as_tuple(op(*sharded, **kwargs))
    placements = [short(a.placements) for a in actual]
    for e, a in zip(expected, actual, strict=True):
        assert a.shape == e.shape, (a.shape, e.shape)
        assert a.dtype is e.dtype
        assert a.stride() == e.stride(), (a.stride(), e.stride())
        torch.testing.assert_close(a.full_tensor().detach(), e.detach(), **tolerance(dtype))
    if differentiable and expected[0].requires_grad:
        weights = torch.linspace(-1, 1, expected[0].numel(), device=mesh.device_type).to(expected[0])
        weights = weights.view(expected[0].shape)
        (expected[0] * weights).sum().backward()
        (actual[0] * distributed(weights, mesh, "R")).sum().backward()
        for i in differentiable:
            grads = plain[i].grad, sharded[i].grad
            assert (grads[0] is None) == (grads[1] is None), names[i]
            if grads[0] is not None:
                torch.testing.assert_close(grads[1].full_tensor(), grads[0], **tolerance(dtype))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for e, a in zip(expected, as_tuple(op(*sharded, **kwargs)), strict=True):
                torch.testing.assert_close(a.full_tensor(), e.detach(), **tolerance(dtype))
    return placements


def run_uneven(mesh):
    """3 samples of 2 processes, and 5 channels of a pointwise op."""
    x, gamma = torch.randn(3, 6, 4, 5, device=mesh.device_type), torch.randn(6, device=mesh.device_type)
    y = kgopt.functional.group_norm(distributed(x, mesh, "S0"), 3, distributed(gamma, mesh, "R"))
    assert short(y.placements) == "S0"
    torch.testing.assert_close(y.full_tensor(), kgopt.functional.group_norm(x, 3, gamma))
    x = torch.randn(2, 5, 4, device=mesh.device_type)
    y = kgopt.functional.activation(distributed(x, mesh, "S1"), "silu")
    assert (short(y.placements), y.shape) == ("S1", x.shape)
    torch.testing.assert_close(y.full_tensor(), kgopt.functional.activation(x, "silu"))


def run_split_groups(mesh):
    """3 groups of 2 channels cannot be shared by two: channels are given up, and the values stay right."""
    x = torch.randn(2, 6, 4, 5, device=mesh.device_type)
    y = kgopt.functional.group_norm(distributed(x, mesh, "S1"), 3)
    assert short(y.placements) in ("S0", "R")
    torch.testing.assert_close(y.full_tensor(), kgopt.functional.group_norm(x, 3))


def run_one_sample(mesh):
    """A batch of 1 has nothing for the second process."""
    x = torch.randn(1, 6, 4, 5, device=mesh.device_type)
    y = kgopt.functional.group_norm(distributed(x, mesh, "S0"), 1)
    torch.testing.assert_close(y.full_tensor(), kgopt.functional.group_norm(x, 1))


def run_channels_last(mesh):
    from torch.distributed.tensor import DTensor

    x = torch.randn(4, 6, 4, 5, device=mesh.device_type).contiguous(memory_format=torch.channels_last)
    for dim, text in enumerate(("S0", "S1")):
        part = x.chunk(WORLD, dim)[mesh.get_local_rank()].contiguous(memory_format=torch.channels_last)
        given = DTensor.from_local(part, mesh, [placement(text)], run_check=False)
        y = kgopt.functional.group_norm(given, 2)
        assert (short(y.placements), y.stride(), y.to_local().stride()) == (text, x.stride(), part.stride())
        torch.testing.assert_close(y.full_tensor(), kgopt.functional.group_norm(x, 2))


def run_autocast(mesh):
    x, w = torch.randn(4, 6, 6, 5, device=mesh.device_type), torch.randn(4, 6, 3, 3, device=mesh.device_type)
    ours, whole = distributed(w, mesh, "R").requires_grad_(), w.clone().requires_grad_()
    with torch.autocast(mesh.device_type, dtype=torch.bfloat16):
        y = kgopt.functional.conv2d(distributed(x, mesh, "S0"), ours)
        expected = kgopt.functional.conv2d(x, whole)
    assert (y.dtype, short(y.placements)) == (torch.bfloat16, "S0")
    torch.testing.assert_close(y.full_tensor(), expected)
    y.float().pow(2).sum().backward()
    expected.float().pow(2).sum().backward()
    assert short(ours.grad.placements) == "P"
    difference = ours.grad.full_tensor() - whole.grad
    assert difference.norm() < 1e-2 * whole.grad.norm()  # halves of a sum, each rounded to bfloat16


def run_mixed(mesh):
    """As PyTorch's own ops, none of which takes a plain tensor beside a DTensor."""
    x, gamma = torch.randn(4, 6, 4, device=mesh.device_type), torch.randn(6, device=mesh.device_type)
    with pytest.raises(RuntimeError, match=r"group_norm: got mixed torch\.Tensor and DTensor.*weight"):
        kgopt.functional.group_norm(distributed(x, mesh, "S0"), 3, gamma)
    with pytest.raises(RuntimeError, match="num_groups"):
        kgopt.functional.group_norm(distributed(x, mesh, "S0"), 4)


def run_modules(mesh):
    """A model of kgopt's modules, distributed by PyTorch: its parameters are DTensors."""
    from torch.distributed.tensor import distribute_module

    torch.manual_seed(0)
    whole = nn.Sequential(
        kgopt.nn.Conv2d(4, 8, 3, padding=1), kgopt.nn.GroupNorm(4, 8, act="silu"), kgopt.nn.Conv2d(8, 2, 1)
    ).to(mesh.device_type, torch.float64)
    nn.init.normal_(whole[1].weight)
    model = distribute_module(copy.deepcopy(whole), mesh)
    x = torch.randn(4, 4, 6, 5, dtype=torch.float64, device=mesh.device_type)
    y = model(distributed(x, mesh, "S0"))
    assert short(y.placements) == "S0"
    y.pow(2).sum().backward()
    whole(x).pow(2).sum().backward()
    torch.testing.assert_close(y.full_tensor().detach(), whole(x).detach())
    for a, e in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), e.grad)


class Net(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), norm or nn.GroupNorm(4, 8)
        self.act, self.last = nn.SiLU(), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.last(self.act(self.norm(self.first(x))))


def net(device):
    torch.manual_seed(0)
    model = Net().to(device, torch.float64)
    nn.init.normal_(model.norm.weight)
    return model, torch.randn(4, 4, 6, 5, dtype=torch.float64, device=device)


def run_optimized_distribute_module(mesh):
    """What PyTorch runs with DTensors, or refuses, an optimized model does too: its sites leave DTensors alone."""
    from torch.distributed.tensor import distribute_module

    whole, x = net(mesh.device_type)
    outcomes = []
    for optimized in (False, True):
        model = copy.deepcopy(whole)
        model = distribute_module(kgopt.optimize(model, measure=False) if optimized else model, mesh)
        found: list = []
        try:
            with torch.no_grad():
                found += [model(distributed(x, mesh, "S0")).full_tensor()]
            model(distributed(x, mesh, "S0")).pow(2).sum().backward()
            found += [p.grad.full_tensor() for p in model.parameters()]
        except RuntimeError as error:  # a torch whose group_norm takes no DTensors, or has no gradients of them
            found.append(str(error).splitlines()[0])
        outcomes.append(found)
    theirs, ours = outcomes
    for a, e in zip(ours, theirs, strict=True):
        assert a == e if isinstance(e, str) else torch.equal(a, e)


def run_wrapped(mesh, wrapper, optimize_first):
    """fully_shard or DDP around an optimized model, or optimize inside them: gradients of the whole batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    whole, x = net(mesh.device_type)
    whole(x).pow(2).mean().backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    if optimize_first:
        kgopt.optimize(model, measure=False)
    if wrapper == "fully_shard":
        model = fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    if not optimize_first:
        kgopt.optimize(model, measure=False)
    mine = x.chunk(WORLD)[mesh.get_local_rank()]
    for _ in range(2):
        model.zero_grad()
        y = model(mine)
        y.pow(2).mean().backward()
    torch.testing.assert_close(y.detach(), whole(mine).detach())
    for (name, a), e in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
        torch.testing.assert_close(grad, e.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.optim.AdamW(model.parameters()).step()
    assert model(mine).isfinite().all()


def run_compiled(mesh):
    """torch.compile of a function of DTensors."""
    x, gamma = torch.randn(4, 6, 4, 5, device=mesh.device_type), torch.randn(6, device=mesh.device_type)

    def function(x, gamma):
        return kgopt.functional.group_norm(x, 3, gamma, act="silu") * 2

    given = distributed(x, mesh, "S0").requires_grad_(), distributed(gamma, mesh, "R").requires_grad_()
    y = torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
    plain = x.clone().requires_grad_(), gamma.clone().requires_grad_()
    expected = function(*plain)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for a, e in zip(given, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), e.grad)


OTHERS = {
    "uneven": run_uneven,
    "split_groups": run_split_groups,
    "one_sample": run_one_sample,
    "channels_last": run_channels_last,
    "autocast": run_autocast,
    "mixed": run_mixed,
    "modules": run_modules,
    "optimized_distribute_module": run_optimized_distribute_module,
    "compiled": run_compiled,
    **{
        f"{wrapper}_{'after' if first else 'before'}_optimize": lambda mesh, w=wrapper, f=first: run_wrapped(mesh, w, f)
        for wrapper in ("fully_shard", "DDP")
        for first in (True, False)
    },
}


def worker(rank, device, port, path):
    """Runs every case; a case that fails on one process would leave the other one waiting, so all must get there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TORCH_LOGS="-all")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh(device, (WORLD,))
    outcomes = {}
    cases = {
        (name, scenario): lambda i=i, s=scenario: run_op(mesh, i, s, torch.float64)
        for i, name in enumerate(NAMES)
        for scenario in SCENARIOS
    }
    cases |= {("other", name): lambda run=run: run(mesh) for name, run in OTHERS.items()}
    for key, run in cases.items():
        torch.manual_seed(0)
        try:
            outcomes[key] = run()
        except BaseException:
            outcomes[key] = "failed\n" + traceback.format_exc()
    if rank == 0:
        torch.save(outcomes, path)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of every case on a device; the processes start once."""
    import torch.multiprocessing as mp

    known = {}

    def of(device):
        if device == "cuda" and torch.cuda.device_count() < WORLD:
            pytest.skip(f"needs {WORLD} GPUs; this machine has {torch.cuda.device_count()}")
        if device not in known:
            path = str(tmp_path_factory.mktemp("dtensor") / "outcomes.pt")
            mp.spawn(worker, (device, free_port(), path), WORLD)
            known[device] = torch.load(path)
        return known[device]

    return of


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", NAMES)
def test_op(name, scenario, device, outcomes):
    found = outcomes(device)[name, scenario]
    assert not isinstance(found, str), found
    if scenario == "samples":
        assert found == SHARDED_BY_SAMPLES[name]
    elif scenario == "channels" and name in SHARDED_BY_CHANNELS:
        assert found == SHARDED_BY_CHANNELS[name]
    elif scenario == "whole":
        assert set(found) == {"R"}


@pytest.mark.parametrize("name", OTHERS)
def test_dtensors(name, device, outcomes):
    """A DTensor given to an op raised NotImplementedError: "does not have a sharding strategy registered"."""
    found = outcomes(device)["other", name]
    assert not isinstance(found, str), found


def test_every_op_has_a_rule():
    """An op without one would raise NotImplementedError for a DTensor."""
    assert {n for n, op in RECORDS.items() if op.dims is not None} == {*NAMES, *BEHIND_AUTOGRAD}
