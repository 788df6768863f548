"""What an entry of the zoo is: a network of a library at its usual size, and one made small for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from kgopt.cli._optional import MissingPackageError

__all__ = ["Decode", "Network", "Steps", "settled"]

# A tuple of arguments or a dict of keywords. A tuple of sizes stands for normal numbers of these sizes, Steps for
# integers; everything else is given as it is.
Arguments = tuple[Any, ...] | dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Steps:
    """An argument of integers: time steps, labels."""

    values: tuple[int, ...]


class Decode(nn.Module):
    """The decoder of a diffusers autoencoder as a module: latent -> image or video. The encoder is dropped."""

    def __init__(self, autoencoder: nn.Module, **keywords: Any) -> None:
        super().__init__()
        autoencoder.encoder = nn.Identity()
        self.autoencoder = autoencoder
        self.keywords = keywords

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """The decoded sample."""
        sample: torch.Tensor = self.autoencoder.decode(z, return_dict=False, **self.keywords)[0]  # type: ignore[operator]
        return sample


@dataclasses.dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        name: what rows and ``--case`` call it.
        package: what pip installs.
        module: what is imported.
        make: the imported module, small? -> the network.
        full: the arguments that it is measured with.
        small: those of tests.
        trains: how people train it: "autocast" (to bf16), "autocast_fp16" (with GradScaler), or "" for never.
        before_training: what its trainers set, for example deep supervision.
        precisions: in which its inference is measured.
        large: built on the device, since the CPU takes minutes.
    """

    name: str
    package: str
    module: str
    make: Callable[[Any, bool], nn.Module]
    full: Arguments
    small: Arguments
    trains: str = ""
    before_training: Callable[[Any], None] | None = None
    precisions: tuple[str, ...] = ("bf16", "fp16", "tf32")
    large: bool = False

    @contextlib.contextmanager
    def built(self, device: torch.device, small: bool = False) -> Iterator[nn.Module]:
        """The network in float32 on the device, in eval mode, its parameters from a fixed seed.

        Raises:
            MissingPackageError: the library is not installed; the text has the pip command.
        """
        try:
            library = importlib.import_module(self.module)
        except (ImportError, RuntimeError) as error:
            raise MissingPackageError(f"{self.package} is missing ({error}); pip install {self.package}") from None
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            with torch.device(device) if self.large and not small else contextlib.nullcontext():
                model = settled(self.make(library, small))
        yield model.to(device).eval()

    def arguments(self, device: torch.device, dtype: torch.dtype, small: bool = False) -> Arguments:
        """New arguments of the same values at each call."""
        generator = torch.Generator().manual_seed(1)

        def made(of: Any) -> Any:
            if isinstance(of, Steps):
                return torch.tensor(of.values, device=device)
            if isinstance(of, tuple) and of and all(isinstance(n, int) for n in of):
                # Rounded, so that a network in bf16 and its reference in float32 are given the same values.
                return torch.randn(of, generator=generator).bfloat16().to(device, dtype)
            return of

        given = self.small if small else self.full
        if isinstance(given, dict):
            return {name: made(of) for name, of in given.items()}
        return tuple(made(of) for of in given)

    def shape(self, small: bool = False) -> list[int]:
        """That of the first argument."""
        given = self.small if small else self.full
        first = next(iter(given.values())) if isinstance(given, dict) else given[0]
        return list(first)


def settled(model: nn.Module) -> nn.Module:
    """``model`` with parameters that show an error: no weight is all zero, no norm has only ones and zeros.

    All are rounded to bf16, so that one reference in float32 serves every precision.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            first = parameter.flatten()[0]
            if bool((parameter == first).all()) and float(first) in (0.0, 1.0) and parameter.numel() > 1:
                if parameter.dim() > 1 and float(first) == 0.0:
                    parameter.normal_(std=max(1, parameter[0].numel()) ** -0.5)
                elif name.endswith("bias") or float(first) == 0.0:
                    parameter.normal_(std=0.2)
                else:
                    parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16())
    return model
