# Machines with a gateway and a controller each, replaced when they do not answer.

locals {
  tags  = merge(var.tags, { "sllm:cluster" = var.name })
  group = "${var.name}-gateway"
}

resource "aws_launch_template" "gateway" {
  name                   = "${var.name}-gateway"
  description            = "A gateway and a controller of sllm"
  image_id               = "resolve:ssm:${var.ami_parameter}"
  instance_type          = var.instance_type
  user_data              = local.user_data
  update_default_version = true
  ebs_optimized          = true
  tags                   = local.tags

  iam_instance_profile {
    arn = aws_iam_instance_profile.gateway.arn
  }

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
    security_groups             = [var.gateway_security_group_id]
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = 16
      encrypted             = true
      kms_key_id            = var.ebs_kms_key_arn
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.name}-gateway" })
    }
  }
}

resource "aws_autoscaling_group" "gateways" {
  name                      = local.group
  vpc_zone_identifier       = var.private_subnet_ids
  min_size                  = var.size
  max_size                  = var.size + 1
  desired_capacity          = var.size
  target_group_arns         = [aws_lb_target_group.gateways.arn]
  wait_for_capacity_timeout = "0"
  # By EC2's own checks and not by the load balancer's: while NATS is away no gateway is ready, and replacing all of them
  # would be one outage more. Who does not answer is seen to on the machine (machine/gateway/watch.sh).
  health_check_type = "EC2"

  launch_template {
    id      = aws_launch_template.gateway.id
    version = aws_launch_template.gateway.latest_version
  }

  # In service once /readyz says so; who never gets there is replaced. With the group itself, so that the first instance
  # has it too; from then on it is what is said below: to change it here would be another group.
  initial_lifecycle_hook {
    name                 = "arrive"
    lifecycle_transition = "autoscaling:EC2_INSTANCE_LAUNCHING"
    heartbeat_timeout    = var.boot_timeout_s
    default_result       = "ABANDON"
  }

  # A new template is rolled out: the next one is ready before the one before it goes.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 150
    }
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
    ignore_changes = [initial_lifecycle_hook]
  }

  # Before the first instance: what it asks for as it starts.
  depends_on = [aws_iam_role_policy.gateway, aws_kms_grant.group]
}

resource "aws_autoscaling_lifecycle_hook" "arrive" {
  name                   = "arrive"
  autoscaling_group_name = aws_autoscaling_group.gateways.name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_LAUNCHING"
  heartbeat_timeout      = var.boot_timeout_s
  default_result         = "ABANDON"
}
