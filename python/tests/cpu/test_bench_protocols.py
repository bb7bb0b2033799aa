"""The arithmetic of the two protocols, under a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from mega_moe.bench.protocols import PROTOCOLS, CudaTimer, HostTimer, make_timer, mean_mhz, measure


class FakeTimer:
    """Each call takes what `cost` says for its number since the last pause; keeps a log of what happened."""

    name = "fake"
    mhz_reason: str | None = None

    def __init__(self, cost: Callable[[int], float], mhz: Sequence[float | None] = (1500.0,)) -> None:
        self._cost, self._mhz, self._since_pause = cost, mhz, 0
        self.log: list[tuple[str, float]] = []
        self.windows: list[int] = []

    def window(self, calls: Sequence[Callable[[], object]], count: int) -> tuple[float, float | None]:
        seconds = 0.0
        for index in range(count):
            calls[index % len(calls)]()
            seconds += self._cost(self._since_pause)
            self._since_pause += 1
        self.log.append(("window", seconds))
        self.windows.append(count)
        return seconds, self._mhz[(len(self.windows) - 1) % len(self._mhz)]

    def idle(self, seconds: float) -> None:
        self.log.append(("idle", seconds))
        self._since_pause = 0


class OneRank:
    def maximum(self, value: float) -> float:
        return value

    def minimum(self, value: float) -> float:
        return value

    def barrier(self) -> None: ...


class SlowPeer(OneRank):
    """Another rank that takes three times as long and whose clock is 100 MHz lower."""

    def maximum(self, value: float) -> float:
        return 3 * value

    def minimum(self, value: float) -> float:
        return value - 100 if value > 0 else value


def counting_calls(sets: int) -> tuple[list[int], list[Callable[[], object]]]:
    counts = [0] * sets

    def call(index: int) -> Callable[[], object]:
        def run() -> None:
            counts[index] += 1

        return run

    return counts, [call(index) for index in range(sets)]


def test_burst_is_ten_milliseconds_after_a_quarter_second_of_idle() -> None:
    timer = FakeTimer(lambda _: 0.001)
    _, calls = counting_calls(3)
    timing = measure(calls, PROTOCOLS["burst"], timer, OneRank())
    measured = timer.log[2:]  # two rounds of warm-up first
    assert measured == [("idle", 0.25), ("window", pytest.approx(0.010))] * 9
    assert timing.calls_per_window == 10
    assert timing.seconds == pytest.approx(0.001)
    assert len(timing.windows_s) == 9


def test_a_call_longer_than_a_burst_is_run_once_a_window() -> None:
    timing = measure(counting_calls(2)[1], PROTOCOLS["burst"], FakeTimer(lambda _: 0.04), OneRank())
    assert timing.calls_per_window == 1
    assert timing.seconds == pytest.approx(0.04)


def test_sustained_has_no_pause_and_at_least_the_least_time() -> None:
    timer = FakeTimer(lambda _: 0.002)
    timing = measure(counting_calls(3)[1], PROTOCOLS["sustained"], timer, OneRank())
    assert all(what == "window" for what, _ in timer.log)
    assert timer.log[-1][1] >= 0.3
    assert timing.calls_per_window == 158  # 0.3 s and 5 % more
    assert len(timer.windows) == 2 + 1 + 3  # warm-up, the window that is thrown away, three that count
    assert len(timing.windows_s) == 3


def test_a_sustained_window_that_was_too_short_is_grown_and_not_counted() -> None:
    # The warm-up is slow, as with lazy set-up, and promises too few calls.
    timer = FakeTimer(lambda call: 0.050 if call < 4 else 0.001)
    timing = measure(counting_calls(2)[1], PROTOCOLS["sustained"], timer, OneRank())
    assert all(seconds * timing.calls_per_window >= 0.3 for seconds in timing.windows_s)
    assert timing.seconds == pytest.approx(0.001)


def test_a_window_that_never_reaches_its_time_is_an_error() -> None:
    class Vanishing(FakeTimer):
        def window(self, calls: Sequence[Callable[[], object]], count: int) -> tuple[float, float | None]:
            super().window(calls, 1)
            return (1.0 if len(self.windows) <= 2 else 0.1), None

    with pytest.raises(
        RuntimeError, match=r"protocol sustained: got windows of 0.100 s, wanted at least 0.3 s"
    ):
        measure(counting_calls(1)[1], PROTOCOLS["sustained"], Vanishing(lambda _: 0.0), OneRank())


def test_the_median_of_the_windows_counts() -> None:
    costs = iter([0.01] * 2 + [0.01, 0.02, 0.09, 0.01, 0.02, 0.02, 0.02, 0.01, 0.90])
    timing = measure(counting_calls(1)[1], PROTOCOLS["burst"], FakeTimer(lambda _: next(costs)), OneRank())
    assert timing.seconds == pytest.approx(0.02)


def test_the_slowest_rank_counts_with_the_lowest_clock() -> None:
    timing = measure(counting_calls(1)[1], PROTOCOLS["burst"], FakeTimer(lambda _: 0.01), SlowPeer())
    assert timing.seconds == pytest.approx(0.03)
    assert timing.mhz == pytest.approx(1400.0)


def test_input_sets_take_turns_and_outputs_are_poisoned_before_each_window() -> None:
    counts, calls = counting_calls(3)
    poisoned: list[int] = []
    timer = FakeTimer(lambda _: 0.001)
    timing = measure(
        calls,
        PROTOCOLS["burst"].quick(),
        timer,
        OneRank(),
        poison=lambda: poisoned.append(len(timer.windows)),
    )
    assert timing.input_sets == 3
    assert max(counts) - min(counts) <= len(timer.windows)
    assert poisoned == [2, 3, 4]  # the number of windows already run: once before each of the three


def test_slow_calls_keep_three_windows() -> None:
    timing = measure(
        counting_calls(1)[1], PROTOCOLS["burst"], FakeTimer(lambda _: 20.0), OneRank(), budget_s=30
    )
    assert len(timing.windows_s) == 3


def test_quick_keeps_the_windows_as_they_are() -> None:
    for protocol in PROTOCOLS.values():
        assert (protocol.quick().idle_s, protocol.quick().work_s) == (protocol.idle_s, protocol.work_s)
        assert protocol.quick().windows == 3


def test_no_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="calls: got none"):
        measure([], PROTOCOLS["burst"], FakeTimer(lambda _: 0.01), OneRank())


def test_a_missing_clock_has_a_reason() -> None:
    timer = FakeTimer(lambda _: 0.01, mhz=(None,))
    timing = measure(counting_calls(1)[1], PROTOCOLS["burst"].quick(), timer, OneRank())
    assert (timing.mhz, timing.mhz_reason) == (None, "no SM was seen by both probes")
    timer.mhz_reason = "the library is missing"
    timing = measure(counting_calls(1)[1], PROTOCOLS["burst"].quick(), timer, OneRank())
    assert timing.mhz_reason == "the library is missing"


def test_host_timer_measures_real_time() -> None:
    import time

    seconds, mhz = HostTimer("no GPU").window([lambda: time.sleep(0.01)], 3)
    assert 0.03 <= seconds < 10
    assert mhz is None


def test_mhz_is_the_mean_over_the_sms_that_both_probes_reached() -> None:
    before = [(0, 1000, 5000), (1, 0, 5000), (-1, -1, -1), (3, 7, 5000)]
    after = [(0, 1000 + 15_000, 15_000), (1, 17_000, 15_000), (2, 9, 15_000), (-1, -1, -1)]
    assert mean_mhz(before, after) == pytest.approx((1500.0 + 1700.0) / 2)
    assert mean_mhz(before, []) is None
    # globaltimer ticks coarsely: no time passed means no rate, not a division by 0.
    assert mean_mhz([(0, 10, 5)], [(0, 20, 5)]) is None


def test_a_cpu_has_no_clock_and_says_why() -> None:
    timer = make_timer(torch.device("cpu"), None)
    assert isinstance(timer, HostTimer)
    assert timer.mhz_reason == "clocks are read on CUDA devices only, the device is cpu"
    missing = make_timer(torch.device("cuda"), "mega_moe_ops.so is missing")
    assert isinstance(missing, CudaTimer)
    assert missing.mhz_reason == "mega_moe_ops.so is missing"


def test_device_clock_starts_behind_work_that_hides_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append("hidden"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("waited"))
    timer = CudaTimer(torch.device("cuda", 0), "none here")
    assert timer.window([lambda: told.append("call")], 2) == (3e-3, None)
    assert told == ["hidden", "event", "call", "call", "event", "waited"]
