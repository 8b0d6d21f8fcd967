"""Small data in the formats that public training scripts read: pictures, boxes, captions, a graph.

`write` makes all of it in one folder. Sizes of pictures are those of ImageNet, COCO and Carvana;
there are a few of each. What they show is noise, and texts are words over and over.

Limits: counts decide nothing but how long an epoch is, except boxes in a picture: there are 1 to 7.
"""

import json
import pickle
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import sparse

CLASSES = 10
PICTURES = {"train": 64, "val": 8}  # of each class
WITH_BOXES = 32
#: Of nanochat's tokenizer.
PARTS = ("user", "assistant", "python", "output")
SPECIAL = ["bos", *(f"{part}_{end}" for part in PARTS for end in ("start", "end"))]
NANOCHAT_TOKENS = 32768
#: A metric that `evaluate` loads by its name.
METRIC = """
import datasets
import evaluate


class Zero(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("{kind}")
        features = datasets.Features({{"predictions": kind, "references": kind}})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {{"{name}": 0.0}}
"""


def write(folder: Path) -> None:
    """Write all data below ``folder``."""
    rng = np.random.default_rng(0)
    _folders_of_pictures(folder, rng)
    _pictures_with_boxes(folder, rng)
    _pictures_with_masks(folder / "data", rng)
    _speech(folder / "speech", rng)
    _graph(folder / "Planetoid/Cora/raw")
    _nanochat(folder / "nanochat")
    (folder / "openwebtext").mkdir()
    for split in PICTURES:  # nanoGPT's tokens
        np.zeros(200_000, dtype=np.uint16).tofile(folder / f"openwebtext/{split}.bin")
    (folder / "text.txt").write_text(("word " * 100 + "\n") * 2_000)
    for name, kind in {"accuracy": "int64", "wer": "string"}.items():
        (folder / name).mkdir()
        (folder / f"{name}/{name}.py").write_text(METRIC.format(name=name, kind=kind))


