"""Norms over channels and in groups of channels, recognized by what is computed.

A value is a sum of terms; a term is a number times powers of atoms. Atoms are the input, its mean over what a norm
reduces (channels, or positions and the channels of a group), what is left of the input without it, mean squares, and
parameters. Operations combine values (:func:`apply`), and :func:`recognize` says which norm a value is. The order in
which code multiplies, its casts, the dims that it moves and the views that it takes leave no trace in a value.
:mod:`~kgopt.rewrite.formulas.interpret` runs a module's forward on such values.
"""

from kgopt.rewrite.formulas.norm import Formula, recognize
from kgopt.rewrite.formulas.operations import OPERATIONS, apply
from kgopt.rewrite.formulas.values import GroupsError, UnknownFormulaError, Value, grouped_input, input_value, parameter

__all__ = [
    "OPERATIONS",
    "Formula",
    "GroupsError",
    "UnknownFormulaError",
    "Value",
    "apply",
    "grouped_input",
    "input_value",
    "parameter",
    "recognize",
]
