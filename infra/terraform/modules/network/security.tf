# Who speaks to whom: one table, and one rule on each side for each of its lines.

locals {
  groups = {
    balancer  = "The load balancer: 443 from clients"
    gateway   = "Gateways and controllers"
    nats      = "NATS servers"
    node      = "GPU nodes"
    endpoints = "Endpoints of AWS's services"
  }

  flows = {
    "balancer to gateway" = { from = "balancer", to = "gateway", port = var.gateway_port }
    "gateway to nats"     = { from = "gateway", to = "nats", port = 4222 }
    "node to nats"        = { from = "node", to = "nats", port = 4222 }
    "nats to nats"        = { from = "nats", to = "nats", port = 6222 }
    "node to node"        = { from = "node", to = "node", port = var.peer_port }
    "gateway to services" = { from = "gateway", to = "endpoints", port = 443 }
    "nats to services"    = { from = "nats", to = "endpoints", port = 443 }
    "node to services"    = { from = "node", to = "endpoints", port = 443 }
  }
}

resource "aws_security_group" "this" {
  # checkov:skip=CKV2_AWS_5:the other modules attach them, by this module's outputs
  for_each = local.groups

  name_prefix = "${var.name}-${each.key}-"
  description = each.value
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-${each.key}" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.this[each.value.to].id
  referenced_security_group_id = aws_security_group.this[each.value.from].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = each.key
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.this[each.value.from].id
  referenced_security_group_id = aws_security_group.this[each.value.to].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = each.key
  tags                         = local.tags
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = toset(var.client_cidrs)

  security_group_id = aws_security_group.this["balancer"].id
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "clients to balancer"
  tags              = local.tags
}

# Counted, since a group that is made beside this module is not known by its id when that is planned.
resource "aws_vpc_security_group_ingress_rule" "monitors" {
  count = length(var.monitor_security_group_ids)

  security_group_id            = aws_security_group.this["gateway"].id
  referenced_security_group_id = var.monitor_security_group_ids[count.index]
  ip_protocol                  = "tcp"
  from_port                    = var.gateway_port
  to_port                      = var.gateway_port
  description                  = "monitor to gateway"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "s3" {
  for_each = toset(["gateway", "nats", "node"])

  security_group_id = aws_security_group.this[each.key].id
  prefix_list_id    = aws_vpc_endpoint.s3.prefix_list_id
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "${each.key} to S3"
  tags              = local.tags
}

# Only where a way out was asked for.
resource "aws_vpc_security_group_egress_rule" "internet" {
  for_each = toset(var.nat == "none" ? [] : ["node"])

  security_group_id = aws_security_group.this[each.key].id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "${each.key} to model hubs"
  tags              = local.tags
}
