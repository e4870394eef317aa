# What a server may do: fetch the artifact and read its own secrets.

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
          Sid      = "ReadOwnSecrets"
          Effect   = "Allow"
          Action   = ["ssm:GetParameter"]
          Resource = ["arn:${local.partition}:ssm:${var.region}:${local.account}:parameter${var.parameter_prefix}/nats/*"]
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

resource "aws_iam_role" "server" {
  name_prefix = "${var.name}-nats-"
  description = "NATS servers of ${var.name}"
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

resource "aws_iam_role_policy" "server" {
  name   = "server"
  role   = aws_iam_role.server.id
  policy = jsonencode(local.policy)
}

resource "aws_iam_instance_profile" "server" {
  name_prefix = "${var.name}-nats-"
  role        = aws_iam_role.server.name
  tags        = local.tags
}
