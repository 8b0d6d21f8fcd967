"""How `--fix` tries remedies, without programs."""

import threading
import time

from gpumem.hardware import catalogue
from phantom_gpu import fix
from phantom_gpu.report_records import Effect, Offer

OFFERS = [Offer(name, name, Effect.NOTHING, "nothing", (), ()) for name in "abcd"]


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
