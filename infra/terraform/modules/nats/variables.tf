variable "name" {
  description = "Name of the cluster; part of the names of what is made here."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name is 2 to 31 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "region" {
  description = "Region of the servers."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region is the code of an AWS region, as us-east-1."
  }
}

variable "vpc_id" {
  description = "VPC that the servers' names are known in."
  type        = string
}

variable "subnets" {
  description = "Zone to private subnet, for three zones: one server in each."
  type        = map(string)

  validation {
    condition     = length(var.subnets) == 3
    error_message = "subnets has exactly three zones: streams have three copies, and the loss of one zone must leave two."
  }
}

variable "security_group_ids" {
  description = "Security groups of the servers (output nats_security_group_id of modules/network)."
  type        = list(string)

  validation {
    condition     = length(var.security_group_ids) > 0
    error_message = "security_group_ids is empty; give the output nats_security_group_id of modules/network."
  }
}

variable "instance_type" {
  description = "Instance type of each server; x86-64, as the wheel with nats-server is."
  type        = string
  default     = "t3.small"

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9]+$", var.instance_type))
    error_message = "instance_type is an EC2 instance type, as t3.small."
  }
}

variable "volume_gb" {
  description = "Size of each server's encrypted volume with streams, in GiB."
  type        = number
  default     = 20

  validation {
    condition     = var.volume_gb >= 10 && var.volume_gb <= 16384
    error_message = "volume_gb is 10 to 16384: bundles of functions lie there too."
  }
}

variable "kms_key_arn" {
  description = "Key for the volumes. null: the account's key for EBS; they are encrypted either way."
  type        = string
  default     = null
}

variable "domain" {
  description = "Private domain of the servers' names; their certificate is for nats-0, nats-1 and nats-2 of it."
  type        = string
  default     = "sllm.internal"

  validation {
    condition     = can(regex("^([a-z0-9-]+\\.)+[a-z]{2,}$", var.domain))
    error_message = "domain is a domain name, as sllm.internal."
  }
}

variable "parameter_prefix" {
  description = "Path in the parameter store below which this cluster's secrets lie: nats/ca, nats/cert, nats/key, nats/accounts."
  type        = string

  validation {
    condition     = can(regex("^(/[A-Za-z0-9_.-]+)+$", var.parameter_prefix))
    error_message = "parameter_prefix is a path such as /sllm/prod, without a slash at its end."
  }
}

variable "artifact_bucket_arn" {
  description = "Bucket with the artifact."
  type        = string

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9][a-z0-9.-]+$", var.artifact_bucket_arn))
    error_message = "artifact_bucket_arn is the ARN of a bucket, as arn:aws:s3:::models."
  }
}

variable "artifact_url" {
  description = "s3:// address of the wheels: an archive (.tar.gz) as for modules/gpu_pool; the extra `server` is installed."
  type        = string

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/+=@,:-]+\\.tar\\.gz$", var.artifact_url))
    error_message = "artifact_url is s3://bucket/key.tar.gz, the key in letters, digits and . _ - / + = @ , : alone, since the machines' shell reads it."
  }
}

variable "artifact_sha256" {
  description = "SHA-256 of that archive."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.artifact_sha256))
    error_message = "artifact_sha256 is 64 lower-case hexadecimal digits, as sha256sum prints them."
  }
}

variable "decrypt_key_arns" {
  description = "KMS keys that the artifact and the parameters are encrypted with, where they are customer keys."
  type        = list(string)
  default     = []
}

variable "ami_parameter" {
  description = "Public parameter that names the image: Amazon Linux 2023."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"

  validation {
    condition     = startswith(var.ami_parameter, "/")
    error_message = "ami_parameter is the full name of a Systems Manager parameter, beginning with a slash."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
