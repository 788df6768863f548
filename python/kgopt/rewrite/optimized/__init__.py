"""An optimized module: what it knows, the class that it has, and what others see of both.

``known`` is the object in its ``__dict__``; ``classes`` makes its class, ``disguise`` has that pass for the original,
``standing`` looks whether a method still stands for the user's, ``wrapped`` lists modules that were given another
forward, ``transaction`` undoes what failed.
"""
