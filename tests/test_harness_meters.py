"""The frame meter against a fake device and a fake clock, so that every expected value is exact."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from ringkv.harness.meters import FrameMeter, PeakRss, StepTime


class FakeDevice:
    """Steps return at once and queue their work; only ``synchronize`` lets the time of that work pass."""

    def __init__(self, step_ms: float = 10.0, first_extra_ms: float = 0.0) -> None:
        self.now_s = 100.0
        self.step_ms = step_ms
        self.extra_ms = first_extra_ms
        self.queued_ms = 0.0
        self.events: list[str] = []

    def step(self) -> None:
        self.queued_ms += self.step_ms + self.extra_ms
        self.extra_ms = 0.0

    def synchronize(self) -> None:
        self.events.append("synchronize")
        self.now_s += self.queued_ms / 1000
        self.queued_ms = 0.0

    def clock(self) -> float:
        self.events.append("clock")
        return self.now_s

    def meter(self, warmup: int = 0, target_fps: float = 20.0) -> FrameMeter:
        return FrameMeter(self.synchronize, warmup=warmup, target_fps=target_fps, clock=self.clock)

    def run(self, meter: FrameMeter, frames: int, rows: int = 1) -> list[StepTime]:
        times = []
        for _ in range(frames):
            meter.start()
            self.step()
            times.append(meter.stop(frames=rows))
        return times


def test_the_device_time_is_measured_and_the_first_call_is_only_in_the_warm_up():
    """Without a synchronise only launch time is measured; with compile time averaged in, the mean is wrong."""
    device = FakeDevice(step_ms=10.0, first_extra_ms=500.0)
    meter = device.meter(warmup=1)
    device.run(meter, 1)
    wall_start = device.now_s
    times = device.run(meter, 10)
    wall_ms = (device.now_s - wall_start) * 1000
    summary = meter.summary()
    assert 9 <= summary["latency/frame_ms_mean"] <= 15
    assert 9 <= summary["latency/frame_ms_p50"] <= 15
    assert summary["latency/frame_ms_p99"] <= 15
    assert 66 <= summary["throughput/frames_per_s"] <= 111
    assert summary["warmup/steps"] == 1
    assert summary["warmup/ms_max"] == pytest.approx(510)
    assert summary["warmup/ms_total"] == pytest.approx(510)
    assert summary["steps/measured"] == summary["frames/measured"] == 10
    assert sum(time.ms for time in times) == pytest.approx(wall_ms, rel=0.1)
    assert not any(time.warmup for time in times)


def test_the_device_is_synchronised_before_both_clock_readings():
    device = FakeDevice()
    meter = device.meter()
    device.step()  # left in the queue by whoever came before
    device.run(meter, 1)
    assert device.events == ["synchronize", "clock"] * 2
    assert meter.summary()["latency/frame_ms_p50"] == pytest.approx(10)


def test_one_frame_is_its_own_percentile_and_has_no_jitter():
    device = FakeDevice(step_ms=12.5)
    meter = device.meter()
    device.run(meter, 1)
    summary = meter.summary()
    assert summary["latency/frame_ms_p50"] == summary["latency/frame_ms_p99"] == pytest.approx(12.5)
    assert summary["latency/jitter_ms"] == 0


def test_a_run_of_warm_up_only_has_no_numbers_instead_of_a_division_by_zero():
    device = FakeDevice()
    meter = device.meter(warmup=3)
    meter.mark_start()
    assert [time.warmup for time in device.run(meter, 3)] == [True, True, True]
    summary = meter.summary()
    for key in ("mean", "p50", "p95", "p99"):
        assert summary[f"latency/frame_ms_{key}"] is None
    assert summary["throughput/frames_per_s"] is None
    assert summary["latency/jitter_ms"] is None
    assert summary["latency/on_time_fraction"] is None
    assert summary["steps/measured"] == 0
    assert summary["warmup/ms_total"] == pytest.approx(30)
    assert summary["latency/first_frame_ms"] == pytest.approx(10)


def test_a_meter_that_never_ran_sums_up_to_nothing():
    summary = FakeDevice().meter(warmup=1).summary()
    assert summary["warmup/ms_max"] is None
    assert summary["latency/first_frame_ms"] is None
    assert summary["context/ms_total"] == 0


def test_a_step_of_three_sessions_is_three_frames_of_its_latency():
    device = FakeDevice(step_ms=10.0)
    meter = device.meter(target_fps=50)
    device.run(meter, 2, rows=3)
    device.step_ms = 30.0
    device.run(meter, 1, rows=2)
    summary = meter.summary()
    # Six frames of 10 ms and two of 30 ms in 50 ms.
    assert summary["throughput/frames_per_s"] == pytest.approx(8 / 0.050)
    assert summary["latency/frame_ms_mean"] == pytest.approx(15)
    assert summary["latency/frame_ms_p50"] == pytest.approx(10)
    assert summary["latency/jitter_ms"] == pytest.approx(75**0.5)
    assert summary["latency/on_time_fraction"] == pytest.approx(6 / 8)
    assert (summary["steps/measured"], summary["frames/measured"]) == (3, 8)


def test_priming_with_context_is_kept_apart_and_counts_towards_the_first_frame():
    device = FakeDevice(step_ms=4.0)
    meter = device.meter(warmup=1)
    meter.mark_start()
    assert device.run(meter, 5, rows=0)[0] == (pytest.approx(4), False)
    device.step_ms = 10.0
    device.run(meter, 3)
    summary = meter.summary()
    assert summary["context/steps"] == 5
    assert summary["context/ms_total"] == pytest.approx(20)
    assert summary["latency/first_frame_ms"] == pytest.approx(30)
    assert summary["warmup/ms_total"] == pytest.approx(10)
    assert summary["throughput/frames_per_s"] == pytest.approx(100)


def test_percentiles_interpolate_between_frames():
    device = FakeDevice()
    meter = device.meter()
    for ms in range(1, 101):
        device.step_ms = float(ms)
        device.run(meter, 1)
    summary = meter.summary()
    assert summary["latency/frame_ms_p50"] == pytest.approx(50.5)
    assert summary["latency/frame_ms_p95"] == pytest.approx(95.05)
    assert summary["latency/frame_ms_p99"] == pytest.approx(99.01)


def test_a_step_that_raised_is_dropped_by_the_next_start():
    device = FakeDevice()
    meter = device.meter()
    meter.start()
    device.now_s += 7
    device.run(meter, 1)
    assert meter.summary()["latency/frame_ms_mean"] == pytest.approx(10)
    with pytest.raises(RuntimeError, match=r"without start"):
        meter.stop()


@pytest.mark.parametrize(
    ("warmup", "target_fps", "message"),
    [(-1, 20.0, "warmup=-1"), (True, 20.0, "warmup=True"), (0, 0.0, "target_fps=0.0"), (0, float("inf"), "target_fps")],
)
def test_a_meter_refuses_a_warm_up_or_target_outside_its_range(warmup, target_fps, message):
    with pytest.raises(ValueError, match=message):
        FakeDevice().meter(warmup=warmup, target_fps=target_fps)


def test_the_peak_is_the_kernels_high_water_mark_and_never_below_a_reading(tmp_path: Path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t 900000000 kB\nVmRSS:\t  5 kB\n")
    assert PeakRss(status).peak_bytes() == 900_000_000 * 1024
    status.write_text("VmHWM:\t 1 kB\n")
    meter = PeakRss(status)
    reading = meter.current_bytes()
    assert meter.peak_bytes() >= reading > 1024


def test_the_peak_is_known_where_the_kernel_tells_no_high_water_mark(tmp_path: Path):
    meter = PeakRss(tmp_path / "absent")
    reading = meter.current_bytes()
    assert meter.peak_bytes() >= reading


def test_a_big_allocation_shows_in_the_peak_after_it_was_given_back():
    gc.collect()  # what an earlier test left must not be given back while this one allocates
    before = PeakRss().peak_bytes()
    block = bytearray(before - PeakRss().current_bytes() + (128 << 20))
    block[::4096] = b"\1" * len(block[::4096])
    del block
    assert PeakRss().peak_bytes() > before


def test_a_meter_that_goes_on_from_the_steps_of_another_sums_up_as_one_that_timed_them_all():
    whole = FakeDevice().meter(warmup=2)
    device = FakeDevice()
    first, second = device.meter(warmup=2), device.meter(warmup=2)
    steps = [(10.0, 0, False), (20.0, 2, True), (30.0, 2, True), (40.0, 2, False), (50.0, 2, False)]
    for meter in (whole, first):
        clock = meter._clock.__self__
        meter.mark_start()
        for ms, frames, warmup in steps[: 3 if meter is first else 5]:
            meter.start()
            clock.now_s += ms / 1000
            assert meter.stop(frames=frames).warmup is warmup
    second.restore(steps[:3], first.first_frame_ms)
    for ms, frames, _ in steps[3:]:
        second.start()
        device.now_s += ms / 1000
        second.stop(frames=frames)
    assert second.summary() == pytest.approx(whole.summary())
    assert second.summary()["latency/first_frame_ms"] == pytest.approx(30.0)
