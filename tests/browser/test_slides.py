"""A deck of slides, opened as a file in a real browser: it runs without a network, and is readable.

Limits: reveal.js is looked for where the Makefile puts it; the lesson is not executed for this, a
picture and a verdict stand in for what it draws.
"""

import os
import shutil
import subprocess
import sys

import browsing
import nbformat
import pytest
from nbformat.v4 import new_output

from labkit.lesson import claims
from labkit.lesson.claim_cards import claim_card

REVEAL = browsing.ROOT / ".venv" / "proxy" / "node_modules" / "reveal.js"
PICTURE = (
    "<svg xmlns='http://www.w3.org/2000/svg' width='800' height='500'>"
    "<rect width='800' height='500' fill='teal'/></svg>"
)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def slides(tmp_path_factory, browser):
    """Lesson 06's slides, with reveal.js beside them, open."""
    browsing.need("nbconvert")
    if not REVEAL.is_dir():
        assert "CI" not in os.environ, f"there is no {REVEAL}"
        pytest.skip(f"there is no {REVEAL}")
    folder = tmp_path_factory.mktemp("slides")
    [path] = (browsing.ROOT / "notebooks").glob("06_*.ipynb")
    book = nbformat.read(path, as_version=4)
    judged = claims.judge(claims.of_lesson("06")[0].id, 0.4, "simulated for T4")
    figure = f'<img alt="A figure" src="data:image/svg+xml;utf8,{PICTURE}" width="800">'
    shown = {"plot": figure, "claim": claim_card(judged).html}
    for cell in book.cells:
        [tag] = cell.metadata.tags
        if cell.cell_type == "code" and tag in shown:
            cell.outputs = [
                new_output("display_data", data={"text/html": shown[tag]}),
                new_output("stream", text="as printed"),
            ]
    nbformat.write(book, folder / "lesson.ipynb")
    config = browsing.ROOT / "workshop" / "slides_config.py"
    command = [sys.executable, "-m", "nbconvert", "--to", "slides", f"--config={config}"]
    subprocess.run(
        [*command, folder / "lesson.ipynb"],
        check=True,
        capture_output=True,
        env=browsing.lesson_environment(folder),
    )
    shutil.copytree(REVEAL, folder / "reveal.js")
    with browsing.watched(browser, size=(1280, 720)) as page:
        page.goto((folder / "lesson.slides.html").as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        yield page


def test_every_slide_is_reached_and_nothing_is_cut_off_at_its_side(slides):
    """That nothing is asked of another host, and no error is made, is held for every page."""
    count = slides.evaluate("Reveal.getTotalSlides()")
    assert count > 12
    for _ in range(count - 1):
        wide = "(s => s.scrollWidth - s.clientWidth)(Reveal.getCurrentSlide())"
        assert slides.evaluate(wide) <= 0, slides.evaluate("location.hash")
        slides.keyboard.press("Space")
    assert slides.evaluate("Reveal.isLastSlide()")
    assert "Key points" in slides.evaluate("Reveal.getCurrentSlide().innerText")


def test_paragraphs_are_the_speakers_and_what_nobody_can_use_is_left_out(slides):
    sentence = "Backward needs what forward computed."
    assert sentence in " ".join(slides.locator("aside.notes").all_text_contents())
    seen = slides.evaluate("""() => {
        const deck = document.querySelector('.slides').cloneNode(true);
        deck.querySelectorAll('aside').forEach(notes => notes.remove());
        return deck.textContent;
    }""")
    for absent in (sentence, "Exercise 1", "pip install", "lab.explore(", "lab.predict("):
        assert absent not in seen
    figure = slides.locator("section:has(> div img[alt='A figure'])").first.text_content()
    assert "as printed" in figure
    assert "lab." not in figure, "the code that draws it"


def test_figures_questions_and_verdicts_are_large(slides):
    figure = slides.locator("img[alt='A figure']").first
    slides.evaluate(
        "e => { const i = Reveal.getIndices(e.closest('section')); Reveal.slide(i.h, i.v) }",
        figure.element_handle(),
    )
    box = figure.bounding_box()
    assert box["height"] > 450
    assert box["y"] + box["height"] < 720
    browsing.shot(slides, "slides-figure")
    question = slides.locator("h3:text-is('How much of the peak will be saved?')")
    assert question.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 60
    cards = slides.locator(".slides section:has-text('Judged by') >> text=Judged by")
    assert cards.first.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 12
    assert slides.locator(".slides math").count() >= 2
    notes = slides.locator("aside.notes")  # of the speaker
    assert notes.count() > 5
    assert not any(notes.nth(i).is_visible() for i in range(notes.count()))
