"""A network and its optimized copy, compared in float64: outputs, gradients of the input and of parameters."""

import contextlib
import copy

import torch
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.norms import sites

SHAPE = (2, 4, 5, 6)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def pair(make, dtype=torch.float64, train=True, std=None, **options):
    """The optimized copy, and the original; with ``std``, parameters that are drawn."""
    torch.manual_seed(0)
    original = make().to(dtype).train(train)
    for p in original.parameters() if std else ():
        nn.init.normal_(p, std=std)
    return kgopt.optimize(copy.deepcopy(original), measure=False, **options), original


def all_faster(model, *given, unwanted=lambda path: ""):
    """Every call that kgopt has an op for was found to be faster; how many there are."""
    with torch.no_grad():
        return glue.find(model, lambda: model(*given), unwanted, always=True)


def results(net, shape=SHAPE):
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64).to(next(net.parameters()).dtype).requires_grad_()
    torch.manual_seed(2)
    y = net(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()], allow_unused=True)]


def check(net, original, shape=SHAPE, **close):
    for ours, theirs in zip(results(net, shape), results(original, shape), strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **(close or CLOSE))


def check_compiled(net, original, shape=SHAPE):
    """In one graph."""
    x = torch.randn(shape).double()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), original(x), **CLOSE)


def note_sites(monkeypatch, **notes):
    """A list of what methods of ``Site`` computed as one op from here on, each call as the method's note names it."""
    found = []

    def watched(run, note):
        def method(site, *operands, **more):
            y = run(site, *operands, **more)
            if y is not None:
                found.append(note(site, *operands, **more))
            return y

        return method

    for name, note in notes.items():
        monkeypatch.setattr(sites.Site, name, watched(getattr(sites.Site, name), note))
    return found


@contextlib.contextmanager
def hooks_see_the_same(net, original, watches, everything=False):
    """Forward hooks of the modules whose names ``watches``, or of all modules at once, see what the original's do."""
    seen, handles = {net: [], original: []}, []
    for model, found in seen.items():
        names = {m: name for name, m in model.named_modules()}

        def note(module, _, y, names=names, found=found):
            if module in names:
                found.append((names[module], y.clone()))

        if everything:
            handles.append(nn.modules.module.register_module_forward_hook(note))
        handles += [m.register_forward_hook(note) for m, name in names.items() if watches(name)]
    yield
    for handle in handles:
        handle.remove()
    assert [name for name, _ in seen[net]] == [name for name, _ in seen[original]]
    for (_, ours), (_, theirs) in zip(seen[net], seen[original], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
