# Who spoke to whom.

locals {
  flow_logs = var.flow_log_days > 0 ? { on = true } : {}
}

resource "aws_cloudwatch_log_group" "flow" {
  for_each = local.flow_logs

  name_prefix       = "/sllm/${var.name}/flow-"
  retention_in_days = var.flow_log_days
  kms_key_id        = var.log_kms_key_arn
  tags              = local.tags
}

resource "aws_iam_role" "flow" {
  for_each = local.flow_logs

  name_prefix = "${var.name}-flow-"
  description = "Flow logs of ${var.name}"
  tags        = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "vpc-flow-logs.amazonaws.com" }
      # For this account's flow logs, not for whoever names this role.
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "flow" {
  for_each = local.flow_logs

  name = "write"
  role = aws_iam_role.flow[each.key].id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
      Resource = ["${aws_cloudwatch_log_group.flow[each.key].arn}:*"]
    }]
  })
}

resource "aws_flow_log" "this" {
  for_each = local.flow_logs

  vpc_id          = aws_vpc.this.id
  traffic_type    = "ALL"
  log_destination = aws_cloudwatch_log_group.flow[each.key].arn
  iam_role_arn    = aws_iam_role.flow[each.key].arn
  tags            = local.tags
}
