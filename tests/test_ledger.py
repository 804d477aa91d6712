"""The bytes ledger: what each strategy moves per frame, and that nothing which moves K or V gets past it.

Window of 16 frames, four denoise passes and a committing one. Layer 0 keeps every frame, layer 1 every other one, so
both have wrapped from frame 32 on. A frame-write is one frame's K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringkv import AttentionResource, EngineResourceInfo, KVConfig, KVSpec, RingKVConfig, RingKVManager
from ringkv.config import CatKVConfig, FullKVConfig, HFSlidingKVConfig, PagedKVConfig, ShiftKVConfig
from ringkv.harness.ledger import LayerBytes, measure_frame
from ringkv.ring import ops
from ringkv.ring.cache import LayerRingCache
from tests.ring_tools import ring

WINDOW, PASSES = 16, 5
LAYERS = (ring(WINDOW), ring(WINDOW, 2))
ON_STRIDE, OFF_STRIDE = 38, 39
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "num_qo_heads": 4,
    "head_dim": 8,
    "tokens_per_frame": 3,
    "num_sessions": 1,
}
FRAME_ELEMENTS = 2 * 2 * 3 * 8


def build(config: KVConfig, attention: str = "auto", dtype: torch.dtype = torch.float32) -> AttentionResource:
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=dtype, attention=attention))


def ring_config(**changes: Any) -> RingKVConfig:
    return RingKVConfig(**(COMMON | {"layers": LAYERS} | changes))


def writes(config: KVConfig, frame: int, attention: str = "auto") -> tuple[float, ...]:
    """Frame-writes of each layer; bytes must say the same."""
    layers = measure_frame(build(config, attention), frame=frame)
    assert [layer.bytes_written for layer in layers] == [layer.frame_writes * FRAME_ELEMENTS * 4 for layer in layers]
    return tuple(layer.frame_writes for layer in layers)


def reads(config: KVConfig, frame: int, attention: str = "auto") -> tuple[float, ...]:
    """Bytes read of each layer, in frames."""
    layers = measure_frame(build(config, attention), frame=frame)
    return tuple(layer.bytes_read / (FRAME_ELEMENTS * 4) for layer in layers)


# -- the strategies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["auto", "sdpa", "segments"])
def test_the_ring_writes_its_scratch_in_every_pass_and_its_slot_once(attention: str) -> None:
    assert writes(ring_config(), ON_STRIDE, attention) == (6, 6)
    assert writes(ring_config(), OFF_STRIDE, attention) == (6, 5)


def test_a_lent_read_moves_its_frame_into_the_slot_and_what_the_slot_held_out_and_back() -> None:
    """In four denoise passes; the commit leaves the frame there. Off the stride a full ring has nothing to hide."""
    assert writes(ring_config(), ON_STRIDE, "lent") == (6 + 4 * 3, 6 + 4 * 3)
    assert writes(ring_config(), OFF_STRIDE, "lent") == (6 + 4 * 3, 5)
    assert reads(ring_config(), ON_STRIDE, "lent") == (5 * 16 + 4 * 3, 5 * 16 + 4 * 3)


def test_a_fast_read_of_the_ring_reads_the_visible_frames_and_copies_none() -> None:
    """Five reads of 15 or 16 history frames and the own one; a masked call also reads the frame that it hides."""
    assert reads(ring_config(), ON_STRIDE, "segments") == (5 * 16, 5 * 16)
    assert reads(ring_config(), OFF_STRIDE, "segments") == (5 * 16, 5 * 17)
    # Frame 38 hides slot 38 % 16 = 6 of layer 0 and slot 19 % 16 = 3 of layer 1, both inside the span.
    assert reads(ring_config(), ON_STRIDE, "sdpa") == (5 * 17, 5 * 17)


def test_the_canonical_read_gathers_the_window_in_every_pass() -> None:
    assert writes(ring_config(), ON_STRIDE, "canonical") == (6 + 5 * 16, 6 + 5 * 16)


def test_shifting_moves_the_window_out_and_back_once_per_kept_frame() -> None:
    config = ShiftKVConfig(layers=LAYERS, **COMMON)
    assert writes(config, ON_STRIDE) == (15 + 15 + 5, 15 + 15 + 5)
    assert writes(config, OFF_STRIDE) == (15 + 15 + 5, 5)


def test_concatenation_rebuilds_the_window_in_every_pass() -> None:
    config = CatKVConfig(layers=LAYERS, **COMMON)
    assert writes(config, ON_STRIDE) == (5 * 16, 5 * 16)
    assert writes(config, OFF_STRIDE) == (5 * 16, 5 * 17)


def test_full_context_writes_its_own_frame_and_now_and_then_everything() -> None:
    config = FullKVConfig(**COMMON)
    assert writes(config, 40) == (5, 5)
    assert reads(config, 40) == (5 * 41, 5 * 41)
    assert writes(config, 32) == (32 + 5, 32 + 5)  # a buffer of 32 frames is full: it is copied into one of 64
    assert writes(FullKVConfig(max_frames=41, **COMMON), 40) == (5, 5)
    assert reads(FullKVConfig(max_frames=60, **COMMON), 40) == (5 * 60, 5 * 60)  # its mask hides, but all is read


def test_full_context_under_a_window_slices_it_or_gathers_a_dilated_one_once() -> None:
    config = FullKVConfig(layers=LAYERS, **COMMON)
    # Gathered: 15 or 16 frames once, the own frame in every pass, besides its own write in every pass.
    assert writes(config, ON_STRIDE) == (5, 15 + 5 + 5)
    assert writes(config, OFF_STRIDE) == (5, 16 + 5 + 5)


@pytest.mark.parametrize("page_tokens", [2, 4])
def test_pages_are_gathered_once_and_written_once(page_tokens: int) -> None:
    pages = {"page_tokens": page_tokens, "num_pages": 400}
    windowed = PagedKVConfig(layers=LAYERS, **pages, **COMMON)
    assert writes(windowed, ON_STRIDE) == (15 + 5 + 1, 15 + 5 + 1)
    assert writes(windowed, OFF_STRIDE) == (15 + 5 + 1, 16 + 5)
    assert writes(PagedKVConfig(**pages, **COMMON), 40) == (40 + 5 + 1, 40 + 5 + 1)


def test_the_sliding_cache_of_transformers_concatenates_in_every_pass() -> None:
    pytest.importorskip("transformers")
    config = HFSlidingKVConfig(layers=(ring(WINDOW), ring(4)), **COMMON)
    assert writes(config, 40) == (5 * 16, 5 * 4)


# -- units ---------------------------------------------------------------------------------------------------


def test_frame_writes_do_not_depend_on_the_dtype_and_bytes_do() -> None:
    wide, narrow = (measure_frame(build(ring_config(), dtype=d), frame=20) for d in (torch.float32, torch.bfloat16))
    assert [layer.frame_writes for layer in wide] == [layer.frame_writes for layer in narrow]
    assert [layer.bytes_written for layer in wide] == [2 * layer.bytes_written for layer in narrow]


def test_fewer_passes_write_less() -> None:
    resource = build(ring_config())
    assert [layer.frame_writes for layer in measure_frame(resource, frame=40, denoise_passes=0)] == [2, 2]
    assert [layer.frame_writes for layer in measure_frame(resource, frame=40, denoise_passes=1)] == [3, 3]


def test_measuring_leaves_the_resource_as_it_was_and_can_be_repeated() -> None:
    resource = build(ring_config())
    first = measure_frame(resource, frame=20)
    assert resource.num_free_sessions == 1
    assert resource.memory_report()["in_use"] == 0
    resource.check_integrity()
    assert measure_frame(resource, frame=20) == first
    with pytest.raises(RuntimeError, match=r"step refused: .*max_frames=3"):
        measure_frame(build(FullKVConfig(max_frames=3, **COMMON)), frame=3)


# -- what is planted is found ----------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, extra: Callable[[LayerRingCache], object]) -> list[LayerBytes]:
    """The ring's ledger with ``extra`` done to a layer before each of its passes."""
    attend = RingKVManager._attend

    def with_extra(self: RingKVManager, q: Tensor, k: Tensor, v: Tensor, layer_idx: int, *args: Any) -> Tensor:
        extra(self.layers[layer_idx])
        return attend(self, q, k, v, layer_idx, *args)

    monkeypatch.setattr(RingKVManager, "_attend", with_extra)
    return measure_frame(build(ring_config()), frame=4)


