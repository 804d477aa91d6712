"""A fault at every boundary of every operation: no session lost, duplicated or changed, and all go on bit for bit.

``pytest tests/test_faults.py -s`` prints the matrix figure by figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from ringkv import StepRunner
from ringkv.movable import MovableSessions
from tests.fault_tools import FAULTS, IN_STEP, OPERATIONS, Fault, Figures, World, census, figures, undisturbed
from tests.model_tools import SMALL, random_actions, random_frames, request, ring_layers
from tests.ring_tools import same_bytes
from tests.strategies import STRATEGIES, build

FAST = ("ring", "paged_windowed", "shift", "cat", "full")
STEP_FAULTS = [fault for fault in FAULTS if fault.operation == "step"]
LEDGER: list[tuple[Fault, str, str, Figures]] = []


@pytest.fixture(scope="module", autouse=True)
def matrix() -> Iterator[None]:
    """Every case that ran, as a table, and its total."""
    LEDGER.clear()
    yield
    width = max((len(str(fault)) for fault, *_ in LEDGER), default=0)
    print(f"\n{'fault':{width}}  {'then':9}  {'strategy':20}  sessions  lost  twice  changed  pool")
    for fault, then, name, row in LEDGER:
        print(
            f"{fault!s:{width}}  {then:9}  {name:20}  {row.sessions:8}  {row.lost:4}  {row.duplicated:5}  "
            f"{row.changed:7}  {row.pool}"
        )
    lost = sum(row.lost for *_, row in LEDGER)
    print(f"{len(LEDGER)} faults, {sum(row.sessions for *_, row in LEDGER)} sessions, {lost} lost")
    assert lost == 0


def strike(
    fault: Fault, name: str, clock: int, cancelled: bool, folder: Path, ledger: list[tuple[Fault, str, str, Figures]]
) -> None:
    """Break one operation, see who is still there, do it again (or end those in it), and go on."""
    operation = OPERATIONS[fault.operation]
    world = World(name, clock, folder if operation.on_disk else None)
    assert operation.feature is None or operation.feature in world.resource.features
    operation.prepare(world)
    before, files = census(world), world.files()
    with pytest.MonkeyPatch.context() as patched:
        fault.patch(patched, world)
        with pytest.raises(fault.error):
            operation.act(world)
    row = figures(before, census(world), fault.aborts)
    ledger.append((fault, "cancelled" if cancelled else "again", name, row))
    world.resource.check_integrity()
    assert row.clean, row
    assert fault.new_file or world.files() == files
    expected, report, free = undisturbed(name, clock, cancelled)
    if cancelled:
        world.cancel()
    elif fault.operation != "step":
        operation.act(world)
        operation.close(world)
    after = world.go_on(("a", "b") if cancelled else IN_STEP)
    row.changed += sum(not same_bytes(after[rid], outputs) for rid, outputs in expected.items())
    assert row.clean, row
    assert (world.resource.memory_report(), world.resource.num_free_sessions) == (report, free)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_loses_doubles_and_changes_no_session(fault: Fault, name: str, tmp_path: Path) -> None:
    strike(fault, name, 9, False, tmp_path, LEDGER)


@pytest.mark.parametrize("name", FAST[:2])
@pytest.mark.parametrize("fault", [fault for fault in STEP_FAULTS if fault.aborts], ids=str)
def test_those_that_end_in_an_aborted_step_leave_nothing_to_the_others(fault: Fault, name: str, tmp_path: Path) -> None:
    strike(fault, name, 9, True, tmp_path, LEDGER)


@pytest.mark.slow
@pytest.mark.parametrize("clock", [2, 10, 12])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("fault", "cancelled"), [*((fault, False) for fault in FAULTS), *((fault, True) for fault in STEP_FAULTS)], ids=str
)
def test_the_same_on_every_strategy_and_at_other_clocks(
    fault: Fault, cancelled: bool, name: str, clock: int, tmp_path: Path
) -> None:
    """Frame 2 before anything wraps, frame 10 off a dilation, frame 12 on it."""
    strike(fault, name, clock, cancelled, tmp_path, LEDGER)


# -- the matrix itself ---------------------------------------------------------------------------------------


def _park_too_early(resource: Any, rid: str) -> None:
    """The session is given up before its copy is safe."""
    state, clock = resource.get_state(rid), resource._table.clock_of(rid)
    resource._give_up(rid)
    resource._parking.put(rid, state)
    resource._table.mark_parked(rid, clock)


def _wake_too_early(resource: Any, rid: str) -> None:
    """The copy is dropped before it has arrived."""
    state = resource._parking.read(rid)
    resource._table.unmark_parked(rid)
    resource._parking.drop(rid)
    resource._put(rid, state, "was woken")


def _fork_by_halves(resource: Any, rid: str, new_rids: Sequence[str]) -> None:
    """The copies that were made stay when one cannot be."""
    for new in new_rids:
        resource.load_state(new, resource.get_state(rid))


@pytest.mark.parametrize(
    ("planted", "method", "fault", "figure"),
    [
        (_park_too_early, "park", "park: host memory full", ("lost", 1)),
        (_wake_too_early, "wake", "wake: layer 0 | layer 1", ("lost", 1)),
        (_fork_by_halves, "fork", "fork: second copy, layer 0 | layer 1", ("duplicated", 1)),
    ],
)
def test_the_matrix_finds_a_planted_mistake(
    planted: Callable[..., None],
    method: str,
    fault: str,
    figure: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MovableSessions, method, planted)
    ledger: list[tuple[Fault, str, str, Figures]] = []
    with pytest.raises(AssertionError):
        strike(next(each for each in FAULTS if str(each) == fault), "ring", 9, False, tmp_path, ledger)
    ((*_, row),) = ledger
    assert (getattr(row, figure[0]), row.clean) == (figure[1], False)


# -- the same with a model -----------------------------------------------------------------------------------

RIDS = ("a", "v", "b")
MODEL_FRAMES = 11
BROKEN_AT = 6
"""Frame of the victim; past a wrap, and on every dilation."""
MODEL_PASSES = 3


@cache
def sampler() -> FrameSampler:
    torch.manual_seed(3)
    return FrameSampler(FrameTransformer(SMALL), sigmas=(1.0, 0.5, 0.0))


def rollouts(name: str) -> StepRunner:
    """Three rollouts, the victim about to make frame ``BROKEN_AT`` and one frame behind the others."""
    resource = build(
        name,
        ring_layers(SMALL, 3, 2),
        tokens=SMALL.tokens_per_frame,
        heads=SMALL.num_kv_heads,
        q_heads=SMALL.num_heads,
        head_dim=SMALL.head_dim,
        sessions=len(RIDS),
    )
    runner = StepRunner(resource, sampler())
    for index, rid in enumerate(RIDS):
        context, actions = random_frames(1, seed=index), random_actions(MODEL_FRAMES, seed=index)
        runner.submit(request(rid, MODEL_FRAMES, context=context, actions=actions, stream=index))
        assert [result.rid for result in runner.step([rid])] == [rid]
    for _ in range(BROKEN_AT - 1):
        assert len(runner.step(RIDS)) == len(RIDS)
    assert len(runner.step(["a", "b"])) == 2
    return runner


def images(runner: StepRunner, *steps: Sequence[str]) -> dict[tuple[str, int], Tensor]:
    """What a series of steps makes, by request and frame, each once."""
    out: dict[tuple[str, int], Tensor] = {}
    for ready in steps:
        for result in runner.step(ready):
            assert (result.rid, result.frame) not in out
            out[result.rid, result.frame] = result.image
    return out


@cache
def undisturbed_images(name: str) -> dict[tuple[str, int], Tensor]:
    """The batches that a disturbed step is made in: the survivors alone, the victim alone, then all together."""
    return images(rollouts(name), ["a"], ["b"], ["v"], RIDS, RIDS)


@pytest.mark.parametrize(
    ("number", "layer"),
    [(0, 1), (MODEL_PASSES - 2, 0), (MODEL_PASSES - 1, 0), (MODEL_PASSES - 1, SMALL.num_layers - 1)],
    ids=["first denoise pass", "last denoise pass", "committing pass begun", "committing pass done"],
)
@pytest.mark.parametrize("name", FAST)
def test_a_model_that_breaks_in_a_layer_costs_one_rollout_one_try(name: str, number: int, layer: int) -> None:
    runner, passes = rollouts(name), [-1]
    resource, usual = runner.resource, runner.resource.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, frame_pos: Tensor, *, commit: bool) -> Tensor:
        out = usual(q, k, v, layer_idx, frame_pos, commit=commit)
        passes[0] += layer_idx == 0
        if "v" in resource._plan.real_ids and passes[0] % MODEL_PASSES == number and layer_idx == layer:
            passes[0] = -1  # whoever is driven next begins at pass 0
            raise FloatingPointError("the model broke")
        return out

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resource, "attend", attend)
        made = images(runner, RIDS)
    assert list(runner.failed) == ["v"]
    assert sorted(rid for rid, _ in made) == ["a", "b"]
    assert (runner.resident, resource.num_free_sessions) == (RIDS, 0)
    resource.check_integrity()
    runner.retry("v")
    made |= images(runner, ["v"], RIDS, RIDS)
    expected = undisturbed_images(name)
    assert made.keys() == expected.keys()
    assert [key for key, image in expected.items() if not torch.equal(made[key], image)] == []
    resource.check_integrity()
