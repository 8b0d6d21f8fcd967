"""A browser, and the rule that no page may make errors.

Limits: the browser lives as long as a module's tests, not longer: while it does, playwright keeps
an event loop running in this thread, and nothing else here could start one.
"""

from collections.abc import Iterator
from typing import Any

import browsing
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A test fails on what its pages did that they must not."""
    result = yield
    problems = [problem for watch in browsing.watches for problem in watch.take()]
    assert not problems, "\n".join(problems)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Where a test failed, what its pages showed then is kept."""
    report = yield
    if report.failed:
        for number, watch in enumerate(browsing.watches):
            if not watch.page.is_closed():
                path = browsing.shot(watch.page, f"failed-{item.name}-{number}")
                report.sections.append(("screenshot", str(path)))
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    with browsing.chromium_started() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that is watched, empty, 1360 × 900."""
    with browsing.watched(browser) as page:
        yield page
