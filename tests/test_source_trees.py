"""How code is read: trees are walked and copied as Python's own functions do, and a class's code is read once."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite import source
from kgopt.rewrite.source.syntax import names


@pytest.mark.parametrize("module", [torch.nn.functional, torch.nn.modules.rnn, source, ast], ids=lambda m: m.__name__)
def test_trees_are_walked_and_copied_as_python_does(module):
    tree = ast.parse(inspect.getsource(module))
    nodes = [n for n in ast.walk(tree) if not isinstance(n, ast.expr_context)]
    assert [id(n) for n in names.walk(tree)] == [id(n) for n in nodes]
    made = names.copied(tree)
    assert ast.dump(made, include_attributes=True) == ast.dump(tree, include_attributes=True)
    shared = {id(n) for n in names.walk(made)} & {id(n) for n in nodes if not isinstance(n, ast.operator)}
    assert not shared


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 4), act

    def forward(self, x):
        return self.act(self.norm(x))


def test_blocks_are_read_once_for_the_roles_of_their_children(monkeypatch):
    read, analyze = [], source._analyze
    monkeypatch.setattr(source, "_analyze", lambda module, *rest: read.append(module) or analyze(module, *rest))
    acts = (nn.SiLU(), nn.ReLU(), nn.SiLU(), nn.Bilinear(1, 1, 1), nn.ReLU())
    model = nn.ModuleList(map(Block, acts))
    kgopt.optimize(model, measure=False)
    found = [row.kind for row in kgopt.report(model).sites]
    assert read == [model[4], model[3], model[2], model]
    assert found[0] == found[2] != found[1] == found[4]
    assert len(set(found)) == 3
