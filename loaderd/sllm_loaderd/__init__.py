"""One per node: checkpoint format, chunk pool, and the pipeline that brings weights to devices."""
