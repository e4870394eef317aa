variable "name" {
  description = "Name of the cluster; part of the names of what is made here."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "name is 2 to 24 lower-case letters, digits and hyphens, a letter first: a load balancer's name has 32."
  }
}

variable "region" {
  description = "Region of the gateways."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region is the code of an AWS region, as us-east-1."
  }
}

variable "vpc_id" {
  description = "VPC of the gateways."
  type        = string
}

variable "public_subnet_ids" {
  description = "Subnets of the load balancer, in two zones at least."
  type        = list(string)

  validation {
    condition     = length(var.public_subnet_ids) >= 2
    error_message = "public_subnet_ids has two zones at least: a load balancer needs them."
  }
}

variable "private_subnet_ids" {
  description = "Subnets of the gateways."
  type        = list(string)

  validation {
    condition     = length(var.private_subnet_ids) > 0
    error_message = "private_subnet_ids is empty; give at least one."
  }
}

variable "balancer_security_group_id" {
  description = "Security group of the load balancer."
  type        = string
}

variable "gateway_security_group_id" {
  description = "Security group of the gateways."
  type        = string
}

variable "host" {
  description = "Name that clients use; the certificate is for it."
  type        = string

  validation {
    condition     = can(regex("^([a-z0-9-]+\\.)+[a-z]{2,}$", var.host))
    error_message = "host is a host name, as sllm.example.com."
  }
}

variable "certificate_arn" {
  description = "Certificate for host, in ACM."
  type        = string

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:acm:", var.certificate_arn))
    error_message = "certificate_arn is the ARN of a certificate in ACM."
  }
}

variable "zone_id" {
  description = "Public Route 53 zone in which host is made. null: the name is made elsewhere, as an alias of the output balancer_dns_name."
  type        = string
  default     = null
}

variable "instance_type" {
  description = "Instance type of the gateways; x86-64."
  type        = string
  default     = "t3.small"

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9]+$", var.instance_type))
    error_message = "instance_type is an EC2 instance type, as t3.small."
  }
}

variable "size" {
  description = "Number of gateways; each machine has a controller too, of which one leads."
  type        = number
  default     = 2

  validation {
    condition     = var.size >= 1 && var.size <= 20 && floor(var.size) == var.size
    error_message = "size is 1 to 20."
  }
}

variable "port" {
  description = "Port of the gateways behind the load balancer; as gateway_port of modules/network."
  type        = number
  default     = 8600

  validation {
    condition     = var.port >= 1024 && var.port <= 65535 && floor(var.port) == var.port
    error_message = "port is 1024 to 65535: gateways are not root, which alone may listen below."
  }
}

variable "idle_timeout_s" {
  description = "Seconds without a byte after which the load balancer ends a connection. Streams send a heartbeat every 10 s; answers that are not streamed send nothing until they are whole."
  type        = number
  default     = 900

  validation {
    condition     = var.idle_timeout_s >= 60 && var.idle_timeout_s <= 4000
    error_message = "idle_timeout_s is 60 to 4000: below a minute it would end streams whose gateway is slow, above 4000 AWS refuses it."
  }
}

variable "drain_s" {
  description = "Seconds that running calls have when a gateway is replaced; then their streams go on at another one."
  type        = number
  default     = 60

  validation {
    condition     = var.drain_s >= 0 && var.drain_s <= 3600
    error_message = "drain_s is 0 to 3600 seconds."
  }
}

variable "boot_timeout_s" {
  description = "Seconds within which a new gateway must answer /readyz; one that does not is ended and replaced."
  type        = number
  default     = 600

  validation {
    condition     = var.boot_timeout_s >= 60 && var.boot_timeout_s <= 7200
    error_message = "boot_timeout_s is 60 to 7200 seconds."
  }
}

variable "deletion_protection" {
  description = "Whether AWS refuses to delete the load balancer. Set to false, and applied, before a cluster is destroyed."
  type        = bool
  default     = true
}

variable "log_bucket" {
  description = "Bucket that the load balancer's access logs are written to. null: none are written."
  type        = string
  default     = null
}

variable "ebs_kms_key_arn" {
  description = "Key for the root volumes, which the group is granted the use of. null: the account's key for EBS; they are encrypted either way."
  type        = string
  default     = null
}

variable "nats_url" {
  description = "The cluster's NATS servers, separated by commas (output url of modules/nats)."
  type        = string

  validation {
    condition     = alltrue([for url in split(",", var.nats_url) : can(regex("^tls://[A-Za-z0-9.-]+:[0-9]+$", url))])
    error_message = "nats_url is tls://host:port, or several with commas: gateways speak to NATS over TLS only."
  }
}

variable "parameter_prefix" {
  description = "Path in the parameter store below which this cluster's secrets lie: nats/ca, gateway/key, gateway/token, controller/key, controller/secrets-key."
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

variable "policy_arns" {
  description = "Policies for the controllers beside their own, by a name each: the scaler_policy_arn of the pool that they size."
  type        = map(string)
  default     = {}
}

variable "settings" {
  description = "More SLLM_ variables for gateways and controllers, as the output controller_settings of modules/gpu_pool. No secrets: they stand in the user data."
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
