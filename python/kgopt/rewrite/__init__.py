"""Finds what kgopt can fuse in models that others wrote: ``kgopt.optimize`` and the ``torch.compile`` backend.

The package is called rewrite because a package and a function cannot share the name ``kgopt.optimize``.

``api`` is what users call, ``backend`` what ``torch.compile`` calls; each folder answers one question for them. A file
imports from the folders of its own layer and of those above it (tests/test_layers.py):

=======  =============================  ===============================================================================
layer    folders                        what they say
=======  =============================  ===============================================================================
torch    pytorch                        what PyTorch has: replaced by somebody? watched by somebody?
class    optimized                      what an optimized module knows; its class, and what others see of it
site     chains formulas                what can be fused, what code means in it; which norm a forward computes
verdict  measure                        PyTorch's code or ours: the rule, the measurement, the report
run      norms glue waiting gradients   what runs in place of a norm, between norms, of values that wait, in training
         cuda_graphs                    calls that are recorded and replayed
find     source captured inductor       front ends: the code of modules, captured graphs; what Inductor makes of the ops
model    model                          what only the whole model can say
entry    api backend                    in which order all that happens
=======  =============================  ===============================================================================
"""

from kgopt.rewrite.api import optimize, restore
from kgopt.rewrite.api import report_of as report
from kgopt.rewrite.inductor import moments as _moments
from kgopt.rewrite.measure.reporting import Report, SiteRow
from kgopt.rewrite.measure.verdicts import forget

_moments.install()

__all__ = ["Report", "SiteRow", "forget", "optimize", "report", "restore"]
