import nbformat
import pytest
from bs4 import BeautifulSoup
from lesson_files import MACHINE, notebook, result
from nbformat.v4 import new_output

from labkit.course import claims, report, session, verdicts
from labkit.course.check import WIDGET_STATE
from labkit.course.outcomes import Outcome, read_outcomes
from labkit.course.results import RESULT_MIME
from labkit.values import InputError

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def executed(folder, *outputs, **changes):
    book = notebook("pass")
    book.cells[2].outputs = list(outputs)
    record = result(**changes).to_dict()
    book.cells[3].outputs = [
        new_output("display_data", data={RESULT_MIME: record, "text/plain": "sum"})
    ]
    nbformat.write(book, folder / "06_saving.ipynb")
    return book


def html_output(text):
    return new_output("display_data", data={"text/html": text})


def outcome(**changes):
    values = {"title": "What does it save?", "status": "passed", "seconds": 12.34}
    values |= {"notebook": "06_saving.ipynb"} | changes
    return Outcome("06", "06_saving", **values)


def test_the_report_shows_lessons_timings_verdicts_and_every_notebook(tmp_path):
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    judgement = session.judgement_record(verdicts.judge(claim.id, 0.123, "simulated for T4"))
    executed(tmp_path, html_output("<b>a picture</b>"), judgements=(judgement,))
    other = Outcome("07", "07_more", "More", "failed", ("it broke",), 1.0)
    page = report.report(tmp_path, [outcome(host_peak_bytes=812 << 20), other]).read_text()
    assert "<b>a picture</b>" in page
    cells = [cell.text for cell in BeautifulSoup(page, "html.parser").select("main > div tr > *")]
    shown = {"06 What does it save?", "✓ passed", "12.3", "812 MiB", "✗ failed", "–", "it broke"}
    judged = {"12.3 %", judgement["verdict"], "simulated for T4", " ".join(claim.sources)}
    assert shown | judged <= set(cells)
    assert "1 of 2 lessons passed, 13 seconds of work, on Test CPU." in page


def test_values_are_escaped(tmp_path):
    machine = {**MACHINE, "name": NASTY}
    judgement = {"id": NASTY, "verdict": "wrong", "measured": {NASTY: 1.0}, "unit": NASTY}
    executed(tmp_path, machine=machine, judgements=(judgement,))
    page = report.report(tmp_path, [outcome(title=NASTY, problems=(NASTY,))]).read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 5


def test_widgets_show_what_they_held(tmp_path):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "HBox"}
    book = executed(tmp_path, new_output("display_data", data=view))
    held = new_output("stream", name="stdout", text="inside the widget")
    book.metadata["widgets"] = {
        WIDGET_STATE: {
            "state": {
                "box": {"state": {"children": ["IPY_MODEL_out", "IPY_MODEL_box"]}},
                "out": {"model_name": "OutputModel", "state": {"outputs": [held]}},
            }
        }
    }
    nbformat.write(book, tmp_path / "06_saving.ipynb")
    page = report.report(tmp_path, [outcome()]).read_text()
    assert "inside the widget" in page
    assert "Interactive: open the notebook" in page


def test_a_notebook_that_is_missing_or_damaged_is_said_so(tmp_path):
    page = report.report(tmp_path, [outcome(notebook="")]).read_text()
    assert "There is no notebook to show" in page
    (tmp_path / "06_saving.ipynb").write_text("{")
    assert "is not a valid notebook" in report.report(tmp_path, [outcome()]).read_text()


def test_a_folder_without_outcomes_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        read_outcomes(tmp_path / "none")
    with pytest.raises(InputError, match="holds no outcomes"):
        read_outcomes(tmp_path)
    (tmp_path / "06_saving.json").write_text('{"number": 6}')
    with pytest.raises(InputError, match=r"06_saving\.json is not an outcome"):
        read_outcomes(tmp_path)


def test_formulas_become_mathml_and_broken_ones_stay_text():
    cell = nbformat.v4.new_markdown_cell(r"Bytes: $L \cdot a$. Broken: $\frac{$. Code: `$x$`.")
    page = report.render(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count("<math") == 1
    assert r"$\frac{$" in page
    assert "<code>$x$</code>" in page
