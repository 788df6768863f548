"""PyTorch's code or kgopt's, by which measurement?

``clocks`` times two functions, ``measuring`` times a chain both ways, ``policy`` has the rule, ``verdicts`` keeps the
answers, by a model's ``fingerprint``; ``reporting`` is the report of them.
"""
