"""What only the whole model can say, with example inputs.

``whole`` asks, over ``timed`` models: which ``layout``, what pays ``between`` the norms, what behind convolutions
(``convolved``); ``race`` asks at the end whether all of it is faster than the model as it came.
"""
