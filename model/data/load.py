"""One call for every kind of data."""

from __future__ import annotations

import os

from model.data import atari, cache, loops, synthetic, video
from model.data.clip import Clip
from model.data.names import check_request


def load_clip(
    name: str,
    *,
    num_frames: int,
    channels: int,
    height: int,
    width: int,
    seed: int,
    index: int = 0,
    path: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] = "data",
) -> Clip:
    """Clip number ``index`` of ``name``, one of ``DATA_NAMES``, the same for the same arguments.

    num_frames, channels, height, width: the shape of ``Clip.frames``; channels is 3 (RGB) or 1 (luma), synthetic
    takes any number. seed, index: every pair gives its own game or motion; of a video, clip ``index`` starts at frame
    ``index * num_frames`` and the seed changes nothing. path: the file or folder of images that ``video`` reads.
    folder: where recorded games are cached.

    ``ValueError``, one line that names key, value and what is allowed, for any other request, for a file that cannot
    be decoded or has too few frames, and for a cache folder that cannot be written.
    """
    check_request(
        name,
        num_frames=num_frames,
        channels=channels,
        height=height,
        width=width,
        seed=seed,
        index=index,
        path=path,
    )
    if name == "synthetic":
        return synthetic.render(num_frames, channels, height, width, seed, index)
    if name == "loops":
        return loops.render(num_frames, channels, height, width, seed, index)
    if path is not None:
        return video.read(path, num_frames, channels, height, width, index)
    request = atari.ClipRequest(name, num_frames, channels, height, width, seed, index)
    return cache.load_or_record(request, folder)
