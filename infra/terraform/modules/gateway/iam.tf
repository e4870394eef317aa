# What a machine with a gateway and a controller may do: fetch the artifact, read its own secrets, answer its own group.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

locals {
  partition = data.aws_partition.current.partition
  account   = data.aws_caller_identity.current.account_id

  policy = {
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "FetchArtifact"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${var.artifact_bucket_arn}/${join("/", slice(split("/", var.artifact_url), 3, length(split("/", var.artifact_url))))}"]
        },
        {
          Sid    = "ReadOwnSecrets"
          Effect = "Allow"
          Action = ["ssm:GetParameter"]
          Resource = [
            for name in ["nats/ca", "gateway/key", "gateway/token", "controller/key", "controller/secrets-key"] :
            "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter${var.parameter_prefix}/${name}"
          ]
        },
        {
          Sid      = "AnswerOwnHook"
          Effect   = "Allow"
          Action   = ["autoscaling:CompleteLifecycleAction"]
          Resource = ["arn:${local.partition}:autoscaling:${var.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${local.group}"]
        },
      ],
      [
        for keys in [var.decrypt_key_arns] : {
          # For what S3 and the parameter store hand out, and for nothing else that the keys encrypt.
          Sid       = "Decrypt"
          Effect    = "Allow"
          Action    = ["kms:Decrypt"]
          Resource  = keys
          Condition = { StringLike = { "kms:ViaService" = ["s3.${var.region}.amazonaws.com*", "ssm.${var.region}.amazonaws.com*"] } }
        } if length(keys) > 0
      ],
    )
  }
}

resource "aws_iam_role" "gateway" {
  name_prefix = "${var.name}-gateway-"
  description = "Gateways and controllers of ${var.name}"
  tags        = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "gateway" {
  name   = "gateway"
  role   = aws_iam_role.gateway.id
  policy = jsonencode(local.policy)
}

resource "aws_iam_instance_profile" "gateway" {
  name_prefix = "${var.name}-gateway-"
  role        = aws_iam_role.gateway.name
  tags        = local.tags
}

resource "aws_iam_role_policy_attachment" "more" {
  for_each = var.policy_arns

  role       = aws_iam_role.gateway.name
  policy_arn = each.value
}

# A group's instances are started by its service-linked role, which may use no customer's key unless it is granted.
resource "aws_kms_grant" "group" {
  for_each = var.ebs_kms_key_arn == null ? {} : { on = var.ebs_kms_key_arn }

  name              = "${var.name}-volumes"
  key_id            = each.value
  grantee_principal = "arn:${local.partition}:iam::${local.account}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"

  operations = [
    "CreateGrant", "Decrypt", "DescribeKey", "Encrypt", "GenerateDataKey", "GenerateDataKeyWithoutPlaintext",
    "ReEncryptFrom", "ReEncryptTo",
  ]
}
