"""Run by a Python on whose path z-lab's `dflash` stands first: load a drafter, fill a block, decode.

Arguments: drafter folder, target folder, a file of inputs, the file of outputs to write (safetensors both).
"""

# mypy: ignore-errors

import json
import sys
import time

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import dflash.model as zlab  # z-lab's, which has the name of ours

# it times itself by the GPU's clock, and there may be none
zlab._cuda_time = time.perf_counter

drafter_folder, target_folder, inputs, outputs = sys.argv[1:]
drafter, loaded = zlab.DFlashDraftModel.from_pretrained(drafter_folder, output_loading_info=True, dtype=torch.float32)
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
given = safetensors.torch.load_file(inputs)
with torch.inference_mode():
    hidden = drafter.eval()(
        position_ids=given["positions"],
        noise_embedding=given["embedded"],
        target_hidden=given["features"],
        past_key_values=DynamicCache(config=drafter.config),
        use_cache=True,
    )
found = {"hidden": hidden}
for row, prompt in enumerate(given["prompts"]):
    decoded = zlab.dflash_generate(drafter, target, prompt[None], int(given["new_tokens"]), None, return_stats=True)
    found[f"tokens.{row}"] = decoded.output_ids[0, len(prompt) :].clone()
    found[f"kept.{row}"] = torch.tensor(decoded.acceptance_lengths)
safetensors.torch.save_file(found, outputs)
facts = {"block": drafter.block_size, "mask": drafter.mask_token_id, "layers": drafter.target_layer_ids}
print(json.dumps({"package": zlab.__file__, "loaded": {key: sorted(value) for key, value in loaded.items()}, **facts}))
