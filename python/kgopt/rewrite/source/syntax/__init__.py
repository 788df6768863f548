"""Python's syntax trees: what code reads, writes and does, whatever it computes.

``code`` (functions to trees and back), ``names``, ``expressions`` and ``trees`` (questions and changes), ``quiet``
(code that changes no tensor), ``method`` (one method, and what names mean in it).
"""
