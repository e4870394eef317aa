variable "name" {
  description = "Name of the cluster; part of the names of what is made here."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name is 2 to 31 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "region" {
  description = "Region of the network."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region is the code of an AWS region, as us-east-1."
  }
}

variable "cidr" {
  description = "Addresses of the VPC; each zone gets a sixteenth for its private subnet and one for its public one."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && try(tonumber(split("/", var.cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.cidr)[1]), 99) <= 22
    error_message = "cidr is an IPv4 range with a prefix of 16 to 22 bits, as 10.42.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones, as [\"us-east-1a\", \"us-east-1b\", \"us-east-1c\"]. NATS puts one server into each, so three outlive the loss of one. A zone's place gives its addresses when it is made: further ones go to the end. None is exchanged for another while a NATS server lies in it, whose name and disk are those of its zone."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 2 && length(var.zones) <= 8 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones has 2 to 8 different zones: a load balancer needs two, a NATS cluster that outlives one needs three."
  }

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, var.region)])
    error_message = "zones are zones of var.region."
  }
}

variable "nat" {
  description = "Way out to the internet for private subnets: none (S3 and the APIs are reached through endpoints), one (a NAT gateway for all zones), per_zone. Models of Hugging Face's hub need one."
  type        = string
  default     = "none"

  validation {
    condition     = contains(["none", "one", "per_zone"], var.nat)
    error_message = "nat is none, one or per_zone."
  }
}

variable "interface_endpoints" {
  description = "AWS services that private subnets reach without the internet, one endpoint in each zone. ssm and autoscaling are what machines ask at boot and when they go."
  type        = list(string)
  default     = ["ssm", "autoscaling"]
}

variable "bucket_arns" {
  description = "Buckets that machines may reach through the S3 endpoint, beside those of Amazon Linux's packages."
  type        = list(string)

  validation {
    condition     = length(var.bucket_arns) > 0 && alltrue([for arn in var.bucket_arns : can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9][a-z0-9.-]+$", arn))])
    error_message = "bucket_arns has at least the models' bucket, as arn:aws:s3:::models."
  }
}

variable "client_cidrs" {
  description = "Who may reach the load balancer's port 443. Nothing else is open to anybody outside."
  type        = list(string)
  default     = ["0.0.0.0/0"]

  validation {
    condition     = length(var.client_cidrs) > 0 && alltrue([for range in var.client_cidrs : can(cidrhost(range, 0))])
    error_message = "client_cidrs has at least one IPv4 range, as 203.0.113.0/24."
  }
}

variable "gateway_port" {
  description = "Port of the gateways behind the load balancer."
  type        = number
  default     = 8600

  validation {
    condition     = var.gateway_port >= 1024 && var.gateway_port <= 65535 && floor(var.gateway_port) == var.gateway_port
    error_message = "gateway_port is 1024 to 65535: gateways are not root, which alone may listen below."
  }
}

variable "monitor_security_group_ids" {
  description = "Groups of what reads /metrics of the gateways inside the VPC (Prometheus). What is in them reaches all that gateways serve, with a token as everybody."
  type        = list(string)
  default     = []
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

variable "flow_log_days" {
  description = "Days that the VPC's flow logs are kept. 0: none are written."
  type        = number
  default     = 365

  validation {
    condition     = contains([0, 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400], var.flow_log_days)
    error_message = "flow_log_days is one of CloudWatch's retentions: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400; or 0 for none."
  }
}

variable "log_kms_key_arn" {
  description = "Key for the flow logs. null: CloudWatch's own; they are encrypted either way."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
