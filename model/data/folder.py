"""A video given as a folder of images."""

from __future__ import annotations

from pathlib import Path

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
"""What counts as a frame in a folder of images, whatever the case."""


def image_files(folder: Path) -> list[Path]:
    """The images in ``folder``, sorted by name (as text: pad numbers with zeros)."""
    return sorted(
        (file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES), key=lambda file: file.name
    )
