"""Every lesson in real JupyterLab, opened and run: what a learner sees of its outputs."""

import pytest
from browsing import ROOT
from jupyterlab_page import lesson_run

from labkit.lesson.notebooks import notebooks_of

pytestmark = [pytest.mark.browser, pytest.mark.nightly, pytest.mark.timeout(1800)]

#: What a learner of a cell's output has to scroll for, or cannot see.
HIDDEN = """cell => [...cell.querySelectorAll('.jp-OutputArea-output, .jp-OutputArea-output *')]
    .filter(e => e.tagName === 'IMG' ? !(e.complete && e.naturalWidth)
        : e.clientWidth && e.scrollWidth > e.clientWidth + 1
            && getComputedStyle(e).overflowX !== 'visible')
    .map(e => e.outerHTML.slice(0, 300))"""


@pytest.fixture(scope="module", params=notebooks_of(ROOT / "notebooks"), ids=lambda p: p.stem)
def lesson(request, browser, tmp_path_factory):
    """A lesson, all of its cells run."""
    with lesson_run(browser, tmp_path_factory.mktemp("lab"), request.param) as page:
        yield page


def test_no_output_is_an_error_a_warning_empty_or_hidden(lesson):
    found = []
    for cell in lesson.saved()["cells"]:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" or output["output_type"] == "error":
                found.append(f"{cell['id']}: {output}")
        if cell.get("outputs"):
            shown = lesson.cell(cell["id"])
            if shown.locator(".jp-Cell-outputArea").bounding_box()["height"] < 10:
                found.append(f"{cell['id']} shows nothing")
            found += [f"{cell['id']} hides a part of {part}" for part in shown.evaluate(HIDDEN)]
    assert not found, "\n".join(found)
