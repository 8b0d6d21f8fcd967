"""A participant of a class as a hub sees one: logs in, follows the link, runs cells over the wire.

Plain HTTP and websockets, by the documented interfaces of JupyterHub, nbgitpuller and Jupyter
Server, so that nothing of ours stands between the test and them.

Limits: messages with binary parts (pictures inside widgets) are passed over.
"""

import json
import re
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlencode, urlsplit

import requests
import websocket
from browsing import PATIENCE_SECONDS


@dataclass
class Participant:
    """Somebody with a browser.

    Attributes:
        hub: the hub's address, ``http://127.0.0.1:8000``.
        name: the name to log in with.
        token: for the server's interface, once ``log_in`` has asked the hub for one.
    """

    hub: str
    name: str
    token: str = ""
    browser: requests.Session = field(default_factory=requests.Session)

    @property
    def server(self) -> str:
        """The address of this participant's own server."""
        return f"{self.hub}/user/{self.name}"

    def xsrf(self, path: str) -> str:
        """The cookie that forms of one part of the site must repeat."""
        return next(c.value for c in self.browser.cookies if (c.name, c.path) == ("_xsrf", path))

    def log_in(self, password: str, *, to: str = "/hub/home") -> requests.Response:
        """Open a page of the hub, be asked who we are, answer, and land where we wanted to go."""
        asked = self.browser.get(self.hub + to)
        assert "/hub/login" in asked.url, asked.url
        form = {"username": self.name, "password": password, "_xsrf": self.xsrf("/hub/")}
        return self.browser.post(asked.url, data=form)

    def ask_for_token(self) -> None:
        """As the hub's page "Token" does."""
        answer = self.browser.post(
            f"{self.hub}/hub/api/users/{self.name}/tokens",
            headers={"X-XSRFToken": self.xsrf("/hub/"), "Referer": f"{self.hub}/hub/token"},
            json={"note": "test", "expires_in": 3600},
        )
        answer.raise_for_status()
        self.token = answer.json()["token"]

    def follow(self, link: str) -> requests.Response:
        """The page behind a link into one's own server, which may have to start first."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            page = self.browser.get(link)
            if page.ok and page.url.startswith(self.server):
                return page
            assert page.status_code in (200, 503), (page.status_code, page.url)
            time.sleep(1)
        raise AssertionError(f"{self.name}'s server did not start; {page.url}: {page.text[-2000:]}")

    def pull(self, page: requests.Response) -> str:
        """What nbgitpuller's page does when it is open; returns where it then leads to."""
        asked = parse_qs(urlsplit(page.url).query)
        query = urlencode({key: asked[key][0] for key in ("repo", "branch")})
        with self.browser.get(f"{self.server}/git-pull/api?{query}", stream=True) as events:
            lines = list(events.iter_lines(decode_unicode=True))
        told = [line.removeprefix("data:") for line in lines if line.startswith("data:")]
        assert json.loads(told[-1])["phase"] == "finished", told
        return asked["urlpath"][0]

    def api(self, path: str, *, method: str = "GET", token: str | None = None, **options):
        """Ask one's server; with no cookie, and with the token given (ours, if none is)."""
        used = self.token if token is None else token
        headers = {"Authorization": f"token {used}"} if used else {}
        url = f"{self.server}/api/{path}"
        return requests.request(method, url, headers=headers, allow_redirects=False, **options)

    def kernel(self, path: str) -> "Kernel":
        """A new kernel of one's server, in the folder of the notebook ``path``."""
        answer = self.api("kernels", method="POST", json={"name": "python3", "path": path})
        answer.raise_for_status()
        return Kernel(self, answer.json()["id"])


class Kernel:
    """A kernel behind a server's websocket; close it to end it."""

    def __init__(self, owner: Participant, key: str):
        self.owner, self.key, self.session = owner, key, uuid.uuid4().hex
        address = re.sub("^http", "ws", owner.server)
        self.channel = websocket.create_connection(
            f"{address}/api/kernels/{key}/channels?session_id={self.session}",
            header=[f"Authorization: token {owner.token}"],
            timeout=PATIENCE_SECONDS,
        )

    def run(self, code: str) -> list[dict]:
        """Execute one cell; returns its outputs, as the kernel sent them.

        Raises:
            AssertionError: the cell ended with an error.
        """
        asked = uuid.uuid4().hex
        header = {"msg_id": asked, "msg_type": "execute_request", "session": self.session}
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        request = {
            "channel": "shell",
            "header": {**header, "username": self.owner.name, "version": "5.3"},
            "parent_header": {},
            "metadata": {},
            "content": {**content, "allow_stdin": False, "stop_on_error": True},
        }
        self.channel.send(json.dumps(request))
        outputs, idle, replied = [], False, False
        while not (idle and replied):
            kind, raw = self.channel.recv_data()
            if kind != websocket.ABNF.OPCODE_TEXT:
                continue
            message = json.loads(raw)
            if message["parent_header"].get("msg_id") != asked:
                continue
            name, content = message["msg_type"], message["content"]
            assert name != "error", f"{code}\n" + "\n".join(content["traceback"])
            replied |= name == "execute_reply"
            idle |= name == "status" and content["execution_state"] == "idle"
            if name in ("stream", "display_data", "execute_result"):
                outputs.append(content)
        return outputs

    def text(self, code: str) -> str:
        """What a cell printed."""
        return "".join(output.get("text", "") for output in self.run(code))

    def close(self) -> None:
        self.channel.close()
        self.owner.api(f"kernels/{self.key}", method="DELETE").raise_for_status()
