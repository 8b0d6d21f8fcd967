"""How hypothesis chooses its examples.

``course``: the same at each run, so that a change is not held up by what it did not touch.
``search``: others at each run, for who looks for faults: ``pytest --hypothesis-profile=search``.
"""

from hypothesis import HealthCheck, settings

patient = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("course", patient, derandomize=True)
settings.register_profile("search", patient)
settings.load_profile("course")
