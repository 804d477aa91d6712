"""States of the paged cache, its bytes, and how it is built."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import EngineResourceInfo, KVSpec
from ringkv import memory as bytes_ahead
from ringkv.config import PagedKVConfig
from ringkv.paged.manager import PagedKVManager
from tests.paged_tools import PATHS, Windows, begin, build_paged, drive, one_pass, random_payload, run, storage_of
from tests.ring_tools import ring, ring_config, same_bytes, step_of

SHAPE = {"num_kv_heads": 2, "num_qo_heads": 2, "head_dim": 4, "tokens_per_frame": 3, "num_layers": 3}
WINDOWS = [ring(3), ring(2, 4), ring(1)]
BOTH = pytest.mark.parametrize("layers", [WINDOWS, None], ids=["windowed", "full"])


def make(layers: Windows, **changes: Any) -> PagedKVManager:
    return build_paged(layers, **{"num_pages": 40, **SHAPE, **changes})


def goes_on_like(target: PagedKVManager, to: str, source: PagedKVManager, rid: str, frames: range) -> bool:
    """Whether both put out the same bytes over ``frames`` for the same inputs."""
    payload = random_payload(source)
    q = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def same(_: str, frame: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return payload("x", frame, layer)

    return same_bytes(run(source, rid, frames, payload=same, q=q), run(target, to, frames, payload=same, q=q))


@BOTH
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("clock", [0, 2, 6, 9])
def test_a_session_goes_on_in_another_pool_with_other_pages(
    layers: Windows, path: str, by_file: bool, clock: int, tmp_path: Path
) -> None:
    source = make(layers, attention=path)
    run(source, "a", range(clock + 1), payload=random_payload(source))
    target = make(layers, attention=path, num_sessions=3, page_tokens=5, num_pages=70)
    for p in range(5):  # pages that follow one another are taken by turns, then every other owner leaves
        drive(target, [("x", p), ("y", p)], payload=random_payload(target))
    target.remove_request("x")
    other = target.get_state("y")
    target.ingest_request("b")
    if by_file:
        source.save("a", tmp_path / "a.safetensors")
        target.load("b", tmp_path / "a.safetensors")
    else:
        target.load_state("b", source.get_state("a"))
    assert same_bytes(target.get_state("b"), source.get_state("a"))
    target.check_integrity()
    for wrong in (0, clock, clock + 2):
        assert not target.admit(*step_of([("b", wrong)])).ok
    assert goes_on_like(target, "b", source, "a", range(clock + 1, clock + 6))
    assert same_bytes(target.get_state("y"), other)
    target.check_integrity()


@BOTH
def test_a_state_holds_what_the_next_frame_sees_and_an_empty_scratch(layers: Windows) -> None:
    manager = make(layers)
    manager.ingest_request("a")
    assert manager.admit(*step_of([("a", 0)])).ok
    state = manager.get_state("a")
    assert state["clock"] is None
    assert all(kv.shape[3] == 3 and not kv.any() and written.all() for kv, written in state["layers"])
    payload = random_payload(manager)
    run(manager, "a", range(7), payload=payload)
    state = manager.get_state("a")
    assert (state["clock"], state["dtype"]) == (6, "float32")
    visible = [[5, 6], [0, 4], []] if layers is not None else [list(range(7))] * 3
    for index, ((kv, written), frames) in enumerate(zip(state["layers"], visible, strict=True)):
        assert kv.shape == (2, 1, 2, 3 * (len(frames) + 1), 4)
        assert written.dtype == torch.bool
        assert written.all()
        assert not kv[:, :, :, -3:].any()
        for place, frame in enumerate(frames):
            assert torch.equal(kv[:, 0, :, 3 * place : 3 * place + 3], torch.stack(payload("a", frame, index)))


def test_a_state_is_a_copy() -> None:
    manager = make(WINDOWS, num_sessions=2)
    run(manager, "a", range(5), payload=random_payload(manager))
    state = manager.get_state("a")
    kept = copy.deepcopy(state)
    run(manager, "a", range(5, 10), payload=random_payload(manager))
    manager.load_state("a", state)
    manager.ingest_request("b")
    manager.load_state("b", state)
    run(manager, "a", range(5, 7), payload=random_payload(manager))
    assert same_bytes(state, kept)
    assert same_bytes(manager.get_state("b"), kept)
    manager.check_integrity()


def test_a_load_replaces_what_the_session_holds_and_voids_its_plan() -> None:
    manager = make(WINDOWS)
    run(manager, "a", range(4), payload=random_payload(manager))
    state = manager.get_state("a")
    run(manager, "a", range(4, 6), payload=random_payload(manager))
    begin(manager, [("a", 6)])
    one_pass(manager, [("a", 6)], commit=True, payload=random_payload(manager))
    manager.load_state("a", state)
    with pytest.raises(RuntimeError, match="was loaded"):
        manager.commit(*step_of([("a", 6)]))
    assert same_bytes(manager.get_state("a"), state)
    manager.check_integrity()


@BOTH
def test_a_load_that_lacks_pages_says_so_and_changes_nothing(layers: Windows) -> None:
    source = make(layers)
    run(source, "a", range(6), payload=random_payload(source))
    state = source.get_state("a")
    needed = 2 if layers is not None else 5
    target = make(layers, num_pages=needed + 1, num_sessions=2)
    run(target, "x", range(2), payload=random_payload(target))
    target.ingest_request("b")
    before, x = storage_of(target), target.get_state("x")
    with pytest.raises(RuntimeError, match=f"needs {needed} pages of layer 0, {needed - 1} of {needed + 1} are free"):
        target.load_state("b", state)
    assert same_bytes(storage_of(target), before)
    assert same_bytes(target.get_state("x"), x)
    assert target.session_of("b") is None
    target.load_state("x", state)  # its own pages count as room
    assert same_bytes(target.get_state("x"), state)
    target.check_integrity()


def _clock(value: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(clock=value)


def _layer(edit: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["layers"].__setitem__(1, edit(*state["layers"][1]))


@pytest.mark.parametrize(
    "spoil",
    [
        _clock(3),
        _clock(-1),
        _clock(None),
        _clock(1.0),
        lambda state: state.update(version=2),
        lambda state: state.update(dtype="bfloat16"),
        lambda state: state["layers"].pop(),
        lambda state: state["geometry"].update(strategy="ring"),
        lambda state: state["geometry"].update(layers=None),
        _layer(lambda kv, written: (kv[:, :, :, 1:], written[1:])),
        _layer(lambda kv, written: (kv.double(), written)),
        _layer(lambda kv, written: (kv, written.int())),
        _layer(lambda kv, written: (kv, torch.arange(len(written)) != 0)),  # half a frame
        _layer(lambda kv, written: (kv, torch.arange(len(written)) < len(written) - 1)),
    ],
)
@pytest.mark.parametrize("holds", [False, True])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    spoil: Callable[[dict[str, Any]], None], holds: bool
) -> None:
    source = make(WINDOWS)
    run(source, "a", range(6), payload=random_payload(source))
    state = source.get_state("a")
    spoil(state)
    target = make(WINDOWS)
    target.ingest_request("b")
    if holds:
        run(target, "b", range(3), payload=random_payload(target))
    before = storage_of(target)
    with pytest.raises(ValueError):
        target.load_state("b", state)
    assert same_bytes(storage_of(target), before)
    assert target.admit(*step_of([("b", 3 if holds else 0)])).ok


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_prediction_equals_what_is_held_to_the_byte(device: str) -> None:
    rng = random.Random(3)
    for _ in range(40):
        windows = [ring(rng.randint(1, 6), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
        layers = windows if rng.random() < 0.6 else None
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
        manager = build_paged(
            layers,
            num_layers=len(windows),
            dtype=dtype,
            device=device,
            page_tokens=rng.randint(1, 9),
            num_pages=rng.randint(1, 30),
            tokens_per_frame=rng.randint(1, 7),
            num_sessions=rng.randint(1, 4),
            head_dim=rng.choice([2, 3, 8]),
            padding_session=rng.random() < 0.5,
        )
        held = sum(t.numel() * t.element_size() for layer in manager.layers for t in (layer.kv, layer.staging))
        assert manager.memory_bytes() == held
        assert bytes_ahead.paged_storage_bytes(manager.config, dtype) == held
        assert bytes_ahead.page_pool_bytes(manager.config, dtype) == sum(layer.kv.nbytes for layer in manager.layers)


def test_the_figures_by_hand() -> None:
    """One layer, H=2, D=4, T=2, bf16: 32 bytes a token; pages of 4 tokens, a window of 3 frames, 2 sessions."""
    shape: dict[str, Any] = {
        "num_kv_heads": 2,
        "num_qo_heads": 2,
        "head_dim": 4,
        "num_sessions": 2,
        "dtype": torch.bfloat16,
    }
    manager = build_paged([ring(3)], num_pages=5, **shape)
    assert bytes_ahead.page_pool_bytes(manager.config, "bfloat16") == 5 * 4 * 32
    assert manager.memory_bytes() == (5 * 4 + 2 * (2 + 1) * 2) * 32
    padded = build_paged([ring(3)], num_pages=5, padding_session=True, **shape)
    assert padded.memory_bytes() == manager.memory_bytes() + (4 + 2) * 32
    assert padded.memory_report()["padding"] == (4 + 2) * 32
    full = build_paged(None, num_pages=5, **shape)
    assert full.memory_bytes() == (5 * 4 + 5 * 4 + 2 * 2) * 32


def test_the_memory_report_adds_up_and_no_buffer_moves() -> None:
    manager = build_paged([ring(3)], num_pages=5, num_sessions=2, head_dim=4, padding_session=True)
    page, frame = 4 * 2 * 4 * 4, 2 * 2 * 4 * 4
    addresses = [(t.kv.data_ptr(), t.staging.data_ptr(), t.table.entries.data_ptr()) for t in manager.layers]
    zeros = torch.zeros(1, 2, 4)

    def check(pages: int, sessions: int) -> None:
        report = manager.memory_report()
        assert (
            report["resident"] == manager.memory_bytes() == bytes_ahead.paged_storage_bytes(manager.config, "float32")
        )
        assert report["in_use"] == pages * page + sessions * frame <= report["resident"] - report["padding"]
        assert report["padding"] == page + frame
        assert report["flags"] == manager.layers[0].table.entries.nbytes
        assert addresses == [
            (t.kv.data_ptr(), t.staging.data_ptr(), t.table.entries.data_ptr()) for t in manager.layers
        ]

    check(0, 0)
    manager.ingest_request("a")
    check(0, 0)
    for p, pages in enumerate([1, 1, 2, 1, 2, 1, 2, 1]):
        drive(manager, [("a", p)], payload=lambda rid, frame, layer: (zeros, zeros))
        check(pages, 1)
    state = manager.get_state("a")
    drive(manager, [("b", 0)], payload=lambda rid, frame, layer: (zeros, zeros), pads=2)
    check(2, 2)
    manager.reset_request("a")
    check(1, 1)
    manager.load_state("a", state)
    check(2, 2)
    for rid in ("a", "b"):
        manager.remove_request(rid)
    check(0, 0)
    manager.check_integrity()
    manager.post_warmup_validate()
    manager.cleanup()
    assert manager.memory_bytes() == 0


# -- building ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["segments", "lent", "flex"])
def test_a_read_that_the_paged_cache_lacks_is_refused_by_name(attention: str) -> None:
    with pytest.raises(ValueError, match=f"'{attention}'.*auto, canonical, sdpa"):
        build_paged(None, attention=attention)


def test_another_strategy_s_config_is_refused_by_name() -> None:
    spec = KVSpec(resource_key="kv", config=ring_config([ring(2)]))
    with pytest.raises(ValueError, match="RingKVConfig"):
        PagedKVManager.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))


def test_a_deployment_may_change_the_number_of_sessions() -> None:
    config = build_paged(None).config
    spec = KVSpec(resource_key="kv", config=config, overrides={"num_sessions": 3})
    manager = spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))
    assert manager.num_free_sessions == 3
    with pytest.raises(ValueError, match="page_tokens"):
        KVSpec(resource_key="kv", config=config, overrides={"page_tokens": 8})


@pytest.mark.parametrize("fault", ["lost page", "moved buffer", "foreign page"])
def test_integrity_is_checked(fault: str) -> None:
    manager = make(WINDOWS, num_sessions=2)
    run(manager, "a", range(3), payload=random_payload(manager))
    manager.check_integrity()
    layer = manager.layers[0]
    if fault == "lost page":
        layer.table.clear(0)
    elif fault == "moved buffer":
        layer.kv = layer.kv.clone()
    else:
        layer.table.grow(1, (0, 3))
    with pytest.raises(RuntimeError):
        manager.check_integrity()


def test_the_config_refuses_bad_page_sizes() -> None:
    values: dict[str, Any] = {"num_kv_heads": 1, "num_qo_heads": 1, "head_dim": 2, "num_sessions": 1, "num_layers": 1}
    for key in ("page_tokens", "num_pages"):
        for bad in (0, -1, 1.5, None):
            with pytest.raises(ValueError, match=key):
                PagedKVConfig(**{"page_tokens": 4, "num_pages": 4, "tokens_per_frame": 2, **values, key: bad})
