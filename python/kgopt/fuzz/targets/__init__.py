"""Targets: every op, function and module, how its calls are drawn, and the same call in PyTorch's words.

A call is Python text, over the names of its tensors. The check evaluates the text, and the program that is printed for
a finding holds it, so both do the same.
"""
