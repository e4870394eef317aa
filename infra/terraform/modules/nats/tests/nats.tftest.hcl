# The plan of a NATS cluster. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_ssm_parameter" {
    defaults = { value = "ami-0123456789abcdef0" }
  }

  mock_resource "aws_ebs_volume" {
    defaults = { id = "vol-0123456789abcdef0" }
  }

  mock_resource "aws_instance" {
    defaults = { private_ip = "10.42.128.10" }
  }
}

variables {
  name                = "prod"
  region              = "us-east-1"
  vpc_id              = "vpc-1"
  subnets             = { us-east-1a = "subnet-a", us-east-1b = "subnet-b", us-east-1c = "subnet-c" }
  security_group_ids  = ["sg-nats"]
  parameter_prefix    = "/sllm/prod"
  artifact_bucket_arn = "arn:aws:s3:::models"
  artifact_url        = "s3://models/artifacts/sllm-server.tar.gz"
  artifact_sha256     = "0000000000000000000000000000000000000000000000000000000000000000"
}

run "three_servers_in_three_zones" {
  command = plan

  assert {
    condition     = keys(aws_instance.server) == ["nats-0", "nats-1", "nats-2"]
    error_message = "names are fixed"
  }

  assert {
    condition     = length(distinct([for server in aws_instance.server : server.subnet_id])) == 3
    error_message = "no zone has two"
  }

  assert {
    condition     = output.url == "tls://nats-0.sllm.internal:4222,tls://nats-1.sllm.internal:4222,tls://nats-2.sllm.internal:4222"
    error_message = "clients know all of them, over TLS"
  }
}

run "closed" {
  command = plan

  assert {
    condition     = alltrue([for server in aws_instance.server : server.metadata_options[0].http_tokens == "required" && !server.associate_public_ip_address])
    error_message = "IMDSv2, no public address"
  }

  assert {
    condition     = alltrue([for server in aws_instance.server : server.root_block_device[0].encrypted]) && alltrue([for volume in aws_ebs_volume.streams : volume.encrypted])
    error_message = "every volume is encrypted"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_role_policy.server.policy).Statement : !contains(statement.Resource, "*")
    ]) && jsondecode(aws_iam_role_policy.server.policy).Statement[0].Resource[0] == "arn:aws:s3:::models/artifacts/sllm-server.tar.gz"
    error_message = "a server reads its artifact and its own secrets"
  }

  assert {
    condition     = alltrue([for text in local.cloud_config : !can(regex("(?i)(BEGIN [A-Z ]*PRIVATE|NKEY SEED)", text)) && length(base64gzip(text)) < 16384])
    error_message = "no secret stands in user data"
  }
}

run "each_server_knows_the_others_and_its_own_volume" {
  command = plan

  assert {
    condition     = strcontains(local.boot_env["nats-1"], "\nSERVER=nats-1\n") && strcontains(local.boot_env["nats-1"], "ROUTES=\"nats-0.sllm.internal nats-1.sllm.internal nats-2.sllm.internal\"")
    error_message = "routes to all"
  }

  assert {
    condition     = strcontains(local.boot_env["nats-1"], "\nVOLUME=vol-") && strcontains(local.boot_env["nats-1"], "\nMAX_FILE_STORE=19327352832\n")
    error_message = "streams have their volume, and stay within it"
  }
}

run "a_boot_that_failed_is_tried_again" {
  command = plan

  assert {
    condition     = alltrue([for text in local.cloud_config : strcontains(text, "sllm-boot.service.d/again.conf") && strcontains(text, "Wants=sllm-boot.service") && strcontains(text, "StartLimitIntervalSec=0")])
    error_message = "no group replaces a NATS server"
  }
}

run "two_zones_are_too_few" {
  command = plan
  variables { subnets = { us-east-1a = "subnet-a", us-east-1b = "subnet-b" } }
  expect_failures = [var.subnets]
}

run "a_volume_that_is_too_small" {
  command = plan
  variables { volume_gb = 1 }
  expect_failures = [var.volume_gb]
}

run "a_domain_that_is_none" {
  command = plan
  variables { domain = "internal" }
  expect_failures = [var.domain]
}

run "an_address_that_a_shell_would_read" {
  command = plan
  variables { artifact_url = "s3://models/my artifacts/sllm-server.tar.gz" }
  expect_failures = [var.artifact_url]
}
