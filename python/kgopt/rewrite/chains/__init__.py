"""What can be fused, and what a module, function or method means in it.

``chain`` is the structure of a site, ``patterns`` finds the largest around a norm, ``meanings``, ``modules`` and
``roles`` say what code means, ``emit`` has a chain as calls of kgopt's ops or of PyTorch's functions.
"""
