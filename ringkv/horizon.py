"""Which frames a ring holds and which of them a frame may see, in plain Python integers.

``visible_frames`` is the executable specification of the cache: everything that reads or writes a ring is
checked against it, and it is itself checked in ``tests/test_horizon.py`` against a slot simulation and
literal lists. Nothing here imports torch, so planners and configs can ask without loading it.

The index arithmetic, once, for a layer with R buckets that keeps every d-th frame:

* frame ``f`` is kept when ``f % d == 0``; it is the ``f // d``-th kept frame and lands in slot ``(f // d) % R``;
* at clock ``p`` the frame being generated is not in history yet, so the kept frames so far are
  ``0, d, ..., d * (b - 1)`` with ``b = ceil(p / d)``;
* of those the last R are still in the ring, minus the one whose slot this frame takes. It takes one only when
  ``p % d == 0``, and then the slot is ``b % R``, which holds kept frame ``b - R``. A frame off the stride
  overwrites nothing, so hiding anything from it would waste a live frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.config import RingKVLayerConfig


def frame_after(clock: int | None) -> int:
    """The frame that comes next once ``clock`` is committed; the first one when nothing is."""
    return 0 if clock is None else clock + 1


def is_kept(layer: RingKVLayerConfig, frame: int) -> bool:
    """Whether a committing pass of ``frame`` writes a ring slot of this layer (and not only scratch)."""
    return frame % layer.pinned_dilation == 0


def slot_of(layer: RingKVLayerConfig, frame: int) -> int:
    """Slot (0-based, in ``range(ring_buckets)``) that the kept frame ``frame`` is written to."""
    assert is_kept(layer, frame), f"frame {frame} is not kept at dilation {layer.pinned_dilation}"
    return (frame // layer.pinned_dilation) % layer.ring_buckets


def hidden_slot(layer: RingKVLayerConfig, frame_pos: int) -> int | None:
    """Slot that the frame at clock ``frame_pos`` will overwrite, hidden from all its passes; None if it takes none."""
    return slot_of(layer, frame_pos) if is_kept(layer, frame_pos) else None


def visible_frames(layer: RingKVLayerConfig, frame_pos: int) -> list[int]:
    """History frames that the frame at clock ``frame_pos`` attends to, ascending, itself not included.

    The stream is one that committed every frame from 0 to ``frame_pos - 1``.
    """
    dilation, kept_so_far = layer.pinned_dilation, -(-frame_pos // layer.pinned_dilation)
    return [dilation * j for j in range(kept_so_far - num_visible(layer, frame_pos), kept_so_far)]


def num_visible(layer: RingKVLayerConfig, frame_pos: int) -> int:
    """How many they are, without naming them."""
    survivors = layer.ring_buckets - 1 if is_kept(layer, frame_pos) else layer.ring_buckets
    return min(-(-frame_pos // layer.pinned_dilation), survivors)


def held_frames(layer: RingKVLayerConfig, clock: int | None) -> list[int]:
    """Frames in the ring once frame ``clock`` is committed, ascending; none for ``clock=None`` (nothing committed).

    This is what a snapshot at ``clock`` contains. It can hold one frame more than the next frame sees.
    """
    if clock is None:
        return []
    newest = clock // layer.pinned_dilation
    return [layer.pinned_dilation * j for j in range(max(0, newest - layer.ring_buckets + 1), newest + 1)]


def overwritten_frames(layer: RingKVLayerConfig, clock: int | None, frames: int) -> list[int]:
    """What the last ``frames`` frames up to ``clock`` overwrote, ascending: what going back any of them needs.

    A frame may have come and gone within them: a ring of one bucket overwrites each of its frames with the next.
    """
    if clock is None:
        return []
    before = held_frames(layer, clock - frames if clock >= frames else None)
    return list(range(before[0] if before else 0, held_frames(layer, clock)[0], layer.pinned_dilation))


def window_frames(layer: RingKVLayerConfig) -> int:
    """Frames that a window in frame order takes at most: what a frame sees, and the frame itself.

    A frame off the stride of a dilated layer sees all ``ring_buckets`` kept ones, any other one less.
    """
    return layer.ring_buckets + int(layer.pinned_dilation > 1)


def session_start(session_idx: int, capacity: int) -> int:
    """First token slot of a session. Python integers: a large pool passes 2**31 (70,000 x 40,000 does)."""
    return session_idx * capacity


def horizon_frames(layer: RingKVLayerConfig) -> int:
    """How many frames back the oldest visible frame can be, plus one: ``ring_buckets * pinned_dilation``."""
    return layer.ring_buckets * layer.pinned_dilation
