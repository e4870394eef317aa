"""The SSD tier: whole partitions of remote models, kept on the node's disk within a limit."""
