# The plan of a network. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_resource "aws_cloudwatch_log_group" {
    defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:flow" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/flow" }
  }
}

variables {
  name        = "prod"
  region      = "us-east-1"
  zones       = ["us-east-1a", "us-east-1b", "us-east-1c"]
  bucket_arns = ["arn:aws:s3:::models"]
}

run "open_to_the_world_is_443_of_the_balancer_alone" {
  command = plan

  assert {
    condition = alltrue([
      for rule in aws_vpc_security_group_ingress_rule.clients : rule.from_port == 443 && rule.to_port == 443 && rule.ip_protocol == "tcp"
    ]) && length(aws_vpc_security_group_ingress_rule.clients) == 1
    error_message = "clients reach 443 and nothing else"
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.flow : rule.cidr_ipv4 == null && rule.cidr_ipv6 == null])
    error_message = "inside, groups are named and not addresses"
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_egress_rule.flow : rule.cidr_ipv4 == null]) && length(aws_vpc_security_group_egress_rule.internet) == 0
    error_message = "no way out unless asked for"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 0 && length(aws_route.nat) == 0
    error_message = "no NAT gateway unless asked for"
  }
}

run "the_default_group_is_shut" {
  command = plan

  assert {
    condition     = length(aws_default_security_group.shut.ingress) == 0 && length(aws_default_security_group.shut.egress) == 0
    error_message = "what names no group reaches nothing"
  }
}

run "subnets" {
  command = plan

  assert {
    condition     = alltrue([for subnet in merge(aws_subnet.public, { for zone, subnet in aws_subnet.private : "private ${zone}" => subnet }) : !subnet.map_public_ip_on_launch])
    error_message = "nothing gets a public address by being there"
  }

  assert {
    condition     = length(distinct([for subnet in concat(values(aws_subnet.public), values(aws_subnet.private)) : subnet.cidr_block])) == 6
    error_message = "subnets do not overlap"
  }
}

run "s3_without_the_internet" {
  command = plan

  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway"
    error_message = "models come through the gateway endpoint, which costs nothing"
  }

  assert {
    condition     = !contains(flatten([for statement in jsondecode(aws_vpc_endpoint.s3.policy).Statement : statement.Resource]), "*")
    error_message = "only named buckets are reached"
  }

  assert {
    condition = alltrue(flatten([
      for statement in jsondecode(aws_vpc_endpoint.s3.policy).Statement : [for action in statement.Action : can(regex("^s3:(Get|List)", action))]
    ]))
    error_message = "machines read, and write nowhere"
  }

  assert {
    condition = alltrue([
      for endpoint in aws_vpc_endpoint.interface :
      jsondecode(endpoint.policy).Statement[0].Condition.StringEquals["aws:PrincipalAccount"] == "123456789012"
    ]) && keys(aws_vpc_endpoint.interface) == ["autoscaling", "ssm"]
    error_message = "the APIs are reached by this account's roles alone"
  }
}

run "flow_logs_are_kept" {
  command = plan

  assert {
    condition     = one(values(aws_flow_log.this)).traffic_type == "ALL" && one(values(aws_cloudwatch_log_group.flow)).retention_in_days == 365
    error_message = "flow logs are on by default"
  }

  assert {
    condition     = jsondecode(one(values(aws_iam_role.flow)).assume_role_policy).Statement[0].Condition.StringEquals["aws:SourceAccount"] == "123456789012"
    error_message = "the role is for this account's flow logs"
  }
}

run "one_nat_for_all_zones" {
  command = plan

  variables {
    nat = "one"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.nat) == 3
    error_message = "every zone goes out through the one"
  }

  assert {
    condition     = keys(aws_vpc_security_group_egress_rule.internet) == ["node"] && aws_vpc_security_group_egress_rule.internet["node"].to_port == 443
    error_message = "nodes alone, HTTPS alone"
  }
}

run "a_nat_for_each_zone" {
  command = plan

  variables {
    nat = "per_zone"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 3
    error_message = "no zone depends on another"
  }
}

run "one_zone_is_too_few" {
  command = plan
  variables { zones = ["us-east-1a"] }
  expect_failures = [var.zones]
}

run "a_zone_of_another_region" {
  command = plan
  variables { zones = ["us-east-1a", "eu-west-1a"] }
  expect_failures = [var.zones]
}

run "a_range_that_is_too_small" {
  command = plan
  variables { cidr = "10.0.0.0/28" }
  expect_failures = [var.cidr]
}

run "nat_is_one_of_three" {
  command = plan
  variables { nat = "yes" }
  expect_failures = [var.nat]
}

run "no_bucket" {
  command = plan
  variables { bucket_arns = [] }
  expect_failures = [var.bucket_arns]
}

run "clients_are_ranges" {
  command = plan
  variables { client_cidrs = ["everybody"] }
  expect_failures = [var.client_cidrs]
}

run "monitors_reach_gateways_and_nothing_else" {
  command = plan

  variables { monitor_security_group_ids = ["sg-prometheus"] }

  assert {
    condition = (
      [for rule in aws_vpc_security_group_ingress_rule.monitors : rule.referenced_security_group_id] == ["sg-prometheus"] &&
      aws_vpc_security_group_ingress_rule.monitors[0].from_port == var.gateway_port &&
      aws_vpc_security_group_ingress_rule.monitors[0].to_port == var.gateway_port
    )
    error_message = "Prometheus reads /metrics at the gateways' port"
  }
}
