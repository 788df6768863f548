"""Norms whose value is scaled and shifted by sample, found in a method.

``modulations`` goes over it, ``begins`` are the calls whose value may wait, ``values`` is what is known of one,
``forms`` what an expression does with it, ``paths`` the statements that it goes through.
"""
