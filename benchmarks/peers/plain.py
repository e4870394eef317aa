"""A script as anybody would write it: import, from_pretrained, generate. ``plain.py MODEL PROMPT COUNT``."""

import json
import sys

from greedy import Greedy

for piece in Greedy(sys.argv[1]).stream(sys.argv[2], int(sys.argv[3])):
    print(json.dumps({"piece": piece}), flush=True)
print(json.dumps({"done": True}), flush=True)
sys.stdin.read()  # until somebody has looked what it has used