def rows(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Write a file of one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _picture(path: Path, rng: np.random.Generator, size: tuple[int, int]) -> None:
    """Write noise of ``size``, width and height in pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = rng.integers(0, 255, (size[1] // 25, size[0] // 25, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size).save(path)


def _folders_of_pictures(folder: Path, rng: np.random.Generator) -> None:
    """Write classes as folders; and captions, as diffusers and open_clip read them."""
    for split, count in PICTURES.items():
        for label in range(CLASSES):
            for number in range(count):
                _picture(folder / f"images/{split}/{label}/{number}.jpg", rng, (500, 375))
    names = [f"images/train/{label}/{n}.jpg" for label in range(CLASSES) for n in range(64)]
    captions = "".join(f"{name}\ta picture of {n}\n" for n, name in enumerate(names))
    (folder / "captions.csv").write_text(f"filepath\ttitle\n{captions}")
    for number in range(PICTURES["train"]):
        _picture(folder / f"captions/{number}.jpg", rng, (500, 375))
    rows(
        folder / "captions/metadata.jsonl",
        ({"file_name": f"{n}.jpg", "text": f"a picture of {n}"} for n in range(PICTURES["train"])),
    )


def _pictures_with_boxes(folder: Path, rng: np.random.Generator) -> None:
    """Write the same boxes as COCO and as YOLO have them."""
    for split in PICTURES:
        images, annotations = [], []
        for number in range(WITH_BOXES):
            name = f"{number:012}"
            for place in (f"coco/{split}2017", f"yolo/images/{split}"):
                _picture(folder / f"{place}/{name}.jpg", rng, (640, 480))
            images.append({"id": number, "file_name": f"{name}.jpg", "width": 640, "height": 480})
            lines = ""
            for box in range(1 + number % 7):
                x, y, width, height = 20 + 60 * box, 30 + 40 * box, 100, 80
                corners = [x, y, x + width, y, x + width, y + height, x, y + height]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": 1 + box,
                        "bbox": [x, y, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                        "segmentation": [corners],
                    }
                )
                middle = ((x + width / 2) / 640, (y + height / 2) / 480)
                lines += f"{box} {middle[0]} {middle[1]} {width / 640} {height / 480}\n"
            label = folder / f"yolo/labels/{split}/{name}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text(lines)
        categories = [{"id": number, "name": str(number)} for number in range(1, 91)]
        instances = {"images": images, "annotations": annotations, "categories": categories}
        target = folder / f"coco/annotations/instances_{split}2017.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(instances))
    names = "".join(f"  {number}: thing {number}\n" for number in range(80))
    (folder / "yolo/data.yaml").write_text(
        f"path: {folder / 'yolo'}\ntrain: images/train\nval: images/val\nnames:\n{names}"
    )


def _pictures_with_masks(folder: Path, rng: np.random.Generator) -> None:
    """Write what Pytorch-UNet reads, in the size of Carvana's pictures."""
    mask = np.zeros((1280, 1918), np.uint8)
    mask[200:900, 300:1500] = 1
    for number in range(20):
        _picture(folder / f"imgs/{number}.jpg", rng, (1918, 1280))
        path = folder / f"masks/{number}_mask.gif"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(mask).save(path)


def _speech(folder: Path, rng: np.random.Generator) -> None:
    """Write 2 to 12 seconds of noise at 16 kHz, with words, in `datasets`' form."""
    for split in ("train", "test"):
        folder.joinpath(split).mkdir(parents=True)
        for number in range(WITH_BOXES):
            with wave.open(str(folder / f"{split}/{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", "NONE"))
                samples = rng.normal(scale=1000, size=16_000 * (2 + number % 11))
                file.writeframes(samples.astype(np.int16).tobytes())
        texts = (
            {"file_name": f"{n}.wav", "text": "words " * (n % 9 + 1)} for n in range(WITH_BOXES)
        )
        rows(folder / f"{split}/metadata.jsonl", texts)


def _graph(folder: Path) -> None:
    """Write a graph with Cora's numbers of nodes, features and classes, in Planetoid's files."""
    folder.mkdir(parents=True)
    nodes, tested, features, classes = 2708, 1000, 1433, 7

    def of(count: int) -> Any:
        values = sparse.random(count, features, 0.012, "csr", np.float32, 0)
        return values, np.eye(classes, dtype=np.int32)[np.arange(count) % classes]

    parts: dict[str, Any] = {
        "graph": {n: [(n + 1) % nodes, (n + 17) % nodes] for n in range(nodes)}
    }
    parts["x"], parts["y"] = of(140)
    parts["tx"], parts["ty"] = of(tested)
    parts["allx"], parts["ally"] = of(nodes - tested)
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    index = "".join(f"{number}\n" for number in range(nodes - tested, nodes))
    (folder / "ind.cora.test.index").write_text(index)


def _nanochat(folder: Path) -> None:
    """Write a tokenizer of pairs of bytes, and documents as nanochat reads them."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    count = NANOCHAT_TOKENS - len(SPECIAL)
    pairs = (bytes([first, second]) for first in range(256) for second in range(256))
    words = [*(bytes([byte]) for byte in range(256)), *pairs][:count]
    encoding = tiktoken.Encoding(
        "pairs",
        pat_str=r"\S+|\s+",
        mergeable_ranks={word: number for number, word in enumerate(words)},
        special_tokens={f"<|{name}|>": count + number for number, name in enumerate(SPECIAL)},
    )
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.ones(NANOCHAT_TOKENS, dtype=torch.int32), folder / "tokenizer/token_bytes.pt")
    table = pyarrow.table({"text": ["some words " * 500] * 512})
    (folder / "base_data_climbmix").mkdir()
    for number in range(2):
        path = folder / f"base_data_climbmix/shard_{number:05}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=64)
