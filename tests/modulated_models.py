"""Blocks with a scale and a shift by sample behind a norm, as libraries write them, and those that are none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

C, E = 8, 12  # channels, and those of the embedding


def exists(value):
    return value is not None


class Base(nn.Module):
    def __init__(self, norm=None) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, C) if norm is None else norm
        self.conv = nn.Conv2d(C, C, 1)
        self.act = nn.SiLU()
        self.slopes = nn.PReLU(C)
        self.drop = nn.Dropout(0.0)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(E, 2 * C))
        self.to_scale, self.to_shift = nn.Linear(E, C), nn.Linear(E, C)
        self.out_layers = nn.Sequential(nn.GroupNorm(2, C), nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(C, C, 1))

    def both(self, e):
        return self.mlp(e)[:, :, None, None].chunk(2, dim=1)


class GuidedDiffusion(Base):
    """ResBlock of openai/guided-diffusion with use_scale_shift_norm; DeepFloyd IF and Kandinsky have it, too."""

    def forward(self, x, e):
        emb_out = self.mlp(e).type(x.dtype)
        while len(emb_out.shape) < len(x.shape):
            emb_out = emb_out[..., None]
        out_norm, out_rest = self.out_layers[0], self.out_layers[1:]
        scale, shift = torch.chunk(emb_out, 2, dim=1)
        h = out_norm(x) * (1 + scale) + shift
        h = out_rest(h)
        return x + h


class Diffusers(Base):
    """ResnetBlock2D of diffusers."""

    kind = "scale_shift"

    def forward(self, hidden_states, temb):
        hidden_states = self.conv(hidden_states)
        temb = self.mlp(temb)[:, :, None, None]
        if self.kind == "default":
            hidden_states = self.norm(hidden_states)
        elif self.kind == "scale_shift":
            if temb is None:
                raise ValueError("temb should not be None")
            time_scale, time_shift = torch.chunk(temb, 2, dim=1)
            hidden_states = self.norm(hidden_states)
            hidden_states = hidden_states * (1 + time_scale) + time_shift
        else:
            hidden_states = self.norm(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.drop(hidden_states)
        return self.conv(hidden_states)


class Lucidrains(Base):
    """Block of lucidrains/denoising-diffusion-pytorch."""

    def forward(self, x, e=None):
        scale_shift = None
        if exists(e):
            scale_shift = self.both(e)
        x = self.conv(x)
        x = self.norm(x)
        if exists(scale_shift):
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        x = self.act(x)
        return self.drop(x)


class InOneExpression(Base):
    def forward(self, x, e):
        scale, shift = self.mlp(e).view(x.shape[0], -1, 1, 1).split(C, dim=1)
        return self.conv(self.act(shift + (scale + 1) * self.norm(x)))


class Addcmul(Base):
    def forward(self, x, e):
        scale, shift = self.mlp(e).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        h = self.norm(x)
        h = torch.addcmul(shift, h, 1 + scale)
        return F.silu(h)


class InPlace(Base):
    def forward(self, x, e):
        h = self.norm(x)
        scale, shift = self.both_of(e)
        h *= scale.to(x.dtype)
        h += shift
        return F.leaky_relu(h, 0.2)

    def both_of(self, e):
        return e[:, :C, None, None], e[:, :C, None, None].flip(1)


class InPlaceAsNames(Base):
    def forward(self, x, e):
        scale, shift = e[:, :C, None, None], e[:, -C:, None, None]
        h = self.norm(x)
        h *= scale
        h += shift
        return F.leaky_relu(h, 0.2)


class Layers(Base):
    """Linear layers are called while the norm waits."""

    def forward(self, x, e):
        h = self.norm(x) * self.to_scale(e)[:, :, None, None] + self.to_shift(e)[:, :, None, None]
        return h.relu()


class MethodsOfTensors(Base):
    """Calls of one argument, of what self was read to make: no layers."""

    def forward(self, x, e):
        scale, shift = self.mlp(e).chunk(2, dim=1)
        scale = scale.unsqueeze(2).unsqueeze(3)
        shift = shift.unsqueeze(2).unsqueeze(3)
        return self.act(scale * self.norm(x) + shift)


class ScaleAlone(Base):
    def forward(self, x, e):
        s = self.to_scale(e)[:, :, None, None]
        return self.act(s * self.norm(x))


class ShiftAlone(Base):
    def forward(self, x, e):
        return self.act(self.norm(x) + self.to_shift(e)[:, :, None, None])


class ShiftAsName(Base):
    def forward(self, x, e):
        e = self.to_shift(e)[:, :, None, None]
        h = self.norm(x)
        h = h + e
        h = self.act(h)
        return h


class Slopes(Base):
    def forward(self, x, e):
        scale, shift = self.both(e)
        return self.slopes(self.norm(x) * scale + shift)


class OneForAll(Base):
    """[1, C, 1, 1]."""

    def forward(self, x, e):
        scale, shift = self.both(e[:1])
        h = self.norm(x)
        h = h * scale + shift
        return self.act(h)


class Dropped(Base):
    """A module that does nothing, and a read of the result in between."""

    def forward(self, x, e):
        scale, shift = self.both(e)
        h = self.norm(x)
        h = self.drop(h)
        h = h * scale + shift
        mean = h.mean()
        return self.act(h) + mean


class Loop(Base):
    def forward(self, x, e):
        scale, shift = self.both(e)
        for _ in range(2):
            x = self.norm(x)
            x = x * scale + shift
        return self.act(x)


class TwoNorms(Base):
    """Another norm on each branch, one modulation behind both."""

    first = True

    def forward(self, x, e):
        scale, shift = self.both(e)
        if self.first:
            h = self.norm(x)
        else:
            h = self.out_layers[0](x)
        h = h * (1 + scale) + shift
        return self.act(h)


class PerhapsReplaced(Base):
    """A loop, and a branch behind a test that is no question, in which the scaled value may be replaced."""

    times, most = 0, 1e9

    def forward(self, x, e):
        scale, _ = self.both(e)
        h = self.norm(x)
        h = h * scale
        for _ in range(self.times):
            h = torch.ones_like(x)
        h = self.act(h)
        y = self.norm(self.conv(h))
        y = y * scale
        if x.sum().item() > self.most:
            y = torch.ones_like(x)
        return self.act(y)


class TwoNormsBesideLayers(Base):
    """The same, with layers that are called while either waits."""

    first = True

    def forward(self, x, e):
        if self.first:
            h = self.norm(x)
        else:
            h = self.out_layers[0](x)
        h = h * self.to_scale(e)[:, :, None, None]
        h = h + self.to_shift(e)[:, :, None, None]
        return self.act(h)


class TwoAtOnce(Base):
    """While one norm waits, another one begins: the first is computed."""

    def forward(self, x, e):
        scale, shift = self.both(e)
        h = self.norm(x)
        g = self.out_layers[0](x)
        g = g * scale + shift
        h = h * shift + scale
        return self.act(h) + self.act(g)


class GroupMean(Base):
    """A factor of one value a sample: another shape."""

    def forward(self, x, e):
        scale, shift = self.both(e)
        h = self.norm(x)
        h = h * (1 + scale[:, :1]) + shift[:, :1]
        h = self.act(h)
        return self.conv(h)


class ByPosition(Base):
    """As SPADE: scale and shift have x's size."""

    def forward(self, x, e):
        scale = self.conv(x)
        h = self.norm(x)
        h = h * (1 + scale) + scale
        return self.act(h)


