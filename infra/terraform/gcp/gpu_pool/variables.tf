variable "name" {
  description = "Name of this pool of nodes; part of the names of what is made here."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,20}$", var.name))
    error_message = "name is 2 to 21 lower-case letters, digits and hyphens, a letter first: a service account's name has 30."
  }
}

variable "project" {
  description = "Project that the nodes belong to."
  type        = string
}

variable "region" {
  description = "Region that the nodes run in."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region is the code of a region of Google Cloud, as us-central1."
  }
}

variable "zones" {
  description = "Zones of the region that have the machine type."
  type        = list(string)

  validation {
    condition     = length(var.zones) > 0 && alltrue([for zone in var.zones : startswith(zone, var.region)])
    error_message = "zones has at least one zone of var.region."
  }
}

variable "subnetwork" {
  description = "Subnetwork with private Google access, through which nodes reach storage and secrets without public addresses."
  type        = string
}

variable "network_tags" {
  description = "Tags that the firewall's rules name: out to NATS at 4222, among nodes at the peer port, nothing in from elsewhere."
  type        = list(string)
  default     = ["sllm-node"]
}

variable "machine_type" {
  description = "Machine type of the a2 or a3 families, whose GPUs come with them."
  type        = string
  default     = "a2-highgpu-1g"

  validation {
    condition     = can(regex("^a[23]-(highgpu|ultragpu|megagpu|edgegpu)-[0-9]+g$", var.machine_type))
    error_message = "machine_type is of the a2 or a3 family, as a2-highgpu-1g or a3-highgpu-8g."
  }
}

variable "local_ssds" {
  description = "Local SSDs of 375 GB to attach for the SSD tier. a2-ultragpu and a3 have theirs already: 0 for these."
  type        = number
  default     = 1

  validation {
    condition     = contains([0, 1, 2, 4, 8], var.local_ssds)
    error_message = "local_ssds is 0, 1, 2, 4 or 8."
  }
}

variable "size" {
  description = "Number of nodes. 0: none."
  type        = number
  default     = 0

  validation {
    condition     = var.size >= 0 && var.size <= 500 && floor(var.size) == var.size
    error_message = "size is 0 to 500."
  }
}

variable "spot" {
  description = "Spot instances, which have 30 seconds from their notice to their end."
  type        = bool
  default     = false
}

variable "node_drain_s" {
  description = "Seconds that running calls have, when a node goes away, to move to another one or to end."
  type        = number
  default     = 20

  validation {
    condition     = var.node_drain_s >= 0 && var.node_drain_s <= 80
    error_message = "node_drain_s is 0 to 80: Google Cloud gives a machine 90 seconds to shut down."
  }

  validation {
    condition     = !var.spot || var.node_drain_s <= 25
    error_message = "node_drain_s is more than the 25 s that a spot instance has; lower it, or set spot = false."
  }
}

variable "image" {
  description = "Image with NVIDIA's driver and container toolkit and Python 3.11 or later: a family of Google's deep learning images."
  type        = string
  default     = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
}

variable "boot_disk_gb" {
  description = "Size of the encrypted boot disk in GB."
  type        = number
  default     = 100

  validation {
    condition     = var.boot_disk_gb >= 60
    error_message = "boot_disk_gb is at least 60: the image alone takes about 50."
  }
}

variable "kms_key" {
  description = "Key for the boot disk. null: Google's own; it is encrypted either way."
  type        = string
  default     = null
}

variable "bucket" {
  description = "Bucket with the artifact."
  type        = string
}

variable "storage_key" {
  description = "Whether models lie in Cloud Storage: then an HMAC key that may read them is in the secrets node-storage-id and node-storage-key, and s3://bucket/prefix names them."
  type        = bool
  default     = false
}

variable "artifact_url" {
  description = "gs:// address of the archive with wheels."
  type        = string

  validation {
    condition     = can(regex("^gs://[a-z0-9][a-z0-9._-]+/[A-Za-z0-9._/+=@,:-]+\\.tar\\.gz$", var.artifact_url))
    error_message = "artifact_url is gs://bucket/key.tar.gz, the key in letters, digits and . _ - / + = @ , : alone, since the machines' shell reads it."
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
  description = "The cluster's NATS servers, separated by commas."
  type        = string

  validation {
    condition     = alltrue([for url in split(",", var.nats_url) : can(regex("^tls://[A-Za-z0-9.-]+:[0-9]+$", url))])
    error_message = "nats_url is tls://host:port, or several with commas: nodes speak to NATS over TLS only."
  }
}

variable "secret_prefix" {
  description = "Beginning of the names of this cluster's secrets in Secret Manager: with sllm-prod, sllm-prod-nats-ca, sllm-prod-node-key, sllm-prod-node-peer-token."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*$", var.secret_prefix))
    error_message = "secret_prefix is lower-case letters, digits and hyphens."
  }
}

variable "peer_port" {
  description = "Port at which nodes serve models to each other."
  type        = number
  default     = 8610

  validation {
    condition     = var.peer_port >= 1024 && var.peer_port <= 65535 && floor(var.peer_port) == var.peer_port
    error_message = "peer_port is 1024 to 65535: nodes are not root, which alone may listen below."
  }
}

variable "settings" {
  description = "More SLLM_ variables for the nodes' daemons. No secrets: they stand in the metadata."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name, value in var.settings : can(regex("^SLLM_[A-Z0-9_]+$", name)) && !can(regex("TOKEN|PASSWORD|SECRET|CREDS", name)) && !strcontains(value, "\n")])
    error_message = "settings has names that begin with SLLM_, values of one line, and no secrets."
  }
}

variable "labels" {
  description = "Labels of what is made here."
  type        = map(string)
  default     = {}
}
