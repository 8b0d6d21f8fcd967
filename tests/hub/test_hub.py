"""A real JupyterHub, three participants at once: each gets the lesson by the link and runs it.

The hub is that of `workshop/jupyterhub_config.py`, started and linked to as
`workshop/jupyterhub.md` says, on ports of this machine only.
"""

import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from browsing import PATIENCE_SECONDS, free_port, serving
from people import Participant

import labkit as lab
from gpumem.files import cache_folder
from labkit.lesson.results import RESULT_MIME, Result

ROOT = Path(__file__).resolve().parents[2]
LESSON = "notebooks/00_start_here.ipynb"
COURSE = "gpu-memory-lab"  # the folder that the link makes
NAMES = ("ada", "bob", "cem")
PROCESS_GIB = 3
# The programs of this Python and of the proxy, wherever the test was started from.
PLACES = [Path(sys.executable).parent, ROOT / ".venv/proxy/node_modules/.bin"]
PATH = os.pathsep.join([*map(str, PLACES), os.environ["PATH"]])

modules = [name for name in ("jupyterhub", "nbgitpuller") if not importlib.util.find_spec(name)]
needed = ("configurable-http-proxy", "git", "prlimit")
programs = [name for name in needed if not shutil.which(name, path=PATH)]
lack = [*modules, *programs]
# Where all are to run, as in continuous integration, they fail without it: nobody reads of skips.
pytestmark = [
    pytest.mark.hub,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(lack) and "CI" not in os.environ, reason=f"there is no {lack}"),
]


@dataclass
class Hub:
    """A hub that runs: its address, its folder and what everybody logs in with."""

    url: str
    folder: Path
    password: str
    repository: Path

    @property
    def link(self) -> str:
        """The link of the page, to this hub and this repository."""
        page = (ROOT / "workshop/jupyterhub.md").read_text(encoding="utf-8")
        lines = re.search(r"^    (https://YOUR-HUB/\S+(?:\n +[?&]\S+)+)", page, re.MULTILINE)[1]
        link = "".join(lines.split()).replace("https://YOUR-HUB", self.url)
        return re.sub("repo=[^&]+", f"repo={quote(self.repository.as_uri(), safe='')}", link)


