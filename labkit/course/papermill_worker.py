"""Execute one notebook, in its own process: ``python -P papermill_worker.py JOB``.

The job is JSON, from ``runner``. Writes one JSON object a line: ``{"cell": 3}`` as cell 3 begins,
at last ``{"failure": null}`` or a sentence. The caller may kill it, and its kernel, at any time;
the notebook on disk then holds the cells so far.

The time limit is for the whole notebook, kernel start included.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else may write into the channel, the kernel least of all

    def report(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    report({"failure": execute(json.loads(sys.argv[1]), report)})


def execute(job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> str | None:
    """Run papermill on the job; return a sentence if something stopped it that the notebook
    does not show. An exception in a cell is in the notebook, so that gives None, as success does.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    deadline = time.monotonic() + job["timeout_seconds"]
    running = {"cell": "the first cell"}

    def on_cell_start(cell: Any, cell_index: int) -> None:
        running["cell"] = f"cell {cell_index + 1} ({cell.get('id', 'no id')})"
        report({"cell": cell_index})

    try:
        papermill.execute_notebook(
            _literal(job["source"]),
            _literal(job["target"]),
            parameters=job["parameters"],
            cwd=job["folder"],
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=max(1, min(60, int(job["timeout_seconds"]))),
            timeout_func=lambda cell: max(0.01, deadline - time.monotonic()),
            on_cell_start=on_cell_start,
            kernel_manager_class=attentive_kernel_manager(),
        )
    except PapermillExecutionError:
        return None
    except CellTimeoutError:
        return (
            f"stopped in {running['cell']} after {job['timeout_seconds']:g} seconds, the time "
            "limit (--timeout raises it)"
        )
    except DeadKernelError:
        return (
            f"the kernel died in {running['cell']}: it crashed, or the system stopped it, most "
            "often because the computer's own memory ran out"
        )
    except OSError as error:
        return f"{error.strerror or error} ({Path(job['target']).parent})"
    except Exception as error:  # whatever papermill, nbclient or the kernel's start raise
        reason = str(error).strip().partition("\n")[0][:300]
        return f"it could not be executed: {type(error).__name__}: {reason}"
    return None


def attentive_kernel_manager() -> type:
    """Return a kernel manager class whose clients cannot miss a reply of their kernel.

    While nbclient waits for a cell's reply it may have to send: an output widget tells the kernel
    what it shows. jupyter_client sends past asyncio, and if the reply arrives in that moment, the
    send consumes ZeroMQ's only notice of it (the file descriptor is edge-triggered). The reply then
    stays unread, and the cell never ends (nteract/papermill#723). Polling again finds it.
    """
    from queue import Empty

    from jupyter_client.asynchronous.client import AsyncKernelClient
    from jupyter_client.channels import AsyncZMQSocketChannel
    from jupyter_client.manager import AsyncKernelManager

    class Channel(AsyncZMQSocketChannel):
        async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
            deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
            while True:
                left = max(0.0, deadline - time.monotonic())
                try:
                    return await super().get_msg(min(left, 1.0))
                except Empty:
                    if left <= 1.0:
                        raise

    class Client(AsyncKernelClient):
        shell_channel_class = Channel

    class Manager(AsyncKernelManager):
        client_factory = Client

    return Manager


def _literal(path: str) -> str:
    """papermill formats paths with the parameters; a brace in a folder's name must survive."""
    return path.replace("{", "{{").replace("}", "}}")


if __name__ == "__main__":
    main()
