"""What every storage strategy owes through ``attend``: what a pass sees, what it changes, who shares a step.

Each strategy is driven through the contract alone. Two oracles: plain softmax in fp64 over the content of the visible
frames, and marked content, whose outputs tell which tokens were visible and how often.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.ring_tools import dense_attention, ring, same_bytes
from tests.strategies import (
    EVERY_READ,
    STRATEGIES,
    UNBOUNDED,
    WINDOWED,
    Content,
    Rollout,
    assert_close,
    history,
    kv_tensors,
    normal,
    seen,
)

every_read = pytest.mark.parametrize(("name", "read"), EVERY_READ)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
windowed = pytest.mark.parametrize("name", WINDOWED)
unbounded = pytest.mark.parametrize("name", UNBOUNDED)

# -- which frames are seen -----------------------------------------------------------------------------------


@windowed
def test_the_window_holds_the_last_frames_and_not_one_more(name: str) -> None:
    """Mask and cache disagreed on whether the window counts the current item, above all when it is exactly full."""
    for buckets in (1, 2, 3):
        for tokens in (1, 2):
            rollout = Rollout(name, [ring(buckets)], tokens=tokens, marked=True)
            expected = [list(range(max(0, p - buckets + 1), p)) for p in range(7)]
            assert rollout.histories("a", range(7)) == expected


@windowed
def test_a_frame_off_the_stride_loses_nothing_that_nobody_overwrites(name: str) -> None:
    """A trim was computed from an allocated size, so it lost valid history for good."""
    rollout = Rollout(name, [ring(3, 2)], marked=True)
    assert rollout.histories("a", range(10)) == [
        *([], [0], [0], [0, 2], [0, 2], [0, 2, 4], [2, 4], [2, 4, 6], [4, 6], [4, 6, 8])
    ]


@windowed
@pytest.mark.parametrize(("buckets", "dilation"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 3), (4, 2)])
def test_three_wraps_of_any_window_see_what_a_slot_simulation_sees(name: str, buckets: int, dilation: int) -> None:
    frames = range(min(3 * buckets * dilation + 2, 30))
    rollout = Rollout(name, [ring(buckets, dilation)], marked=True)
    assert rollout.histories("a", frames) == [history(name, ring(buckets, dilation), p) for p in frames]


@unbounded
def test_full_context_sees_every_frame(name: str) -> None:
    rollout = Rollout(name, [ring(3)], marked=True)
    assert rollout.histories("a", range(20)) == [list(range(p)) for p in range(20)]


@windowed
def test_layers_have_windows_of_their_own(name: str) -> None:
    """A mask was computed once and reused for every layer."""
    expected = {7: ([6], [0, 4]), 8: ([7], [4]), 9: ([8], [4, 8])}
    for order in ((0, 1), (1, 0)):
        windows = (ring(2), ring(2, 4))
        rollout = Rollout(name, [windows[i] for i in order], marked=True)
        for frame, passes in enumerate(rollout.stream("a", range(10))):
            if frame in expected:
                found = [seen(out[0], 2)[:-1] for out in passes[-1]]
                assert found == [expected[frame][i] for i in order]


@every_read
def test_every_pass_is_dense_attention_over_the_visible_frames(name: str, read: str) -> None:
    windows = (ring(3), ring(2, 3), ring(1, 2))
    rollout = Rollout(name, windows, tokens=3, heads=2, q_heads=4, head_dim=8, attention=read)
    for frame, passes in enumerate(rollout.stream("a", range(14), noisy=1)):
        for variant, outputs in zip((1, 0), passes, strict=True):
            for layer, out in enumerate(outputs):
                v = rollout.content("a", frame, layer, variant)[2]
                assert_close(out[0], rollout.expected("a", frame, layer, variant), v)
        if frame >= 3 and name in WINDOWED:
            wider = rollout.expected("a", frame, 0, more=[frame - 3])
            with pytest.raises(AssertionError):
                assert_close(passes[-1][0][0], wider, v)


@every_read
def test_the_output_depends_on_the_last_frames_only(name: str, read: str) -> None:
    """Partial writes into a full window changed the result although the kept suffix was the same."""
    streams = [Rollout(name, [ring(3)], attention=read, seed="late") for _ in range(2)]
    late, early = streams[0].content, Rollout(name, [ring(3)], seed="early").content
    streams[1].content = lambda rid, frame, layer, variant: (late if frame >= 5 else early)(rid, frame, layer, variant)
    left, right = (stream.run("a", range(9)) for stream in streams)
    assert not torch.equal(left[6], right[6])
    same = [torch.equal(left[p], right[p]) for p in (7, 8)]
    assert same == [name in WINDOWED] * 2


# -- passes --------------------------------------------------------------------------------------------------


@every_read
def test_denoise_passes_see_themselves_and_leave_history_alone(name: str, read: str) -> None:
    """Noisy passes leaked into history, or the wrong content was committed."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], marked=True, attention=read)
    rollout.run("a", range(4))
    rows = [("a", 4)]
    rollout.begin(rows)
    before = rollout.resource.get_state("a")
    expected = [[*history(name, window, 4)] for window in rollout.windows]
    for variant in (1, 2, 3, 3):
        for layer, out in enumerate(rollout.full_pass(rows, variant=variant)):
            past = [f * 2 + t for f in expected[layer] for t in range(2)]
            assert out[0, 0, 0].nonzero().flatten().tolist() == [*past, 64 - variant]
    assert same_bytes(rollout.resource.get_state("a"), before)
    committed = rollout.full_pass(rows, commit=True)
    again = rollout.full_pass(rows, commit=True)
    assert same_bytes(committed, again)
    assert [seen(out[0], 2) for out in committed] == [[*frames, 4] for frames in expected]
    rollout.finish(rows)
    assert rollout.histories("a", [5]) == [history(name, ring(3), 5)]


