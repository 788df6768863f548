"""Models whose module cannot be imported by its name: loaded from a path, typed into a notebook, made by exec."""

from __future__ import annotations

import importlib.util
import linecache
import pickle
import types

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite.gradients import training
from optimize_pairs import all_faster

SOURCE = """
import torch.nn.functional as F
from torch import nn

SCALE = 2.0


def scaled(x):
    return x * SCALE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.conv = nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return scaled(x + self.conv(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.up = Block(), nn.Upsample(scale_factor=2)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), Block())

    def forward(self, x):
        x = F.interpolate(self.body(self.block(x)), scale_factor=2)
        return F.relu(self.up(x)) * SCALE
"""


def of_path(name, tmp_path):
    path = tmp_path / "loaded.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_exec(name, tmp_path):
    cell = "<cell 7>"
    linecache.cache[cell] = (len(SOURCE), None, SOURCE.splitlines(True), cell)
    names = {"__name__": name}
    exec(compile(SOURCE, cell, "exec"), names)
    return types.SimpleNamespace(**names)


def parts(model, x, which):
    """``model``, optimized so that its classes have this part."""
    model = kgopt.optimize(model, measure=False, channels_last=which == "layout")
    if which == "glue":
        all_faster(model, x)
    if which == "training":
        for module in [model, *model.modules()]:
            if not isinstance(module, (nn.GroupNorm, nn.ReLU, nn.SiLU)):
                training._wrapped.add(module, training.TrainingState)
    return model


@pytest.mark.parametrize("name", ["a_name_of_nobody", "__main__", "json"])
@pytest.mark.parametrize("load", [of_path, of_exec])
@pytest.mark.parametrize("which", ["sites", "layout", "glue", "training"])
def test_torch_compile(load, name, which, tmp_path):
    """Dynamo imports the module of a function that it inlines from a frame of another one: the frames of kgopt's made
    ``InternalTorchDynamoError: ModuleNotFoundError`` of models that torch.compile takes as they are.
    """
    torch.manual_seed(0)
    model, x = load(name, tmp_path).Net().double().eval(), torch.randn(2, 8, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        y = torch.compile(parts(model, x, which), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_pickling_does_what_the_original_does(tmp_path):
    """An object of a class that cannot be imported is refused, optimized or not, and by the same error."""
    model = of_path("a_name_of_nobody", tmp_path).Net()
    refused = (pickle.PicklingError, AttributeError, ImportError)
    with pytest.raises(refused) as plain:
        pickle.dumps(model)
    with pytest.raises(type(plain.value)):
        pickle.dumps(kgopt.optimize(model, measure=False))
