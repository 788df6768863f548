"""CUDA graphs of whole models: a call whose launches take longer than their work is recorded once and replayed.

The root gets a forward (the outermost part of its class) that looks a call up: by the kinds of its tensors, the values
of its other arguments, and PyTorch's switches. A call that was recorded copies its tensors to the recording's own,
replays, and returns copies of the results. A tensor that lay at one address in two calls is read there instead, as long
as each call has it there; the first that has not is recorded anew, with copies. Every other call runs the plain path.

A replay runs no Python. So a model is recorded only where repeating its call showed no effect but its results (no write
to its state or its inputs, no random number, no copy between CPU and GPU), and each call compares all that the model
holds with what it held then (:class:`~kgopt.rewrite.cuda_graphs.stamp.Stamp`). Values of GPU tensors may change, their
addresses may not. Those are compared before the launch, all else while the device works: a replay that turns out wrong
has written to its own memory alone, and its result is dropped.

==============  ========================================================================================================
machine         recording and replaying on the device
keys            arguments and results: which calls share a recording, what is copied
outside         what the code of a call reads outside of the model
stamp           all that a model holds
effects         what a call does beside its result
recording       one call, from the first look to the replay
calls           the calls of one model
part            the part of its class, and the questions of kgopt.optimize
replayed        functions that a compiler made
replayed_steps  training steps of such: forward and backward
==============  ========================================================================================================
"""

from kgopt.rewrite.cuda_graphs.calls import BUSY as BUSY
from kgopt.rewrite.cuda_graphs.calls import Graphs as Graphs
from kgopt.rewrite.cuda_graphs.machine import LONG as LONG
from kgopt.rewrite.cuda_graphs.part import (
    can_record,
    is_busy,
    may_pay,
    record,
    seconds_of_replays,
    set_mode,
    text_of,
)

__all__ = ["can_record", "is_busy", "may_pay", "record", "seconds_of_replays", "set_mode", "text_of"]
