"""What the paged cache puts out: against softmax written out, against the ring, and with garbage around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringkv.paged.manager import PagedKVManager
from tests.paged_tools import (
    PATHS,
    Windows,
    begin,
    build_paged,
    drive,
    one_pass,
    owned_tokens,
    random_payload,
    run,
    storage_of,
)
from tests.ring_tools import PAD_TAG, build_manager, dense_attention, reference_history, ring, same_bytes, step_of

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "num_qo_heads": 6, "head_dim": 8, "tokens_per_frame": 3}
WINDOWS = [ring(4), ring(3, 2), ring(1), ring(2, 3, frames=5)]
ROWS = ("a", "b")


def query(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE["num_qo_heads"], SHAPE["tokens_per_frame"], SHAPE["head_dim"], generator=generator).to(
        dtype
    )


def mixed(path: str, layers: Windows, dtype: torch.dtype = torch.float32, **changes: int) -> PagedKVManager:
    """Two sessions three frames apart, on pages of 4 tokens that no frame of 3 fits."""
    values: dict[str, Any] = {"num_sessions": 3, "num_layers": len(WINDOWS), "num_pages": 48} | SHAPE | changes
    manager = build_paged(layers, attention=path, dtype=dtype, **values)
    run(manager, "a", range(3), payload=random_payload(manager, dtype), q=query(0, dtype))
    return manager


def rows_at(step: int) -> list[tuple[str, int]]:
    return [("b", step), ("a", step + 3)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [WINDOWS, None], ids=["windowed", "full"])
def test_reads_are_softmax_over_what_is_visible(
    layers: Windows, path: str, dtype: torch.dtype, tolerance: float
) -> None:
    manager = mixed(path, layers, dtype)
    payload = random_payload(manager, dtype)
    for step in range(13):  # the longest window wraps three times
        q = query(step, dtype)
        outputs = drive(manager, rows_at(step), payload=payload, q=q)
        for index, out in enumerate(outputs):
            assert out.dtype == dtype
            for row, (rid, p) in enumerate(rows_at(step)):
                history = list(range(p))
                if layers is not None:
                    history = reference_history(layers[index].ring_buckets, layers[index].pinned_dilation, p)
                pairs = [payload(rid, f, index) for f in [*history, p]]
                k, v = (torch.cat(frames, dim=1) for frames in zip(*pairs, strict=True))
                gap = (out[row].double() - dense_attention(q, k, v)).abs().max()
                assert gap <= tolerance * v.abs().max(), (index, row, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_canonical_reads_are_bit_equal_to_the_ring_at_every_frame(dtype: torch.dtype) -> None:
    """What is visible is the same bytes in the same order, so where it is stored cannot show, wrapped or not."""
    paged = mixed("canonical", WINDOWS, dtype)
    other = build_manager(WINDOWS, attention="canonical", dtype=dtype, num_sessions=3, **SHAPE)
    payload = random_payload(paged, dtype)
    run(other, "a", range(3), payload=payload, q=query(0, dtype))
    for step in range(13):
        q, rows = query(step, dtype), rows_at(step)
        for manager in (paged, other):
            begin(manager, rows)
        for commit in (False, True):
            ours, theirs = (one_pass(m, rows, commit=commit, payload=payload, q=q) for m in (paged, other))
            assert same_bytes(ours, theirs), step
        for manager in (paged, other):
            manager.commit(*step_of(rows))


def test_a_query_in_another_dtype_than_the_cache_is_read_in_its_own() -> None:
    for path in PATHS:
        manager = mixed(path, WINDOWS, torch.bfloat16)
        payload = random_payload(manager, torch.bfloat16)
        q = query(5)
        out = run(manager, "a", range(3, 4), payload=payload, q=q)[0]
        k, v = (torch.cat(f, dim=1) for f in zip(*(payload("a", f, 0) for f in range(4)), strict=True))
        assert out.dtype == torch.float32
        torch.testing.assert_close(out[0].double(), dense_attention(q, k, v), rtol=0, atol=1e-5)


# -- garbage -------------------------------------------------------------------------------------------------


def poison(manager: PagedKVManager, value: float, *, stale_entries: bool) -> None:
    """Put ``value`` into everything that no frame may see: pages nobody owns, tokens of owned pages that hold no
    committed frame that is still visible, the staging area; and a page number into table entries nobody owns."""
    holders = {manager.session_of(rid): rid for rid in ROWS}
    for layer in manager.layers:
        keep = []
        for session in range(manager.num_sessions):
            owned = owned_tokens(layer, session)
            if session in holders:
                clock = manager.get_state(holders[session])["clock"]
                visible = list(range(clock + 1))
                dilation = 1
                if layer.window is not None:
                    dilation = layer.window.pinned_dilation
                    visible = reference_history(layer.window.ring_buckets, dilation, clock + 1)
                first = layer.table.owned(session)[0] * layer.table.page_tokens
                places = [f // dilation * 3 + t - first for f in visible for t in range(3)]
                keep += [owned[place] for place in places]
            if stale_entries:
                first, end = layer.table.owned(session)
                mine = {page % layer.table.width for page in range(first, end)}
                for column in set(range(layer.table.width)) - mine:
                    layer.table.entries[session, column] = 1
        dirty = torch.ones(layer.kv.shape[3], dtype=torch.bool)
        dirty[keep] = False
        layer.kv[:, :, :, dirty] = value
        layer.staging.fill_(value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [WINDOWS, None], ids=["windowed", "full"])
@pytest.mark.parametrize("stale_entries", [False, True])
def test_garbage_in_what_is_not_visible_changes_no_output(layers: Windows, path: str, stale_entries: bool) -> None:
    """NaN, so that even a weight of zero would show."""
    clean, dirty = mixed(path, layers), mixed(path, layers)
    payload = random_payload(clean)
    used: list[set[int]] = [set() for _ in dirty.layers]
    for step in range(9):
        for manager in (clean, dirty):
            begin(manager, rows_at(step))
        for tokens, layer in zip(used, dirty.layers, strict=True):
            tokens.update(*(owned_tokens(layer, session) for session in (0, 1)))
        if step:
            poison(dirty, float("nan"), stale_entries=stale_entries)
        q = query(step)
        for commit in (False, True):
            ours = one_pass(clean, rows_at(step), commit=commit, payload=payload, q=q)
            theirs = one_pass(dirty, rows_at(step), commit=commit, payload=payload, q=q)
            assert same_bytes(ours, theirs)
        for manager in (clean, dirty):
            manager.commit(*step_of(rows_at(step)))
    freed = [
        tokens.difference(*(owned_tokens(layer, session) for session in (0, 1)))
        for tokens, layer in zip(used, dirty.layers, strict=True)
    ]
    if layers is not None:
        assert all(freed), "every window has left pages behind"


@pytest.mark.parametrize("path", PATHS)
def test_the_canary_sees_garbage_in_one_visible_token(path: str) -> None:
    clean, dirty = mixed(path, WINDOWS), mixed(path, WINDOWS)
    token = owned_tokens(dirty.layers[0], 0)[1]
    dirty.layers[0].kv[1, 0, 0, token] += 1.0
    ours, theirs = (run(m, "a", range(3, 4), payload=random_payload(m), q=query(3)) for m in (clean, dirty))
    assert not same_bytes(ours[0], theirs[0])
    assert same_bytes(ours[1:], theirs[1:])


def test_history_is_gathered_once_for_all_passes_of_a_frame() -> None:
    clean, wiped = mixed("auto", WINDOWS), mixed("auto", WINDOWS)
    payload = random_payload(clean)
    for manager in (clean, wiped):
        begin(manager, [("a", 3)])
        one_pass(manager, [("a", 3)], commit=False, payload=payload, q=query(1))
    for layer in wiped.layers:
        layer.kv.fill_(float("nan"))
    for seed, commit in ((2, False), (3, True)):
        ours, theirs = (one_pass(m, [("a", 3)], commit=commit, payload=payload, q=query(seed)) for m in (clean, wiped))
        assert same_bytes(ours, theirs)


# -- padding, layout, gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [WINDOWS, None], ids=["windowed", "full"])
def test_padding_rows_touch_only_the_pages_reserved_for_them(layers: Windows, path: str) -> None:
    plain, padded = mixed(path, layers), mixed(path, layers, padding_session=True)
    payload = random_payload(plain)
    assert [layer.table.pool.num_free for layer in plain.layers] == [
        layer.table.pool.num_free for layer in padded.layers
    ]
    for step in range(6):
        ours = drive(plain, rows_at(step), payload=payload, q=query(step))
        theirs = drive(padded, rows_at(step), payload=payload, q=query(step), pads=2)
        for left, right in zip(ours, theirs, strict=True):
            assert torch.equal(left, right[:2])
            torch.testing.assert_close(right[2:], torch.full_like(right[2:], PAD_TAG))
    alone = drive(padded, [("a", 9)], payload=payload, q=query(9), pads=3)
    for left, right in zip(drive(plain, [("a", 9)], payload=payload, q=query(9)), alone, strict=True):
        assert torch.equal(left, right[:1])
    for rid in ROWS:
        assert same_bytes(plain.get_state(rid), padded.get_state(rid))
    for ours_, theirs_ in zip(plain.layers, padded.layers, strict=True):
        reserved = ours_.kv.shape[3]
        assert torch.equal(ours_.kv, theirs_.kv[:, :, :, :reserved])
        assert theirs_.kv.shape[3] == reserved + 4  # one frame of 3 tokens: one page
        assert torch.equal(theirs_.kv[:, :, :, reserved : reserved + 3], torch.full((2, 1, 2, 3, 8), PAD_TAG))
    padded.check_integrity()
    with pytest.raises(ValueError, match="padding_session"):
        plain.plan(*step_of([("a", 10)], 1))


def test_inputs_may_have_any_strides() -> None:
    left, right = mixed("auto", WINDOWS), mixed("auto", WINDOWS)
    payload = random_payload(left)

    def permuted(rid: str, frame: int, layer: int) -> tuple[Tensor, Tensor]:
        k, v = payload(rid, frame, layer)
        return k.transpose(0, 1).contiguous().transpose(0, 1), v.transpose(1, 2).contiguous().transpose(1, 2)

    for p in range(3, 7):
        ours = run(left, "a", range(p, p + 1), payload=payload, q=query(p))
        assert same_bytes(ours, run(right, "a", range(p, p + 1), payload=permuted, q=query(p)))


def test_the_cache_does_not_join_the_callers_graph() -> None:
    manager = mixed("auto", WINDOWS)
    payload = random_payload(manager)
    begin(manager, [("a", 3)])
    k, v = (t[None].requires_grad_() for t in payload("a", 3, 0))
    manager.attend(query(0)[None], k, v, 0, torch.tensor([3]), commit=True)
    assert not manager.layers[0].kv.requires_grad
    assert not manager.layers[0].staging.requires_grad


def test_helper_tensors_live_on_the_cache_s_device() -> None:
    """Index tensors were created on the default device, not the cache's."""
    torch.set_default_device("meta")
    try:
        manager = build_paged([ring(2)], num_sessions=2, num_pages=6, padding_session=True)
        ones = torch.ones(2, 1, 2, 2, device="cpu")
        for p in range(4):
            manager.ingest_request("a")
            assert manager.admit(*step_of([("a", p)], 1)).ok
            manager.plan(*step_of([("a", p)], 1))
            out = manager.attend(ones, ones, ones, 0, torch.tensor([p, 0], device="cpu"), commit=True)
            assert torch.equal(out, ones)
            manager.commit(*step_of([("a", p)], 1))
        state = manager.get_state("a")
        assert {t.device.type for pair in state["layers"] for t in pair} == {"cpu"}
        manager.reset_request("a")
        manager.load_state("a", state)
        manager.check_integrity()
        assert len(storage_of(manager)) == 2
    finally:
        torch.set_default_device(None)
