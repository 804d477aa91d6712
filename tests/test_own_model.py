"""The example of a foreign model does what its docstring says, and agrees with attention written out."""

from __future__ import annotations

import torch

from ringkv import RingKVLayerConfig, visible_frames
from scripts import own_model


def test_the_example_runs_and_says_what_it_took(capsys):
    assert own_model.main([]) == 0
    assert "40 frames through a ring of 8" in capsys.readouterr().out
    assert own_model.main(["ring_frames=8"]) == 2


@torch.no_grad()
def test_the_example_equals_a_dense_recomputation_of_its_window():
    """Every frame's K and V are kept in lists and attended to with a written-out softmax over ``visible_frames``."""
    torch.manual_seed(1)
    model, window = own_model.FrameModel(), 3
    got, _ = own_model.rollout(model, num_frames=11, ring_frames=window)
    layer = RingKVLayerConfig(ring_frames=window, ring_buckets=window)
    history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in model.blocks]
    x = model.start
    for frame in range(11):

        def attend(index, frame=frame):
            def dense(q, k, v):
                history[index].append((k, v))
                seen = [*visible_frames(layer, frame), frame]
                keys, values = (torch.cat([history[index][f][i] for f in seen], dim=2) for i in (0, 1))
                group = q.shape[1] // k.shape[1]
                keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
                return torch.softmax(q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ values

            return dense

        x = model(x, attend)
        torch.testing.assert_close(got[frame], x[0], rtol=1e-5, atol=1e-5)


def test_the_example_holds_the_same_bytes_however_long_it_runs():
    model = own_model.FrameModel()
    assert own_model.rollout(model, 3, ring_frames=4)[1] == own_model.rollout(model, 12, ring_frames=4)[1]
