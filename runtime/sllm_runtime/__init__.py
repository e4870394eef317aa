"""The runtime: protocol, platform, control plane and worker of sllm."""
