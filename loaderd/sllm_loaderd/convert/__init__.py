"""Conversion of model directories to checkpoints. Imports torch only where a source or a module needs it."""

from sllm_loaderd.convert.directory import ConvertOptions, convert_directory, write_checkpoint

__all__ = ["ConvertOptions", "convert_directory", "write_checkpoint"]
