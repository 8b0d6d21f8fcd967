import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import MACHINE, notebook, result
from nbformat.v4 import new_output

from labkit import claims, report, session
from labkit.check import WIDGET_STATE
from labkit.memory import InputError
from labkit.outcomes import Outcome
from labkit.results import RESULT_MIME

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
    judgement = session.judgement_record(claims.judge(claim.id, 0.123, "simulated for T4"))
    executed(tmp_path, html_output("<b>a picture</b>"), judgements=(judgement,))
    other = Outcome("07", "07_more", "More", "failed", ("it broke",), 1.0)
    page = report.report(tmp_path, [outcome(host_peak_bytes=812 << 20), other]).read_text()
    assert '<td class="number">812 MiB</td>' in page
    assert '<td class="number">–</td>' in page
    for text in ("12.3", "What does it save?", "12.3 %", "simulated for T4", "it broke"):
        assert text in page
    assert judgement["verdict"] in page
    assert f"<td>{' '.join(claim.sources)}</td>" in page
    assert "<b>a picture</b>" in page
    assert "1 of 2 lessons passed, 13 seconds of work, on Test CPU." in page


def test_values_are_escaped(tmp_path):
    machine = {**MACHINE, "name": NASTY}
    judgement = {"id": NASTY, "verdict": "wrong", "measured": {NASTY: 1.0}, "unit": NASTY}
    executed(tmp_path, machine=machine, judgements=(judgement,))
    page = report.report(tmp_path, [outcome(title=NASTY, problems=(NASTY,))]).read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 5


def test_nothing_is_fetched_and_nothing_runs(tmp_path):
    shown = (
        '<link rel="stylesheet" href="https://x.org/a.css"><script src="https://x.org/a.js">'
        '</script><iframe src="https://x.org"></iframe><img alt="badge" src="https://x.org/b.svg">'
        '<img src="data:image/png;base64,AAAA"><p onclick="go()" style="background:'
        'url(https://x.org/c.png)">text</p><style>@import url("https://x.org/d.css");'
        '.a{background:url(https://x.org/e.png)}</style><a href="java\nscript:go()">click</a>'
        '<a href="https://pytorch.org">a plain link may stay</a><video poster="//x.org/f.png">'
        "</video><object data='https://x.org/g'></object>"
    )
    js = new_output("display_data", data={"application/javascript": "go()", "text/plain": "js"})
    executed(tmp_path, html_output(shown), js)
    page = report.report(tmp_path, [outcome()]).read_text()
    assert "x.org" not in page
    assert "<script" not in page
    assert "onclick" not in page
    assert "script:go" not in page.replace("\n", "")
    assert "badge" in page
    assert "data:image/png;base64,AAAA" in page
    assert "https://pytorch.org" in page
    assert not re.search(r"""<link|src=["'](?!data:)|@import|url\((?!data:)""", page)


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
        report.report(tmp_path / "none")
    with pytest.raises(InputError, match="holds no outcomes"):
        report.report(tmp_path)
    (tmp_path / "06_saving.json").write_text('{"number": 6}')
    with pytest.raises(InputError, match=r"06_saving\.json is not an outcome"):
        report.report(tmp_path)


def test_an_outcome_cannot_point_outside_its_folder(tmp_path):
    record = '{"number": "06", "name": "a", "title": "a", "status": "passed", "problems": [],'
    (tmp_path / "a.json").write_text(record + '"notebook": "../../etc/passwd"}')
    with pytest.raises(InputError, match="wrong kind"):
        report.report(tmp_path)


@given(st.text(alphabet="<>scriptimg\"'=/ onload:javadt&;#x0\n", max_size=60))
def test_no_text_gets_a_script_or_a_handler_through(text):
    for tag in BeautifulSoup(report.sanitise(text), "html.parser").find_all(True):
        assert tag.name != "script"
        assert not any(name.startswith("on") for name in tag.attrs)


def test_formulas_become_mathml_and_broken_ones_stay_text():
    cell = nbformat.v4.new_markdown_cell(r"Bytes: $L \cdot a$. Broken: $\frac{$. Code: `$x$`.")
    page = report.render(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count("<math") == 1
    assert r"$\frac{$" in page
    assert "<code>$x$</code>" in page
