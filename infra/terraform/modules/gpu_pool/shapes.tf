# What a node of each type has: cores, half of its memory, its GPUs.

locals {
  shapes = {
    "g5.xlarge"    = { cpu = 4, memory = "8GiB", gpus = "A10G:24GiB" }
    "g5.2xlarge"   = { cpu = 8, memory = "16GiB", gpus = "A10G:24GiB" }
    "g5.12xlarge"  = { cpu = 48, memory = "96GiB", gpus = join(",", [for _ in range(4) : "A10G:24GiB"]) }
    "g6.xlarge"    = { cpu = 4, memory = "8GiB", gpus = "L4:24GiB" }
    "g6.2xlarge"   = { cpu = 8, memory = "16GiB", gpus = "L4:24GiB" }
    "g6.12xlarge"  = { cpu = 48, memory = "96GiB", gpus = join(",", [for _ in range(4) : "L4:24GiB"]) }
    "g6e.xlarge"   = { cpu = 4, memory = "16GiB", gpus = "L40S:48GiB" }
    "g6e.12xlarge" = { cpu = 48, memory = "192GiB", gpus = join(",", [for _ in range(4) : "L40S:48GiB"]) }
    "p5.48xlarge"  = { cpu = 192, memory = "1024GiB", gpus = join(",", [for _ in range(8) : "H100:80GiB"]) }
  }

  shape = coalesce(var.node_shape, try(local.shapes[var.instance_types[0]], null))
}
