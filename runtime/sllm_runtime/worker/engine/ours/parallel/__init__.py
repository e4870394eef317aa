"""Our engine over several ranks that share every layer: tensor parallelism (Megatron-LM, section 3).

``group`` sums over ranks, ``shards`` makes a model of a rank's weights, ``ranks`` drives them all.
"""
