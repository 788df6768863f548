"""Values that wait for what comes next: the objects that code rewritten by ``source`` calls.

``base`` is what all of them share; ``sums``, ``modulated`` (scales and shifts), ``maps`` (upsampling) and ``padding``
are one kind each, ``formats`` is ``x.contiguous()``, which may do nothing.
"""
