"""Our own engine: continuous batching over paged KV, with output that does not depend on who else is in the batch.

Read in this order: ``numerics`` (what makes a row's bits its own), ``pages`` and ``kv`` (where K and V lie),
``scheduler`` (who computes what in a step), ``batch`` and ``attention`` (one step as tensors), ``model`` (families),
``engine`` (all of it behind ``base.Engine``), ``selftest`` (how exactness is proven at a start).
"""
