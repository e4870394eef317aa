# The plan of the gateways. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/gateway" }
  }

  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }

  mock_resource "aws_lb" {
    defaults = {
      arn      = "arn:aws:elasticloadbalancing:us-east-1:123456789012:loadbalancer/app/prod/1"
      dns_name = "prod.elb.amazonaws.com"
      zone_id  = "Z1"
    }
  }

  mock_resource "aws_lb_target_group" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/prod/1" }
  }
}

variables {
  name                       = "prod"
  region                     = "us-east-1"
  vpc_id                     = "vpc-1"
  public_subnet_ids          = ["subnet-pa", "subnet-pb"]
  private_subnet_ids         = ["subnet-a", "subnet-b"]
  balancer_security_group_id = "sg-balancer"
  gateway_security_group_id  = "sg-gateway"
  host                       = "sllm.example.com"
  certificate_arn            = "arn:aws:acm:us-east-1:123456789012:certificate/1"
  nats_url                   = "tls://nats-0.sllm.internal:4222"
  parameter_prefix           = "/sllm/prod"
  artifact_bucket_arn        = "arn:aws:s3:::models"
  artifact_url               = "s3://models/artifacts/sllm-server.tar.gz"
  artifact_sha256            = "0000000000000000000000000000000000000000000000000000000000000000"
}

run "tls_and_nothing_else" {
  command = plan

  assert {
    condition     = aws_lb_listener.https.port == 443 && aws_lb_listener.https.protocol == "HTTPS" && strcontains(aws_lb_listener.https.ssl_policy, "TLS13-1-2")
    error_message = "clients speak TLS 1.2 at least"
  }

  assert {
    condition     = aws_lb.this.drop_invalid_header_fields && aws_lb.this.enable_deletion_protection
    error_message = "headers that are none go no further; the door is not deleted by accident"
  }
}

run "streams_are_not_cut_off" {
  command = plan

  assert {
    condition     = aws_lb.this.idle_timeout >= 600
    error_message = "an answer may be long in coming"
  }

  assert {
    condition     = aws_lb_target_group.gateways.health_check[0].path == "/readyz" && tonumber(aws_lb_target_group.gateways.deregistration_delay) == 60
    error_message = "a gateway that is not ready gets no calls, one that goes may end its own"
  }
}

run "closed" {
  command = plan

  assert {
    condition     = aws_launch_template.gateway.metadata_options[0].http_tokens == "required" && !tobool(aws_launch_template.gateway.network_interfaces[0].associate_public_ip_address)
    error_message = "IMDSv2, no public address"
  }

  assert {
    condition     = alltrue([for disk in aws_launch_template.gateway.block_device_mappings : tobool(disk.ebs[0].encrypted)])
    error_message = "every volume is encrypted"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_role_policy.gateway.policy).Statement :
      alltrue([for resource in statement.Resource : !endswith(resource, "*")])
    ])
    error_message = "rights name what they are for"
  }

  assert {
    condition     = length(aws_launch_template.gateway.user_data) < 16384
    error_message = "AWS takes 16 KiB of user data"
  }
}

run "settings_of_a_pool" {
  command = plan

  variables {
    settings    = { SLLM_NODE_PROVIDER = "aws", SLLM_NODES_GROUP = "chat-gpu" }
    policy_arns = { chat-gpu = "arn:aws:iam::123456789012:policy/scaler" }
  }

  assert {
    condition     = strcontains(local.cluster_env, "\nSLLM_NODES_GROUP=chat-gpu\n") && aws_iam_role_policy_attachment.more["chat-gpu"].policy_arn == "arn:aws:iam::123456789012:policy/scaler"
    error_message = "the controller knows its pool and may size it"
  }
}

run "outputs" {
  command = plan

  assert {
    condition     = output.url == "https://sllm.example.com" && strcontains(output.profile, "SLLM_URL=https://sllm.example.com") && strcontains(output.profile, "/sllm/prod/gateway/token")
    error_message = "who reads the outputs can call"
  }
}

run "a_name_for_it" {
  command = plan
  variables { zone_id = "Z2" }

  assert {
    condition     = aws_route53_record.host["on"].name == "sllm.example.com"
    error_message = "the host is an alias of the load balancer"
  }
}

run "no_certificate" {
  command = plan
  variables { certificate_arn = "letsencrypt" }
  expect_failures = [var.certificate_arn]
}

run "an_idle_timeout_that_ends_streams" {
  command = plan
  variables { idle_timeout_s = 5 }
  expect_failures = [var.idle_timeout_s]
}

run "one_zone_is_too_few" {
  command = plan
  variables { public_subnet_ids = ["subnet-pa"] }
  expect_failures = [var.public_subnet_ids]
}

run "a_secret_in_settings" {
  command = plan
  variables { settings = { SLLM_TOKEN = "x" } }
  expect_failures = [var.settings]
}
