"""``load_forms.py DIRECTORY``: the other forms of ``model.safetensors`` that peers read; prints which it made."""

import json
import os
import sys

import torch
from safetensors.torch import load_file

directory = sys.argv[1]
tensors = load_file(directory + "/model.safetensors")
made, missing = ["bin"], {}
torch.save(tensors, directory + "/pytorch_model.bin")
try:
    from tensorizer import TensorSerializer
except ImportError as error:
    missing["tensorizer"] = str(error)
else:
    serializer = TensorSerializer(directory + "/model.tensors")
    serializer.write_state_dict(tensors)
    serializer.close()
    made.append("tensors")
for name in os.listdir(directory):
    with open(os.path.join(directory, name), "rb") as file:
        os.fsync(file.fileno())
print(json.dumps({"made": made, "missing": missing}), flush=True)
