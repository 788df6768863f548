"""Models as others write them: the blocks of well-known libraries in miniature, and code that must be left alone."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from kgopt.rewrite import backend

C = 8


def norm(groups=2, channels=C):
    return nn.GroupNorm(groups, channels)


def conv3(channels=C):
    return nn.Conv3d(C, channels, 3, padding=1)


class MonaiResBlock(nn.Module):
    """SegResNet's block: one in-place ReLU for both norms, and an in-place addition."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.act = norm(), norm(4), nn.ReLU(inplace=True)
        self.conv1, self.conv2 = conv3(), conv3()

    def forward(self, x):
        identity = x
        x = self.norm1(x)
        x = self.act(x)
        x = self.conv1(x)
        x = self.norm2(x)
        x = self.act(x)
        x = self.conv2(x)
        x += identity
        return x


class DiffusersResnetBlock(nn.Module):
    """One SiLU for two norms and the time embedding; the activation stands behind the branches that normalize."""

    def __init__(self, mode="default"):
        super().__init__()
        self.norm1, self.norm2, self.nonlinearity = norm(), norm(4), nn.SiLU()
        self.conv1, self.conv2 = conv3(), conv3()
        self.time_emb_proj, self.dropout, self.mode = nn.Linear(4, C), nn.Dropout(0.0), mode

    def forward(self, input_tensor, temb=None):
        hidden_states = input_tensor

        hidden_states = self.norm1(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)

        hidden_states = self.conv1(hidden_states)

        if temb is not None:
            temb = self.nonlinearity(temb)
            temb = self.time_emb_proj(temb)[:, :, None, None, None]

        if self.mode == "default":
            if temb is not None:
                hidden_states = hidden_states + temb
            hidden_states = self.norm2(hidden_states)
        elif self.mode == "scale_shift":
            if temb is None:
                raise ValueError("temb is None")
            hidden_states = self.norm2(hidden_states)
            hidden_states = hidden_states * (1 + temb) + temb
        else:
            hidden_states = self.norm2(hidden_states)

        hidden_states = self.nonlinearity(hidden_states)

        hidden_states = self.dropout(hidden_states)
        hidden_states = self.conv2(hidden_states)
        return input_tensor + hidden_states


class SingleConv(nn.Sequential):
    """pytorch3dunet's: a Sequential of named modules in the order of a string."""

    def __init__(self, order):
        super().__init__()
        make = {
            "c": lambda: ("conv", conv3()),
            "g": lambda: ("groupnorm", norm()),
            "r": lambda: ("ReLU", nn.ReLU(inplace=True)),
            "l": lambda: ("LeakyReLU", nn.LeakyReLU(inplace=True)),
            "e": lambda: ("ELU", nn.ELU(inplace=True)),
            "d": lambda: ("dropout", nn.Dropout(0.0)),
        }
        for letter in order:
            self.add_module(*make[letter]())


class Functional(nn.Module):
    """Nested expressions, keyword arguments, methods."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = norm(), nn.InstanceNorm3d(C, affine=True), norm(4), norm(8)
        self.c1, self.c2 = conv3(), conv3()

    def forward(self, x):
        h = self.c2(F.silu(self.n2(self.c1(F.leaky_relu(self.n1(x), 0.01)))))
        h = F.relu(self.n3(h), inplace=True)
        return self.n4(h).tanh() + x


class TwoStatements(nn.Module):
    """The activation is an argument of the next call; new names for every value."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([norm(), norm(4)])
        self.inner = nn.ModuleDict({"conv": conv3()})
        self.c = conv3()

    def forward(self, x):
        a = self.norms[0](x)
        b = self.c(F.gelu(a, approximate="tanh"))
        c = self.norms[1](self.c(b))
        d = torch.sigmoid(c)
        if d.shape[0] > 1:
            return d + x
        return d


class WithTorchContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = norm(), nn.Mish()

    def forward(self, x):
        with torch.autograd.profiler.record_function("block"):
            x = self.norm(x)
            x = self.act(x)
        for _ in range(2):
            x = self.norm(x)
            x = self.act(x)
        return x


