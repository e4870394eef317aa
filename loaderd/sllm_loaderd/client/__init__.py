"""What other rooms may use of loaderd: `LoaderControl` for the invoker, `LoaderSession` for the worker. No torch."""

from sllm_loaderd.client.control import LoaderControl
from sllm_loaderd.client.keeping import KeptBatch, KeptChunks
from sllm_loaderd.client.load import SessionLoad
from sllm_loaderd.client.mapping import Mapping, PartitionMemory
from sllm_loaderd.client.session import LoaderSession

__all__ = ["KeptBatch", "KeptChunks", "LoaderControl", "LoaderSession", "Mapping", "PartitionMemory", "SessionLoad"]
