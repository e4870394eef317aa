# One pool of GPU nodes: a launch template and an Auto Scaling group that the controller sizes.

locals {
  tags = merge(var.tags, { "sllm:pool" = var.name })
  # A node that is asked to go stops its daemons, which takes the drain and some seconds around it.
  terminate_timeout_s = var.node_drain_s + 60
}

resource "aws_launch_template" "node" {
  name                   = "${var.name}-node"
  description            = "A GPU node of sllm that joins its cluster by itself"
  image_id               = "resolve:ssm:${var.ami_parameter}"
  user_data              = local.user_data
  update_default_version = true
  ebs_optimized          = true
  tags                   = local.tags

  iam_instance_profile {
    arn = aws_iam_instance_profile.node.arn
  }

  # IMDSv2 alone, and not through a second network hop: what runs in a container has no access to the node's role.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  monitoring {
    enabled = true
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = var.security_group_ids
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.root_volume_gb
      throughput            = 250
      encrypted             = true
      kms_key_id            = var.ebs_kms_key_arn
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.name}-node" })
    }
  }
}

resource "aws_autoscaling_group" "nodes" {
  name                      = var.name
  vpc_zone_identifier       = var.subnet_ids
  min_size                  = var.min_size
  max_size                  = var.max_size
  desired_capacity          = coalesce(var.initial_size, var.min_size)
  health_check_type         = "EC2"
  health_check_grace_period = var.boot_timeout_s
  capacity_rebalance        = var.spot_percentage > 0
  wait_for_capacity_timeout = "0"
  # Which node goes is the controller's decision: AWS must neither pick one to shrink nor move one to even out zones.
  protect_from_scale_in = true
  suspended_processes   = ["AZRebalance"]

  mixed_instances_policy {
    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.node.id
        version            = aws_launch_template.node.latest_version
      }

      dynamic "override" {
        for_each = var.instance_types

        content {
          instance_type = override.value
        }
      }
    }

    instances_distribution {
      on_demand_allocation_strategy            = "prioritized"
      on_demand_base_capacity                  = var.on_demand_base
      on_demand_percentage_above_base_capacity = 100 - var.spot_percentage
      spot_allocation_strategy                 = "price-capacity-optimized"
    }
  }

  # With the group itself, so that the first instance has them too. From then on they are what is said below: to change
  # them here would be another group.
  initial_lifecycle_hook {
    name                 = "arrive"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_LAUNCHING"
    heartbeat_timeout    = var.boot_timeout_s
    default_result       = "ABANDON"
  }

  initial_lifecycle_hook {
    name                 = "drain"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_TERMINATING"
    heartbeat_timeout    = local.terminate_timeout_s
    default_result       = "CONTINUE"
  }

  dynamic "tag" {
    for_each = local.tags

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity, initial_lifecycle_hook]
  }

  # Before the first instance: what it asks for as it starts.
  depends_on = [aws_iam_role_policy.node, aws_kms_grant.group]
}

resource "aws_autoscaling_lifecycle_hook" "arrive" {
  name                   = "arrive"
  autoscaling_group_name = aws_autoscaling_group.nodes.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_LAUNCHING"
  heartbeat_timeout      = var.boot_timeout_s
  default_result         = "ABANDON"
}

resource "aws_autoscaling_lifecycle_hook" "drain" {
  name                   = "drain"
  autoscaling_group_name = aws_autoscaling_group.nodes.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_TERMINATING"
  heartbeat_timeout      = local.terminate_timeout_s
  default_result         = "CONTINUE"
}
