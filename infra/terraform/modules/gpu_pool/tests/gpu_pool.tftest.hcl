# The plan of one pool. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/node" }
  }

  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
}

variables {
  name               = "chat-gpu"
  region             = "us-east-1"
  subnet_ids         = ["subnet-a", "subnet-b"]
  security_group_ids = ["sg-node"]
  model_bucket_arn   = "arn:aws:s3:::models"
  artifact_url       = "s3://models/artifacts/sllm-node.tar.gz"
  artifact_sha256    = "0000000000000000000000000000000000000000000000000000000000000000"
  nats_url           = "tls://nats-0.sllm.internal:4222,tls://nats-1.sllm.internal:4222,tls://nats-2.sllm.internal:4222"
  parameter_prefix   = "/sllm/prod"
}

run "defaults" {
  command = plan

  assert {
    condition     = aws_launch_template.node.metadata_options[0].http_tokens == "required"
    error_message = "IMDSv1 is not to be had"
  }

  assert {
    condition     = aws_launch_template.node.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "containers have no access to the node's role"
  }

  assert {
    condition     = alltrue([for disk in aws_launch_template.node.block_device_mappings : tobool(disk.ebs[0].encrypted)])
    error_message = "every volume is encrypted"
  }

  assert {
    condition     = !tobool(aws_launch_template.node.network_interfaces[0].associate_public_ip_address)
    error_message = "a node has no public address"
  }

  assert {
    condition     = startswith(aws_launch_template.node.image_id, "resolve:ssm:/aws/service/")
    error_message = "the image is the cloud's own, by public parameter"
  }

  assert {
    condition     = aws_autoscaling_group.nodes.min_size == 0 && aws_autoscaling_group.nodes.desired_capacity == 0
    error_message = "the pool may be empty, and begins so"
  }

  assert {
    condition     = aws_autoscaling_group.nodes.protect_from_scale_in && contains(aws_autoscaling_group.nodes.suspended_processes, "AZRebalance")
    error_message = "which node goes is the controller's decision"
  }

  assert {
    condition     = one([for policy in aws_autoscaling_group.nodes.mixed_instances_policy : policy.instances_distribution[0].on_demand_percentage_above_base_capacity]) == 100
    error_message = "no spot instance unless asked for"
  }

  assert {
    condition     = aws_autoscaling_group.nodes.capacity_rebalance == false
    error_message = "nothing to rebalance without spot instances"
  }
}

run "a_node_that_goes_is_drained_first" {
  command = plan

  assert {
    condition = one([
      for hook in aws_autoscaling_group.nodes.initial_lifecycle_hook : hook.heartbeat_timeout
      if hook.name == "drain" && hook.lifecycle_transition == "autoscaling:EC2_INSTANCE_TERMINATING" && hook.default_result == "CONTINUE"
    ]) > var.node_drain_s
    error_message = "the drain hook is there and waits longer than a drain takes"
  }

  assert {
    condition = one([
      for hook in aws_autoscaling_group.nodes.initial_lifecycle_hook : hook.default_result
      if hook.lifecycle_transition == "autoscaling:EC2_INSTANCE_LAUNCHING"
    ]) == "ABANDON"
    error_message = "a node that is never ready is replaced"
  }

  assert {
    condition     = strcontains(local.cloud_config, "systemctl stop sllm-node.service") && strcontains(local.cloud_config, "TimeoutStopSec=120")
    error_message = "what drains is on the machine, and systemd waits for it"
  }

  assert {
    condition     = !strcontains(local.files["/etc/systemd/system/sllm-watch.service"], "Requires=")
    error_message = "a machine whose boot failed answers the hook too"
  }
}

run "spot" {
  command = plan

  variables {
    spot_percentage = 100
    on_demand_base  = 1
    instance_types  = ["g6.xlarge", "g5.xlarge"]
  }

  assert {
    condition = one([
      for policy in aws_autoscaling_group.nodes.mixed_instances_policy :
      policy.instances_distribution[0].spot_allocation_strategy == "price-capacity-optimized" &&
      policy.instances_distribution[0].on_demand_base_capacity == 1 &&
      policy.instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    ])
    error_message = "spot instances by price and capacity, above the base"
  }

  assert {
    condition     = aws_autoscaling_group.nodes.capacity_rebalance
    error_message = "an instance in danger is replaced before it goes"
  }

  assert {
    condition     = length(aws_autoscaling_group.nodes.mixed_instances_policy[0].launch_template[0].override) == 2
    error_message = "every type is offered"
  }
}

run "least_rights" {
  command = plan

  assert {
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : statement.Action])) == toset([
      "s3:ListBucket", "s3:GetBucketLocation", "s3:GetObject", "ssm:GetParameter", "autoscaling:CompleteLifecycleAction",
    ])
    error_message = "a node reads models and its own secrets, and answers its hooks; no more"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : !contains(statement.Resource, "*")
    ])
    error_message = "a node's rights name what they are for"
  }

  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_policy.scaler.policy).Statement :
      !contains(statement.Resource, "*") || toset(statement.Action) == toset(["autoscaling:DescribeAutoScalingGroups"])
    ])
    error_message = "the controller sizes this one group"
  }
}

run "user_data" {
  command = plan

  assert {
    condition     = length(aws_launch_template.node.user_data) < 16384
    error_message = "AWS takes 16 KiB of user data"
  }

  assert {
    condition     = { for file in yamldecode(local.cloud_config).write_files : file.path => file.content } == local.files
    error_message = "cloud-init writes each file as it is"
  }

  assert {
    condition     = !can(regex("(?i)(BEGIN [A-Z ]*PRIVATE|NKEY SEED|\\nSLLM_[A-Z_]*TOKEN=[^%])", local.cloud_config))
    error_message = "no secret stands in user data"
  }

  assert {
    condition     = strcontains(local.node_env, "SLLM_NATS_URL=tls://")
    error_message = "the node joins over TLS"
  }

  assert {
    condition     = strcontains(local.boot_env, "\nSTAGES=\"packages account storage memory namespaces gpus software credentials environment\"\nPACKAGES=\"mdadm xfsprogs\"\n")
    error_message = "disks are made into one before anything is put there"
  }
}