class SeveralValues(Base):
    """As FiLM layers that return what they made of the embedding, too."""

    def forward(self, x, e):
        scale, shift = self.both(e)
        h = self.norm(x)
        h = torch.addcmul(shift, h, scale + 1)
        return h, (scale, shift)


class AroundSeveralValues(Base):
    """As CogVideoX's block: caches beside the value, in a dict of the method's."""

    def __init__(self, norm=None) -> None:
        super().__init__(norm)
        self.film = SeveralValues(norm)
        self.plain = False

    def forward(self, x, e):
        kept = {}
        if not self.plain:
            h, kept["first"] = self.film(x, e=e)
        else:
            h = self.norm(x)
        h = self.act(h)
        h = self.conv(h)
        h, (scale, _) = self.film(h, e)
        return F.relu(h) + scale * kept["first"][1]


class Wider(Base):
    """The product has another dtype than the norm, where that is no float64."""

    def forward(self, x, e):
        scale, shift = self.both(e)
        return self.act(self.norm(x) * scale.double() + shift.double())


class Number(Base):
    def forward(self, x, e):
        h = self.norm(x)
        h = h * 0.5 + 2
        return self.act(h)


class ReadTwice(Base):
    def forward(self, x, e):
        scale, shift = self.both(e)
        h = self.norm(x)
        g = h.mean()
        h = h * scale + shift
        return self.act(h) + g


class ChangesInput(Base):
    def forward(self, x, e):
        scale, shift = self.both(e)
        x = x + 0
        h = self.norm(x)
        x.mul_(2)
        h = h * scale + shift
        return self.act(h) + x


class Handled(Base):
    def forward(self, x, e):
        scale, shift = self.both(e)
        try:
            h = self.norm(x)
            h = h * scale + shift
        except ValueError:
            return x
        return self.act(h)


# By what has been computed as one op: whether it has a factor, a shift, and the activation.
FUSED = {
    GuidedDiffusion: [(True, True, "silu")],
    Diffusers: [(True, True, "silu")],
    Lucidrains: [(True, True, "silu")],
    InOneExpression: [(True, True, "silu")],
    Addcmul: [(True, True, "silu")],
    InPlaceAsNames: [(True, True, "leaky_relu(0.2)")],
    Layers: [(True, True, "relu")],
    MethodsOfTensors: [(True, True, "silu")],
    ScaleAlone: [(True, False, "silu")],
    ShiftAlone: [(False, True, "silu")],
    ShiftAsName: [(False, True, "silu")],
    Slopes: [(True, True, "prelu")],
    OneForAll: [(True, True, "silu")],
    Dropped: [(True, True, "none")],
    Loop: [(True, True, "none"), (True, True, "silu")],
    TwoNorms: [(True, True, "silu")],
    TwoNormsBesideLayers: [(True, True, "silu")],
    TwoAtOnce: [(True, True, "none")],
    AroundSeveralValues: [(True, True, "silu"), (True, True, "relu")],
}
APART = [InPlace, GroupMean, ByPosition, Wider, Number, ReadTwice, Handled]
