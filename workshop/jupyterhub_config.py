"""A hub on one machine, for a class whose members trust one another; jupyterhub.md says how.

The environment fills it in: CLASS_PASSWORD is what everybody logs in with, under a name of their
own; CLASS_FOLDER holds a folder for each name (`class` here, if not set); CLASS_GIB is the memory
that one process may take, a whole number (8).

Limits: no wall between participants. All servers run as the account that starts the hub, so a
notebook can read every folder and end every process of that account: take one that owns nothing
else. Memory is limited for each process, not for each person. Linux, for `prlimit`.
"""

import os
from pathlib import Path

GIB = 1 << 30


def setting(name, default):
    """An environment variable that is not empty, else the default."""
    return os.environ.get(name) or default


password = setting("CLASS_PASSWORD", "")
if len(password) < 8:  # the authenticator's own least, said before anything is started
    raise SystemExit("Set CLASS_PASSWORD to at least 8 characters: what the class logs in with.")

gib = setting("CLASS_GIB", "8")
if not gib.isdecimal() or not int(gib):
    raise SystemExit(f"Set CLASS_GIB to a whole number of GiB, 1 or more, not {gib!r}.")

folder = Path(setting("CLASS_FOLDER", "class")).absolute()
folder.mkdir(parents=True, exist_ok=True)
folder.chmod(0o700)  # also where it was there before

c = get_config()  # noqa: F821  (traitlets provides it)

# Who: nobody without the password.
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = password
c.Authenticator.allow_all = True  # every name, with the password
# A name becomes a folder's. The hub matches from the start on, and not up to the end by itself.
c.Authenticator.username_pattern = r"[a-z][a-z0-9_-]{0,30}\Z"
c.JupyterHub.active_server_limit = 40  # whoever has it cannot fill the machine with names

# Where: this machine only. For a room see jupyterhub.md: the password crosses the network.
c.JupyterHub.ip = "127.0.0.1"
c.JupyterHub.cookie_secret_file = str(folder / "cookie_secret")
c.JupyterHub.db_url = f"sqlite:///{folder / 'hub.sqlite'}"
c.ConfigurableHTTPProxy.pid_file = str(folder / "proxy.pid")

# What each gets. This spawner has no limits of its own. `--data` counts what a process writes to:
# beyond it PyTorch says "can't allocate memory", and the server, the hub and the others go on.
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(folder / "homes" / "{username}")
c.Spawner.cmd = [
    "prlimit",
    f"--data={int(gib) * GIB}",
    "jupyterhub-singleuser",
]
c.Spawner.default_url = "/lab"
c.Spawner.http_timeout = 120  # seconds; twenty servers that start together wait for each other
c.Spawner.start_timeout = 180
c.JupyterHub.concurrent_spawn_limit = 20
c.Spawner.environment = {
    "LABKIT_CACHE": setting("LABKIT_CACHE", str(folder / "labkit-cache")),  # one for all
    "HF_HUB_OFFLINE": "1",  # nobody waits for a model hub
    "OMP_NUM_THREADS": setting("OMP_NUM_THREADS", "2"),  # else a thread per core, for each person
}