@pytest.mark.parametrize(
    ("extra", "frames"),
    [
        (lambda layer: layer.kv.clone(), 17),
        (lambda layer: layer.kv[:, :, :, 3:6].contiguous(), 1),
        (lambda layer: layer.kv.transpose(2, 3).contiguous(), 17),
        (lambda layer: layer.kv.to(torch.float64), 17),
        (lambda layer: torch.cat([layer.kv[:, :, :, :6], layer.kv[:, :, :, 9:]], dim=3), 16),
        (lambda layer: layer.kv.index_select(3, torch.arange(12)), 4),
        (lambda layer: layer.kv[:, :, :, torch.arange(12)], 4),
        (lambda layer: torch.stack([layer.kv[0], layer.kv[1]]), 17),
        (lambda layer: layer.kv[:, :, :, :3].copy_(layer.kv[:, :, :, 3:6].clone()), 2),
        (lambda layer: layer.kv[:, :, :, 48:].zero_(), 1),
        (lambda layer: torch.empty_like(layer.kv).copy_(layer.kv), 17),
        (lambda layer: layer.kv.detach().clone().clone(), 34),
    ],
)
def test_a_planted_copy_of_the_pool_is_counted(
    monkeypatch: pytest.MonkeyPatch, extra: Callable[[LayerRingCache], object], frames: int
) -> None:
    assert [layer.frame_writes for layer in planted(monkeypatch, extra)] == [6 + PASSES * frames] * 2


