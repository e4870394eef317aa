"""``load_forms.py DIRECTORY FILE…``: those forms of ``model.safetensors`` that peers read; prints which it made."""

import json
import os
import sys

import torch
from safetensors.torch import load_file

BIN, TENSORS = "pytorch_model.bin", "model.tensors"
directory, wanted = sys.argv[1], sys.argv[2:]
tensors = load_file(directory + "/model.safetensors")
made, missing = [], {}
if BIN in wanted:
    torch.save(tensors, f"{directory}/{BIN}")
    made.append(BIN)
if TENSORS in wanted:
    try:
        from tensorizer import TensorSerializer
    except ImportError as error:
        missing["tensorizer"] = str(error)
    else:
        serializer = TensorSerializer(f"{directory}/{TENSORS}")
        serializer.write_state_dict(tensors)
        serializer.close()
        made.append(TENSORS)
for name in os.listdir(directory):
    with open(os.path.join(directory, name), "rb") as file:
        os.fsync(file.fileno())
print(json.dumps({"made": made, "missing": missing}), flush=True)
