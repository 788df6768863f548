"""What runs in training alone: ops that were measured with their gradients, and less that is kept for the backward.

``training`` and ``joins`` (concatenation) are measured ops; ``recompute`` (results of norms) and ``casts`` (weights
under autocast) save memory.
"""
