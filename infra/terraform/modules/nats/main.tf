# Three servers with fixed names, one in each zone, each with a volume of its own for its streams.

locals {
  tags    = merge(var.tags, { "sllm:cluster" = var.name })
  zones   = sort(keys(var.subnets))
  servers = { for index, zone in local.zones : "nats-${index}" => { zone = zone, subnet = var.subnets[zone] } }
}

data "aws_ssm_parameter" "image" {
  name = var.ami_parameter
}

resource "aws_ebs_volume" "streams" {
  for_each = local.servers

  availability_zone = each.value.zone
  type              = "gp3"
  size              = var.volume_gb
  encrypted         = true
  kms_key_id        = var.kms_key_arn
  tags              = merge(local.tags, { Name = "${var.name}-${each.key}-streams" })

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_instance" "server" {
  for_each = local.servers

  ami                         = nonsensitive(data.aws_ssm_parameter.image.value)
  instance_type               = var.instance_type
  subnet_id                   = each.value.subnet
  vpc_security_group_ids      = var.security_group_ids
  iam_instance_profile        = aws_iam_instance_profile.server.name
  user_data_base64            = local.user_data[each.key]
  associate_public_ip_address = false
  ebs_optimized               = true
  monitoring                  = true
  tags                        = merge(local.tags, { Name = "${var.name}-${each.key}" })

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = 16
    encrypted   = true
    kms_key_id  = var.kms_key_arn
    tags        = local.tags
  }

  # A new image, script or type is taken when a server is replaced, one at a time: `terraform apply -replace`. All three
  # would be stopped at once for another type.
  lifecycle {
    ignore_changes = [ami, user_data_base64, instance_type]
  }

  # Before it starts: what it asks for as it does.
  depends_on = [aws_iam_role_policy.server]
}

resource "aws_volume_attachment" "streams" {
  for_each = local.servers

  device_name                    = "/dev/sdf"
  volume_id                      = aws_ebs_volume.streams[each.key].id
  instance_id                    = aws_instance.server[each.key].id
  stop_instance_before_detaching = true
}

resource "aws_route53_zone" "internal" {
  # checkov:skip=CKV2_AWS_38:DNSSEC does not exist for private zones
  # checkov:skip=CKV2_AWS_39:queries of a private zone are logged by the VPC's resolver, where that is wanted
  name    = var.domain
  comment = "Servers of the sllm cluster ${var.name}"
  tags    = local.tags

  vpc {
    vpc_id = var.vpc_id
  }
}

resource "aws_route53_record" "server" {
  for_each = local.servers

  zone_id = aws_route53_zone.internal.zone_id
  name    = "${each.key}.${var.domain}"
  type    = "A"
  ttl     = 10
  records = [aws_instance.server[each.key].private_ip]
}
