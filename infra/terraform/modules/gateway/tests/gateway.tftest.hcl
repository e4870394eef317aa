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

  mock_resource "aws_lb_listener" {
    defaults = { arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:listener/app/prod/1/1" }
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

run "what_gateways_tell_without_a_token_is_not_for_clients" {
  command = plan

  assert {
    condition = (
      toset(one(aws_lb_listener_rule.told_to_nobody_else.condition).path_pattern[0].values) == toset(["/metrics", "/readyz"])
      && aws_lb_listener_rule.told_to_nobody_else.action[0].type == "fixed-response"
      && aws_lb_listener_rule.told_to_nobody_else.action[0].fixed_response[0].status_code == "401"
    )
    error_message = "functions' names, their calls and queues are not for everybody who reaches the door"
  }

  assert {
    condition = (
      aws_lb_listener_rule.told_to_who_has_the_token.priority < aws_lb_listener_rule.told_to_nobody_else.priority
      && contains(flatten([
        for condition in aws_lb_listener_rule.told_to_who_has_the_token.condition :
        [for header in condition.http_header : header.http_header_name]
      ]), "Authorization")
      && contains(flatten([
        for condition in aws_lb_listener_rule.told_to_who_has_the_token.condition :
        [for path in condition.path_pattern : tolist(path.values)]
      ]), "/metrics")
    )
    error_message = "who shows a token is sent on to a gateway, which looks at it"
  }
}

run "streams_are_not_cut_off" {
  command = plan

  assert {
    condition     = aws_lb.this.idle_timeout >= 600
    error_message = "an answer may be long in coming"
  }

  assert {
    condition     = strcontains(local.cluster_env, "\nSLLM_KEEP_ALIVE=960\n")
    error_message = "gateways keep a connection longer than the load balancer, which would else meet a closed one"
  }

  assert {
    condition     = aws_lb_target_group.gateways.health_check[0].path == "/readyz" && tonumber(aws_lb_target_group.gateways.deregistration_delay) == 60
    error_message = "a gateway that is not ready gets no calls, one that goes may end its own"
  }
}

run "in_service_once_it_is_ready_and_not_replaced_for_an_outage" {
  command = plan

  assert {
    condition = one([
      for hook in aws_autoscaling_group.gateways.initial_lifecycle_hook : hook.default_result
      if hook.lifecycle_transition == "autoscaling:EC2_INSTANCE_LAUNCHING" && hook.heartbeat_timeout == var.boot_timeout_s
    ]) == "ABANDON"
    error_message = "a gateway that is never ready is replaced"
  }

  assert {
    condition     = strcontains(local.boot_env, "\nGROUP=prod-gateway\n") && aws_autoscaling_group.gateways.name == "prod-gateway"
    error_message = "the machine knows whom it tells"
  }

  assert {
    condition     = aws_autoscaling_group.gateways.health_check_type == "EC2"
    error_message = "while NATS is away no gateway is ready, and none is replaced for it"
  }

  assert {
    condition     = !strcontains(local.cloud_config, "Requires=sllm-boot") && strcontains(local.cloud_config, "StartLimitIntervalSec=0") && strcontains(local.cloud_config, "sllm-boot.service.d/again.conf")
    error_message = "what is not there yet is waited for"
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
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.gateway.policy).Statement : statement.Action])) == toset([
      "s3:GetObject", "ssm:GetParameter", "autoscaling:CompleteLifecycleAction",
    ])
    error_message = "a gateway fetches its artifact and its secrets and answers its hook; no more"
  }

  assert {
    condition     = !can(regex("(?i)(BEGIN [A-Z ]*PRIVATE|NKEY SEED|\\nSLLM_[A-Z_]*TOKEN=[^%])", local.cloud_config))
    error_message = "no secret stands in user data"
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

run "a_customers_key_for_volumes" {
  command = plan
  variables { ebs_kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/volumes" }

  assert {
    condition     = aws_launch_template.gateway.block_device_mappings[0].ebs[0].kms_key_id == var.ebs_kms_key_arn
    error_message = "volumes are encrypted with it"
  }

  assert {
    condition     = aws_kms_grant.group["on"].grantee_principal == "arn:aws:iam::123456789012:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling" && contains(aws_kms_grant.group["on"].operations, "CreateGrant")
    error_message = "who starts the machines may use it"
  }
}

run "a_door_that_may_be_deleted" {
  command = plan
  variables { deletion_protection = false }

  assert {
    condition     = !aws_lb.this.enable_deletion_protection
    error_message = "a cluster can be destroyed by who says so before"
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

run "an_address_that_a_shell_would_read" {
  command = plan
  variables { artifact_url = "s3://models/my artifacts/sllm-server.tar.gz" }
  expect_failures = [var.artifact_url]
}
