"""Begin the phantom GPU in a process as soon as it has imported torch, and change transformers.

Python imports this module when it starts, as `environment` of ``environment.py`` has put its
folder on the path; a ``sitecustomize`` that it hides is imported, too.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


#: The package that this folder lies in.
PACKAGE = "phantom_gpu"
#: What it does as soon as a module is there.
AFTER = [
    ("torch", "environment", "begin"),
    ("huggingface_hub.constants", "hub_stand_ins", "after_constants"),
    ("transformers.utils.hub", "hub_stand_ins", "after_files"),
    ("transformers.tokenization_utils_base", "hub_stand_ins", "after_tokenizers"),
    ("datasets.load", "hub_stand_ins", "after_datasets"),
    ("transformers.modeling_utils", "zero_weights", "after_models"),
    ("transformers.generation.stopping_criteria", "zero_weights", "after_stopping"),
]
if os.environ.get("LABKIT_PHANTOM_WATCH"):
    AFTER += [
        ("safetensors.torch", "watch_script", "after_safetensors"),
        ("transformers.cache_utils", "kv_cache", "after_caches"),
        ("transformers.modeling_utils", "program", "after_models"),
        ("transformers.training_args", "program", "after_arguments"),
        ("accelerate.accelerator", "program", "after_accelerate"),
        ("lightning.pytorch.trainer.trainer", "program", "after_lightning"),
        ("pytorch_lightning.trainer.trainer", "program", "after_lightning"),
        ("trl.trainer.sft_trainer", "program", "after_trl"),
    ]


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        # Libraries also ask for it without importing it then, and may do so first.
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_continue(module):
            execute(module)
            for _, file, function in filter(lambda each: each[0] == name, AFTER):
                try:
                    getattr(importlib.import_module(f"{PACKAGE}.{file}"), function)(module)
                except (AttributeError, ImportError) as error:
                    if name == "torch":
                        raise
                    said = f"{name} of this version is left as it is ({error})"
                    print(f"labkit: {said}: what is not on this machine is missed", file=sys.stderr)

        spec.loader.exec_module = execute_and_continue
        return spec


if os.environ.get("LABKIT_PHANTOM"):
    sys.meta_path[:0] = map(_After, {name for name, *_ in AFTER})

hidden = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path != HERE]
)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
