"""How `--fix` tries remedies, without programs."""

import threading
import time
from types import SimpleNamespace

import pytest

from gpumem.hardware import catalogue
from phantom_gpu import fix
from phantom_gpu.report_records import Effect, Offer

OFFERS = [Offer(name, name, Effect.NOTHING, "nothing", (), ()) for name in "abcd"]


def report(retries, reserved_bytes):
    answer, gpu = SimpleNamespace(remedies=[]), SimpleNamespace(retries=retries)
    gpu.peak_allocated_bytes = 0
    return SimpleNamespace(
        fits=True,
        worst=lambda: (answer, gpu),
        by_gpu=lambda: [(answer, gpu)],
        least_seconds=lambda answer: None,
        peak_reserved_bytes=reserved_bytes,
    )


@pytest.mark.parametrize(("retries", "plain_bytes"), [(0, 90), (1, 120)])
def test_what_fits_only_without_its_cache_is_run_again_with_room(retries, plain_bytes):
    search = fix._Search([], catalogue.gpu("t4"), {"gpus": 1}, 0, lambda sentence: None, 95)
    search._run = lambda offers: report(0, 120)
    search.run(report(retries, 90))
    assert search.plain.reserved_bytes == plain_bytes


class OneAtATime(fix._Search):
    """Of programs that cannot run beside each other, as when both write one file."""

    def _try(self, offers):
        if not self.asked["file"].acquire(blocking=False):
            return fix.Trial(offers, failure="it read half a file")
        time.sleep(0.05)
        self.asked["file"].release()
        return fix.Trial(offers, reserved_bytes=1)


def test_a_trial_that_failed_beside_another_is_made_again_alone(monkeypatch):
    monkeypatch.setattr(fix.os, "cpu_count", lambda: 2)
    said = []
    asked = {"gpus": 1, "file": threading.Lock()}
    search = OneAtATime([], catalogue.gpu("t4"), asked, 0, said.append)
    search._try_each(OFFERS)
    assert sorted(trial.names for trial in search.alone) == ["a", "b", "c", "d"]
    assert not any(trial.failure for trial in search.alone)
    assert [each.partition(":")[0] for each in said] == [f"{n} of 4" for n in (1, 2, 3, 4)]
