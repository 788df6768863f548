"""Functions that scale and shift what they are given, for models of another file to import."""


def modulate(x, shift, scale):
    """As in DiT, of feature maps."""
    return x * (1 + scale[:, :, None, None]) + shift[:, :, None, None]


def film(h, gamma, beta=None):
    while gamma.dim() < h.dim():
        gamma, beta = gamma[..., None], beta[..., None]
    return beta + gamma * h


def shifted_first(h, scale, shift):
    return (h + shift) * scale


def twice(h, scale, shift):
    """Reads it twice."""
    return h * scale + shift + h


def asked(h, scale, shift):
    """What it does depends on the values."""
    return h * scale + shift if scale.sum() > 0 else h


def written(h, scale, shift):
    scale.mul_(2)
    return h * scale + shift


def kept(h, scale, shift, seen=[]):  # noqa: B006
    seen.append(h)
    return h * scale + shift
