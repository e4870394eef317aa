# What a node may do: read the model bucket, its own cluster's node secrets, and answer its own group's hooks.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

locals {
  partition = data.aws_partition.current.partition
  account   = data.aws_caller_identity.current.account_id
  group_arn = "arn:${local.partition}:autoscaling:${var.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${var.name}"

  # What nodes need to join, and no other component's secrets.
  node_parameters = [
    for name in ["nats/ca", "node/key", "node/peer-token"] :
    "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter${var.parameter_prefix}/${name}"
  ]

  node_policy = {
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "ListModels"
          Effect   = "Allow"
          Action   = ["s3:ListBucket", "s3:GetBucketLocation"]
          Resource = [var.model_bucket_arn]
        },
        {
          Sid      = "ReadModels"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${var.model_bucket_arn}/*"]
        },
        {
          Sid      = "ReadNodeSecrets"
          Effect   = "Allow"
          Action   = ["ssm:GetParameter"]
          Resource = local.node_parameters
        },
        {
          Sid      = "AnswerOwnHooks"
          Effect   = "Allow"
          Action   = ["autoscaling:CompleteLifecycleAction"]
          Resource = [local.group_arn]
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

  # What the controller needs to size this one group: its NodeProvider.
  scaler_policy = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid    = "SizeThisGroup"
        Effect = "Allow"
        Action = [
          "autoscaling:SetDesiredCapacity",
          "autoscaling:TerminateInstanceInAutoScalingGroup",
        ]
        Resource = [local.group_arn]
      },
      {
        # AWS has no narrower resource for it.
        Sid      = "SeeGroups"
        Effect   = "Allow"
        Action   = ["autoscaling:DescribeAutoScalingGroups"]
        Resource = ["*"]
      },
    ]
  }
}

resource "aws_iam_role" "node" {
  name_prefix = "${var.name}-node-"
  description = "Nodes of the pool ${var.name}"
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

resource "aws_iam_role_policy" "node" {
  name   = "node"
  role   = aws_iam_role.node.id
  policy = jsonencode(local.node_policy)
}

resource "aws_iam_instance_profile" "node" {
  name_prefix = "${var.name}-node-"
  role        = aws_iam_role.node.name
  tags        = local.tags
}

resource "aws_iam_policy" "scaler" {
  name_prefix = "${var.name}-scaler-"
  description = "Size the pool ${var.name}: for the role of the controller"
  policy      = jsonencode(local.scaler_policy)
  tags        = local.tags
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
