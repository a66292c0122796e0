"""Run by a Python on whose path SpecForge stands first: load a drafter with its model class and fill a block.

Arguments: root of the installed packages, drafter folder, a file of inputs, the file of outputs to write.
"""

# mypy: ignore-errors

import json
import sys
import types
from pathlib import Path

import safetensors.torch
import torch

root, drafter_folder, inputs, outputs = sys.argv[1:]
for package in ("specforge", "specforge.modeling", "specforge.modeling.draft"):
    # bare packages in place of its own, which import a serving engine before anything else
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(Path(root, *package.split(".")))]

from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: E402

drafter, loaded = DFlashDraftModel.from_pretrained(drafter_folder, output_loading_info=True, dtype=torch.float32)
given = safetensors.torch.load_file(inputs)
with torch.inference_mode():
    hidden = drafter.eval()(
        position_ids=given["positions"], noise_embedding=given["embedded"], target_hidden=given["features"]
    )
safetensors.torch.save_file({"hidden": hidden}, outputs)
facts = {"block": drafter.block_size, "mask": drafter.mask_token_id, "layers": drafter.target_layer_ids}
module = sys.modules[DFlashDraftModel.__module__]
print(
    json.dumps({"package": module.__file__, "loaded": {key: sorted(value) for key, value in loaded.items()}, **facts})
)
