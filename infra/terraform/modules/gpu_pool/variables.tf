variable "name" {
  description = "Name of this pool of nodes; also the name of its Auto Scaling group, which SLLM_NODES_GROUP of the controller names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name is 2 to 31 lower-case letters, digits and hyphens, a letter first: it becomes part of resource names."
  }
}

variable "region" {
  description = "Region that the nodes run in; what they tell boto3."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region is the code of an AWS region, as us-east-1."
  }
}

variable "subnet_ids" {
  description = "Private subnets, one for each zone that nodes may run in (output private_subnet_ids of modules/network)."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) > 0
    error_message = "subnet_ids is empty; give at least one private subnet, or nodes have nowhere to run."
  }
}

variable "security_group_ids" {
  description = "Security groups of the nodes (output node_security_group_id of modules/network)."
  type        = list(string)

  validation {
    condition     = length(var.security_group_ids) > 0
    error_message = "security_group_ids is empty; without one AWS takes the VPC's default group, which modules/network shuts."
  }
}

variable "instance_types" {
  description = "Instance types of the g5, g6, g6e, p5, p5e or p5en families, the preferred first. One node shape: give types with the same number of GPUs, since the controller packs starts onto it."
  type        = list(string)
  default     = ["g6.xlarge"]

  validation {
    condition     = length(var.instance_types) > 0 && length(var.instance_types) <= 20
    error_message = "instance_types has 1 to 20 types."
  }

  validation {
    condition     = alltrue([for kind in var.instance_types : can(regex("^(g5|g6|g6e|p5|p5e|p5en)\\.[0-9]*(x|xlarge|large|metal)", kind))])
    error_message = "instance_types takes types of the families g5, g6, g6e, p5, p5e, p5en, as g6.xlarge: others have no NVIDIA GPU that the image's driver knows."
  }
}

variable "node_shape" {
  description = "What one node has for the controller's packing: cores, bytes of memory for instances (half of the machine's: the rest is the chunk pool), GPUs as \"L4:24GiB\". null: what is known of the first type."
  type        = object({ cpu = number, memory = string, gpus = string })
  default     = null

  validation {
    condition     = var.node_shape != null || contains(keys(local.shapes), try(var.instance_types[0], ""))
    error_message = "node_shape is needed for this instance type: what is known are some sizes of g5, g6, g6e, p5 (shapes.tf)."
  }

  # All controllers are told of it: none would start with one that it cannot read.
  validation {
    condition = var.node_shape == null ? true : (
      var.node_shape.cpu > 0 && can(regex("^\\s*(0*[1-9][0-9]*(\\.[0-9]+)?|0+\\.[0-9]*[1-9][0-9]*)\\s*[kKMGT]?i?[bB]?\\s*$", var.node_shape.memory)) &&
      alltrue([for gpu in split(",", var.node_shape.gpus) : can(regex("^\\s*[A-Za-z][A-Za-z0-9._-]*:\\s*[0-9]+(\\.[0-9]+)?\\s*[kKMGT]i?[bB]?\\s*$", gpu))])
    )
    error_message = "node_shape has cores, memory as 16GiB, and each GPU by its kind and memory, as L4:24GiB,L4:24GiB."
  }
}

variable "min_size" {
  description = "Least number of nodes. 0: the pool goes away when nobody calls."
  type        = number
  default     = 0

  validation {
    condition     = var.min_size >= 0 && floor(var.min_size) == var.min_size
    error_message = "min_size is a whole number, 0 or more."
  }
}

variable "max_size" {
  description = "Most nodes at a time: what bounds the bill. A spot instance that AWS is about to take back may be one more for the minutes in which it is replaced."
  type        = number
  default     = 4

  validation {
    condition     = var.max_size >= 0 && var.max_size <= 500 && var.max_size >= var.min_size
    error_message = "max_size is at least min_size, and at most 500."
  }
}

variable "initial_size" {
  description = "Nodes when the group is made. From then on the controller decides, and Terraform leaves the number alone. null: min_size."
  type        = number
  default     = null

  validation {
    condition     = var.initial_size == null ? true : var.initial_size >= var.min_size && var.initial_size <= var.max_size
    error_message = "initial_size lies between min_size and max_size."
  }
}

variable "spot_percentage" {
  description = "Share of nodes above on_demand_base that are spot instances, in percent. 0: none."
  type        = number
  default     = 0

  validation {
    condition     = var.spot_percentage >= 0 && var.spot_percentage <= 100
    error_message = "spot_percentage is 0 (on demand only) to 100 (spot only)."
  }
}

variable "on_demand_base" {
  description = "The first so many nodes are on demand, whatever spot_percentage says."
  type        = number
  default     = 0

  validation {
    condition     = var.on_demand_base >= 0 && floor(var.on_demand_base) == var.on_demand_base
    error_message = "on_demand_base is a whole number, 0 or more."
  }
}

