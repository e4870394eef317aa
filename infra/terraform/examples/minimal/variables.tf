variable "region" {
  description = "Region of the cluster."
  type        = string
  default     = "us-east-1"
}

variable "zones" {
  description = "Three zones of the region."
  type        = list(string)
  default     = ["us-east-1a", "us-east-1b", "us-east-1c"]

  validation {
    condition     = length(var.zones) == 3
    error_message = "zones has exactly three zones: one NATS server lies in each."
  }
}

variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "sllm"
}

variable "bucket_name" {
  description = "Name of the bucket with models and artifacts; unique in the whole world."
  type        = string
}

variable "host" {
  description = "Name that clients use."
  type        = string
}

variable "certificate_arn" {
  description = "Certificate for host, in ACM."
  type        = string
}

variable "parameter_prefix" {
  description = "Where the cluster's secrets lie in the parameter store (machine/new-secrets.sh)."
  type        = string
  default     = "/sllm/sllm"
}

variable "artifacts" {
  description = "Keys in the bucket of the archives with wheels, and their SHA-256: `server` for NATS and gateways, `node` for GPU nodes."
  type = object({
    server = object({ key = string, sha256 = string })
    node   = object({ key = string, sha256 = string })
  })
}