def make_repository(folder):
    """The lesson in a bare repository, as a participant's server would find it on the network."""
    work, bare = folder / "work", folder / "served" / COURSE
    (work / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / LESSON, work / LESSON)
    who = ["-c", "user.name=Teacher", "-c", "user.email=teacher@example.org"]
    commit = [*who, "commit", "-q", "-m", "A lesson"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], commit):
        subprocess.run(["git", *command], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    return bare


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub; afterwards its proxy and everybody's servers and kernels must have ended, too."""
    assert not lack, f"there is no {lack}"
    folder, password = tmp_path_factory.mktemp("hub"), secrets.token_urlsafe(12)
    front, inner, proxy = (free_port() for _ in range(3))
    command = ["jupyterhub", "-f", str(ROOT / "workshop/jupyterhub_config.py")]
    command += [f"--port={front}", f"--JupyterHub.hub_port={inner}"]
    command += [f"--ConfigurableHTTPProxy.api_url=http://127.0.0.1:{proxy}"]
    if os.geteuid() == 0:
        command.append("--Spawner.args=--allow-root")
    environment = {
        **os.environ,
        "PATH": PATH,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CLASS_PASSWORD": password,
        "CLASS_FOLDER": str(folder / "class"),
        "CLASS_GIB": str(PROCESS_GIB),
        "LABKIT_CACHE": str(cache_folder()),
    }
    url, log = f"http://127.0.0.1:{front}", folder / "hub.log"
    with serving(
        command, answers=f"{url}/hub/health", cwd=folder, environment=environment, log=log
    ):
        yield Hub(url, folder / "class", password, make_repository(folder))


@dataclass
class Work:
    """What came of a participant's lesson: the notebook opened, and what its cells displayed."""

    person: Participant
    opened: str
    shown: list[dict]

    @property
    def result(self) -> dict:
        [found] = [data[RESULT_MIME] for data in self.shown if RESULT_MIME in data]
        return found


def take_part(hub, name, together):
    """From the link to the last cell; all wait for each other before the lesson."""
    person = Participant(hub.url, name)
    person.log_in(hub.password, to=hub.link.removeprefix(hub.url))
    opened = person.pull(person.follow(hub.link))
    person.ask_for_token()
    together.wait(PATIENCE_SECONDS)
    return Work(person, opened, run_lesson(person, opened))


def run_lesson(person, opened):
    """What the cells of the notebook that is open display."""
    path = opened.removeprefix("lab/tree/")
    answer = person.api(f"contents/{path}")
    answer.raise_for_status()
    outputs = []
    kernel = person.kernel(path)
    for cell in answer.json()["content"]["cells"]:
        if cell["cell_type"] == "code":
            outputs += kernel.run(cell["source"])
    kernel.close()
    return [output["data"] for output in outputs if "data" in output]


@pytest.fixture(scope="module")
def works(hub):
    """Three participants who do the lesson at the same moment."""
    together = threading.Barrier(len(NAMES))
    with ThreadPoolExecutor(len(NAMES)) as pool:
        futures = [pool.submit(take_part, hub, name, together) for name in NAMES]
        return [future.result() for future in futures]


# --- the lesson --------------------------------------------------------------------------------


def test_the_link_opens_the_lesson_in_ones_own_copy(hub, works):
    for work in works:
        assert work.opened == f"lab/tree/{COURSE}/{LESSON}"
        copy = hub.folder / "homes" / work.person.name / COURSE / LESSON
        assert copy.read_bytes() == (ROOT / LESSON).read_bytes()


def test_each_result_is_right_and_all_are_equal_in_bytes(works):
    weights_bytes = 4 * lab.model_info("SmolLM2-135M").parameters
    found = []
    for work in works:
        result = Result.from_dict(work.result)
        assert result.broken_invariants() == []
        [run] = result.runs
        assert run.by_category["weights"] == weights_bytes
        first, second, *_ = run.step_peaks_bytes
        assert run.peak_bytes >= second > first > 4 * weights_bytes
        assert sum("data:image/png" in data.get("text/html", "") for data in work.shown) >= 2
        found.append(
            [(run.peak_bytes, run.by_category, run.step_peaks_bytes) for run in result.runs]
        )
    assert found[0] == found[1] == found[2]


def test_a_process_over_its_memory_is_told_so_and_goes_on(works):
    kernel = works[0].person.kernel(f"{COURSE}/{LESSON}")
    assert kernel.text("import os; print(os.environ['OMP_NUM_THREADS'])") == "1\n"
    code = (
        "import torch\n"
        "try:\n    torch.zeros({numbers})\n"
        "except RuntimeError as error:\n    print('refused' if 'allocate' in str(error) else error)"
    )
    assert kernel.text(code.format(numbers=(PROCESS_GIB << 30) // 4)) == "refused\n"
    assert kernel.text(code.format(numbers=1 << 28)) == ""  # a gibibyte
    kernel.close()


# --- who may ------------------------------------------------------------------------------------


def test_everybody_sees_only_their_own_files(works):
    for work in works:
        mine, secret = work.person, f"{work.person.name}.txt"
        file = {"type": "file", "format": "text", "content": "x"}
        mine.api(f"contents/{secret}", method="PUT", json=file).raise_for_status()
    for work in works:
        seen = {item["name"] for item in work.person.api("contents").json()["content"]}
        assert seen == {COURSE, f"{work.person.name}.txt"}


def test_nobody_else_gets_into_a_server(works):
    ada, bob, _ = (work.person for work in works)
    for token in ("", secrets.token_hex(16), bob.token):
        for method, path in (("GET", "contents"), ("POST", "kernels"), ("POST", "terminals")):
            assert ada.api(path, method=method, token=token, json={}).status_code == 403, path
    assert ada.api("contents").status_code == 200, "its owner's own still works"
    page = bob.browser.get(f"{ada.server}/lab")
    assert page.status_code in (403, 404)
    assert bob.browser.get(f"{bob.server}/lab").status_code == 200


def test_the_hub_refuses(hub, works):
    for name, password in (("eve", "wrong password"), ("Eve/../ada", hub.password)):
        assert Participant(hub.url, name).log_in(password).status_code in (400, 403)
    assert sorted(path.name for path in (hub.folder / "homes").iterdir()) == list(NAMES)
    assert hub.folder.stat().st_mode & 0o077 == 0  # others on this machine cannot look in