class PrivateNames(nn.Module):
    """Name mangling, super(), defaults and a docstring must survive the rewriting."""

    def __init__(self):
        super().__init__()
        self.__norm, self.act = norm(), nn.Hardswish()

    def forward(self, x, *, scale=2.0):
        """The one."""
        super().train(self.training)
        x = self.__norm(x)
        x = self.act(x)
        return x * scale


class OtherMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = norm(), nn.ELU()

    def encode(self, x):
        return self.act(self.norm(x))

    def forward(self, x):
        return self.encode(x)


# ---------------------------------------------------------------------------------------------- the three pipelines


class MeanA(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.group_norm = nn.Conv3d(C, 12, 3), norm(4, 12)

    def forward(self, x):
        x = self.conv(x)
        x = self.group_norm(x)
        x = x.mean(dim=[1, 2, 3, 4])
        return x


class MeanB(MeanA):
    def forward(self, x):
        return torch.mean(self.group_norm(self.conv(x)), dim=(-1, -2, -3, 1))


class MeanC(MeanA):
    def forward(self, x):
        normed = self.group_norm(self.conv(x))
        return normed.flatten(1).mean(1)


class TransposedA(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(C, 12, 3, stride=2, output_padding=1, bias=False)
        self.relu, self.group_norm = nn.ReLU(), norm(4, 12)

    def forward(self, x):
        x = self.conv_transpose(x)
        x = self.relu(x)
        x = self.group_norm(x)
        return x


class TransposedB(TransposedA):
    def forward(self, x):
        return self.group_norm(F.relu(self.conv_transpose(x), inplace=True))


class TransposedC(TransposedA):
    def forward(self, x):
        return self.group_norm(self.conv_transpose(x).relu_())


class LogSumExpA(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.group_norm = nn.Conv2d(C, 16, 3), norm(4, 16)
        self.tanh, self.hard_swish = nn.Tanh(), nn.Hardswish()

    def forward(self, x):
        x_conv = self.conv(x)
        x_norm = self.group_norm(x_conv)
        x_tanh = self.tanh(x_norm)
        x_hard_swish = self.hard_swish(x_tanh)
        x_res = x_conv + x_hard_swish
        x_logsumexp = torch.logsumexp(x_res, dim=1, keepdim=True)
        return x_logsumexp


class LogSumExpB(LogSumExpA):
    def forward(self, x):
        c = self.conv(x)
        return torch.logsumexp(F.hardswish(torch.tanh(self.group_norm(c))) + c, dim=1, keepdim=True)


class LogSumExpC(LogSumExpA):
    def forward(self, x):
        c = self.conv(x)
        r = c.add(self.hard_swish(self.group_norm(c).tanh()))
        return r.logsumexp(1, keepdim=True)


# ---------------------------------------------------------------------------------------- what must be left alone


class LeftAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.conv = norm(), nn.SiLU(), conv3()
        self.seen = None


class ReadTwice(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        return self.act(h) + h


class AlsoReturned(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        return y, h


class Kept(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        self.seen = h
        return self.act(h)


class InTry(LeftAlone):
    def forward(self, x):
        try:
            x = self.norm(x)
            x = self.act(x)
        except ValueError:
            return x
        return x


class InABranchOfTry(LeftAlone):
    def forward(self, x):
        try:
            if x.dim() == 5:
                x = self.norm(x)
                x = self.act(x)
        except ValueError:
            return x
        return x


class OtherCodeFirst(LeftAlone):
    def forward(self, x):
        x = x.clone()
        h = self.norm(x)
        return x.add_(1) * self.act(h)


class InWith(LeftAlone):
    def forward(self, x):
        with contextlib.suppress(ValueError):
            x = self.norm(x)
            x = self.act(x)
        return x


class LivesOnInTheLoop(LeftAlone):
    def forward(self, x):
        h = x
        y = x
        for _ in range(2):
            y = y + h
            h = self.norm(y)
            y = self.act(h)
        return y


class InAClosure(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        return (lambda: y + h)()


class InANestedFunction(LeftAlone):
    """One that does more than a method's own code: its default is computed where it is defined."""

    def forward(self, x):
        def block(t, kept=x):
            t = self.norm(t)
            return self.act(t)

        return block(x)


class Walrus(LeftAlone):
    def forward(self, x):
        y = self.act(h := self.norm(x))
        return y + h


class Deleted(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        del h
        return y


class Augmented(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        h += y
        return h


class ReturnInBetween(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        if x.shape[0] > 100:
            return h
        h = self.act(h)
        return h


class OtherStatementInBetween(LeftAlone):
    def forward(self, x):
        x = x.clone()
        h = self.norm(x)
        x.add_(1)
        h = self.act(h)
        return h + x


class ReadsLocals(LeftAlone):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        return y + locals()["h"]


class Generator(LeftAlone):
    def steps(self, x):
        x = self.norm(x)
        yield self.act(x)

    def forward(self, x):
        return next(iter(self.steps(x)))


class OtherAlpha(LeftAlone):
    def __init__(self):
        super().__init__()
        self.act = nn.CELU(-0.5)

    def forward(self, x):
        return self.act(self.norm(x))


class MyGroupNorm(nn.GroupNorm):
    def forward(self, input):
        return super().forward(input) * self.weight[0]


class OwnNorm(LeftAlone):
    def __init__(self):
        super().__init__()
        self.norm = MyGroupNorm(2, C)

    def forward(self, x):
        return self.act(self.norm(x))


class RunningStats(LeftAlone):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm3d(C, track_running_stats=True)

    def forward(self, x):
        return self.act(self.norm(x))


def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    wrapper.__wrapped__ = function
    return wrapper


class Decorated(LeftAlone):
    @decorated
    def forward(self, x):
        return self.act(self.norm(x))


class ConvReadTwice(LogSumExpA):
    def forward(self, x):
        c = self.conv(x)
        r = c + self.hard_swish(self.tanh(self.group_norm(c)))
        return torch.logsumexp(r, dim=1, keepdim=True) + c.mean()


FUSED = {
    "monai": MonaiResBlock,
    "diffusers": DiffusersResnetBlock,
    "diffusers_scale_shift": lambda: DiffusersResnetBlock("scale_shift"),
    "functional": Functional,
    "two_statements": TwoStatements,
    "return_in_between": ReturnInBetween,
    "with_torch_context": WithTorchContext,
    "private_names": PrivateNames,
    "other_methods": OtherMethods,
    "cgr": lambda: SingleConv("cgr"),
    "cgdl": lambda: SingleConv("cgdl"),
    "crg": lambda: SingleConv("crg"),
    "gcr": lambda: SingleConv("gcr"),
    "cge": lambda: SingleConv("cge"),
    "sequential": lambda: nn.Sequential(conv3(), norm(), nn.SiLU(), conv3()),
}

PIPELINES = {
    "conv3d_group_norm_mean": (MeanA, MeanB, MeanC),
    "conv_transpose3d_relu_group_norm": (TransposedA, TransposedB, TransposedC),
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp": (LogSumExpA, LogSumExpB, LogSumExpC),
}

# Class -> what the report says about the norm.
ALONE = {
    ReadTwice: "read 2 times",
    AlsoReturned: "read 2 times",
    Kept: "read 2 times",
    InTry: "try block",
    InABranchOfTry: "try block",
    OtherCodeFirst: "other code of the same statement runs in between",
    InWith: "with block",
    LivesOnInTheLoop: "read 2 times",
    InAClosure: "",
    InANestedFunction: "",
    Walrus: "",
    Deleted: "read 2 times",
    Augmented: "read 2 times",
    OtherStatementInBetween: "another statement runs in between: x.add_(1)",
    ReadsLocals: "locals()",
    Generator: "is a generator",
    OtherAlpha: "CELU(alpha=-0.5) has parameters that no op takes",
    Decorated: "decorator",
}


def input_for(model, device="cpu", dtype=torch.float32, batch=2):
    """A random input of the model's rank and channels."""
    shape = (batch, C, 9, 7) if isinstance(model, LogSumExpA) else (batch, C, 5, 6, 7)
    return torch.randn(shape, device=device, dtype=dtype) * 2 + 0.5


def randomized(model, device="cpu"):
    """Random parameters: with gamma = 1 and beta = 0 a comparison proves little."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4 + 0.2)
    return model.to(device)


def rewritten(function, *args):
    """Captures with Dynamo, rewrites, runs without Inductor: (result, report)."""

    def rewrite(graph, inputs):
        backend.rewrite_graph(graph, always=True)
        return graph.forward

    result = torch.compile(function, backend=rewrite, fullgraph=True)(*args)
    return result, backend.last_report
