terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.32, < 7.0" # the first with max_healthy_percentage
    }
  }
}
