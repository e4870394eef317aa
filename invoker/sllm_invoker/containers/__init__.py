"""Sandboxes that are containers of podman or docker, driven by the engine's command line."""
