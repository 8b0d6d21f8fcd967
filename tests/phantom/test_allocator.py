"""labkit's model of the allocator against PyTorch's own C++: the same random requests."""

from pathlib import Path

import pytest

JUDGE = Path(__file__).with_name("judge.py")
STEPS = 10_000
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("gpu", "settings", "more"),
    [
        ("a100-80gb", "", []),
        ("a100-80gb", EXPANDABLE, []),
        ("t4", "", []),  # full: out of memory, retries
        ("t4", EXPANDABLE, []),
        ("t4", "max_split_size_mb:64", []),
        ("t4", "roundup_power2_divisions:4", []),
        ("t4", "garbage_collection_threshold:0.6", ["--fraction", "0.8"]),
        ("t4", EXPANDABLE, ["--fraction", "0.5"]),
        ("t4", "", ["--streams", "3"]),
        ("t4", EXPANDABLE, ["--streams", "3"]),
    ],
)
def test_the_same_requests_take_the_same_bytes(on_phantom, gpu, settings, more):
    said = on_phantom(gpu, JUDGE, settings, STEPS, 7, *more)
    assert f"equal at {STEPS} steps" in said
    assert gpu != "t4" or " 0 retries" not in said  # it was full
