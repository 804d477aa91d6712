"""A fault at every boundary of every operation: no session lost, duplicated or changed, and all go on bit for bit.

``pytest tests/test_faults.py -s`` prints the matrix figure by figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_tools import FAULTS, IN_STEP, OPERATIONS, Fault, Figures, World, census, figures, undisturbed
from tests.ring_tools import same_bytes
from tests.strategies import STRATEGIES

FAST = ("ring", "paged_windowed", "shift", "cat", "full")
CASES = [
    (fault, cancelled) for fault in FAULTS for cancelled in ((False, True) if fault.operation == "step" else (False,))
]
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


def strike(fault: Fault, name: str, clock: int, cancelled: bool, folder: Path) -> None:
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
    LEDGER.append((fault, "cancelled" if cancelled else "again", name, row))
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
@pytest.mark.parametrize(("fault", "cancelled"), CASES, ids=lambda value: str(value))
def test_a_fault_loses_doubles_and_changes_no_session(fault: Fault, cancelled: bool, name: str, tmp_path: Path) -> None:
    strike(fault, name, 9, cancelled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("clock", [1, 10, 12])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("fault", "cancelled"), CASES, ids=lambda value: str(value))
def test_the_same_on_every_strategy_and_at_other_clocks(
    fault: Fault, cancelled: bool, name: str, clock: int, tmp_path: Path
) -> None:
    """Frame 1 before anything wraps, frame 10 off a dilation, frame 12 on it."""
    strike(fault, name, clock, cancelled, tmp_path)
