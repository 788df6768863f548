"""Finds what kgopt can fuse in models that others wrote: ``kgopt.optimize`` and the ``torch.compile`` backend.

The package is called rewrite because a package and a function cannot share the name ``kgopt.optimize``.

=====================  ==============================================================================================
patterns               what fuses: a tiny graph, one matcher, and what PyTorch's modules and functions mean
source, backend        the two front ends: Python source and nn.Sequential; captured graphs
sites, emit            the checks at each call; a chain as ops
inductor               what compiled code gains after it was traced
policy                 PyTorch's code or ours: the rule and the measurement
whole, fingerprint     what the whole model decides; which models are equal
verdicts               what was measured, for the process and on disk
classes, disguise      the classes that modules get; what tools see of them
layout                 channels_last inside
api, reporting         kgopt.optimize, restore, report
transaction            calls and changes that are undone where they fail
=====================  ==============================================================================================
"""

from kgopt.rewrite import inductor as _inductor
from kgopt.rewrite.api import optimize, restore
from kgopt.rewrite.api import report_of as report
from kgopt.rewrite.reporting import Report, SiteRow
from kgopt.rewrite.verdicts import forget

_inductor.install()

__all__ = ["Report", "SiteRow", "forget", "optimize", "report", "restore"]
