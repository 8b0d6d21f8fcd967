"""A fixture for anybody's tests: does this training script fit a GPU that is not there?

    def test_training_fits_a_4090(phantom_gpu):
        verdict = phantom_gpu("train.py", "--batch-size", "8", gpu="rtx-4090", steps=3)
        assert verdict.fits, verdict

pytest loads this wherever labkit is installed, so nothing is imported here before a test asks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from phantom_gpu.report import FitReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--phantom-required``."""
    wanted = "fail tests of phantom_gpu where no phantom GPU can be made, instead of skipping them"
    parser.getgroup("phantom GPU").addoption("--phantom-required", action="store_true", help=wanted)


@pytest.fixture
def phantom_gpu(request: pytest.FixtureRequest) -> Callable[..., "FitReport"]:
    """Run a training script on phantom GPUs, and return the `FitReport`, which is printed as well.

    The words are those of ``labkit phantom``: a script, ``"-m", module`` or ``"--", command``, then
    arguments. Options are those of `run_program`: ``gpu`` must be given, ``gpus`` are as many as
    the program's launcher starts processes.

    The test is skipped where no phantom GPU can be made, and fails there under
    ``--phantom-required``. An `InputError` says what is wrong with a word or an option.
    """
    from gpumem.inputs import InputError
    from phantom_gpu.build_stubs import find_wheel, stub_libraries
    from phantom_gpu.command_line import command_line, processes_of
    from phantom_gpu.run_script import run_program

    try:
        stub_libraries(find_wheel())
    except InputError as error:
        if request.config.getoption("--phantom-required"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))

    def run(*words: Any, gpu: str, gpus: int = 0, **options: Any) -> "FitReport":
        command = command_line([str(word) for word in words])
        report = run_program(command, gpu=gpu, gpus=gpus or processes_of(command), **options)
        if report.interrupted:
            raise KeyboardInterrupt
        print(report)
        return report

    return run
