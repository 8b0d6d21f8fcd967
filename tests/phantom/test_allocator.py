"""labkit's model of the allocator against PyTorch's own C++: the same random requests."""

import json
from pathlib import Path

import pytest

JUDGE = Path(__file__).with_name("judge.py")
STEPS = 6_000
EXPANDABLE = "expandable_segments:True"
#: Settings, streams, and the fraction of the memory that may be taken.
CASES = {
    "a100-80gb": [("", 1, None), (EXPANDABLE, 1, None)],
    "t4": [  # full: out of memory, retries
        ("", 1, None),
        (EXPANDABLE, 1, None),
        ("max_split_size_mb:64", 1, None),
        ("roundup_power2_divisions:4", 1, None),
        ("garbage_collection_threshold:0.6", 1, 0.8),
        (EXPANDABLE, 1, 0.5),
        ("", 3, None),
        (EXPANDABLE, 3, None),
    ],
}


@pytest.mark.parametrize("gpu", CASES)
def test_the_same_requests_take_the_same_bytes(on_phantom, gpu):
    lines = on_phantom(gpu, JUDGE, STEPS, 7, *map(json.dumps, CASES[gpu])).splitlines()
    for case, said in zip(CASES[gpu], lines, strict=True):
        assert f"equal at {STEPS} steps" in said, case
        assert gpu != "t4" or " 0 retries" not in said, case  # it was full