@every_read
def test_a_denoise_pass_after_the_committing_one_does_not_change_what_is_committed(name: str, read: str) -> None:
    twins = [Rollout(name, [ring(3), ring(2, 2)], attention=read) for _ in range(2)]
    for rollout, late in zip(twins, (False, True), strict=True):
        for p in range(9):
            rollout.begin([("a", p)])
            rollout.full_pass([("a", p)], commit=True)
            for variant in (1, 2) if late else ():
                rollout.full_pass([("a", p)], variant=variant)
            rollout.finish([("a", p)])
    assert same_bytes(twins[0].resource.get_state("a"), twins[1].resource.get_state("a"))
    assert same_bytes(*(rollout.run("a", range(9, 13)) for rollout in twins))


@every_read
def test_planning_a_frame_again_does_not_lose_a_frame(name: str, read: str) -> None:
    """A window that shifts for a new frame must not shift again when that frame is begun anew."""
    twins = [Rollout(name, [ring(3), ring(2, 2)], attention=read) for _ in range(2)]
    for p in range(8):
        expected = twins[0].drive([("a", p)])[-1]
        for _ in range(2):
            twins[1].begin([("a", p)])
            twins[1].full_pass([("a", p)], variant=3)
        assert same_bytes(twins[1].drive([("a", p)])[-1], expected)
        assert same_bytes(*(rollout.resource.get_state("a") for rollout in twins))


@pytest.mark.parametrize("layers_done", [1, 2])
@every_read
def test_an_aborted_commit_leaves_nothing_behind(name: str, read: str, layers_done: int) -> None:
    """The model raised between its committing pass and the commit; the frame is driven again with other content."""
    twins = [Rollout(name, [ring(3), ring(2, 2)], attention=read) for _ in range(2)]
    calm, troubled = twins
    for p in range(8):
        troubled.begin([("a", p)])
        usual = troubled.content

        def tagged(
            rid: str, frame: int, layer: int, variant: int, usual: Content = usual
        ) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = usual(rid, frame, layer, variant)
            return q, torch.full_like(k, 1000.0), torch.full_like(v, 1000.0)

        troubled.content = tagged
        for layer in range(layers_done):
            troubled.layer_pass([("a", p)], layer, commit=True)
        troubled.content = usual
        state = troubled.resource.get_state("a")
        assert all(1000.0 not in kv for kv, _ in state["layers"])
        assert state["clock"] == (p - 1 if p else None)
        assert same_bytes(troubled.drive([("a", p)])[-1], calm.drive([("a", p)])[-1])
    troubled.resource.check_integrity()


@pytest.mark.parametrize("name", ["shift", "cat", "full", "full_windowed", "full_static", "full_static_windowed"])
def test_planning_after_an_aborted_commit_clears_storage_of_it(name: str) -> None:
    """Where an own frame has no place that every pass rewrites anyway, as the scratch of a ring is."""
    rollout = Rollout(name, [ring(3), ring(2, 2)])
    usual = rollout.content
    for p in range(6):
        rollout.begin([("a", p)])
        rollout.content = lambda *key: tuple(torch.full_like(t, 1000.0) for t in usual(*key))
        rollout.full_pass([("a", p)], commit=True)
        rollout.content = usual
        assert any(1000.0 in t for t in kv_tensors(rollout.resource))
        rollout.begin([("a", p)])
        assert not any(1000.0 in t for t in kv_tensors(rollout.resource))
        rollout.drive([("a", p)])


