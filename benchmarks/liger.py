"""Run cases of one of Liger-Kernel's own benchmark scripts, for `benchmarks.silicon`.

    python -m phantom_gpu h100 benchmarks/liger.py CHECKOUT SCRIPT < CASES

``SCRIPT`` is below ``benchmark/scripts`` of the checkout. It runs as it is and hands its functions
to `utils.run_benchmarks` beside it, whose place is taken here: each function that measures memory
is called with the published cases of its kernel, in the script's order of modes and providers.
CASES are rows of JSON: kernel, provider, mode, x, config. Each one's bytes go to standard output
as they come: its number among the cases, and what the script itself reads as the peak.

Speed is not measured. Where a script measures it first, cuBLAS has its workspaces before the first
case of memory, so each provider is called twice before. Weights on the host are not drawn at
random, which takes no GPU memory but most of the time. A case is repeated three times, not ten: the
first may take less than those that find gradients from before, and the median of three is one of
these. Scripts that choose their sizes by a first run get the published sizes without it.
"""

import contextlib
import functools
import importlib.metadata
import json
import runpy
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from drivers import answer

REPEATS, BEFORE = 3, 2
#: What draws the weights of PyTorch's layers.
DRAWN_BY = ("kaiming_uniform_", "xavier_uniform_", "uniform_", "normal_")


def run(checkout: Path, script: str, cases: list[dict[str, Any]]) -> None:
    """Run the script with the packages of its checkout."""
    scripts = checkout / "benchmark" / "scripts"
    sys.path[:0] = [str(scripts), str(checkout / "src"), str(checkout)]
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "liger-kernel" else installed(name)
    for name in DRAWN_BY:
        setattr(torch.nn.init, name, _not_on_host(getattr(torch.nn.init, name)))
    import utils  # the script's own

    utils._test_memory = functools.partial(utils._test_memory, _iter=REPEATS)
    with contextlib.suppress(ImportError):  # older checkouts have none
        import benchmark_model_configs

        benchmark_model_configs.estimate_kernel_peak_memory = lambda probe_fn: 1 << 30
    left = dict(enumerate(cases))
    after_speed: set[str] = set()

    def asked_for(case: dict[str, Any]) -> Any:
        return utils.SingleBenchmarkRunInput(
            x=case["x"],
            kernel_provider=case["provider"],
            kernel_operation_mode=case["mode"],
            extra_benchmark_config={k: _dtype(v) for k, v in case["config"].items()},
        )

    def run_benchmarks(bench_test_fn: Any, kernel_name: str, metric_name: str, **kept: Any) -> None:
        modes, providers = kept["kernel_operation_modes"], kept["kernel_providers"]
        if metric_name != "memory":
            after_speed.update(providers)
            return
        here = [number for number, case in left.items() if case["kernel"] == kernel_name]
        measured_before = [provider for provider in providers if provider in after_speed]
        for provider, number in product(measured_before, here[:BEFORE]):
            with contextlib.suppress(Exception):  # its own case says it again
                asked = asked_for(left[number] | {"provider": provider, "mode": modes[0]})
                bench_test_fn(asked)
        order = {number: (left[number]["mode"], left[number]["provider"]) for number in here}
        for number in sorted(
            here, key=lambda n: (modes.index(order[n][0]), providers.index(order[n][1]))
        ):
            asked = asked_for(left.pop(number))
            answer(answers, number, functools.partial(median_bytes, bench_test_fn, asked))

    utils.run_benchmarks = run_benchmarks
    answers, sys.stdout = sys.stdout, sys.stderr  # the script prints, too
    sys.argv = [script]
    runpy.run_path(str(scripts / script), run_name="__main__")


def median_bytes(bench_test_fn: Any, asked: Any) -> int:
    """Return the median of what the script's own function measures."""
    return round(bench_test_fn(asked).y_50 * 2**20)


def _dtype(value: Any) -> Any:
    """Return what JSON has as ``"torch.bfloat16"``."""
    name = str(value)
    return getattr(torch, name.removeprefix("torch.")) if name.startswith("torch.") else value


def _not_on_host(draw: Any) -> Any:
    @functools.wraps(draw)
    def draw_on_gpu(tensor: torch.Tensor, *args: Any, **kept: Any) -> torch.Tensor:
        return draw(tensor, *args, **kept) if tensor.is_cuda else tensor

    return draw_on_gpu


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), sys.argv[2], json.load(sys.stdin))
