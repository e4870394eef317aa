output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "public_subnet_ids" {
  description = "Subnets of the load balancer, in the order of the zones."
  value       = [for zone in var.zones : aws_subnet.public[zone].id]
}

output "private_subnet_ids" {
  description = "Subnets of everything else, in the order of the zones."
  value       = [for zone in var.zones : aws_subnet.private[zone].id]
}

output "balancer_security_group_id" {
  description = "For the load balancer."
  value       = aws_security_group.this["balancer"].id
}

output "gateway_security_group_id" {
  description = "For gateways."
  value       = aws_security_group.this["gateway"].id
}

output "nats_security_group_id" {
  description = "For NATS servers."
  value       = aws_security_group.this["nats"].id
}

output "node_security_group_id" {
  description = "For GPU nodes."
  value       = aws_security_group.this["node"].id
}

output "s3_endpoint_id" {
  description = "The endpoint through which machines reach S3; a bucket's policy may demand it."
  value       = aws_vpc_endpoint.s3.id
}

output "private_subnets" {
  description = "Zone to private subnet."
  value       = { for zone in var.zones : zone => aws_subnet.private[zone].id }

  precondition {
    condition     = length(distinct([for zone in var.zones : aws_subnet.private[zone].cidr_block])) == length(var.zones)
    error_message = "zones puts a new one where its addresses would be those of one that is there: further ones go to the end."
  }
}
