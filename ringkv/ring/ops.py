"""The write of a ring, as a registered operator that declares what it mutates.

A compiled region sees one opaque call that changes three buffers in place, so it neither clones a pool nor breaks the
graph. Registration is the low-level ``torch.library.Library`` one, whose dispatch is several times cheaper than that of
a Python ``custom_op``; ``benchmarks/op_cost.py`` measures both.

Shapes: B rows, H KV heads, T tokens per frame, D head dim; ``kv`` is ``[2, 1, H, sessions * capacity, D]``.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("ringkv", "DEF")
_LIBRARY.define(
    "ring_write(Tensor(a!) kv, Tensor(b!) written, Tensor(c!) commits, Tensor k, Tensor v, Tensor frame_pos, "
    "Tensor session_idx, bool commit, int ring_frames, int ring_buckets, int pinned_dilation) -> ()"
)


def write_on_host(
    kv: torch.Tensor,
    written: torch.Tensor,
    commits: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frame_pos: torch.Tensor,
    session_idx: torch.Tensor,
    commit: bool,
    ring_frames: int,
    ring_buckets: int,
    pinned_dilation: int,
) -> None:
    """CPU body: the clocks are read, and each row's frame is copied straight into its slot, without a temporary."""
    tokens = k.shape[2]
    capacity = (ring_frames + 1) * tokens
    if commit:
        commits.add_(1)  # before the write: a write that fails half-way still counts as begun
    for row, (clock, session) in enumerate(zip(frame_pos.tolist(), session_idx.tolist(), strict=True)):
        start = session * capacity
        places = [start + ring_frames * tokens]
        if commit and clock % pinned_dilation == 0:
            places.append(start + (clock // pinned_dilation) % ring_buckets * tokens)
            written[places[1] : places[1] + tokens] = True
        frame = (k[row], v[row])
        for place in places:
            keys, values = kv.narrow(3, place, tokens).unbind(0)
            keys.copy_(frame[0])
            values.copy_(frame[1])


def write_on_device(
    kv: torch.Tensor,
    written: torch.Tensor,
    commits: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frame_pos: torch.Tensor,
    session_idx: torch.Tensor,
    commit: bool,
    ring_frames: int,
    ring_buckets: int,
    pinned_dilation: int,
) -> None:
    """Accelerator body: the same writes by index, without asking the device anything, so that a graph can hold it.

    Every row of a pass takes the same instructions whatever its clock: a row off the stride sends its second write to
    scratch again, with the same content, so the duplicate is harmless.
    """
    rows, heads, tokens, head_dim = k.shape
    capacity = (ring_frames + 1) * tokens
    if commit:
        commits.add_(1)
    offsets = torch.arange(tokens, device=kv.device)
    start = session_idx * capacity
    scratch = start + ring_frames * tokens
    targets = [scratch]
    if commit:
        slot = torch.div(frame_pos, pinned_dilation, rounding_mode="floor") % ring_buckets
        targets.append(torch.where(frame_pos % pinned_dilation == 0, start + slot * tokens, scratch))
    for buffer, frame in ((kv[0, 0], k), (kv[1, 0], v)):
        flat = frame.transpose(0, 1).reshape(heads, rows * tokens, head_dim).to(kv.dtype)
        for target in targets:
            buffer.index_copy_(1, (target[:, None] + offsets).view(-1), flat)
    if commit:
        written.index_fill_(0, (targets[1][:, None] + offsets).view(-1), True)


def _write_fake(*args: object) -> None:
    return None


_LIBRARY.impl("ring_write", write_on_host, "CPU")
_LIBRARY.impl("ring_write", write_on_device, "CompositeExplicitAutograd")
torch.library.register_fake("ringkv::ring_write", _write_fake, lib=_LIBRARY)

ring_write = torch.ops.ringkv.ring_write.default
"""The dispatching operator, resolved once: looking it up by name costs a little at every call."""
