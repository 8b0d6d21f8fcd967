"""How hypothesis chooses its examples, which tests stay together on one process, and that garbage
is looked for among what a test made.

``course``: few examples, the same at each run, so that a change is not held up by what it did not
touch. ``search``: many, and others at each run, for `make test-all`.
"""

import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

patient = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("course", patient, derandomize=True, max_examples=25)
settings.register_profile("search", patient, max_examples=500)
settings.load_profile("course")


@pytest.fixture(autouse=True)
def only_new_objects_are_searched_for_garbage():
    """Each run on a device collects garbage, and half a million objects that live as long as the
    process take half a second each time. What is there before a test is left out."""
    gc.collect()
    gc.freeze()


class _ByFile(LoadScopeScheduling):
    """Keep a file's tests on one process, as its fixtures are; a lesson on a phantom goes alone."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.endswith("phantom/test_lessons.py"):
            return nodeid
        # Two browsers at once lose clicks and keys, so all pages share one process.
        return "browser" if "/browser/" in file else file


@pytest.hookimpl(optionalhook=True)  # absent under -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out; ``loadgroup``'s marks are lost on pytest 9.2 (pytest-xdist 3.8)."""
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the browser and the hub first: they take long, and nothing else waits for them."""
    items.sort(key=lambda item: not {"browser", "hub"} & item.keywords.keys())
