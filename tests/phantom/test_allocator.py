"""labkit's model of the allocator against PyTorch's own C++: the same random requests."""

import json
from pathlib import Path

import pytest

JUDGE = Path(__file__).with_name("judge.py")
STEPS = 6_000
EXPANDABLE = "expandable_segments:True"
#: Settings and streams.
CASES = {
    "a100-80gb": [("", 1), (EXPANDABLE, 1)],
    "t4": [("", 1), (EXPANDABLE, 1), ("", 3), (EXPANDABLE, 3)],  # full: out of memory, retries
}


@pytest.mark.parametrize("gpu", CASES)
def test_the_same_requests_take_the_same_bytes(on_phantom, gpu):
    lines = on_phantom(gpu, JUDGE, STEPS, 7, *map(json.dumps, CASES[gpu])).splitlines()
    for case, said in zip(CASES[gpu], lines, strict=True):
        assert f"equal at {STEPS} steps" in said, case
        assert gpu != "t4" or " 0 retries" not in said, case  # it was full
