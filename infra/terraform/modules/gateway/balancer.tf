# The one door to the outside: TLS at the load balancer, gateways behind it.

locals {
  # What gateways tell without a token. That is for who reaches them inside the VPC: for probes and Prometheus.
  inside = ["/metrics", "/readyz"]
}

resource "aws_lb" "this" {
  # checkov:skip=CKV2_AWS_28:who calls is known by a token; a web application firewall is the operator's decision
  # checkov:skip=CKV_AWS_91:access logs are written where var.log_bucket says so
  name                       = "${var.name}-gateway"
  load_balancer_type         = "application"
  internal                   = false
  subnets                    = var.public_subnet_ids
  security_groups            = [var.balancer_security_group_id]
  idle_timeout               = var.idle_timeout_s
  drop_invalid_header_fields = true
  desync_mitigation_mode     = "strictest"
  enable_deletion_protection = var.deletion_protection
  tags                       = local.tags

  dynamic "access_logs" {
    for_each = var.log_bucket == null ? [] : [var.log_bucket]

    content {
      bucket  = access_logs.value
      prefix  = "${var.name}-gateway"
      enabled = true
    }
  }
}

resource "aws_lb_target_group" "gateways" {
  # checkov:skip=CKV_AWS_378:gateways speak HTTP; TLS ends at the load balancer, and only its security group reaches them
  # By its port: another one's group is made before this one goes, which the listener sends to until then.
  # The usual one's keeps the name that it always had: a group that is there is not replaced by a release.
  name                 = "${var.name}-${var.port == 8600 ? "gateway" : var.port}"
  vpc_id               = var.vpc_id
  port                 = var.port
  protocol             = "HTTP"
  target_type          = "instance"
  deregistration_delay = var.drain_s
  # A gateway with fewer running streams takes the next one.
  load_balancing_algorithm_type = "least_outstanding_requests"
  tags                          = local.tags

  health_check {
    path                = "/readyz"
    matcher             = "200"
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_lb_listener" "https" {
  load_balancer_arn = aws_lb.this.arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn
  tags              = local.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.gateways.arn
  }
}

# From outside it takes one, as `sllm top` has: the load balancer sees that it is there, the gateway that it is the right
# one.
resource "aws_lb_listener_rule" "told_to_who_has_the_token" {
  listener_arn = aws_lb_listener.https.arn
  priority     = 10
  tags         = local.tags

  action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.gateways.arn
  }

  condition {
    path_pattern {
      values = local.inside
    }
  }

  condition {
    http_header {
      http_header_name = "Authorization"
      values           = ["Bearer *"]
    }
  }
}

resource "aws_lb_listener_rule" "told_to_nobody_else" {
  listener_arn = aws_lb_listener.https.arn
  priority     = 20
  tags         = local.tags

  action {
    type = "fixed-response"

    fixed_response {
      status_code  = "401"
      content_type = "application/json"
      message_body = jsonencode({
        error = { code = "unauthorized", message = "a bearer token is needed here: set SLLM_TOKEN" }
      })
    }
  }

  condition {
    path_pattern {
      values = local.inside
    }
  }
}

resource "aws_route53_record" "host" {
  for_each = var.zone_id == null ? {} : { on = var.zone_id }

  zone_id = each.value
  name    = var.host
  type    = "A"

  alias {
    name                   = aws_lb.this.dns_name
    zone_id                = aws_lb.this.zone_id
    evaluate_target_health = true
  }
}