run "settings_reach_the_daemons" {
  command = plan

  variables {
    settings = { SLLM_POOL_SIZE = "4" }
    labels   = { team = "chat" }
  }

  assert {
    condition     = strcontains(local.node_env, "\nSLLM_POOL_SIZE=4\n") && strcontains(local.boot_env, "\nLABELS=pool=chat-gpu,team=chat\n")
    error_message = "settings and labels are rendered"
  }

  assert {
    condition     = output.controller_settings.SLLM_NODES_LABELS == "pool=chat-gpu,team=chat"
    error_message = "the controller knows which labels a node will have that it makes"
  }
}

run "empty_for_ever" {
  command = plan

  variables {
    max_size = 0
  }

  assert {
    condition     = aws_autoscaling_group.nodes.max_size == 0
    error_message = "a pool may be shut"
  }
}

run "customer_keys_may_be_used" {
  command = plan

  variables {
    decrypt_key_arns = ["arn:aws:kms:us-east-1:123456789012:key/models"]
  }

  assert {
    condition = one([
      for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : statement.Resource[0] if statement.Sid == "Decrypt"
    ]) == "arn:aws:kms:us-east-1:123456789012:key/models"
    error_message = "exactly the keys that were named"
  }

  assert {
    condition = one([
      for statement in jsondecode(aws_iam_role_policy.node.policy).Statement : statement.Condition.StringLike["kms:ViaService"] if statement.Sid == "Decrypt"
    ]) == ["s3.us-east-1.amazonaws.com*", "ssm.us-east-1.amazonaws.com*"]
    error_message = "for the bucket and the parameters alone"
  }

  assert {
    condition     = length(aws_kms_grant.group) == 0
    error_message = "no grant where volumes have the account's key"
  }
}

run "a_customers_key_for_volumes" {
  command = plan
  variables { ebs_kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/volumes" }

  assert {
    condition     = aws_launch_template.node.block_device_mappings[0].ebs[0].kms_key_id == var.ebs_kms_key_arn
    error_message = "volumes are encrypted with it"
  }

  assert {
    condition     = aws_kms_grant.group["on"].grantee_principal == "arn:aws:iam::123456789012:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling" && contains(aws_kms_grant.group["on"].operations, "CreateGrant")
    error_message = "who starts the machines may use it"
  }
}

run "the_controller_is_told_of_the_pool" {
  command = plan

  assert {
    condition     = output.controller_settings.SLLM_NODES_GROUP == "chat-gpu" && output.controller_settings.SLLM_NODES_GPUS == "L4:24GiB"
    error_message = "its group, and the shape of its first type"
  }
}

run "nodes_of_one_type_say_what_the_controller_is_told" {
  command = plan
  variables {
    instance_types = ["g6.xlarge"]
    settings       = { SLLM_SANDBOX = "docker" }
  }

  assert {
    condition     = strcontains(local.node_env, "\nSLLM_GPUS=L4:24GiB\n")
    error_message = "a driver tells longer names, and not the memory"
  }

  assert {
    condition     = output.controller_settings.SLLM_NODES_SANDBOX == "docker"
    error_message = "functions with an image have nodes made"
  }
}

run "nodes_of_several_types_say_what_their_driver_tells" {
  command = plan
  variables { instance_types = ["g6.xlarge", "g5.xlarge"] }

  assert {
    condition     = !strcontains(local.node_env, "SLLM_GPUS=")
    error_message = "they have not all the same"
  }
}

run "a_type_of_unknown_shape" {
  command = plan
  variables { instance_types = ["g6.48xlarge"] }
  expect_failures = [var.node_shape]
}

run "wrong_name" {
  command = plan
  variables { name = "Chat GPU" }
  expect_failures = [var.name]
}

run "wrong_region" {
  command = plan
  variables { region = "Virginia" }
  expect_failures = [var.region]
}

run "no_subnet" {
  command = plan
  variables { subnet_ids = [] }
  expect_failures = [var.subnet_ids]
}

run "no_gpu" {
  command = plan
  variables { instance_types = ["m7i.large"] }
  expect_failures = [var.instance_types]
}

run "more_than_the_most" {
  command = plan
  variables { initial_size = 9 }
  expect_failures = [var.initial_size]
}

run "least_above_most" {
  command = plan
  variables { min_size = 5 }
  expect_failures = [var.max_size]
}

run "more_spot_than_all" {
  command = plan
  variables { spot_percentage = 101 }
  expect_failures = [var.spot_percentage]
}

run "a_drain_longer_than_a_spot_notice" {
  command = plan

  variables {
    spot_percentage = 50
    node_drain_s    = 600
  }

  expect_failures = [var.node_drain_s]
}

run "nats_without_tls" {
  command = plan
  variables { nats_url = "nats://nats-0:4222" }
  expect_failures = [var.nats_url]
}

run "a_digest_that_is_none" {
  command = plan
  variables { artifact_sha256 = "latest" }
  expect_failures = [var.artifact_sha256]
}

run "a_secret_in_settings" {
  command = plan
  variables { settings = { SLLM_PEER_TOKEN = "x" } }
  expect_failures = [var.settings]
}

run "an_address_that_a_shell_would_read" {
  command = plan
  variables { artifact_url = "s3://models/my artifacts/sllm-node.tar.gz" }
  expect_failures = [var.artifact_url]
}
