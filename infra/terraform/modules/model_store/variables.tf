variable "bucket_name" {
  description = "Name of the bucket; unique in the whole world."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name is 3 to 63 lower-case letters, digits and hyphens, without dots: TLS to the bucket's own name needs that."
  }
}

variable "old_version_days" {
  description = "Days after which a version that was replaced or deleted goes for good."
  type        = number
  default     = 30

  validation {
    condition     = var.old_version_days >= 1 && floor(var.old_version_days) == var.old_version_days
    error_message = "old_version_days is a whole number of days, at least 1."
  }
}

variable "log_bucket" {
  description = "Bucket that access logs are written to. null: none are written."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
