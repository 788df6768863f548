"""Finds what kgopt can fuse in models that others wrote: ``kgopt.optimize`` and the ``torch.compile`` backend.

The package is called rewrite because a package and a function cannot share the name ``kgopt.optimize``.

A file imports from its own layer and from those above it (tests/test_layers.py):

=======  =========================================  ==================================================================
layer    files                                      what it says
=======  =========================================  ==================================================================
torch    places originals watching captured         what PyTorch has: replaced by somebody? watched by somebody?
class    known standing disguise                    what an optimized module knows; what others see of its class
site     chain patterns meanings modules roles      what can be fused, and what a module, function or method means in it
         classes reporting transaction              making the classes; the report; undoing what failed
         formulas interpret                         which norm over channels a forward computes
verdict  verdicts fingerprint emit clocks           PyTorch's code or ours: the rule and the measurement;
         measuring policy channels                  a norm over channels and the input at hand
run      carry recompute arguments sites norms      what runs in place of a site, of a norm, between norms, in training,
         formats wrapped glue sums modulated        in channels_last; what is left of it for the backward
         padding joins training layout waits
         channel_norms casts graphs maps            CUDA graphs of whole calls
         norm_calls spared
find     source sequential backend                  front ends: Python source, nn.Sequential, captured graphs
         functional_norms upsampled_graphs contest
         convolutions padded_graphs mapped_graphs
         writes replayed_steps resampled_graphs
         whole_graphs replayed autocast_graphs
         decomposed plain_graphs tapped_graphs
         unbiased_graphs doubled_graphs
         inductor lowering weights                  what Inductor makes of the ops
model    convolved timed between whole race api     what the whole model decides; optimize, restore, report
=======  =========================================  ==================================================================
"""

from kgopt.rewrite import inductor as _inductor
from kgopt.rewrite.api import optimize, restore
from kgopt.rewrite.api import report_of as report
from kgopt.rewrite.reporting import Report, SiteRow
from kgopt.rewrite.verdicts import forget

_inductor.install()

__all__ = ["Report", "SiteRow", "forget", "optimize", "report", "restore"]