@pytest.mark.parametrize(
    "extra",
    [
        lambda layer: (layer.kv.unbind(0), layer.kv[0].view(-1), layer.kv[0].expand(3, -1, -1, -1)),
        lambda layer: (layer.written.clone(), layer.commits.clone(), layer.kv.new_zeros(5)),
        lambda layer: torch.isnan(layer.kv).any(),
    ],
)
def test_views_flags_and_questions_are_not_writes(
    monkeypatch: pytest.MonkeyPatch, extra: Callable[[LayerRingCache], object]
) -> None:
    assert [layer.frame_writes for layer in planted(monkeypatch, extra)] == [6, 6]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (lambda layer: layer.kv * 1, "aten.mul.Tensor"),
        (lambda layer: torch.where(layer.kv > 0, layer.kv, 0), "aten.where"),
        (lambda layer: layer.kv.add_(0), "aten.add_.Tensor"),
        (lambda layer: torch.empty_like(layer.kv).add_(layer.kv), "aten.add_.Tensor"),
    ],
)
def test_an_operator_that_the_ledger_does_not_know_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, extra: Callable[[LayerRingCache], object], name: str
) -> None:
    with pytest.raises(RuntimeError, match=name):
        planted(monkeypatch, extra)


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that write by the registered operator, as those that a graph holds do, and read nothing."""

    def attend(
        self: RingKVManager, q: Tensor, k: Tensor, v: Tensor, layer_idx: int, frame_pos: Tensor, commit: bool
    ) -> Tensor:
        self.layers[layer_idx].write(k, v, frame_pos, self._staged_sessions[: len(q)], commit=commit)
        return q

    monkeypatch.setattr(RingKVManager, "_attend", attend)


@pytest.mark.usefixtures("by_operator")
def test_the_body_of_a_registered_operator_is_counted_not_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert writes(ring_config(), ON_STRIDE) == (6, 6)
    assert writes(ring_config(), OFF_STRIDE) == (6, 5)
    body = ops.write_on_host

    def wasteful(kv: Tensor, *args: Any) -> None:
        body(kv, *args)
        body(kv, *args)
        kv.clone()

    monkeypatch.setattr(ops, "write_on_host", wasteful)
    assert writes(ring_config(), ON_STRIDE) == (2 * 6 + PASSES * 17,) * 2


@pytest.mark.usefixtures("by_operator")
def test_the_body_that_an_accelerator_runs_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends the second write of a frame off the stride to scratch again, so a dilated layer saves nothing."""
    monkeypatch.setattr(ops, "write_on_host", ops.write_on_device)
    assert writes(ring_config(), ON_STRIDE) == (6, 6)
    assert writes(ring_config(), OFF_STRIDE) == (6, 6)


def test_what_moves_between_passes_counts_for_the_layer_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingKVManager, "_committed", lambda self, session, frame: self.layers[1].kv.clone())
    assert writes(ring_config(), ON_STRIDE) == (6, 6 + 17)
    monkeypatch.setattr(
        RingKVManager, "_committed", lambda self, session, frame: torch.cat([layer.kv for layer in self.layers])
    )
    with pytest.raises(RuntimeError, match=r"layers \[0, 1\] at once"):
        writes(ring_config(), ON_STRIDE)