variable "node_drain_s" {
  description = "Seconds that running calls have, when a node goes away, to move to another one or to end. A spot instance has two minutes from its notice to its end."
  type        = number
  default     = 90

  validation {
    condition     = var.node_drain_s >= 0 && var.node_drain_s <= 3600
    error_message = "node_drain_s is 0 to 3600 seconds."
  }

  validation {
    condition     = var.spot_percentage == 0 || var.node_drain_s <= 100
    error_message = "node_drain_s is more than the 100 s that a spot instance has after its notice was seen; lower it, or set spot_percentage = 0."
  }
}

variable "boot_timeout_s" {
  description = "Seconds within which a node must be READY; one that is not is ended and replaced."
  type        = number
  default     = 900

  validation {
    condition     = var.boot_timeout_s >= 60 && var.boot_timeout_s <= 7200
    error_message = "boot_timeout_s is 60 to 7200 seconds."
  }
}

variable "ami_parameter" {
  description = "Public parameter that names the image: Amazon Linux 2023 with NVIDIA's driver and container toolkit. Nothing of that is installed at boot."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"

  validation {
    condition     = startswith(var.ami_parameter, "/")
    error_message = "ami_parameter is the full name of a Systems Manager parameter, beginning with a slash."
  }
}

variable "root_volume_gb" {
  description = "Size of the encrypted root volume in GiB."
  type        = number
  default     = 100

  validation {
    condition     = var.root_volume_gb >= 75 && var.root_volume_gb <= 16384
    error_message = "root_volume_gb is 75 to 16384: the image's own snapshot takes 75 GiB."
  }
}

variable "ebs_kms_key_arn" {
  description = "Key for the root volume, which the group is granted the use of. null: the account's key for EBS; the volume is encrypted either way."
  type        = string
  default     = null
}

variable "model_bucket_arn" {
  description = "Bucket with the models and with the artifact (output bucket_arn of modules/model_store)."
  type        = string

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9][a-z0-9.-]+$", var.model_bucket_arn))
    error_message = "model_bucket_arn is the ARN of a bucket, as arn:aws:s3:::models."
  }
}

variable "decrypt_key_arns" {
  description = "KMS keys that the bucket's objects and the parameters are encrypted with, where they are customer keys."
  type        = list(string)
  default     = []
}

variable "artifact_url" {
  description = "s3:// address of the wheels that nodes install: an archive (.tar.gz) with the wheel of `make dist` and every wheel it needs."
  type        = string

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/+=@,:-]+\\.tar\\.gz$", var.artifact_url))
    error_message = "artifact_url is s3://bucket/key.tar.gz, the key in letters, digits and . _ - / + = @ , : alone, since the machines' shell reads it; docs/terraform.md says how it is made."
  }
}

variable "artifact_sha256" {
  description = "SHA-256 of that archive; a node that downloads anything else does not start."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.artifact_sha256))
    error_message = "artifact_sha256 is 64 lower-case hexadecimal digits, as sha256sum prints them."
  }
}

variable "nats_url" {
  description = "The cluster's NATS servers, separated by commas (output url of modules/nats)."
  type        = string

  validation {
    condition     = alltrue([for url in split(",", var.nats_url) : can(regex("^tls://[A-Za-z0-9.-]+:[0-9]+$", url))])
    error_message = "nats_url is tls://host:port, or several with commas: nodes speak to NATS over TLS only."
  }
}

variable "parameter_prefix" {
  description = "Path in the parameter store below which this cluster's secrets lie: nats/ca, node/key, node/peer-token."
  type        = string

  validation {
    condition     = can(regex("^(/[A-Za-z0-9_.-]+)+$", var.parameter_prefix))
    error_message = "parameter_prefix is a path such as /sllm/prod, without a slash at its end."
  }
}

variable "peer_port" {
  description = "Port at which nodes serve models to each other; the security group of modules/network opens it among them."
  type        = number
  default     = 8610

  validation {
    condition     = var.peer_port >= 1024 && var.peer_port <= 65535 && floor(var.peer_port) == var.peer_port
    error_message = "peer_port is 1024 to 65535."
  }
}

variable "settings" {
  description = "More SLLM_ variables for the nodes' daemons, as { SLLM_POOL_SIZE = \"4\" } (docs/invoker.md, docs/loaderd.md). No secrets: they stand in the user data."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name, value in var.settings : can(regex("^SLLM_[A-Z0-9_]+$", name)) && !strcontains(value, "\n")])
    error_message = "settings has names that begin with SLLM_, and values of one line."
  }

  validation {
    condition     = alltrue([for name in keys(var.settings) : !can(regex("TOKEN|PASSWORD|SECRET|CREDS", name))])
    error_message = "settings stand in the instances' user data, where secrets do not belong; put them into the parameter store."
  }
}

variable "labels" {
  description = "Labels of the nodes beside pool, zone, type and market, which they have anyway."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name, value in var.labels : can(regex("^[a-z][a-z0-9_-]*$", name)) && can(regex("^[A-Za-z0-9_.-]+$", value))])
    error_message = "labels has plain words: name and value of letters, digits, dots, underscores and hyphens."
  }

  validation {
    condition     = length(setintersection(keys(var.labels), ["pool", "zone", "type", "market"])) == 0
    error_message = "labels has none of pool, zone, type and market: a node has its own, which the controller could not know before."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
