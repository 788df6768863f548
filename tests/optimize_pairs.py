"""A network and its optimized copy, compared in float64: outputs, gradients of the input and of parameters."""

import copy

import torch

import kgopt


def pair(make):
    torch.manual_seed(0)
    original = make().double()
    return kgopt.optimize(copy.deepcopy(original), measure=False), original


def results(net):
    torch.manual_seed(1)
    x = torch.randn(2, 4, 5, 6).double().requires_grad_()
    y = net(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()], allow_unused=True)]


def check(net, original):
    for ours, theirs in zip(results(net), results(original), strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
