# Ways to AWS's services that do not leave its network.

locals {
  # Where Amazon Linux 2023 keeps its packages; read only.
  package_buckets = ["arn:${data.aws_partition.current.partition}:s3:::al2023-repos-${var.region}-de612dc2"]
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [for table in aws_route_table.private : table.id]
  tags              = merge(local.tags, { Name = "${var.name}-s3" })

  # Who may do what is the roles' affair; here is said which buckets there are at all, so that nothing leaves to others, and that machines
  # read alone.
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Own"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:ListBucket", "s3:GetBucketLocation"]
        Resource  = flatten([for arn in var.bucket_arns : [arn, "${arn}/*"]])
      },
      {
        Sid       = "Packages"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject"]
        Resource  = [for arn in local.package_buckets : "${arn}/*"]
      },
    ]
  })
}

resource "aws_vpc_endpoint" "interface" {
  for_each = toset(var.interface_endpoints)

  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for subnet in aws_subnet.private : subnet.id]
  security_group_ids  = [aws_security_group.this["endpoints"].id]
  tags                = merge(local.tags, { Name = "${var.name}-${each.key}" })

  # What a machine may do there is its role's affair; the roles are this account's, so no other's key is of use inside.
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OwnAccount"
      Effect    = "Allow"
      Principal = "*"
      Action    = ["*"]
      Resource  = ["*"]
      Condition = { StringEquals = { "aws:PrincipalAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}