@every_strategy
def test_storage_does_not_join_the_callers_graph(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2)])
    usual = rollout.content
    rollout.content = lambda *key: tuple(t.clone().requires_grad_() for t in usual(*key))
    for passes in rollout.stream("a", range(5)):
        assert passes[-1][0].requires_grad  # through q
    assert not any(t.requires_grad for t in kv_tensors(rollout.resource))


# -- batches -------------------------------------------------------------------------------------------------


@every_read
def test_rows_at_different_clocks_share_a_step(name: str, read: str) -> None:
    """One row's clock was used for all."""
    for window, first, second in ((ring(3), 7, 1), (ring(3, 2), 7, 2)):
        rollout = Rollout(name, [window], marked=True, sessions=2, attention=read)
        rollout.run("a", range(first))
        rollout.run("b", range(second))
        out = rollout.drive([("a", first), ("b", second)])[-1][0]
        assert [seen(row, 2)[:-1] for row in out] == [history(name, window, p) for p in (first, second)]
        assert rollout.histories("b", [second + 1]) == [history(name, window, second + 1)]
        assert rollout.histories("a", [first + 1]) == [history(name, window, first + 1)]


@every_read
def test_a_row_is_what_it_is_alone_and_others_are_left_untouched(name: str, read: str) -> None:
    """A batch row was confused with a session."""
    windows = [ring(3), ring(2, 2)]
    rollout = Rollout(name, windows, heads=2, q_heads=4, head_dim=8, sessions=3, attention=read)
    alone = {rid: Rollout(name, windows, heads=2, q_heads=4, head_dim=8, attention=read) for rid in "abc"}
    at = dict.fromkeys("abc", 0)
    for _ in range(2):
        for rids in ("a", "cab", "bc", "ba"):
            untouched = {rid: rollout.resource.get_state(rid) for rid in set("abc") - set(rids) if at[rid]}
            rows = [(rid, at[rid]) for rid in rids]
            out = rollout.drive(rows)
            for row, (rid, frame) in enumerate(rows):
                for batched, single in zip(out, alone[rid].drive([(rid, frame)]), strict=True):
                    for left, right in zip(batched, single, strict=True):
                        assert torch.allclose(left[row], right[0], atol=1e-6)
                at[rid] += 1
            assert all(same_bytes(rollout.resource.get_state(rid), state) for rid, state in untouched.items())
    rollout.resource.check_integrity()


@every_read
def test_padding_rows_change_nothing_of_the_real_ones(name: str, read: str) -> None:
    """Padded tokens were stored like real ones, or a -1 marker addressed the last slot."""
    windows = [ring(3), ring(2, 2)]
    plain, padded = (
        Rollout(name, windows, sessions=2, padding=True, attention=read, head_dim=8, heads=2) for _ in range(2)
    )
    for rollout in (plain, padded):
        for rid in "ab":
            rollout.run(rid, range(4))
    for p, rows, pads in ((4, "ab", 2), (5, "ab", 1), (6, "a", 3), (6, "b", 1)):
        step = [(rid, p) for rid in rows]
        assert same_bytes(padded.drive(step, pads=pads), plain.drive(step))
        for rid in "ab":
            state = padded.resource.get_state(rid)
            assert same_bytes(state, plain.resource.get_state(rid))
            assert all(777.0 not in kv for kv, _ in state["layers"])
    assert padded.resource.memory_bytes() == plain.resource.memory_bytes()
    padded.resource.check_integrity()


@every_strategy
def test_padding_without_a_padding_session_is_refused(name: str) -> None:
    rollout = Rollout(name, [ring(3)])
    with pytest.raises(ValueError, match="padding_session"):
        rollout.begin([("a", 0)], pads=1)
    rollout.begin([("a", 0)])


# -- the oracles ----------------------------------------------------------------------------------------------


def test_the_oracle_of_these_tests_is_softmax() -> None:
    q, k, v = normal(2, 3, 4, key="q"), normal(1, 5, 4, key="k"), normal(1, 5, 4, key="v")
    assert_close(torch.nn.functional.scaled_dot_product_attention(q, k, v), dense_attention(q, k, v), v)


def test_marked_content_tells_a_frame_seen_twice_or_in_part() -> None:
    def output(marks: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(marks), 8).float().mean(0).expand(1, 2, 8)

    assert seen(output([0, 1, 4, 5]), 2) == [0, 2]
    for wrong in ([0, 1, 0, 1, 4, 5], [0, 1, 4]):
        with pytest.raises(AssertionError):
            seen(output(wrong), 2)
