"""What the process that workers are forked from imports, once for all of them. Nothing here may touch a GPU."""

from __future__ import annotations

import torch

import kgopt.fuzz.ops
import kgopt.fuzz.worker  # noqa: F401

# Its first call imports torch._inductor, which takes seconds.
torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
