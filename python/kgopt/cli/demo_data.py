"""Real input for the demo, from files that other packages ship in their wheels; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from kgopt.cli._optional import MissingPackageError, require

__all__ = ["load_mri", "load_photos", "mri_patches", "mri_unshuffled", "photo_tiles"]


def _standardize(x: torch.Tensor) -> torch.Tensor:
    """Zero mean, unit variance over the whole tensor."""
    return (x - x.mean()) / x.std()


def load_mri() -> torch.Tensor:
    """The echo-planar MRI of nibabel's test data as fp32 [time = 2, depth = 24, height = 128, width = 96].

    Raises MissingPackageError where nibabel, or the file in it, is missing.
    """
    nibabel = require("nibabel", "demo")
    path = Path(nibabel.__file__).parent / "tests" / "data" / "example4d.nii.gz"
    if not path.is_file():
        raise MissingPackageError(
            f"this nibabel {nibabel.__version__} ships no {path.name}; pip install --upgrade nibabel"
        )
    volume = nibabel.load(path).get_fdata(dtype="float32")  # [128, 96, 24, 2]
    return _standardize(torch.from_numpy(volume.copy()).permute(3, 2, 0, 1).contiguous())


def load_photos() -> list[torch.Tensor]:
    """Photographs as fp32 [3, H, W] in [0, 1]: those of scikit-image, else those of scikit-learn.

    Raises MissingPackageError where neither is installed.
    """
    try:
        folder = Path(require("skimage", "demo").__file__).parent / "data"
        names = ["astronaut.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "hubble_deep_field.jpg"]
        paths = [folder / name for name in names if (folder / name).is_file()]
        read = require("skimage.io", "demo").imread
        images = [read(path) for path in paths]
    except MissingPackageError:
        images = []
    if not images:
        images = list(require("sklearn.datasets", "demo").load_sample_images().images)
    return [torch.from_numpy(image[..., :3].copy()).permute(2, 0, 1).float() / 255 for image in images]


def mri_patches(volume: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Patches [N, 3, 24, 32, 32] of the volume; channels: both time points and their difference."""
    channels = torch.stack([volume[0], volume[1], _standardize(volume[1] - volume[0])])
    blocks = channels.unfold(2, 32, 32).unfold(3, 32, 32)  # [3, 24, 4, 3, 32, 32]
    patches = blocks.permute(2, 3, 0, 1, 4, 5).reshape(-1, 3, volume.shape[1], 32, 32)
    return patches[:count].contiguous()


def mri_unshuffled(volume: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """The volume at a quarter of its resolution, [N, 64, 6, 32, 24]; channels: the 4x4x4 voxels of each place."""
    times, depth, height, width = volume.shape
    x = volume.reshape(times, depth // 4, 4, height // 4, 4, width // 4, 4).permute(0, 2, 4, 6, 1, 3, 5)
    return x.reshape(times, 64, depth // 4, height // 4, width // 4)[:count].contiguous()


def photo_tiles(photos: list[torch.Tensor], count: int | None = None) -> torch.Tensor:
    """Tiles [N, 8, 128, 128]; channels: 2x2 pixels of the luminance and of red minus blue."""
    tiles = []
    for photo in photos:
        red, green, blue = photo
        pair = torch.stack([_standardize(0.299 * red + 0.587 * green + 0.114 * blue), _standardize(red - blue)])
        for top in range(0, photo.shape[1] - 255, 256):
            for left in range(0, photo.shape[2] - 255, 256):
                tiles.append(F.pixel_unshuffle(pair[:, top : top + 256, left : left + 256], 2))
    return torch.stack(tiles[:count]).contiguous()
